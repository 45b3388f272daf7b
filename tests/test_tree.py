"""TokenTree: constructors, merging, validation."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from selfspec import TokenTree

ROOT = torch.tensor([5])


def bits(tree: TokenTree, b: int, n: int) -> set[int]:
    words = tree.ancestors[b, n].tolist()
    return {64 * w + i for w, word in enumerate(words) for i in range(64) if word >> i & 1}


def check(tree: TokenTree) -> None:
    """Depth and ancestors follow from parents."""
    for b, count in enumerate(tree.num_nodes.tolist()):
        for n in range(count):
            path, node = {n}, n
            while node:
                node = int(tree.parents[b, node])
                path.add(node)
            assert bits(tree, b, n) == path
            assert int(tree.depth[b, n]) == len(path) - 1


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 128, 129])
def test_chain(nodes: int) -> None:
    tree = TokenTree.chain(5, list(range(nodes - 1)))
    check(tree)
    assert tree.tokens.tolist() == [[5, *range(nodes - 1)]]
    assert (tree.max_depth, tree.max_nodes, tree.width) == (nodes - 1, nodes, nodes)
    tree.validate(ROOT, 200, nodes)


def test_from_paths_shares_prefixes() -> None:
    tree = TokenTree.from_paths(ROOT, [[[1, 2, 3], [1, 4], [6], [1, 2]]])
    assert tree.tokens.tolist() == [[5, 1, 2, 3, 4, 6]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 1, 0]]
    check(tree)
    assert sorted(tree.paths()[0]) == [[1, 2, 3], [1, 4], [6]]


def test_from_paths_pads_rows_and_keeps_the_budget() -> None:
    root = torch.tensor([5, 6, 7])
    tree = TokenTree.from_paths(root, [[[1, 2, 3], [9, 9]], [], [[4]]], max_draft_tokens=4)
    assert tree.num_nodes.tolist() == [5, 1, 2]
    assert tree.tokens[0].tolist() == [5, 1, 2, 3, 9]
    assert tree.paths() == [[[1, 2, 3], [9]], [], [[4]]]
    check(tree)
    tree.validate(root, 10, 4)


def test_one_chain_is_cut_to_the_budget() -> None:
    assert TokenTree.from_paths(ROOT, [[[1, 2, 3]]], 2).tokens.tolist() == [[5, 1, 2]]
    assert TokenTree.from_paths(ROOT, [[[1, 2, 3]]], 0).tokens.tolist() == [[5]]


def test_random_paths_round_trip() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rows = [
            [rng.choices(range(4), k=rng.randint(1, 5)) for _ in range(rng.randint(1, 6))]
            for _ in range(3)
        ]
        tree = TokenTree.from_paths(torch.tensor([5, 5, 5]), rows)
        check(tree)
        tree.validate(torch.tensor([5, 5, 5]), 6, 40)
        for row, paths in zip(rows, tree.paths(), strict=True):
            prefixes = {tuple(p[:i]) for p in row for i in range(1, len(p) + 1)}
            assert {tuple(p[:i]) for p in paths for i in range(1, len(p) + 1)} == prefixes
        assert tree.num_nodes.tolist() == [
            1 + len({tuple(p[:i]) for p in row for i in range(1, len(p) + 1)}) for row in rows
        ]


def test_merge_has_no_duplicate_siblings() -> None:
    a = TokenTree.from_paths(ROOT, [[[1, 2], [3]]])
    b = TokenTree.from_paths(ROOT, [[[1, 7], [3, 4]]])
    merged = TokenTree.merge([a, b])
    assert sorted(merged.paths()[0]) == [[1, 2], [1, 7], [3, 4]]
    siblings = list(zip(merged.parents[0].tolist(), merged.tokens[0].tolist(), strict=True))
    assert len(siblings) == len(set(siblings))
    assert TokenTree.merge([a, b], 3).max_nodes == 4
    assert TokenTree.merge([a]) is a


def test_chains_are_told_from_trees_row_by_row() -> None:
    root = torch.tensor([5, 5])
    assert TokenTree.from_paths(root, [[[1, 2]], []]).is_chain
    assert TokenTree.root_only(root).is_chain
    tree = TokenTree.from_paths(root, [[[1, 2]], [[3], [4]]])  # as wide as its longest chain
    assert not tree.is_chain
    chains = tree.first_chains()
    assert chains.is_chain
    assert chains.paths() == [[[1, 2]], [[3]]]


def test_merge_refuses_sampled_trees() -> None:
    sampled = TokenTree.chain(ROOT, torch.tensor([[1]]), log_q=torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="deterministic drafts only"):
        TokenTree.merge([sampled, sampled])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.tensor([[5, 1, 2]], dtype=torch.int32)}, "tokens must be int64"),
        ({"tokens": torch.empty(1, 0, dtype=torch.int64)}, "tokens must be int64"),
        ({"parents": torch.tensor([[-1, 0, 1]])}, "parents must be torch.int32"),
        ({"depth": torch.zeros(1, 2, dtype=torch.int32)}, "depth must be torch.int32"),
        ({"ancestors": torch.zeros(1, 3, 2, dtype=torch.int64)}, "ancestors must be"),
        ({"num_nodes": torch.tensor([3])}, "num_nodes must be"),
        ({"log_q": torch.zeros(1, 2, 8)}, "log_q must be"),
    ],
)
def test_malformed_shapes(change: dict[str, torch.Tensor], message: str) -> None:
    good = TokenTree.chain(5, [1, 2])
    fields = {
        name: getattr(good, name)
        for name in ("tokens", "parents", "depth", "ancestors", "num_nodes", "log_q")
    }
    with pytest.raises(ValueError, match=message):
        TokenTree(**{**fields, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.tensor([[6, 1, 2]])}, "must be the root 5"),
        ({"tokens": torch.tensor([[5, 1, 8]])}, "token 8 of node 2, row 0, is outside"),
        ({"tokens": torch.tensor([[5, -1, 2]])}, "token -1 of node 1, row 0, is outside"),
        ({"parents": torch.tensor([[-1, 0, 2]], dtype=torch.int32)}, "parents come before"),
        ({"parents": torch.tensor([[0, 0, 1]], dtype=torch.int32)}, "node 0 of row 0 must have"),
        ({"depth": torch.tensor([[0, 1, 1]], dtype=torch.int32)}, "not its parent's plus one"),
        ({"ancestors": torch.tensor([[[1], [3], [5]]])}, "do not match its parents"),
        ({"num_nodes": torch.tensor([4], dtype=torch.int32)}, "num_nodes of row 0 is 4"),
        ({"num_nodes": torch.tensor([0], dtype=torch.int32)}, "num_nodes of row 0 is 0"),
    ],
)
def test_malformed_contents(change: dict[str, torch.Tensor], message: str) -> None:
    good = TokenTree.chain(5, [1, 2])
    fields = {
        name: getattr(good, name)
        for name in ("tokens", "parents", "depth", "ancestors", "num_nodes")
    }
    with pytest.raises(ValueError, match=message):
        TokenTree(**{**fields, **change}).validate(ROOT, 8, 5)


def test_validate_checks_batch_and_budget() -> None:
    tree = TokenTree.chain(5, [1, 2])
    with pytest.raises(ValueError, match="draft has 1 rows, the batch has 2"):
        tree.validate(torch.tensor([5, 5]), 8, 5)
    with pytest.raises(ValueError, match="the budget was 1"):
        tree.validate(ROOT, 8, 1)


def test_from_topology_refuses_what_cannot_be_walked() -> None:
    tokens = torch.tensor([[5, 1, 2]])
    for parents in ([-1, 1, 0], [0, 0, 0], [-1, 0, 0, 0]):
        with pytest.raises(ValueError, match="parent"):
            TokenTree.from_topology(tokens, parents)


def test_one_short_list_of_parents_for_all_rows() -> None:
    tree = TokenTree.from_topology(torch.tensor([[1, 2, 3, 0], [4, 5, 6, 0]]), [-1, 0, 0])
    assert tree.num_nodes.tolist() == [3, 3]
    assert tree.parents.tolist() == [[-1, 0, 0, -1]] * 2
    assert tree.max_children == 2


@pytest.mark.parametrize(
    ("parents", "most"), [([-1], 0), ([-1, 0, 1], 1), ([-1, 0, 0, 2, 2, 2], 3)]
)
def test_children_are_counted_alike_from_lists_and_tensors(parents: list[int], most: int) -> None:
    tokens = torch.arange(len(parents))[None]
    made = TokenTree.from_topology(tokens, parents)
    read = dataclasses.replace(made, log_q=torch.zeros(1, len(parents), 8), max_children=-1)
    assert made.max_children == read.max_children == most
