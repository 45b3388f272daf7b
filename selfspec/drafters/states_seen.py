"""The target's states that a draft network has not taken into its own cache yet.

An entry of such a cache is made from the target's own states, once they are known; what drafting
wrote for its own guesses lies behind the entries and is overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from selfspec.state import Acceptance, DecodeState, TargetOutput

AT_ONCE = 256  # states of a catch-up; a prompt is one piece, whatever its length


class StatesSeen:
    """Hidden states of committed tokens that wait.

    Rows may have different numbers of them: after a step without drafts one more each, after one
    with drafts as many as were accepted and one, after a pause all since then.

    Args:
        taps: Layers, in the order in which their states are put side by side.
        state: After the prompt.
        output: Of the prompt.

    Attributes:
        counts: How many wait, by row.
    """

    def __init__(self, taps: tuple[int, ...], state: DecodeState, output: TargetOutput) -> None:
        self.taps = taps
        states = _side_by_side([output.hidden[tap] for tap in taps])
        # The prompt may continue a cache, or begin with embeddings: ids, states and what is cached
        # of a row agree at their ends.
        slots = states.shape[1]
        self.counts = [
            min(slots, cached, len(state.tokens(b))) for b, cached in enumerate(state.cache.lengths)
        ]
        self._lengths = list(state.length)
        self._waiting = states.new_zeros(state.batch, max(self.counts), states.shape[2])
        for b, count in enumerate(self.counts):
            self._waiting[b, :count] = states[b, slots - count :]

    def add(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Keep the states of the nodes that were accepted; `state` is committed already."""
        path = acceptance.path.clamp(min=0).long()[:, :, None]
        new = [length - seen for length, seen in zip(state.length, self._lengths, strict=True)]
        self._lengths = list(state.length)
        kept = []
        for tap in self.taps:
            hidden = output.hidden[tap]
            kept.append(hidden.gather(1, path.to(hidden.device).expand(-1, -1, hidden.shape[2])))
        self._append(_side_by_side(kept), new)

    def _append(self, states: Tensor, new: list[int]) -> None:
        """Add the first `new[b]` of `states` [B, P, n C] to every row."""
        filled, most = max(self.counts), max(n + c for n, c in zip(new, self.counts, strict=True))
        if filled == 0 and states.shape[1] >= most:
            self._waiting, self.counts = states[:, :most], new
            return
        if most > self._waiting.shape[1]:
            grown = states.new_zeros(states.shape[0], max(most, 2 * filled), states.shape[2])
            grown[:, :filled] = self._waiting[:, :filled]
            self._waiting = grown
        for b, (at, count) in enumerate(zip(self.counts, new, strict=True)):
            self._waiting[b, at : at + count] = states[b, :count]
        self.counts = [at + count for at, count in zip(self.counts, new, strict=True)]

    def take(self, most: int, state: DecodeState) -> tuple[Tensor, list[int], Tensor]:
        """The oldest states that wait; they wait no longer.

        Args:
            most: At most this many a row.
            state: For the tokens.

        Returns:
            [B, P, n C] states, how many are real in every row (the rest is padding), and int64
            [B, P] the tokens that came after them, on the CPU.
        """
        counts = [min(count, most) for count in self.counts]
        width = max(counts)
        states = _unstrided(self._waiting[:, :width])
        ids = torch.zeros(state.batch, width, dtype=torch.int64)
        for b, count in enumerate(counts):
            if count:
                tokens = state.tokens(b)
                first = len(tokens) - self.counts[b]
                ids[b, :count] = torch.from_numpy(tokens[first : first + count])
        left = [waiting - count for waiting, count in zip(self.counts, counts, strict=True)]
        if any(left):
            rest = states.new_zeros(state.batch, max(left), states.shape[2])
            for b, (count, more) in enumerate(zip(counts, left, strict=True)):
                rest[b, :more] = self._waiting[b, count : count + more]
            self._waiting = rest
        self.counts = left
        return states, counts, ids


def _unstrided(states: Tensor) -> Tensor:
    """[B, P, C] with rows right behind each other: else products with them copy their weights.

    `contiguous` does not look at the stride of a batch of one, but products do.
    """
    if states.stride(0) == states.shape[1] * states.shape[2]:
        return states.contiguous()
    return states.clone(memory_format=torch.contiguous_format)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """States of several layers [B, M, C], which may be on several devices, as [B, M, n C]."""
    return torch.cat([part.to(parts[-1].device) for part in parts], dim=-1)
