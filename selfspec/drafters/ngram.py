"""Drafts copied from the text so far: prompt lookup.

https://github.com/apoorvumang/prompt-lookup-decoding; the choice among matches differs, see below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from selfspec.drafters.options import check_int
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.state import Acceptance, DecodeState, TargetOutput


class NGramDrafter:
    """Proposes what followed the last tokens when they occurred before.

    The longest suffix of the row that occurred before decides; among its occurrences the most
    recent one is tried first. A short match is weak evidence, so it may draft `2 ** match` tokens
    only. The text is searched by array comparison: there is no index to build or to keep, and a
    call over 50,000 tokens takes well under a millisecond.

    Args:
        min_match: Shortest suffix, in tokens, that counts as a match.
        max_match: Longest suffix that is distinguished.
        max_candidates: Different continuations to draft as one tree. The first gets the budget; the
            others share what it leaves.

    Raises:
        TypeError: If an option is no int.
        ValueError: If one is too small, or `max_match` less than `min_match`.

    Example:
        History `a b c d ... x b c`: the longest suffix that occurred before is `b c`, followed by
        `d`; the draft starts with `d`.
    """

    hidden_taps: Sequence[int] = ()
    makes_valid_trees = True
    most_recent = 256  # matches of one length that are looked through for different candidates

    def __init__(self, min_match: int = 2, max_match: int = 8, max_candidates: int = 1) -> None:
        check_int("min_match", min_match, 1)
        check_int("max_match", max_match, min_match)
        check_int("max_candidates", max_candidates, 1)
        self.min_match = min_match
        self.max_match = max_match
        self.max_candidates = max_candidates

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """Copy continuations for every row that has a match and room."""
        paths = [
            self.continuations(state.tokens(b), min(budget, state.room(b) - 1))
            for b in range(state.batch)
        ]
        return TokenTree.from_paths(state.root, paths, budget)

    def continuations(self, tokens: np.ndarray, budget: int) -> list[list[int]]:
        """What followed earlier occurrences of the last tokens.

        Args:
            tokens: int64 [T], oldest first.
            budget: Most tokens of a continuation.

        Returns:
            At most `max_candidates` continuations that differ in their first token, best first.
        """
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
        found: list[list[int]] = []
        seen: set[int] = set()
        for length, ends in reversed(by_length):
            if length < self.min_match:
                break
            for at in ends[: -self.most_recent - 1 : -1]:
                first = int(tokens[at])
                if first in seen:
                    continue
                seen.add(first)
                found.append(tokens[at : at + min(budget, 2**length)].tolist())
                if len(found) == self.max_candidates:
                    return found
        return found

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Nothing to keep: the state holds the text."""

    def reset(self) -> None:
        """Nothing to forget."""
