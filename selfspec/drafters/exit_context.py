"""What the attention of a trained exit looks at: states of earlier tokens after the exit layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.drafters.own_cache import OwnCache
from selfspec.drafters.states_seen import AT_ONCE, StatesSeen
from selfspec.topology import chain_topology

if TYPE_CHECKING:
    from selfspec.networks.attention import Attend
    from selfspec.networks.exit import ExitNetwork
    from selfspec.state import DecodeState, TargetOutput


class ExitContext:
    """What the attention of an exit has seen of a request.

    Args:
        network: Fitted to the model.
        state: After the prompt.
        output: Of the prompt.
    """

    def __init__(self, network: ExitNetwork, state: DecodeState, output: TargetOutput) -> None:
        self.network = network
        self.seen = StatesSeen((network.config.exit_layer,), state, output)
        self.cache = OwnCache(state.batch, max(self.seen.counts) + 64, network.rotary)

    def catch_up(self, state: DecodeState) -> None:
        """Entries for all states that wait: those of every committed token but the root."""
        device = state.root.device
        while any(self.seen.counts):
            is_prompt = not any(self.cache.lengths)
            most = max(self.seen.counts) if is_prompt else AT_ONCE
            states, counts, _ = self.seen.take(most, state)
            positions, _ = self.cache.open_next(states.shape[1], device)
            angles = self.cache.angles(positions, states.dtype)
            self.cache.layers[0].update(*self.network.entries(states.to(device), angles))
            self.cache.keep(counts)

    def run(self, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What the head reads, [B, P, C], of states [B, P, C]."""
        angles = self.cache.angles(positions, states.dtype)
        out: Tensor = self.network(states, angles, attend)
        return out

    def chain(self) -> _Chain:
        """A draft that begins with the root."""
        return _Chain(self, self.network.norm.weight.device)


class _Chain:
    """The root and the drafted tokens behind it, one after the other."""

    def __init__(self, context: ExitContext, device: torch.device) -> None:
        self._context = context
        self._prefix, _ = context.cache.placement(device)
        self._nodes = 0

    def follow(self, states: Tensor) -> Tensor:
        """What the head reads of the state [B, 1, C] of the next token."""
        cache = self._context.cache
        _, _, bits = chain_topology(self._nodes + 1, states.device)
        ancestors = bits[:, -1:].expand(cache.batch, -1, -1)
        attend = cache.expand(self._nodes, ancestors, self._prefix)
        positions = self._prefix[:, None].long() + self._nodes
        self._nodes += 1
        return self._context.run(states, positions, attend)
