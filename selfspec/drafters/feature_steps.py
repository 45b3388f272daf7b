"""A feature network in one request: over states of the target, then over its own guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.drafters.own_cache import OwnCache
from selfspec.drafters.states_seen import AT_ONCE, StatesSeen
from selfspec.drafters.trained import best_tokens
from selfspec.topology import packed_bits

if TYPE_CHECKING:
    from selfspec.networks.attention import Attend
    from selfspec.networks.feature import FeatureNetwork
    from selfspec.state import DecodeState, TargetOutput


class FeatureSteps:
    """The network, its cache, and the states that are not in it yet.

    Args:
        network: As it runs on the model.
        state: After the prompt.
        output: Of the prompt.
    """

    def __init__(self, network: FeatureNetwork, state: DecodeState, output: TargetOutput) -> None:
        self.network = network
        self.seen = StatesSeen(network.config.taps, state, output)
        self.cache = OwnCache(state.batch, max(self.seen.counts) + 64, network.rotary)
        self.vocab_size = output.logits.shape[-1]
        architecture = state.target.architecture
        self._embed = architecture.embeddings
        self._norm = None
        if network.config.layout == "eagle":
            assert architecture.readout is not None
            self._norm = architecture.readout.norm
        self._last: Tensor | None = None

    def best(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B, W, k] after outputs [B, W, C], best first, and log-probabilities.

        `k` is `count`, or all of a smaller vocabulary.
        """
        return best_tokens(self.network.head, self.network.readout(hidden), count)

    def catch_up(self, state: DecodeState) -> Tensor:
        """Cache entries for all states that wait; the output after the last one, [B, 1, C].

        A row without any, which has ended, keeps the output that it had.
        """
        seen, device = self.seen, state.root.device
        if any(seen.counts) and not any(self.cache.lengths):
            self._last = self._read_prompt(state)
        while any(seen.counts):
            feature, tokens, counts = self._take(AT_ONCE, state)
            positions, attend = self.cache.append(tokens.shape[1], device)
            out = self.run(feature, tokens, positions, attend)
            self.cache.keep(counts)
            at = torch.tensor(counts, device=device).clamp(min=1) - 1
            last = out[torch.arange(state.batch, device=device), at]
            if self._last is not None and not all(counts):
                ended = torch.tensor([count == 0 for count in counts], device=device)
                last = torch.where(ended[:, None], self._last, last)
            self._last = last
        assert self._last is not None
        return self._last[:, None]

    def _read_prompt(self, state: DecodeState) -> Tensor:
        """Keys and values of all of it, and the output at its end alone, [B, C]."""
        cache, device = self.cache, state.root.device
        feature, tokens, counts = self._take(max(self.seen.counts), state)
        embedded = self._embed()(tokens).to(feature.dtype)
        x, residual = self.network.inputs(embedded, feature)
        positions, _ = cache.open_next(tokens.shape[1], device)
        angles = cache.angles(positions, feature.dtype)
        cache.layers[0].update(*self.network.keys_and_values(x, angles))
        # The last entry is made once more, as a node behind the others, which attends.
        cache.keep([max(count - 1, 0) for count in counts])
        prefix, _ = cache.placement(device)
        itself = torch.ones(state.batch, 1, 1, dtype=torch.int64, device=device)
        attend = cache.expand(0, itself, prefix)
        rows, end = torch.arange(state.batch, device=device)[:, None], prefix.long()[:, None]
        angles = cache.angles(end, feature.dtype)
        out = self.network.layer(x[rows, end], residual[rows, end], angles, attend)
        cache.keep([min(count, 1) for count in counts])
        return out[:, 0]

    def _take(self, most: int, state: DecodeState) -> tuple[Tensor, Tensor, list[int]]:
        """Features [B, P, C] of at most so many states that wait, tokens after them, and counts."""
        device = state.root.device
        states, counts, tokens = self.seen.take(most, state)
        if self._norm is not None:
            states = self._norm(states)
        feature = self.network.fuse(states.to(device, self.network.o_proj.weight.dtype))
        return feature, tokens.to(device), counts

    def run(self, feature: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One forward; keys and values go to the slots that the cache was opened at.

        Args:
            feature: [B, P, C] at `positions`.
            tokens: int64 [B, P], one position on.
            positions: int64 [B, P].
            attend: Of the cache.

        Returns:
            [B, P, C]
        """
        embedded = self._embed()(tokens).to(feature.dtype)
        angles = self.cache.angles(positions, feature.dtype)
        out: Tensor = self.network(embedded, feature, angles, attend)
        return out


class Expansion:
    """The nodes of one draft, level by level, behind the entries of the cache.

    Args:
        steps: Caught up.
        device: Where they run.
    """

    def __init__(self, steps: FeatureSteps, device: torch.device) -> None:
        self._steps = steps
        self._prefix, _ = steps.cache.placement(device)
        self._level = 0
        self._visible: Tensor | None = None  # bool [B, W, nodes so far], of the last level

    def run(self, hidden: Tensor, parent: Tensor, tokens: Tensor) -> Tensor:
        """Run a level.

        Args:
            hidden: [B, W, C] outputs of the level before.
            parent: int64 [B, w], of which of them the new nodes are children.
            tokens: int64 [B, w] of the new nodes.

        Returns:
            [B, w, C]
        """
        batch, width = tokens.shape
        feature = hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[2]))
        own = torch.eye(width, dtype=torch.bool, device=hidden.device).expand(batch, -1, -1)
        if self._visible is not None:
            above = parent[:, :, None].expand(-1, -1, self._visible.shape[2])
            own = torch.cat([self._visible.gather(1, above), own], dim=2)
        self._visible = own
        nodes = own.shape[2] - width
        attend = self._steps.cache.expand(nodes, packed_bits(own), self._prefix)
        positions = (self._prefix[:, None].long() + self._level).expand(-1, width)
        self._level += 1
        return self._steps.run(feature, tokens, positions, attend)
