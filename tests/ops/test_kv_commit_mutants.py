"""Broken commits: what the other tests compare must tell them from the right one."""

import random
from collections.abc import Callable

import pytest
import torch

from .mutation import listed, load
from .test_kv_commit import buffers_like, expected_after, random_pages, random_paths


def commit_is_right(function: Callable[..., None]) -> bool:
    rng = random.Random(0)
    for trial in range(4):
        paths, counts = random_paths(rng, 3, 7, 12)
        prefix, pages, shape = [0, 11, 5], None, (3, 2, 30, 16)
        if trial % 2:
            pages, shape = random_pages(rng, 3, 4), (13, 2, 8, 16)
        keys, values = (buffers_like([shape], torch.float32) for _ in range(2))
        buffers = [*keys, *values]
        expected = [expected_after(buffer, paths, counts, prefix, pages) for buffer in buffers]
        index = [torch.tensor(x).int() for x in (paths, counts, prefix)]
        function(buffers, *index, None if pages is None else torch.tensor(pages).int())
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
        "lane + target, tl.load(lane + source": "lane + source, tl.load(lane + target"
    },
    "rows alike": {"path_ptr + b * path_len": "path_ptr"},
    "table of the first row": {"block_table_ptr + b * table_len": "block_table_ptr"},
    "a page's slot not reduced": {"(slot % page_size) * stride_s": "slot * stride_s"},
    "page of the root for all": {
        "target = _offset(prefix_len + i, table_row_ptr,": (
            "target = _offset(prefix_len + i, table_row_ptr + (prefix_len // page_size) - "
            "(prefix_len + i) // page_size,"
        )
    },
    "row of a page": {"if not PAGED:\n        lane": "if True:\n        lane"},
}
REFERENCE_MUTANTS = {
    "last node forgotten": {"step <= num_accepted": "step < num_accepted"},
    "one slot off": {"base + column + 1": "base + column"},
    "rows alike": {"path[row, column + 1]": "path[0, column + 1].clamp(min=0)"},
    "table of the first row": {"block_table[row, slot": "block_table[0, slot"},
    "a page's slot not reduced": {"slot % page_size": "slot.clamp(max=page_size - 1)"},
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
