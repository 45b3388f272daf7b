"""The loss of a batch, for every kind of draft network, one draft step (or head) after the other.

At position t a feature network and heads know the true tokens up to t + 1 and predict t + 2, t + 3,
...; an exit predicts t + 1. What they should say is what the target says after the token before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from selfspec.networks.exit import ExitNetwork
from selfspec.networks.feature import FeatureNetwork
from selfspec.networks.heads import HeadsNetwork
from selfspec.networks.vocabulary import DraftHead
from selfspec.training.losses import Distilled, distill
from selfspec.training.unroll import exit_states, unroll

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.training.batches import Batch
    from selfspec.training.config import TrainConfig
    from selfspec.training.initial import Network


class Objective:
    """Losses of a network by depth.

    Args:
        network: On the device of its batches.
        architecture: Of the target: its embeddings and its final norm are used.
        config: Of the training.

    Raises:
        ValueError: If the network reads states after the final norm, which was not found.
    """

    def __init__(self, network: Network, architecture: Architecture, config: TrainConfig) -> None:
        self.network = network
        self.architecture = architecture
        self.config = config
        last = architecture.num_layers
        if isinstance(network, FeatureNetwork):
            self.taps = network.config.taps
            self.depths = config.steps
            self.normed = network.config.layout == "eagle"
        elif isinstance(network, HeadsNetwork):
            self.taps = (last,)
            self.depths = network.config.num_heads
            self.normed = True
        else:
            self.taps = (network.config.exit_layer,)
            self.depths = 1
            self.normed = False
        if self.normed and architecture.readout is None:
            raise ValueError(
                "the model's final norm was not found, and these drafts read the state after it: "
                'train kind="feature".'
            )
        device = next(network.parameters()).device
        self._indices = [head.indices(device) for head in self._heads()]

    def _heads(self) -> list[DraftHead]:
        if isinstance(self.network, HeadsNetwork):
            return [self.network.head(k) for k in range(self.depths)]
        return [self.network.head] * self.depths

    def __call__(
        self, batch: Batch, ranks: int = 0, prompt_weight: float | None = None
    ) -> list[Distilled]:
        """Losses of `batch`, depth by depth; see `distill`.

        Args:
            batch: On the network's device and in its dtype.
            ranks: R, how many ranks to count.
            prompt_weight: Instead of the config's.
        """
        share = self.config.prompt_weight if prompt_weight is None else prompt_weight
        is_exit = isinstance(self.network, ExitNetwork)
        # Depth s at position t is about token t + 2 + s: what the target says at t + 1 + s.
        weights = pad(batch.weights(share), (0, self.depths))
        top, probs = (pad(x, (0, 0, 0, self.depths)) for x in (batch.top, batch.probs))
        length = batch.ids.shape[1]
        windows = [slice(s + (not is_exit), s + (not is_exit) + length) for s in range(self.depths)]
        keep = [weights[:, window] > 0 for window in windows]
        found = []
        for s, states in enumerate(self._states(batch, keep)):
            counted, window = keep[s], windows[s]
            tokens = self._indices[s][top[:, window][counted]]
            found.append(
                distill(
                    states,
                    self._heads()[s].matrix,
                    tokens,
                    probs[:, window][counted],
                    weights[:, window][counted],
                    self.config.loss,
                    ranks,
                )
            )
        return found

    def _states(self, batch: Batch, keep: list[Tensor]) -> Iterator[Tensor]:
        """What the head reads, [M, C] of the positions to keep, for every depth."""
        network, taps = self.network, batch.taps
        if self.normed:
            taps = self._final_norm(taps)
        if isinstance(network, ExitNetwork):
            yield exit_states(network, taps, keep[0])
            return
        embedded = self._embedded(batch.ids[:, 1:], taps.dtype)
        embedded = pad(embedded, (0, 0, 0, self.depths))
        length = taps.shape[1]
        if isinstance(network, FeatureNetwork):
            window = embedded[:, : length + self.depths - 1]
            anyhow = torch.stack(keep).any(0)
            for s, feature in enumerate(unroll(network, window, taps, self.depths, anyhow)):
                yield network.readout(feature[keep[s][anyhow]])
            return
        for k in range(self.depths):
            path = None
            if network.config.conditioned:
                steps = [embedded[:, j : j + length][keep[k]] for j in range(k + 1)]
                path = torch.stack(steps, dim=-2)
            yield network(k, taps[keep[k]], path)

    @torch.no_grad()
    def _embedded(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        module = self.architecture.embeddings()
        device: torch.device = module.weight.device  # type: ignore[assignment]
        out: Tensor = module(ids.to(device))
        return out.to(ids.device, dtype)

    @torch.no_grad()
    def _final_norm(self, states: Tensor) -> Tensor:
        assert self.architecture.readout is not None
        norm = self.architecture.readout.norm
        weight = next(norm.parameters())
        out: Tensor = norm(states.to(weight.device, weight.dtype))
        return out.to(states.device, states.dtype)
