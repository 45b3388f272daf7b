"""Broken commits: what the other tests compare must tell them from the right one."""

import random
from collections.abc import Callable

import pytest
import torch

from .mutation import listed, load
from .test_kv_commit import buffers_like, expected_after, random_paths


def commit_is_right(function: Callable[..., None]) -> bool:
    rng = random.Random(0)
    for _ in range(4):
        paths, counts = random_paths(rng, 3, 7, 12)
        prefix = [0, 11, 5]
        keys, values = (buffers_like([(3, 2, 30, 16)], torch.float32) for _ in range(2))
        buffers = [*keys, *values]
        expected = [expected_after(buffer, paths, counts, prefix) for buffer in buffers]
        function(buffers, *(torch.tensor(x).int() for x in (paths, counts, prefix)))
        if not all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True)):
            return False
    return True


KERNEL_MUTANTS = {
    "last node forgotten": {"range(1, num_accepted + 1)": "range(1, num_accepted)"},
    "first node forgotten": {"range(1, num_accepted + 1)": "range(2, num_accepted + 1)"},
    "backwards": {
        "range(1, num_accepted + 1):": (
            "range(1, num_accepted + 1):\n        i = num_accepted + 1 - i"
        )
    },
    "source and target swapped": {
        "lane + (prefix_len + node)": "lane + (prefix_len + i )",
        "lane + (prefix_len + i)": "lane + (prefix_len + node)",
    },
    "rows alike": {"path_ptr + b * path_len": "path_ptr"},
}
REFERENCE_MUTANTS = {
    "last node forgotten": {"step <= num_accepted": "step < num_accepted"},
    "one slot off": {"base + column + 1": "base + column"},
    "rows alike": {"path[row, column + 1]": "path[0, column + 1].clamp(min=0)"},
}


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changes", listed(KERNEL_MUTANTS))
def test_kernel_mutant_is_caught(changes, tmp_path):
    function = load("kv_commit", "kernel.py", changes, tmp_path).kv_commit_triton
    assert commit_is_right(function) is not bool(changes)


@pytest.mark.parametrize("changes", listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(changes, tmp_path):
    function = load("kv_commit", "reference.py", changes, tmp_path).kv_commit_reference
    assert commit_is_right(function) is not bool(changes)
