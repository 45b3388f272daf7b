"""Broken confidences: what the other tests compare must tell them from the right one."""

import math
from collections.abc import Callable

import pytest
import torch
from selfspec_kernels.exit_confidence import ExitConfidence

from .head_cases import EVERYTHING, Case, build, head_of
from .mutation import listed, load
from .test_exit_confidence import assert_confidence

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def confidence_is_right(function: Callable[..., ExitConfidence]) -> bool:
    peaked = {"logit_scale": 3.0}
    cases = [
        Case((5,), 200, 24, bias=True, reduced=150, options=EVERYTHING),
        # The two best in one block, or in two.
        Case((16,), 100, 24, options=peaked),
    ]
    try:
        for case in cases:
            inputs = build(case)
            assert_confidence(function(inputs.hidden, head_of(inputs)), inputs)
        dead = function(torch.full((1, 24), math.nan), head_of(inputs))
    except AssertionError:
        return False
    return [x.tolist() for x in vars(dead).values()] == [[0], [0.0], [0.0], [0.0]]


KERNEL_MUTANTS = {
    "second of the best block": {"seconds, firsts), 0)": "seconds, _NO_KEY), 0)"},
    "second of another block": {"seconds, firsts), 0)": "_NO_KEY, firsts), 0)"},
    "second is the best": {"tl.where(firsts == best, seconds, firsts)": "firsts"},
    "blocks weigh alike": {"tl.exp(offset)": "tl.exp(0.0 * offset)"},
    "moments not shifted": {"moments + sums * offset": "moments"},
    "entropy of the shift alone": {"moments + sums * offset": "sums * offset"},
    "moment added": {"tl.log(total) - moment": "tl.log(total) + moment"},
    "rows alike": {"keys_ptr + 2 * row * num_blocks": "keys_ptr"},
    "nothing is divided by": {"total = tl.where(dead, 1.0, total)": "pass"},
    "a dead row is sure": {"tl.where(dead, 0.0, 1.0 / total)": "1.0 / total"},
    "reduced ids returned": {"tl.load(token_ids_ptr + token)": "token"},
}
REFERENCE_MUTANTS = {
    "second is the best": {"probs[:, 1] if": "probs[:, 0] if"},
    "entropy in bits": {"total.log()": "total.log2()"},
    "moment dropped": {"(weights * shifted).sum(dim=-1)": "0"},
    "moment not divided": {
        "(weights * shifted).sum(dim=-1) / total": "(weights * shifted).sum(-1)"
    },
    "a dead row is NaN": {"x.masked_fill(dead, 0.0)": "x"},
    "reduced ids returned": {"original_ids(positions[:, 0], head)": "positions[:, 0]"},
}


@pytest.mark.interpret
@pytest.mark.parametrize("changes", listed(KERNEL_MUTANTS))
def test_kernel_mutant_is_caught(changes, tmp_path):
    function = load("exit_confidence", "kernel.py", changes, tmp_path).exit_confidence_triton
    assert confidence_is_right(function) is not bool(changes)


@pytest.mark.parametrize("changes", listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(changes, tmp_path):
    function = load("exit_confidence", "reference.py", changes, tmp_path).exit_confidence_reference
    assert confidence_is_right(function) is not bool(changes)
