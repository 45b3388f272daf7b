"""Broken acceptance: what the other tests compare must tell it from the right one."""

import random
from collections.abc import Callable

import pytest
import torch

from .mutation import listed, load
from .test_tree_accept import walk
from .trees import random_forest


def accept_is_right(function: Callable[..., tuple[torch.Tensor, ...]]) -> bool:
    rng = random.Random(0)
    nodes, max_depth = 33, 6
    forest = random_forest(nodes, [0] * 30)
    tokens, targets = ([[rng.randrange(2) for _ in range(nodes)] for _ in range(30)] for _ in "ab")
    counts = [rng.randint(1, nodes) for _ in range(30)]
    path, num_accepted, next_token = function(
        torch.tensor(tokens),
        torch.tensor(forest.parents, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(targets),
        max_depth,
    )
    got = zip(path.tolist(), num_accepted.tolist(), next_token.tolist(), strict=True)
    rows = zip(tokens, forest.parents, targets, counts, strict=True)
    return list(got) == [walk(a, b, c, max_depth, count) for a, b, c, count in rows]


FIRST_STEP = "first_child(in_tree & (tokens == wanted), parents, 0, BLOCK)"
NEXT_STEP = "first_child(in_tree & (tokens == wanted), parents, child, BLOCK)"
KERNEL_MUTANTS = {
    "any node with the token": {"chosen & (parents == node)": "chosen"},
    "any child": {
        step: step.replace(" & (tokens == wanted)", "") for step in (FIRST_STEP, NEXT_STEP)
    },
    "padding accepted": {"tl.minimum(tl.load(num_nodes_ptr + b), size)": "size"},
    "target of the level": {"target_tokens_ptr + child": "target_tokens_ptr + num_accepted"},
    "end of the path not written": {"mask=level <= max_depth": "mask=level < max_depth"},
    "walk never leaves the root": {NEXT_STEP: FIRST_STEP},
}
REFERENCE_MUTANTS = {
    "padding accepted": {" & (node < num_nodes[:, None])": ""},
    "any child": {"(tokens == wanted) & ": ""},
    "target of the child": {
        "target_tokens.gather(1, parents.long().clamp(min=0))": "target_tokens"
    },
}


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changes", listed(KERNEL_MUTANTS))
def test_kernel_mutant_is_caught(changes, tmp_path):
    function = load("tree_accept", "kernel.py", changes, tmp_path).tree_accept_triton
    assert accept_is_right(function) is not bool(changes)


@pytest.mark.parametrize("changes", listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(changes, tmp_path):
    function = load("tree_accept", "reference.py", changes, tmp_path).tree_accept_reference
    assert accept_is_right(function) is not bool(changes)
