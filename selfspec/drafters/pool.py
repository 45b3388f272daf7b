"""Drafts of several drafters as the candidates of one tree.

Every drafter says of each of its nodes how probable it is; how far that can be believed is learned
(`selfspec.drafters.judge`). A node that several of them draft is as probable as the most convincing
of them says, who knows that he is not alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from selfspec.drafters.judge import learn_from
from selfspec.tree_rows import GrowingRow, Nodes, likeliest, ranked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from selfspec.drafters.judge import Judge
    from selfspec.state import DecodeState
    from selfspec.tree import TokenTree

_LEAST = 1e-6  # of a probability
_UNKNOWN = 0.5  # of a node of which its drafter says nothing, if its parent is right
# Before anything is known: what the drafter says, whatever the depth, and whoever says so too.
BELIEF = np.array([0.0, 1.0, 0.0, 0.0])


class _Row:
    """The candidates of one row, and who says what of them."""

    def __init__(self, root: int) -> None:
        self.tree = GrowingRow(root)
        # Node, drafter, and what that drafter says of it if its parent is right.
        self.nodes: list[int] = []
        self.parts: list[int] = []
        self.said: list[float] = []

    def add(self, part: int, nodes: Nodes) -> None:
        place = [0]
        expected = nodes.expected
        for n in range(1, len(nodes.tokens)):
            parent = nodes.parents[n]
            node = self.tree.add(place[parent], nodes.tokens[n])
            place.append(node)
            self.nodes.append(node)
            self.parts.append(part)
            if expected is None:
                self.said.append(_UNKNOWN)
            else:
                self.said.append(min(expected[n] / max(expected[parent], _LEAST), 1.0))


class Pool:
    """The candidates of one step, B rows.

    Args:
        state: Where decoding stands.
        judges: Of the drafters that may be asked.
    """

    def __init__(self, state: DecodeState, judges: Sequence[Judge]) -> None:
        self._judges = judges
        self._rows = [_Row(token) for token in state.root.tolist()]
        self._chains = state.target.architecture.support == "chain"
        self._lengths = list(state.length)
        self._described: list[np.ndarray] = []
        self._expected: list[np.ndarray] | None = None

    def add(self, part: int, tree: TokenTree) -> None:
        """Take the draft of a drafter."""
        for row, nodes in zip(self._rows, tree.rows(), strict=True):
            row.add(part, nodes)
        self._expected = None

    @property
    def expected(self) -> list[np.ndarray]:
        """Of every row, the probability [N] that verification comes by each node."""
        if self._expected is None:
            self._described = [_describe(row) for row in self._rows]
            self._expected = [
                self._survival(row, described)
                for row, described in zip(self._rows, self._described, strict=True)
            ]
        return self._expected

    def _survival(self, row: _Row, described: np.ndarray) -> np.ndarray:
        count = len(row.tree)
        parents = np.asarray(row.tree.parents)
        given = np.zeros(count)
        parts, nodes = np.asarray(row.parts, int), np.asarray(row.nodes, int)
        for part in np.unique(parts):
            own = parts == part
            np.maximum.at(given, nodes[own], self._judges[part].probabilities(described[own]))
        # One of the children at most is right.
        sums = np.zeros(count)
        np.add.at(sums, parents[1:], given[1:])
        given[1:] /= np.maximum(sums[parents[1:]], 1.0)
        found = np.ones(count)
        for n in range(1, count):  # parents come before their children
            found[n] = found[parents[n]] * given[n]
        return _best_chain(parents, found) if self._chains else found

    def promise(self, rows: int) -> float:
        """Probability that one of the first tokens is right, the mean over `rows` rows."""
        found = 0.0
        for row, expected in zip(self._rows, self.expected, strict=True):
            first = np.asarray(row.tree.parents) == 0
            found += float(expected[first].sum())
        return min(found / rows, 1.0)

    def ranked(self, rows: int) -> list[float]:
        """What the best, second best, ... candidates give a row, the mean over `rows` rows."""
        return ranked(self.expected, rows)

    def choose(self, count: int) -> list[Nodes]:
        """The `count` most probable candidates of every row."""
        return [
            likeliest(row.tree, expected, count)
            for row, expected in zip(self._rows, self.expected, strict=True)
        ]

    def learn(self, state: DecodeState) -> None:
        """See what the text went on with; `state` is committed."""
        if not self._described:
            return
        for b, row in enumerate(self._rows):
            came = state.length[b] - self._lengths[b]
            if not row.nodes or not came:
                continue
            learn_from(
                state.ending(b, came),
                row.tree,
                row.nodes,
                row.parts,
                self._described[b],
                self._judges,
            )


def _best_chain(parents: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The same [N] on the way from the root to the best child of each node, 0 elsewhere."""
    found, node = np.zeros_like(expected), 0
    found[0] = 1.0
    while len(children := np.flatnonzero(parents == node)):
        node = int(children[np.argmax(expected[children])])
        found[node] = expected[node]
    return found


def _describe(row: _Row) -> np.ndarray:
    """[M, 4] of what was said: one; log-odds; depth; whether another drafter says so, too."""
    nodes = np.asarray(row.nodes, int)
    depth = np.zeros(len(row.tree))
    for n in range(1, len(row.tree)):
        depth[n] = depth[row.tree.parents[n]] + 1
    votes = np.bincount(nodes, minlength=len(row.tree))
    said = np.clip(np.asarray(row.said, float), _LEAST, 1 - _LEAST)
    log_odds = np.log(said) - np.log1p(-said)
    return np.stack([np.ones(len(nodes)), log_odds, depth[nodes], votes[nodes] > 1.0], axis=1)
