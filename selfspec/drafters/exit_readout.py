"""Reading draft tokens off an early layer through a trained exit."""

from __future__ import annotations

from selfspec_kernels.draft_topk import draft_topk
from torch import Tensor

from selfspec.networks.exit import ExitNetwork


class ExitReadout:
    """From states after the network's exit layer to draft tokens; see `selfspec.readout.Readout`.

    Args:
        network: Fitted to the model.
    """

    def __init__(self, network: ExitNetwork) -> None:
        self.network = network

    @property
    def known(self) -> Tensor | None:
        """int64 [Vd], the tokens that can be drafted, or None for all."""
        return self.network.head.ids

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable token after each of `hidden` [..., C] and its probability, [...]."""
        ids, log_probs = self.top(hidden, 1)
        return ids[..., 0], log_probs[..., 0].exp()

    def top(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities of the `k` most probable tokens, [..., k], best first."""
        head = self.network.head
        states = self._states(hidden)
        indices, log_probs = draft_topk(states, head.matrix, min(k, head.matrix.shape[0]))
        return head.tokens(indices).to(hidden.device), log_probs.to(hidden.device)

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Logits [..., V] of `hidden` [..., C]; -inf for tokens that the exit does not know."""
        head = self.network.head
        return head.spread(head(self._states(hidden)), vocab_size).to(hidden.device)

    def _states(self, hidden: Tensor) -> Tensor:
        states: Tensor = self.network(hidden.to(self.network.norm.weight.device))
        return states
