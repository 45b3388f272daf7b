"""Broken statistics: what the other tests compare must tell them from the right ones."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from selfspec_kernels.row_stats import RowStats, keep_mask
from torch import Tensor

from .mutation import listed, load
from .test_row_stats import disagreement, random_logits

# A vocabulary of two tiles: a flat row with hundreds of ties, and a peaked one of few.
LOGITS = random_logits((2, 4500), torch.float32, 0)
LOGITS[0] = LOGITS[0].mul(4 / 3).round().div(4)
LOGITS[0, [60, 90, 4300]] = LOGITS[0].max() + 0.5
LOGITS[1, 4400] += 14
LOGITS[1, 7] = float("nan")
CASES = [
    (LOGITS, {}),
    (LOGITS, {"temperature": 0.7, "top_k": 30, "top_p": 0.6}),
    (LOGITS, {"top_p": 0.6}),
    (LOGITS, {"top_p": 0.3, "min_p": 0.001}),
    (LOGITS, {"min_p": 0.3}),
    (LOGITS, {"top_k": 3}),
    (torch.zeros(1, 8), {"top_p": 0.5}),
]


def stats_are_right(
    function: Callable[..., RowStats], mask_of: Callable[[Tensor, RowStats, float], Tensor]
) -> bool:
    for logits, case in CASES:
        options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | case
        stats = function(logits, *options.values())
        mask = mask_of(logits, stats, options["temperature"])
        if disagreement(logits, stats, mask, **options):
            return False
    return True


def broken(file: str, changes: dict[str, str], folder: Path) -> ModuleType:
    """`kernel.py` with `file` changed, which it may import."""
    modules: list[ModuleType] = []
    for name in ("kernel_tile.py", "kernel_select.py", "kernel.py"):
        module = load("row_stats", name, changes if name == file else {}, folder)
        for other in modules:
            for key, value in vars(other).items():
                if hasattr(value, "fn") and key in vars(module):
                    setattr(module, key, value)
        modules.append(module)
    return modules[-1]


KERNEL_MUTANTS = {
    "kernel_tile.py": {
        "NaN as maximum": {'tl.where(x == x, x, float("-inf"))': "x"},
        "no temperature": {"if HAS_TEMPERATURE:": "if BLOCK < 0:"},
        "last tile dropped": {"there = tile < tiles": "there = tile < tiles - 1"},
        "sum not rescaled": {" * weight_of(maxima, maximum)": ""},
    },
    "kernel_select.py": {
        "border below": {
            f"base + tl.sum(over_{part}, 0) >=": f"base + tl.sum(over_{part}, 0) >"
            for part in ("quarter", "half", "last")
        },
        "rank off by one": {"reached = count >= top_k": "reached = count > top_k"},
        "candidates on top of each other": {
            "tl.where(part < tile, candidates, 0)": "candidates * 0"
        },
        "half too far": {"high = last - 1": "high = half"},
        "mass above forgotten": {"tl.sum(tl.where(above, mass, 0.0), 0)": "tl.sum(mass * 0, 0)"},
        "count above forgotten": {"tl.sum(tl.where(above, count, 0), 0)": "tl.sum(count * 0, 0)"},
    },
    "kernel.py": {
        "last argmax": {
            "tl.min(tl.where(inside & (x == maximum), index, vocab), 0)": (
                "tl.max(tl.where(inside & (x == maximum), index, -1), 0)"
            )
        },
        "what lies above forgotten": {"key, base, share, True": "key, 0.0, share, True"},
        "one tie too few": {"tl.ceil((share": "tl.floor((share"},
        "share of all": {"mass = base + amount_over": "base + amount_over"},
        "mass before min-p": {
            "floor > threshold, floor_mass, mass": "floor > threshold, mass, mass"
        },
    },
}
REFERENCE_MUTANTS = {
    "first ties": {"last = before > before[..., -1:] - ties": "last = before <= ties"},
    "border dropped": {"(scaled > threshold) | (equal & last)": "scaled > threshold"},
    "rank off by one": {"vocab - top_k]": "vocab - top_k - 1]"},
    "at most the share": {"- weight < top_p": "- weight <= top_p"},
    "share of all": {"weight = weight.masked_fill(": "weight.masked_fill("},
    "NaN as maximum": {"return clean(scaled": "return scaled if scaled.ndim else clean(scaled"},
    "no temperature": {"if temperature != 1.0:": "if temperature < 0:"},
    "min-p instead of top-p": {
        "top_p < 1:\n        threshold": "top_p < 1 and not min_p:\n        threshold"
    },
    "logsumexp of all": {"min_p > 0:\n        scaled": "min_p > 1:\n        scaled"},
}


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("file", "changes"),
    [
        pytest.param(file, changes, id=name)
        for file, mutants in [("kernel.py", {"none": {}}), *KERNEL_MUTANTS.items()]
        for name, changes in mutants.items()
    ],
)
def test_kernel_mutant_is_caught(file, changes, tmp_path):
    function = broken(file, changes, tmp_path).row_stats_triton
    assert stats_are_right(function, keep_mask) is not bool(changes)


@pytest.mark.parametrize("changes", listed(REFERENCE_MUTANTS))
def test_reference_mutant_is_caught(changes, tmp_path):
    module = load("row_stats", "reference.py", changes, tmp_path)

    def mask_of(logits: Tensor, stats: RowStats, temperature: float) -> Tensor:
        return module.kept(module.scaled_logits(logits, temperature), stats.threshold, stats.ties)

    assert stats_are_right(module.row_stats_reference, mask_of) is not bool(changes)
