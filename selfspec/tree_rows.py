"""Trees on the host, a row at a time, while they are put together."""

from __future__ import annotations

from typing import NamedTuple


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
