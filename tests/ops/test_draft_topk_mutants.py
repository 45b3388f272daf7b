"""Broken heads: what the other tests compare must tell them from the right one."""

import math
from collections.abc import Callable

import pytest
import torch
from selfspec_kernels.draft_topk.head import Head

from .head_cases import EVERYTHING, Case, build, head_of, in_order
from .mutation import listed, load
from .test_draft_topk import assert_topk

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def topk_is_right(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> bool:
    cases = [
        Case((3,), 200, 136, k=8, bias=True, reduced=170, options=EVERYTHING),
        Case((2,), 40, 8, k=3, dtype=torch.float16, magnitude=3e4, options={"norm_offset": 6.0}),
    ]
    # Negative logits, ties on the two sides of every border, the best not in front; and NaN.
    weight = torch.tensor([[-2.0 - (i * 29 % 5)] for i in range(140)])
    weight[:64].clamp_(max=-3.0)
    weight[7] = math.nan
    ties = Head(weight, None, 0.0, 0.0, None, 1.0, 0.0, None)
    logits = weight[:, 0].nan_to_num(-math.inf).tolist()
    logits[7] = -math.inf
    try:
        for case in cases:
            inputs = build(case)
            assert_topk(*function(inputs.hidden, head_of(inputs), case.k), inputs, case.k)
        ids, _ = function(torch.ones(1, 1), ties, 40)
    except (AssertionError, RuntimeError):
        return False
    return ids.tolist() == [in_order(logits)[:40]]


KERNEL_MUTANTS = {
    "last of equal tokens": {
        "(0x7FFFFFFF - position).to(tl.int64)": "position.to(tl.int64)",
        "0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)": "(key & 0x7FFFFFFF).to(tl.int32)",
    },
    "negative logits upside down": {"tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)": "bits"},
    "NaN kept": {"(logits == logits) & in_head": "in_head"},
    "padding takes part": {"(logits == logits) & in_head[None, :]": "logits == logits"},
    "last channels dropped": {"tl.range(0, HIDDEN_SIZE,": "tl.range(0, HIDDEN_SIZE - BLOCK_C,"},
    "squares of the last channels": {"squares += ": "squares = "},
    "offset of the norm dropped": {"(gain + norm_offset)": "gain"},
    "eps dropped": {"squares / HIDDEN_SIZE + norm_eps": "squares / HIDDEN_SIZE"},
    "no room in float16": {"2.0**-7 if": "1.0 if"},
    "bias of the place": {"bias_ptr + token": "bias_ptr + position"},
    "soft cap halved": {"(2.0 / softcap)": "(1.0 / softcap)"},
    "a key never leaves": {"tl.where(keys == best[:, None], _NO_KEY, keys)": "keys"},
    "blocks weigh alike": {"sums * tl.exp(logit_of(firsts) - shift)": "sums"},
    "lists never move on": {"taken += won.to(tl.int32)": "taken += 0"},
    "two keys at a time": {"taken += won.to(tl.int32)": "taken += 2 * won.to(tl.int32)"},
    "reduced ids returned": {"tl.load(token_ids_ptr + token)": "token"},
}
REFERENCE_MUTANTS = {
    "last of equal tokens": {"keys |= last - torch.arange": "keys |= torch.arange"},
    "groups in order of their best": {"chosen.sort(dim=-1).values": "chosen"},
    "a group too few": {"min(k, groups))": "min(k, groups) - 1)"},
    "negative logits upside down": {"(bits ^ ((bits >> 31) & 0x7FFFFFFF))": "bits"},
    "NaN kept": {'nan=float("-inf"), neginf': "nan=0.0, neginf"},
    "offset of the norm dropped": {" + head.norm_offset": ""},
    "eps dropped": {" + head.norm_eps": ""},
    "bias of the place": {"bias.index_select(0, head.token_ids)": "bias[: head.num_tokens]"},
    "reduced ids returned": {"head.token_ids[positions]": "positions"},
}


@pytest.mark.interpret
@pytest.mark.parametrize("changes", listed(KERNEL_MUTANTS))
def test_kernel_mutant_is_caught(changes, tmp_path):
    function = load("draft_topk", "kernel.py", changes, tmp_path).draft_topk_triton
    assert topk_is_right(function) is not bool(changes)


@pytest.mark.parametrize("changes", listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(changes, tmp_path):
    function = load("draft_topk", "reference.py", changes, tmp_path).draft_topk_reference
    assert topk_is_right(function) is not bool(changes)
