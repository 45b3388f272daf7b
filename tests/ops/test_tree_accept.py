import random

import pytest
import torch
from selfspec_kernels import tree_accept

from .trees import BACKENDS, random_forest


def accept(rows, max_depth, backend, num_nodes=None):
    """Run rows of (tokens, parents, target tokens) and return lists."""
    tokens, parents, targets = (torch.tensor(column) for column in zip(*rows, strict=True))
    counts = torch.tensor(num_nodes or [tokens.shape[1]] * len(rows), dtype=torch.int32)
    inputs = (tokens, parents.int(), counts, targets)
    before = [tensor.clone() for tensor in inputs]
    path, num_accepted, next_token = tree_accept(*inputs, max_depth=max_depth, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    assert path.shape == (len(rows), max_depth + 1)
    assert (path.dtype, num_accepted.dtype, next_token.dtype) == (
        torch.int32,
        torch.int32,
        torch.int64,
    )
    return path.tolist(), num_accepted.tolist(), next_token.tolist()


def walk(tokens, parents, targets, max_depth, num_nodes):
    """The rule, in words of one node at a time."""
    path = [0]
    while len(path) <= max_depth:
        here = path[-1]
        children = [n for n in range(num_nodes) if parents[n] == here]
        right = [n for n in children if tokens[n] == targets[here]]
        if not right:
            break
        path.append(right[0])
    return path + [-1] * (max_depth + 1 - len(path)), len(path) - 1, targets[path[-1]]


CHAIN = [-1, 0, 1, 2]
# 0 -> 1 -> 3 -> 5 and 0 -> 2 -> 4
FORK = [-1, 0, 0, 1, 2, 3]
STORIES = {
    "full match": (([9, 1, 2, 3], CHAIN, [1, 2, 3, 4]), 3, None, ([0, 1, 2, 3], 3, 4)),
    "early mismatch": (([9, 1, 2, 3], CHAIN, [7, 2, 3, 4]), 3, None, ([0, -1, -1, -1], 0, 7)),
    "late mismatch": (([9, 1, 2, 3], CHAIN, [1, 2, 8, 4]), 3, None, ([0, 1, 2, -1], 2, 8)),
    "a match behind a mismatch does not count": (
        ([9, 1, 2, 3], CHAIN, [1, 7, 3, 4]),
        3,
        None,
        ([0, 1, -1, -1], 1, 7),
    ),
    "second branch": (
        ([9, 1, 2, 3, 4, 5], FORK, [2, 0, 4, 0, 6, 0]),
        3,
        None,
        ([0, 2, 4, -1], 2, 6),
    ),
    "a cousin with the right token": (
        ([9, 1, 2, 3, 4, 5], FORK, [1, 4, 0, 0, 0, 0]),
        3,
        None,
        ([0, 1, -1, -1], 1, 4),
    ),
    "only a root": (([9], [-1], [5]), 3, None, ([0, -1, -1, -1], 0, 5)),
    "the root's own token is no draft": (([5, 1], [-1, 0], [5, 3]), 1, None, ([0, -1], 0, 5)),
    "duplicate siblings: the first": (
        ([9, 1, 1, 2, 3], [-1, 0, 0, 1, 2], [1, 3, 3, 0, 0]),
        2,
        None,
        ([0, 1, -1], 1, 3),
    ),
    "padding is ignored": (([9, 1, 2, 3], CHAIN, [1, 2, 3, 4]), 3, 2, ([0, 1, -1, -1], 1, 2)),
    "depth is capped": (([9, 1, 2, 3], CHAIN, [1, 2, 3, 4]), 2, None, ([0, 1, 2], 2, 3)),
    "depth zero": (([9, 1, 2, 3], CHAIN, [1, 2, 3, 4]), 0, None, ([0], 0, 1)),
    "deeper than the tree": (([9, 1], [-1, 0], [1, 4]), 5, None, ([0, 1, -1, -1, -1, -1], 1, 4)),
}


@pytest.mark.parametrize(
    ("row", "max_depth", "num_nodes", "expected"), STORIES.values(), ids=STORIES.keys()
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_story(backend, row, max_depth, num_nodes, expected):
    got = accept([row], max_depth, backend, num_nodes and [num_nodes])
    assert tuple(column[0] for column in got) == expected


@pytest.mark.parametrize("num_nodes", [1, 2, 31, 32, 33, 65, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_trees(backend, num_nodes):
    rng = random.Random(num_nodes)
    batch, max_depth = 20, 9
    forest = random_forest(num_nodes, [0] * batch, seed=num_nodes)
    counts = [num_nodes, *(rng.randint(1, num_nodes) for _ in range(batch - 1))]
    rows = [
        ([rng.randrange(2) for _ in range(num_nodes)], parents, [rng.randrange(2) for _ in parents])
        for parents in forest.parents
    ]
    expected = [walk(*row, max_depth, count) for row, count in zip(rows, counts, strict=True)]
    got = accept(rows, max_depth, backend, counts)
    assert list(zip(*got, strict=True)) == expected
    if num_nodes > 30:
        assert max(got[1]) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_token_ids_and_strided_inputs(backend):
    large = 2**40
    tokens = torch.tensor([[large, large + 1], [large, large + 2]])
    targets = torch.tensor([[large + 1, 3], [large + 1, 3]])
    parents = torch.tensor([[-1, 0], [-1, 0]], dtype=torch.int32)
    counts = torch.tensor([2], dtype=torch.int32).expand(2)
    path, num_accepted, next_token = tree_accept(
        tokens.mT.contiguous().mT,
        parents.mT.contiguous().mT,
        counts,
        targets.mT.contiguous().mT,
        max_depth=1,
        backend=backend,
    )
    assert path.tolist() == [[0, 1], [0, -1]]
    assert num_accepted.tolist() == [1, 0]
    assert next_token.tolist() == [3, large + 1]


GOOD = {
    "tokens": torch.zeros(2, 3, dtype=torch.int64),
    "parents": torch.tensor([[-1, 0, 1]] * 2, dtype=torch.int32),
    "num_nodes": torch.full((2,), 3, dtype=torch.int32),
    "target_tokens": torch.zeros(2, 3, dtype=torch.int64),
    "max_depth": 2,
}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"tokens": GOOD["tokens"].int()}, TypeError, "tokens must be torch.int64"),
        ({"parents": GOOD["parents"].long()}, TypeError, "parents must be torch.int32"),
        ({"num_nodes": GOOD["num_nodes"].long()}, TypeError, "num_nodes must be torch.int32"),
        ({"target_tokens": GOOD["tokens"].int()}, TypeError, "target_tokens must be torch.int64"),
        ({"tokens": GOOD["tokens"][0]}, ValueError, r"tokens has shape \(3,\), expected \[B, N\]"),
        ({"parents": GOOD["parents"][:, :2]}, ValueError, r"parents has shape \(2, 2\)"),
        ({"num_nodes": GOOD["num_nodes"][:1]}, ValueError, r"num_nodes has shape \(1,\)"),
        ({"target_tokens": GOOD["tokens"][:1]}, ValueError, r"target_tokens has shape \(1, 3\)"),
        ({"parents": GOOD["parents"].to("meta")}, ValueError, "parents is on meta"),
        ({"max_depth": -1}, ValueError, "max_depth=-1"),
        ({"backend": "cpu"}, ValueError, "backend='cpu'"),
        ({"backend": "triton"}, ValueError, 'backend="triton" needs CUDA'),
        (
            {k: GOOD[k][:, :0] for k in ("tokens", "parents", "target_tokens")},
            ValueError,
            "tokens has no nodes",
        ),
    ],
)
def test_refuses_what_does_not_fit(changes, error, match):
    with pytest.raises(error, match=f"tree_accept: {match}"):
        tree_accept(**(GOOD | changes))
