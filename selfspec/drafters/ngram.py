"""Drafts copied from the text so far: prompt lookup.

https://github.com/apoorvumang/prompt-lookup-decoding; the choice among matches differs, see below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from selfspec.match_survival import MatchSurvival
from selfspec.options import check_int, check_probability
from selfspec.tree import TokenTree
from selfspec.tree_rows import Nodes, ranked

if TYPE_CHECKING:
    from selfspec.state import Acceptance, DecodeState, TargetOutput

Match = tuple[int, list[int]]  # tokens that matched, and what followed them


class NGramDrafter:
    """Proposes what followed the last tokens when they occurred before.

    The longest suffix of the row that occurred before decides; among its occurrences the most
    recent one is tried first. A short match is weak evidence, so it may draft `2 ** match` tokens
    only, and of those the ones that are right often enough for the time they take: how often that
    is, is learned from every step, whether a copy was verified in it or not. The text is searched
    by array comparison: there is no index to build or to keep, and a call over 50,000 tokens takes
    well under a millisecond.

    Args:
        min_match: Shortest suffix, in tokens, that counts as a match.
        max_match: Longest suffix that is distinguished.
        max_candidates: Different continuations to draft as one tree. The first gets the budget; the
            others share what it leaves.
        min_prob: Least probability of a token to be verified. None: the tokens that are decoded in
            the time that it adds, as measured. 0: everything that matches.

    Raises:
        TypeError: If an option is no int.
        ValueError: If one is too small, or `max_match` less than `min_match`.

    Example:
        History `a b c d ... x b c`: the longest suffix that occurred before is `b c`, followed by
        `d`; the draft starts with `d`.
    """

    hidden_taps: Sequence[int] = ()
    makes_valid_trees = True
    sizes_itself = True  # by how often copies were right
    most_recent = 256  # matches of one length that are looked through for different candidates

    def __init__(
        self,
        min_match: int = 2,
        max_match: int = 8,
        max_candidates: int = 1,
        min_prob: float | None = None,
    ) -> None:
        check_int("min_match", min_match, 1)
        check_int("max_match", max_match, min_match)
        check_int("max_candidates", max_candidates, 1)
        if min_prob is not None:
            check_probability("min_prob", min_prob)
        self.min_match = min_match
        self.max_match = max_match
        self.max_candidates = max_candidates
        self.min_prob = min_prob
        # Of the request, once it has drafted; of the step, length of every row and what matched.
        self._survival: MatchSurvival | None = None
        self._proposed: list[tuple[int, list[Match]]] = []

    def __copy__(self) -> NGramDrafter:
        """For a request beside another one."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.reset()
        return new

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """Copy continuations for every row that has a match and room, as far as that pays."""
        if self._survival is None:
            self._survival = state.costs.matches.for_request()
        found = [
            self.matches(state.tokens(b), min(budget, state.room(b) - 1))
            for b in range(state.batch)
        ]
        self._proposed = list(zip(state.length, found, strict=True))
        if not any(found):
            return TokenTree.root_only(state.root)
        probable = [
            [self._survival.path(m, len(copied), not r) for r, (m, copied) in enumerate(row)]
            for row in found
        ]
        least = self._least(probable, state)
        rows = [
            _row(token, [copied for _, copied in row], paths, floor, budget)
            for token, row, paths, floor in zip(
                state.root.tolist(), found, probable, least, strict=True
            )
        ]
        return TokenTree.from_rows(state.root, rows)

    def _least(self, probable: list[list[np.ndarray]], state: DecodeState) -> list[float]:
        """Of every row, the least probability of a token that is verified."""
        if self.min_prob is not None:
            return [self.min_prob] * len(probable)
        expected = [np.concatenate([np.ones(1), *row]) for row in probable]
        rows = max(1, state.frozen.count(False))
        count = state.costs.choose(state.batch, ranked(expected, rows))
        best = [np.sort(row[1:])[::-1] for row in expected]
        # As many of every row, if it has so many.
        return [float(row[:count][-1]) if count and len(row) else np.inf for row in best]

    def continuations(self, tokens: np.ndarray, budget: int) -> list[list[int]]:
        """What followed earlier occurrences of the last tokens.

        Args:
            tokens: int64 [T], oldest first.
            budget: Most tokens of a continuation.

        Returns:
            At most `max_candidates` continuations that differ in their first token, best first.
        """
        return [copied for _, copied in self.matches(tokens, budget)]

    def matches(self, tokens: np.ndarray, budget: int) -> list[Match]:
        """The same, each with the number of tokens that matched before it."""
        if budget < 1:
            return []
        end = len(tokens)
        # Ends of earlier occurrences of ever longer suffixes; position `end` itself is no match.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1 if end else np.empty(0, np.int64)
        by_length = [(1, ends)]
        for length in range(2, self.max_match + 1):
            ends = ends[ends >= length]
            if not len(ends):
                break
            ends = ends[tokens[ends - length] == tokens[end - length]]
            by_length.append((length, ends))
        found: list[Match] = []
        seen: set[int] = set()
        for length, ends in reversed(by_length):
            if length < self.min_match:
                break
            for at in ends[: -self.most_recent - 1 : -1]:
                first = int(tokens[at])
                if first in seen:
                    continue
                seen.add(first)
                copied = tokens[at : at + min(budget, 2**length)].tolist()
                found.append((length, copied))
                if len(found) == self.max_candidates:
                    return found
        return found

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Learn which copies were right, verified or not: the text has gone on either way."""
        if self._survival is None or not state.costs.adaptive:
            return
        for b, (length, found) in enumerate(self._proposed):
            new = state.ending(b, state.length[b] - length)
            for rank, (match, copied) in enumerate(found):
                self._survival.observe(match, copied, new, not rank)
        self._proposed = []

    def reset(self) -> None:
        """Forget the request before."""
        self._survival, self._proposed = None, []


def _row(
    root: int, copies: list[list[int]], paths: list[np.ndarray], least: float, budget: int
) -> Nodes:
    """The tree of copies, which differ in their first token, as far as they are probable enough."""
    tokens, parents, expected = [root], [-1], [1.0]
    for copied, path in zip(copies, paths, strict=True):
        count = min(int((path >= least).sum()), budget + 1 - len(tokens))
        if count < 1:
            continue
        parents += [0, *range(len(tokens), len(tokens) + count - 1)]
        tokens += copied[:count]
        expected += path[:count].tolist()
    return Nodes(tokens, parents, expected)
