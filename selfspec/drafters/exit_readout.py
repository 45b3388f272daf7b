"""Reading draft tokens off an early layer through a trained exit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from selfspec_kernels.exit_confidence import ExitConfidence, exit_confidence
from torch import Tensor

from selfspec.drafters.trained import best_tokens
from selfspec.readout import on_device

if TYPE_CHECKING:
    from selfspec.drafters.exit_context import ExitContext
    from selfspec.networks.exit import ExitNetwork


class ExitReadout:
    """From states after the network's exit layer to draft tokens; see `selfspec.readout.Readout`.

    Args:
        network: Fitted to the model.
        context: For a network with attention: what it attends to. Then every state that is read is
            that of the next token of a chain.
    """

    def __init__(self, network: ExitNetwork, context: ExitContext | None = None) -> None:
        self.network = network
        self._chain = None if context is None else context.chain()

    @property
    def known(self) -> Tensor | None:
        """int64 [Vd], the tokens that can be drafted, or None for all."""
        return self.network.head.ids

    @property
    def size(self) -> int:
        """How many tokens can be drafted."""
        return self.network.head.size

    def best(self, hidden: Tensor) -> ExitConfidence:
        """The most probable token after each of `hidden` [..., C], and how sure it is."""
        head = self.network.head
        found = exit_confidence(self._states(hidden), head.matrix)
        return on_device(replace(found, token=head.tokens(found.token)), hidden.device)

    def top(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities of the `k` most probable tokens, [..., k], best first."""
        tokens, log_probs = best_tokens(self.network.head, self._states(hidden), k)
        return tokens.to(hidden.device), log_probs.to(hidden.device)

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Logits [..., V] of `hidden` [..., C]; -inf for tokens that the exit does not know."""
        head = self.network.head
        return head.spread(head(self._states(hidden)), vocab_size).to(hidden.device)

    def _states(self, hidden: Tensor) -> Tensor:
        states = hidden.to(self.network.norm.weight.device)
        if self._chain is None:
            found: Tensor = self.network(states)
            return found
        rows, _, size = (states if states.ndim == 3 else states[:, None]).shape
        return self._chain.follow(states.reshape(rows, 1, size)).view(states.shape)
