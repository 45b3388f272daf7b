"""Drafts copied from this text and from earlier ones, as often as each went on so.

Oliaro et al. 2024 (SuffixDecoding), https://arxiv.org/abs/2411.04975: the longest suffix of the
text that occurred before, in the text itself or in what this wrapper has generated and read, and a
tree of how it went on, by frequency. Texts are searched by array comparison; there is no index.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import log, log2
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.costs import HISTORY
from selfspec.drafters.judge import Judge, judge_of, learn_from
from selfspec.history import History
from selfspec.options import check_int, check_probability
from selfspec.tree import TokenTree
from selfspec.tree_rows import GrowingRow, likeliest, ranked

if TYPE_CHECKING:
    from selfspec.state import Acceptance, DecodeState, TargetOutput

# Log-odds that a copy goes on right before anything is known: one; those of its share among all
# copies; the length of the match, in doublings; the number of copies, likewise; whether it is the
# latest copy; whether it is of an earlier text.
_BELIEF = np.array([-2.4, 1.0, 1.1, 0.0, 0.3, -0.5])
_FLOOR = 0.5  # of the price of a node, from which one is a candidate
_MOST = 64  # copies of a match that are looked at, the latest


@dataclass(frozen=True)
class _Draft:
    """What was found for one row."""

    length: int  # of the row, when it was drafted
    tree: GrowingRow
    described: np.ndarray  # [N - 1, F]
    expected: np.ndarray  # [N]


class SuffixDrafter:
    """Proposes what followed the last tokens when they occurred before, here or in earlier texts.

    All copies of the longest suffix count, those of this text and of earlier requests of the same
    wrapper (`history_tokens` of them at most; other wrappers never see them, and
    `spec.costs.forget_texts()` drops them). What they went on with becomes a tree, whose
    nodes are as probable as their share of the copies, the length of the match and what became of
    earlier drafts say.

    Args:
        min_match: Shortest suffix, in tokens, that counts as a match.
        max_match: Longest suffix that is distinguished.
        history_tokens: Tokens of earlier requests that are kept; 0, or a wrapper with
            `adaptive=False`: this text alone.
        min_prob: Least probability of a token to be verified. None: the tokens that are decoded in
            the time that it adds, as measured.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If one is out of range.
    """

    hidden_taps: Sequence[int] = ()
    makes_valid_trees = True
    sizes_itself = True  # by how often copies were right

    def __init__(
        self,
        min_match: int = 1,
        max_match: int = 32,
        history_tokens: int = 200_000,
        min_prob: float | None = None,
    ) -> None:
        check_int("min_match", min_match, 1)
        check_int("max_match", max_match, min_match)
        check_int("history_tokens", history_tokens, 0)
        if min_prob is not None:
            check_probability("min_prob", min_prob)
        self.min_match = min_match
        self.max_match = max_match
        self.history_tokens = history_tokens
        self.min_prob = min_prob
        # Of the request: who is to be believed, what was drafted last, rows whose text is kept.
        self._judge: Judge | None = None
        self._drafts: list[_Draft] = []
        self._kept: set[int] = set()

    def __copy__(self) -> SuffixDrafter:
        """For a request beside another one."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.reset()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Without the request that is being decoded."""
        return {**self.__dict__, "_judge": None, "_drafts": [], "_kept": set()}

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """A tree for every row that has a match and room, as far as that pays."""
        if self._judge is None:
            self._judge = judge_of(state.costs, "copies", _BELIEF)
        floor = self.min_prob
        if floor is None:
            floor = _FLOOR * state.costs.node_price(state.batch)
        earlier = self._earlier(state).tokens
        self._drafts = [
            self._row(state.tokens(b), earlier, min(budget, state.room(b) - 1), floor, self._judge)
            for b in range(state.batch)
        ]
        count = budget
        if self.min_prob is None:
            rows = max(1, state.frozen.count(False))
            given = ranked([draft.expected for draft in self._drafts], rows)
            count = min(state.costs.choose(state.batch, given), budget)
        rows_chosen = [likeliest(draft.tree, draft.expected, count) for draft in self._drafts]
        return TokenTree.from_rows(state.root, rows_chosen)

    def _earlier(self, state: DecodeState) -> History:
        """Earlier texts; none where calls are to be repeatable."""
        if not self.history_tokens or not state.costs.adaptive:
            return History(0)
        found = state.costs.kept.get(HISTORY)
        if not isinstance(found, History):
            state.costs.kept[HISTORY] = found = History(self.history_tokens)
        return found

    def _row(
        self, tokens: np.ndarray, earlier: np.ndarray, budget: int, floor: float, judge: Judge
    ) -> _Draft:
        tree = GrowingRow(int(tokens[-1]) if len(tokens) else 0)
        described: list[list[float]] = []
        expected = [1.0]
        probability = judge.of_one()
        match, copies, own = self._copies(tokens, earlier, budget)
        # The most probable first: a node that copies have come to, which copies, and how far.
        queue = [(-1.0, 0, list(range(len(copies))), 0)]
        for _ in range(budget + 1):  # so many are enough for the best of the budget
            if not queue:
                break
            _, node, of, depth = heapq.heappop(queue)
            if len(of) == 1:  # the common case: what is left is a chain
                rest = copies[of[0]][depth:]
                if not rest:
                    continue
                latest, value = depth > 0 or of[0] == 0, expected[node]
                for at, token in enumerate(rest, match + depth):
                    row = _describe(at, 1, 1, latest, of[0] >= own)
                    value *= probability(row)
                    if value < floor:
                        break
                    node = tree.add(node, token)
                    described.append(row)
                    expected.append(value)
                continue
            went: dict[int, list[int]] = {}
            for at in of:
                if depth < len(copies[at]):
                    went.setdefault(copies[at][depth], []).append(at)
            if not went:
                continue
            total = sum(map(len, went.values()))
            latest = True  # copies are in order, the latest first
            for token, which in went.items():
                row = _describe(match + depth, len(which), total, latest, which[0] >= own)
                latest = False
                value = expected[node] * probability(row)
                if value < floor:
                    continue
                child = tree.add(node, token)
                described.append(row)
                expected.append(value)
                heapq.heappush(queue, (-value, child, which, depth + 1))
        return _Draft(len(tokens), tree, np.array(described), np.array(expected))

    def _copies(
        self, tokens: np.ndarray, earlier: np.ndarray, budget: int
    ) -> tuple[int, list[list[int]], int]:
        """The longest match's length, what followed it, the latest first, and how many here."""
        if budget < 1 or not len(tokens):
            return 0, [], 0
        found = [longest_match(tokens, tokens[:-1], self.max_match, at_end=True)]
        found.append(longest_match(tokens, earlier, self.max_match))
        match = max(length for length, _ in found)
        if match < self.min_match:
            return 0, [], 0
        most = min(budget, 2**match)
        copies: list[list[int]] = []
        for text, (length, ends) in zip((tokens, earlier), found, strict=True):
            if length < match:
                continue
            for end in ends[: -_MOST - 1 : -1]:
                copied = text[end : end + most]
                stop = np.flatnonzero(copied < 0)
                copies.append((copied[: stop[0]] if len(stop) else copied).tolist())
        own = len(found[0][1]) if found[0][0] == match else 0
        return match, copies[:_MOST], own

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Learn which copies were right, verified or not; keep the text of rows that have ended."""
        if self._judge is not None and state.costs.adaptive:
            for b, draft in enumerate(self._drafts):
                came = len(state.tokens(b)) - draft.length
                if came and len(draft.described):
                    nodes = range(1, len(draft.tree))
                    learn_from(
                        state.ending(b, came),
                        draft.tree,
                        nodes,
                        [0] * len(nodes),
                        draft.described,
                        [self._judge],
                    )
        self._drafts = []
        for b, ended in enumerate(state.frozen):
            if ended and b not in self._kept:
                self._kept.add(b)
                self._earlier(state).add(state.tokens(b))

    def reset(self) -> None:
        """Forget the request before, but for its text."""
        self._judge, self._drafts, self._kept = None, [], set()


def _describe(match: int, count: int, total: int, latest: bool, earlier: bool) -> list[float]:
    """Features of a token that `count` of `total` copies have."""
    share = (count + 0.5) / (total + 1.0)
    log_odds = log(share) - log(1.0 - share)
    return [1.0, log_odds, log2(match), log2(total), float(latest), float(earlier)]


def longest_match(
    tokens: np.ndarray, text: np.ndarray, most: int, at_end: bool = False
) -> tuple[int, np.ndarray]:
    """Where the longest suffix of `tokens` occurs in `text`.

    Args:
        tokens: int64 [T].
        text: int64 [U].
        most: Longest suffix that is looked for.
        at_end: Whether an occurrence at the very end counts (something follows it elsewhere).

    Returns:
        Its length, 0 if the last token does not occur; int64 [M], where occurrences end, rising.
    """
    end = len(tokens)
    ends = np.flatnonzero(text == tokens[-1]) + 1
    if not at_end:
        ends = ends[ends < len(text)]
    if not len(ends):
        return 0, ends
    length = 1
    while length < min(most, end):
        longer = ends[ends > length]
        longer = longer[text[longer - length - 1] == tokens[end - length - 1]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return length, ends
