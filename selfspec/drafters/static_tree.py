"""Trees whose shape is fixed before anything is drafted.

A node is named by its path of ranks: (0, 2) is the third-best token after the best one. If the
target's token at depth d is the r-th best with probability a[d, r], given that everything before it
is right, a node is accepted with the product along its path, and the sum over the nodes is how many
tokens a tree is expected to give. No node has a larger product than its parent or its elder
sibling, so that taking the largest product next, again and again, gives the best tree of every
size. Cai et al. 2024 (Medusa), section 2.3.3, https://arxiv.org/abs/2401.10774.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.state import DecodeState

Path = tuple[int, ...]
Table = tuple[tuple[float, ...], ...]


def assumed_accuracies(depth: int, ranks: int = 10) -> Table:
    """Rank accuracies for heads that were not measured.

    Published first heads are right in 56 % of the cases; deeper ones less often, and of the others
    the second-best token is much the likeliest. Only the order of the products matters.
    """
    return tuple(
        tuple(0.56 * 0.85**d * (1.0 if r == 0 else 0.2 / r) for r in range(ranks))
        for d in range(depth)
    )


@lru_cache(maxsize=512)
def best_paths(accuracies: Table, count: int, least: float = 0.0) -> tuple[Path, ...]:
    """The nodes of the best tree.

    Args:
        accuracies: [depth, rank], see the module. A rank counts for no more than a better one: as
            measured on few texts it may seem to.
        count: Most nodes, the root not counted.
        least: Nodes have to be accepted with more than this probability.

    Returns:
        Paths in the order in which they are worth drafting: the first n are the best tree of n
        nodes. Parents and elder siblings come before a node. Fewer than `count` if there are not
        so many, or the rest is not worth it.
    """
    table = [[min(row[: r + 1]) for r in range(len(row))] for row in accuracies]
    # By product; of equal ones the shallower, then the one of better ranks.
    heap: list[tuple[float, int, Path]] = []
    if table and table[0]:
        heap.append((-table[0][0], 1, (0,)))
    found: list[Path] = []
    while heap and len(found) < count and -heap[0][0] > least:
        path = heapq.heappop(heap)[2]
        found.append(path)
        for new in ((*path, 0), (*path[:-1], path[-1] + 1)):
            if len(new) <= len(table) and new[-1] < len(table[len(new) - 1]):
                product = math.prod(table[d][rank] for d, rank in enumerate(new))
                heapq.heappush(heap, (-product, len(new), new))
    return tuple(found)


@lru_cache(maxsize=512)
def products(accuracies: Table, paths: tuple[Path, ...]) -> tuple[float, ...]:
    """Probability of every one of `paths`."""
    return tuple(math.prod(accuracies[d][rank] for d, rank in enumerate(path)) for path in paths)


def check_paths(tree: Sequence[Sequence[int]], depth: int, ranks: int) -> tuple[Path, ...]:
    """A user's tree, as paths.

    Args:
        tree: Rank paths.
        depth: Tokens that can be drafted one after another.
        ranks: Tokens that can be told apart at one position.

    Raises:
        TypeError: If it is no list of lists of ints.
        ValueError: If a node lacks its parent or elder sibling, or is out of range.
    """
    try:
        paths = tuple(tuple(index(rank) for rank in path) for path in tree)
    except TypeError:
        raise TypeError(
            f"tree={tree!r} must be a list of rank paths, like [[0], [1], [0, 0]]."
        ) from None
    if not paths:
        raise ValueError("tree=[] has no node; leave tree out to have one fitted.")
    known: set[Path] = {()}
    for path in paths:
        if not 1 <= len(path) <= depth or not all(0 <= rank < ranks for rank in path):
            raise ValueError(
                f"tree has {list(path)}: a path has 1..{depth} ranks, each in 0..{ranks - 1}."
            )
        elder = (*path[:-1], path[-1] - 1)
        missing = [other for other in (path[:-1], elder) if other not in known and min(other) >= 0]
        if missing or path in known:
            why = f"before {list(missing[0])}" if missing else "twice"
            raise ValueError(
                f"tree has {list(path)} {why}: every path once, after its parent and the sibling "
                "of the next better rank."
            )
        known.add(path)
    return paths


@dataclass(frozen=True, eq=False)
class Level:
    """The nodes of one depth that have children, M of them.

    Attributes:
        nodes: int64 [M], their numbers in the tree.
        ranks: Most children of one of them.
        parent: int64 [M], where their parents are among the nodes of the level above.
        candidate: int64 [M], where their tokens are among the candidates of the level above: its
            nodes times its ranks, flattened. At the root neither means anything.
    """

    nodes: Tensor
    ranks: int
    parent: Tensor
    candidate: Tensor


@dataclass(frozen=True, eq=False)
class StaticTree:
    """A shape, and where its tokens are found among the candidates that heads give.

    Attributes:
        one: The shape, for one row; its tokens mean nothing.
        levels: Nodes with children, by depth.
        picks: int64 [N - 1]: for every node but the root, where its token is among the candidates
            of all levels one after another, each as in `Level.candidate`.
        ranks: Most children of any node.
        rank_picks: int64 [N - 1]: the same among `ranks` candidates of every depth, for heads to
            which all nodes of a depth are the same.
    """

    one: TokenTree
    levels: tuple[Level, ...]
    picks: Tensor
    ranks: int
    rank_picks: Tensor

    def filled(
        self,
        state: DecodeState,
        drafts: Tensor,
        log_q: Tensor | None = None,
        expected: Sequence[float] | None = None,
    ) -> TokenTree:
        """The tree of every row.

        A row with less room has the first nodes, as many as it would get if it were alone.

        Args:
            state: For roots and rooms.
            drafts: int64 [B, N - 1] tokens.
            log_q: See `TokenTree`.
            expected: Likewise, of the nodes but the root, the same for every row.
        """
        batch, width, one = state.batch, self.one.width, self.one
        counts = [max(1, min(width, state.room(b))) for b in range(batch)]
        if min(counts) == width:
            num_nodes = one.num_nodes.expand(batch)
        else:
            num_nodes = torch.tensor(counts, dtype=torch.int32, device=drafts.device)
        said = None
        if expected is not None:
            said = torch.tensor([[1.0, *expected]], device=drafts.device).expand(batch, -1)
        return replace(
            one,
            expected=said,
            tokens=torch.cat([state.root[:, None], drafts], dim=1),
            parents=one.parents.expand(batch, -1),
            depth=one.depth.expand(batch, -1),
            ancestors=one.ancestors.expand(batch, -1, -1),
            num_nodes=num_nodes,
            log_q=log_q,
            max_nodes=max(counts),
        )


@lru_cache(maxsize=512)
def static_tree(paths: tuple[Path, ...], device: torch.device) -> StaticTree:
    """The tree of `paths`, made once.

    Made outside inference mode, as `chain_topology`.

    Args:
        paths: Of one node or more, parents and elder siblings before a node.
        device: Where its tensors go.
    """
    number = {path: n for n, path in enumerate(((), *paths))}
    children: dict[Path, int] = {}
    for path in paths:
        children[path[:-1]] = children.get(path[:-1], 0) + 1
    depth = max(map(len, paths))
    expanded = [
        [path for path in number if len(path) == d and path in children] for d in range(depth)
    ]
    place = {path: at for level in expanded for at, path in enumerate(level)}
    ranks = [max(children[path] for path in level) for level in expanded]

    def candidate(path: Path) -> int:
        return place[path[:-1]] * ranks[len(path) - 1] + path[-1] if path else 0

    first = [0]  # candidate of every level
    for level, width in zip(expanded, ranks, strict=True):
        first.append(first[-1] + len(level) * width)

    def indices(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    with torch.inference_mode(False):
        return StaticTree(
            one=TokenTree.from_topology(
                torch.zeros(1, len(number), dtype=torch.int64, device=device),
                [-1, *(number[path[:-1]] for path in paths)],
            ),
            levels=tuple(
                Level(
                    nodes=indices([number[path] for path in level]),
                    ranks=width,
                    parent=indices([place[path[:-1]] if path else 0 for path in level]),
                    candidate=indices([candidate(path) for path in level]),
                )
                for level, width in zip(expanded, ranks, strict=True)
            ),
            picks=indices([first[len(path) - 1] + candidate(path) for path in paths]),
            ranks=max(ranks),
            rank_picks=indices([(len(path) - 1) * max(ranks) + path[-1] for path in paths]),
        )
