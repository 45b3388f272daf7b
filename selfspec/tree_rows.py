"""Trees on the host, a row at a time, while they are put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Nodes(NamedTuple):
    """The nodes of one row, the root first and parents before their children.

    Attributes:
        tokens: Of every node.
        parents: Likewise; -1 for the root.
        expected: Probability that verification comes by each node; None if nobody said.
    """

    tokens: list[int]
    parents: list[int]
    expected: list[float] | None


class GrowingRow:
    """A tree in which no node has two children with the same token."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that has this token, if there is one."""
        return self._children.get((node, token))

    def add(self, node: int, token: int) -> int:
        """That child, new if there was none."""
        found = self._children.get((node, token))
        if found is None:
            found = self._children[node, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(node)
        return found


def ranked(expected: Sequence[np.ndarray], rows: int) -> list[float]:
    """What the best, second best, ... nodes give a row, the root left out.

    Args:
        expected: Of every row, the probability [N] that verification comes by each node.
        rows: How many rows the mean is over: those that still take tokens.
    """
    best = [np.sort(row[1:])[::-1] for row in expected]
    sums = np.zeros(max(map(len, best)))
    for row in best:
        sums[: len(row)] += row
    found: list[float] = (sums / rows).tolist()
    return found


def likeliest(tree: GrowingRow, expected: np.ndarray, count: int) -> Nodes:
    """The `count` most probable nodes of a row, those without any probability left out.

    Args:
        tree: The row.
        expected: [N], no more for a node than for its parent.
        count: Most nodes, the root not counted.
    """
    # Parents are at least as probable and made before: with ties in order they come along.
    order = np.argsort(-expected[1:], kind="stable")[:count] + 1
    kept = [0, *sorted(node for node in order.tolist() if expected[node] > 0)]
    place = {node: at for at, node in enumerate(kept)}
    parents = [-1, *(place[tree.parents[node]] for node in kept[1:])]
    tokens = [tree.tokens[node] for node in kept]
    return Nodes(tokens, parents, expected[kept].tolist())
