"""What a feature drafter remembers of a request: its own keys and values, and what they lack yet.

An entry of the drafter's cache belongs to a pair: the hidden states of the target at one position,
and the token that came next. It is made from the target's own states, once they are known; what
drafting wrote for its own guesses lies behind the entries and is overwritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.cache import TreeCache

if TYPE_CHECKING:
    from selfspec.state import Acceptance, DecodeState, TargetOutput

_ENDLESS = 1 << 30


class FeaturesSeen:
    """Hidden states of committed tokens that are not in the drafter's cache yet, and that cache.

    Rows may have different numbers of them: after a step without drafts one more each, after one
    with drafts as many as were accepted and one, after a pause all since then.

    Args:
        taps: Layers, in the order in which their states are put side by side.
        state: After the prompt.
        output: Of the prompt.
    """

    def __init__(self, taps: tuple[int, ...], state: DecodeState, output: TargetOutput) -> None:
        self.taps = taps
        states = self._side_by_side(output)
        # The prompt may continue a cache, or begin with embeddings: ids, states and what is cached
        # of a row agree at their ends.
        slots = states.shape[1]
        counts = [
            min(slots, cached, len(state.tokens(b))) for b, cached in enumerate(state.cache.lengths)
        ]
        self.counts = counts
        self.lengths = list(state.length)
        most = max(counts)
        self.waiting = states.new_zeros(state.batch, most, states.shape[2])
        for b, count in enumerate(counts):
            self.waiting[b, :count] = states[b, slots - count :]
        self.cache = TreeCache(1, state.batch, reserve=most + 64, longest=_ENDLESS)

    def _side_by_side(self, output: TargetOutput) -> Tensor:
        parts = [output.hidden[tap] for tap in self.taps]
        return torch.cat([part.to(parts[-1].device) for part in parts], dim=-1)

    def add(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Keep the states of the nodes that were accepted; `state` is committed already."""
        states = self._side_by_side(output)
        path = acceptance.path.to(states.device).clamp(min=0).long()
        new = [length - seen for length, seen in zip(state.length, self.lengths, strict=True)]
        self.lengths = list(state.length)
        kept = states.gather(1, path[:, :, None].expand(-1, -1, states.shape[2]))
        self._append(kept, new)

    def _append(self, states: Tensor, new: list[int]) -> None:
        """Add the first `new[b]` of `states` [B, P, n C] to every row."""
        filled, most = max(self.counts), max(n + c for n, c in zip(new, self.counts, strict=True))
        if filled == 0 and states.shape[1] >= most:
            # Not a view: products of a strided batch copy their weights.
            self.waiting, self.counts = states[:, :most].contiguous(), new
            return
        if most > self.waiting.shape[1]:
            grown = states.new_zeros(states.shape[0], max(most, 2 * filled), states.shape[2])
            grown[:, :filled] = self.waiting[:, :filled]
            self.waiting = grown
        for b, (at, count) in enumerate(zip(self.counts, new, strict=True)):
            self.waiting[b, at : at + count] = states[b, :count]
        self.counts = [at + count for at, count in zip(self.counts, new, strict=True)]

    def take(self, state: DecodeState, most: int) -> tuple[Tensor, Tensor, list[int]]:
        """The oldest states that wait, with the tokens that came after them.

        Args:
            state: Its tokens.
            most: At most this many a row.

        Returns:
            [B, P, n C] states, int64 [B, P] tokens on the same device, and how many are real in
            every row; the rest is padding. They count as cached from now on.
        """
        counts = [min(count, most) for count in self.counts]
        width = max(counts)
        states = self.waiting[:, :width].contiguous()
        ids = torch.zeros(state.batch, width, dtype=torch.int64)
        for b, count in enumerate(counts):
            if count:
                tokens = state.tokens(b)
                first = len(tokens) - self.counts[b]
                ids[b, :count] = torch.from_numpy(tokens[first : first + count])
        self.counts = [left - count for left, count in zip(self.counts, counts, strict=True)]
        if any(self.counts):
            rest = states.new_zeros(state.batch, max(self.counts), states.shape[2])
            for b, (count, left) in enumerate(zip(counts, self.counts, strict=True)):
                rest[b, :left] = self.waiting[b, count : count + left]
            self.waiting = rest
        return states, ids.to(states.device), counts
