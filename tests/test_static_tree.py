"""Static trees: the best ones, and where their tokens come from."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from selfspec.drafters.static_tree import (
    assumed_accuracies,
    best_paths,
    check_paths,
    static_tree,
)

TABLES = {
    "steep": ((0.9, 0.05), (0.8, 0.1), (0.7, 0.2)),
    "flat": ((0.4, 0.3, 0.2), (0.35, 0.3, 0.25)),
    "ragged": ((0.5, 0.3), (0.45,), (0.9, 0.06)),
}


def gain(tree: Any, table: Any) -> float:
    return sum(math.prod(table[d][r] for d, r in enumerate(path)) for path in tree)


def closed(tree: Any) -> bool:
    """Whether parents are all there."""
    return all(path[:-1] in tree or len(path) == 1 for path in tree)


@pytest.mark.parametrize("name", TABLES)
def test_no_tree_of_any_size_is_better(name: str) -> None:
    table = TABLES[name]
    ranks = [range(len(row)) for row in table]
    nodes = [p for d in range(1, len(table) + 1) for p in itertools.product(*ranks[:d])]
    order = best_paths(table, len(nodes))
    assert sorted(order) == sorted(nodes)
    for size in range(1, min(6, len(nodes))):
        subsets = itertools.combinations(nodes, size)
        best = max(gain(tree, table) for tree in subsets if closed(set(tree)))
        assert gain(order[:size], table) == pytest.approx(best)
        assert best_paths(table, size) == order[:size]


def test_parents_and_elder_siblings_come_first_whatever_was_measured() -> None:
    """Few texts may make a worse rank seem better; draws need siblings without gaps."""
    table = ((0.3, 0.4, 0.1), (0.0, 0.5), (0.9, 0.1))
    order = best_paths(table, 50)
    assert order == ((0,), (1,), (2,))  # behind depth 2's best token, never right, is nothing
    mixed = best_paths(((0.3, 0.4, 0.1), (0.2, 0.5)), 50)
    assert check_paths(mixed, 2, 3) == mixed
    assert len(mixed) == 9
    assert mixed[:3] == ((0,), (1,), (2,))


def test_assumed_accuracies_are_probabilities_and_make_a_tree() -> None:
    table = assumed_accuracies(5)
    assert all(sum(row) < 1 and list(row) == sorted(row, reverse=True) for row in table)
    order = best_paths(table, 31)
    assert len(order) == 31
    assert max(map(len, order)) >= 3
    assert max(path[0] for path in order) >= 3
    assert best_paths(table, 10_000)[-1]  # more than there are heads and ranks for is legal


@pytest.mark.parametrize("paths", [best_paths(assumed_accuracies(4), 31), ((0,),), ((0,), (1,))])
def test_tokens_are_found_where_the_shape_says(paths: Any) -> None:
    """Candidates that spell their path, gathered as the drafter does, give every node its own."""
    shape = static_tree(paths, torch.device("cpu"))
    base = 70

    def spelt(path: Any) -> int:
        return sum((rank + 1) * base**d for d, rank in enumerate(path))

    found: list[int] = []
    names: list[Any] = [()]
    above: list[Any] = []  # candidates of the level above
    for level in shape.levels:
        if above:
            parents = [names[i] for i in level.parent.tolist()]
            names = [above[i] for i in level.candidate.tolist()]
            assert parents == [path[:-1] for path in names]
        assert [((), *paths)[n] for n in level.nodes.tolist()] == names
        above = [(*path, rank) for path in names for rank in range(level.ranks)]
        found += map(spelt, above)
    drafts = torch.tensor(found)[shape.picks]
    assert drafts.tolist() == [spelt(path) for path in paths]
    tree = shape.one
    tree.validate(tree.tokens[:, 0], 1, len(paths))
    assert [((), *paths)[p] for p in tree.parents[0, 1:]] == [path[:-1] for path in paths]
    by_rank = [(d, r) for d in range(len(shape.levels)) for r in range(shape.ranks)]
    assert [by_rank[i] for i in shape.rank_picks] == [(len(p) - 1, p[-1]) for p in paths]


def test_shapes_are_made_once_and_outlive_inference_mode() -> None:
    paths = best_paths(assumed_accuracies(2), 5)
    with torch.inference_mode():
        static_tree.cache_clear()
        shape = static_tree(paths, torch.device("cpu"))
    assert static_tree(paths, torch.device("cpu")) is shape
    assert not any(t.is_inference() for t in (shape.picks, shape.one.ancestors))


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        (7, TypeError, r"tree=7 must be a list of rank paths, like"),
        ([[0.5]], TypeError, "must be a list of rank paths"),
        ([], ValueError, r"tree=\[\] has no node"),
        ([[0], [0, 0, 0]], ValueError, r"\[0, 0, 0\]: a path has 1..2 ranks"),
        ([[0], [3]], ValueError, r"\[3\]: a path has 1..2 ranks, each in 0..2"),
        ([[-1]], ValueError, "a path has 1..2 ranks"),
        ([[]], ValueError, "a path has 1..2 ranks"),
        ([[0], [2]], ValueError, r"\[2\] before \[1\]"),
        ([[0, 0], [0]], ValueError, r"\[0, 0\] before \[0\]"),
        ([[0], [0]], ValueError, r"\[0\] twice"),
    ],
)
def test_refused_trees(tree: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_paths(tree, 2, 3)


def test_a_published_tree_is_taken() -> None:
    paths = check_paths([[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]], 4, 10)
    assert paths[3] == (0, 1)
