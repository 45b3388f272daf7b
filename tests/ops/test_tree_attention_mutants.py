"""Broken tree attention: what the other tests compare must tell it from the right one."""

from collections.abc import Callable

import pytest
import torch

from .mutation import listed, load
from .test_tree_attention import TOLERANCE, Case, build, hidden_fill
from .trees import attention_oracle

ATTENTION_CASES = [
    Case(66, (0, 70), queries=33, groups=3),
    Case(33, (0, 70), queries=20, groups=2, window=6),
    Case(12, (3, 20), queries=5, groups=2, softcap=3.0, scale=2.0, sinks=True),
]


def attention_is_right(function: Callable[..., torch.Tensor], backend: str) -> bool:
    for case in ATTENTION_CASES:
        inputs = build(case, hidden_fill(case, backend))
        tensors = (inputs.query, inputs.key, inputs.value)
        options = dict(inputs.options, scale=case.scale or case.head_size**-0.5)
        expected = attention_oracle(*tensors, inputs.forest, **options)
        out = function(*tensors, inputs.layout, **options).double()
        tolerance = TOLERANCE[case.dtype]
        if not torch.allclose(out, expected, rtol=tolerance, atol=tolerance):
            return False
    return True


KERNEL_MUTANTS = {
    "window one too wide in the prefix": {"distance < window": "distance <= window"},
    "window one too wide in the tree": {"depth[None, :] < window": "depth[None, :] <= window"},
    "window by slot": {"depth_ptr + (num_nodes - num_queries) + m": "depth_ptr + 0 * m"},
    "depth of the first nodes": {"depth_ptr + (num_nodes - num_queries) + m": "depth_ptr + m"},
    "prefix starts late": {"- window + 1, 0)": "- window + 2, 0)"},
    "prefix one slot too long": {"start + offs_n < prefix_len": "start + offs_n <= prefix_len"},
    "ancestors of the first word": {"word_ptrs + start // 64": "word_ptrs"},
    "ancestors of another query": {"num_queries + m) * (": "num_queries + m // 2) * ("},
    "ancestors ignored": {"visible = visible & in_n[None, :]": "visible = in_n[None, :]"},
    "last tile of nodes dropped": {
        "tl.range(0, num_nodes, BLOCK_N)": "tl.range(0, num_nodes - 2, BLOCK_N)"
    },
    "third head of a group missed": {"+ row % GROUPS": "+ row % 2"},
    "sum not rescaled": {"row_sum * decay": "row_sum"},
    "values not rescaled": {"acc * decay[:, None]": "acc"},
    "no guard for a row without slots": {
        'tl.where(new_max == float("-inf"), 0.0, new_max)': "new_max"
    },
    "hidden nodes read": {"mask=seen[:, None] &": "mask=in_n[:, None] &"},
    "sink not counted": {"row_sum += 1.0": "row_sum += 0.0"},
    "wrong soft cap": {"(1.0 - 2.0 / (": "(1.0 - 1.0 / ("},
}
REFERENCE_MUTANTS = {
    "packed in the other order": {
        "query.reshape(batch, kv_heads, groups * num_queries, -1)": (
            "query.transpose(1, 2).reshape(batch, kv_heads, groups * num_queries, -1)"
        )
    },
    "no window": {"layout.bias(key_len, window,": "layout.bias(key_len, 0,"},
    "no soft cap": {"torch.tanh(scores / softcap) * softcap": "scores"},
    "sink kept as a slot": {".softmax(dim=-1)[..., :-1]": ".softmax(dim=-1)[..., 1:]"},
}


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("changes", listed(KERNEL_MUTANTS))
def test_kernel_mutant_is_caught(changes, tmp_path):
    function = load("tree_attention", "kernel.py", changes, tmp_path).tree_attention_triton
    assert attention_is_right(function, "triton") is not bool(changes)


@pytest.mark.parametrize("changes", listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(changes, tmp_path):
    function = load("tree_attention", "reference.py", changes, tmp_path).tree_attention_reference
    assert attention_is_right(function, "reference") is not bool(changes)
