"""Broken tree attention: what the other tests compare must tell it from the right one."""

from collections.abc import Callable

import pytest
import torch
from selfspec_kernels.tree_attention import kernel as launcher
from torch import Tensor

from .attention_cases import LSE_TOLERANCE, Case, build, hidden_fill, is_close, oracle, torch_itself
from .mutation import listed, load

WHOLE = [
    Case(66, (0, 70), queries=33, groups=3),
    Case(33, (0, 70), queries=20, groups=2, window=6),
    Case(12, (3, 20), queries=5, groups=2, softcap=3.0, scale=2.0, sinks=True),
]
SPLIT = [
    Case(5, (40, 20, 0), groups=2, kv_heads=2, start=True, memory="paged", splits=2),
    Case(3, (150, 2), sinks=True, splits=3, slack=20, groups=2),
]


def is_right(
    function: Callable[..., tuple[Tensor, Tensor]], backend: str, cases: list[Case]
) -> bool:
    """Whether a launcher or reference passes every case, with its denominators."""
    for case in cases:
        inputs = build(case, hidden_fill(case, backend))
        options = dict(inputs.options, scale=case.scale or case.head_size**-0.5)
        launch = {"num_splits": case.splits} if backend == "triton" else {}
        expected, log_sum = oracle(inputs)
        for return_lse in (False, True):
            out, lse = function(
                inputs.query,
                *inputs.cache,
                inputs.layout,
                **options,
                **launch,
                return_lse=return_lse,
            )
            if not is_close(out, expected, torch_itself(inputs)):
                return False
        tolerance = LSE_TOLERANCE[case.dtype]
        if not torch.allclose(lse.double(), log_sum, rtol=tolerance, atol=tolerance):
            return False
    return True


ATTEND_MUTANTS = {
    "window one too wide in the prefix": {"distance < window": "distance <= window"},
    "window one too wide in the tree": {"depth[None, :] < window": "depth[None, :] <= window"},
    "window by slot": {"depth_ptr + (num_nodes - num_queries) + m": "depth_ptr + 0 * m"},
    "depth of the first nodes": {"depth_ptr + (num_nodes - num_queries) + m": "depth_ptr + m"},
    "prefix starts late": {"- window + 1, first_slot)": "- window + 2, first_slot)"},
    "prefix one slot too long": {"slot + offs_n < stop_slot": "slot + offs_n <= stop_slot"},
    "start ignored": {"tl.maximum(tl.load(start_ptr + b), 0)": "0"},
    "start of the first row": {"tl.load(start_ptr + b)": "tl.load(start_ptr)"},
    "page of the first row": {"table_ptr += b * table_width": "table_ptr += 0"},
    "first page": {"table_ptr + slots // PAGE_SIZE": "table_ptr + 0 * slots"},
    "slot not taken within its page": {"(slots % PAGE_SIZE)": "(slots % (PAGE_SIZE - 1))"},
    "ancestors of the first word": {"word_ptrs + start // 64": "word_ptrs"},
    "ancestors of another query": {"num_queries + m) * ((": "num_queries + m // 2) * (("},
    "ancestors ignored": {"visible = visible & in_n[None, :]": "visible = in_n[None, :]"},
    "last tile of nodes dropped": {
        "tl.range(0, stop_node, BLOCK_N)": "tl.range(0, stop_node - 2, BLOCK_N)"
    },
    "third head of a group missed": {"+ row % GROUPS": "+ row % 2"},
    "sum not rescaled": {"row_sum * decay": "row_sum"},
    "values not rescaled": {"acc * decay[:, None]": "acc"},
    "no guard for a row without slots": {
        'tl.where(new_max == float("-inf"), 0.0, new_max)': "new_max"
    },
    "hidden nodes read": {"            seen,\n": "            in_n,\n"},
    "sink not counted": {
        "row_sum += tl.where(stop_node > 0, 1.0": "row_sum += tl.where(False, 1.0"
    },
    "sink in every split": {
        "row_max = tl.where(stop_node > 0, sink,": "row_max = tl.where(stop_node >= 0, sink,",
        "row_sum += tl.where(stop_node > 0,": "row_sum += tl.where(stop_node >= 0,",
    },
    "wrong soft cap": {"capped = 1.0 - 2.0 / (": "capped = 1.0 - 1.0 / ("},
    "wrong soft cap of small scores": {"945.0 + square * (420.0": "945.0 + square * (105.0"},
    "nodes in every split": {"tl.where(split == last, num_nodes, 0)": "num_nodes"},
    "nodes in no split": {"split == last, num_nodes": "split > last, num_nodes"},
    "splits overlap": {"first_slot += split * size": "first_slot += split * (size - 1)"},
    "gap between splits": {"first_slot + size, prefix_len": "first_slot + size - 1, prefix_len"},
    "split runs into the nodes": {
        "first_slot + size, prefix_len": "first_slot + size, prefix_len + 1"
    },
    "partial results not normalised": {"out = acc / row_sum[:, None]": "out = acc"},
    "weights of partial results without the sum": {
        "tl.store(lse_ptr + place, row_max + tl.log2(row_sum), mask": (
            "tl.store(lse_ptr + place, row_max, mask"
        )
    },
    "denominators to base 2": {"(row_max + tl.log2(row_sum)) * _LN2": "row_max + tl.log2(row_sum)"},
}
COMBINE_MUTANTS = {
    "first split dropped": {"tl.range(0, splits, UNROLL)": "tl.range(1, splits, UNROLL)"},
    "last split dropped": {"split < splits, num_rows": "split < splits - 1, num_rows"},
    "all splits weigh the same": {
        "weight = tl.exp2(lse - shift)": 'weight = tl.where(lse == float("-inf"), 0.0, 1.0)'
    },
    "natural exponential of a logarithm to base 2": {
        "weight = tl.exp2(lse - shift)": "weight = tl.exp(lse - shift)"
    },
    "empty splits read": {'(lse != float("-inf"))[:, None]': "in_part[:, None]"},
    "weights not summed": {"total += weight": "total = weight"},
    "denominators to base 2": {"(top + tl.log2(total)) * _LN2": "top + tl.log2(total)"},
    "denominator of the largest split": {"(top + tl.log2(total))": "(top + 0.0 * total)"},
}
REFERENCE_MUTANTS = {
    "packed in the other order": {
        "query.reshape(batch, kv_heads, groups * num_queries, -1)": (
            "query.transpose(1, 2).reshape(batch, kv_heads, groups * num_queries, -1)"
        )
    },
    "no window": {"layout.bias(key_len, window,": "layout.bias(key_len, 0,"},
    "no soft cap": {"torch.tanh(scores / softcap) * softcap": "scores"},
    "sink kept as a slot": {
        ".softmax(dim=-1)[..., :key_len]": ".softmax(dim=-1)[..., scores.shape[-1] - key_len :]"
    },
    "denominators without sinks": {"scores.logsumexp(": "scores[..., :key_len].logsumexp("},
    "pages in the order of memory": {
        "pages[table]": "pages[table.sort(dim=1).values]",
    },
    "hidden slots kept": {".masked_fill(hidden, 0)\n\n\ndef _explicit": "\n\n\ndef _explicit"},
}


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changes", listed(ATTEND_MUTANTS))
def test_kernel_mutant_is_caught(changes, tmp_path, monkeypatch):
    broken = load("tree_attention", "kernel_attend.py", changes, tmp_path)
    monkeypatch.setattr(launcher, "attend_kernel", broken.attend_kernel)
    assert is_right(launcher.tree_attention_triton, "triton", WHOLE + SPLIT) is not bool(changes)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changes", listed(COMBINE_MUTANTS))
def test_combining_mutant_is_caught(changes, tmp_path, monkeypatch):
    broken = load("tree_attention", "kernel_combine.py", changes, tmp_path)
    monkeypatch.setattr(launcher, "combine_kernel", broken.combine_kernel)
    assert is_right(launcher.tree_attention_triton, "triton", SPLIT) is not bool(changes)


@pytest.mark.parametrize("changes", listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(changes, tmp_path):
    function = load("tree_attention", "reference.py", changes, tmp_path).tree_attention_reference
    assert is_right(function, "reference", WHOLE + SPLIT) is not bool(changes)
