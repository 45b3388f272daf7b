"""`row_stats` against float64 and transformers' own warpers, by its reference and by its kernels.

Shares of probability are compared outside a band of 1e-6 (`BAND`): closer to a border, the float32
sums of transformers are no judge either. Logarithms of sums get room for a few float32 roundings.
"""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import selfspec_kernels
import torch
from selfspec_kernels.row_stats import RowStats, keep_mask, row_stats
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .trees import BACKENDS

BAND = 1e-6
LOGSUMEXP = {"atol": 4e-6, "rtol": 1e-6}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def stable_top_p(scaled: Tensor, top_p: float) -> Tensor:
    """TopPLogitsWarper with a stable sort: which of equal logits it drops is left open there."""
    ordered, index = scaled.sort(stable=True, dim=-1)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return scaled.masked_fill(dropped.scatter(-1, index, dropped), -math.inf)


def warped(scaled: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, stable=True):
    """What transformers' warpers leave of rows of scaled logits."""
    if top_k:
        scaled = TopKLogitsWarper(top_k)(None, scaled)
    if top_p < 1:
        scaled = stable_top_p(scaled, top_p) if stable else TopPLogitsWarper(top_p)(None, scaled)
    if min_p:
        scaled = MinPLogitsWarper(min_p)(None, scaled)
    return scaled


def scaled_rows(logits: Tensor, temperature: float = 1.0) -> Tensor:
    rows = (logits.float() / temperature).flatten(0, -2)
    return torch.where(rows.isnan(), -math.inf, rows)


def disagreement(
    logits: Tensor, stats: RowStats, mask: Tensor, temperature: float = 1.0, **filters
) -> str:
    """What is wrong with statistics of rows and the mask they give, in a word; "" if nothing is."""
    scaled = scaled_rows(logits, temperature)
    mask = mask.flatten(0, -2)
    left = warped(scaled.double(), **filters)
    differ = (mask & (scaled > -math.inf)) != (left > -math.inf)
    # Rows may differ by tokens that the border of top-p or min-p cannot tell apart.
    share = scaled.double().softmax(-1)
    if filters.get("top_k"):
        share = warped(scaled.double(), top_k=filters["top_k"]).softmax(-1)
    if ((share * differ).sum(-1) > BAND).any():
        return "mask"
    if filters.get("top_p", 1.0) == 1.0 and not filters.get("min_p") and differ.any():
        return "mask of top-k"
    if not torch.equal(stats.maximum.flatten(), scaled.amax(-1)):
        return "maximum"
    first = [row.tolist().index(row.max().item()) for row in scaled]
    if stats.argmax.flatten().tolist() != first:
        return "argmax"
    kept = scaled.double().masked_fill(~mask, -math.inf)
    if not torch.allclose(stats.logsumexp.flatten().double(), kept.logsumexp(-1), **LOGSUMEXP):
        return "logsumexp"
    equal = (scaled == stats.threshold.flatten()[:, None]).sum(-1)
    held = (mask & (scaled == stats.threshold.flatten()[:, None])).sum(-1)
    vocab = logits.shape[-1]
    ties = stats.ties.flatten()
    if not torch.equal(ties, torch.where(held < equal, held, vocab).int()):
        return "ties"
    return ""


def random_logits(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def planted_logits(vocab: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A peaked row, a flat one, one of few values, and one with its ties far apart."""
    rows = random_logits((4, vocab), dtype, seed)
    rows[0, vocab // 2] = 25
    rows[1] *= 0.01
    rows[2] = rows[2].round()
    rows[3, [0, vocab // 3, vocab - 1]] = rows[3].max() + 1
    return rows


COMBINATIONS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.7},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.31, "temperature": 0.3},
    {"min_p": 0.05},
    {"min_p": 1.0, "temperature": 2.5},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 25, "top_p": 0.95, "min_p": 0.2, "temperature": 0.6},
    {"top_p": 0.5, "min_p": 0.001},
]
NAMES = ["-".join(f"{k}{v}" for k, v in options.items()) or "none" for options in COMBINATIONS]


@pytest.mark.parametrize("options", COMBINATIONS, ids=NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_tile(backend, options):
    small = COMBINATIONS.index(options) % 2
    logits = planted_logits(*((31, torch.float32) if small else (1000, torch.bfloat16)), seed=1)
    before = logits.clone()
    stats = row_stats(logits, **options, backend=backend)
    assert torch.equal(logits, before)
    mask = keep_mask(logits, stats, options.get("temperature", 1.0))
    assert disagreement(logits, stats, mask, **options) == ""


# Tiles have 4096 entries: one over, many, and the vocabulary of Qwen.
LARGE = [
    (4097, 3, torch.float16, {}),
    (4097, 1, torch.float32, {"top_p": 0.9, "temperature": 0.8}),
    (4097, 1, torch.float16, {"top_k": 4096, "top_p": 0.99}),
    (49152, 1, torch.bfloat16, {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7}),
    (49152, 1, torch.float32, {"min_p": 0.01}),
    (151936, 3, torch.bfloat16, {}),
    (32, 33, torch.float32, {}),
    (32, 33, torch.float16, {"min_p": 0.1, "temperature": 0.9}),
]


@pytest.mark.parametrize(("vocab", "rows", "dtype", "options"), LARGE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_tiles(backend, vocab, rows, dtype, options):
    logits = random_logits((rows, vocab), dtype, vocab)
    stats = row_stats(logits, **options, backend=backend)
    fields = (stats.maximum, stats.argmax, stats.logsumexp, stats.threshold, stats.ties)
    assert [field.dtype for field in fields] == [
        torch.float32,
        torch.int64,
        torch.float32,
        torch.float32,
        torch.int32,
    ]
    assert all(field.shape == (rows,) for field in fields)
    mask = keep_mask(logits, stats, options.get("temperature", 1.0))
    assert disagreement(logits, stats, mask, **options) == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_across_tiles(backend):
    # Few tokens above, 600 at the border on both sides of the tiles' border at 4096.
    logits = torch.full((1, 5000), -20.0)
    logits[0, [5, 4500]] = 2.0
    logits[0, 3800:4400] = 1.0
    top, each = math.exp(2), math.exp(1)
    total = 2 * top + 600 * each + 4398 * math.exp(-20)
    share = (2 * top + 250.5 * each) / total
    stats = row_stats(logits, top_p=share, backend=backend)
    assert (stats.argmax.item(), stats.threshold.item(), stats.ties.item()) == (5, 1.0, 251)
    kept = keep_mask(logits, stats)[0].nonzero().flatten().tolist()
    assert kept == [5, *range(4149, 4400), 4500]
    assert stats.logsumexp.item() == pytest.approx(math.log(2 * top + 251 * each), abs=1e-5)
    # Top-k takes no notice of how many are equal.
    stats = row_stats(logits, top_k=3, backend=backend)
    assert (stats.threshold.item(), stats.ties.item()) == (1.0, 5000)
    assert keep_mask(logits, stats).sum() == 602


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_border_that_floats_hit_exactly(backend, share):
    logits = torch.zeros(1, 8)
    stats = row_stats(logits, top_p=share, backend=backend)
    left = warped(logits, top_p=share)
    assert torch.equal(keep_mask(logits, stats), left > -math.inf)
    assert stats.ties.item() == max(1, round(8 * share))


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_of_both_signs_are_equal(backend):
    logits = torch.tensor([[-0.0, -1.0, 0.0, -0.0]])
    stats = row_stats(logits, top_k=2, backend=backend)
    assert (stats.argmax.item(), keep_mask(logits, stats).tolist()) == (
        0,
        [[True, False, True, True]],
    )


INF, NAN = math.inf, math.nan
SPECIAL = torch.tensor(
    [
        [NAN, 1.0, 3.0, NAN, 3.0, -INF],
        [-INF] * 6,
        [NAN] * 6,
        [0.0, INF, 2.0, INF, NAN, -INF],
        [-INF, -INF, -INF, -INF, -INF, -5.0],
        [3e38, -3e38, 3e38, 0.0, -INF, NAN],
    ]
)
KEPT = {  # of each row, as indices
    (): [range(6)] * 6,
    (("top_k", 2),): [[2, 4], range(6), range(6), [1, 3], range(6), [0, 2]],
    (("top_k", 3), ("top_p", 0.4)): [[4], range(6), range(6), [3], [5], [2]],
    (("top_p", 0.6),): [[2, 4], range(6), range(6), [1, 3], [5], [0, 2]],
    (("min_p", 0.5),): [[2, 4], range(6), range(6), [1, 3], [5], [0, 2]],
}


@pytest.mark.parametrize(("filters", "expected"), KEPT.items())
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_infinities(backend, filters, expected):
    stats = row_stats(SPECIAL, **dict(filters), backend=backend)
    assert stats.maximum.tolist()[:2] == [3.0, -INF]
    assert stats.maximum.tolist()[2:] == [-INF, INF, -5.0, SPECIAL[5, 0].item()]
    assert stats.argmax.tolist() == [2, 0, 0, 1, 5, 0]
    for field in vars(stats).values():
        assert not field.isnan().any()
    mask = keep_mask(SPECIAL, stats)
    assert [row.nonzero().flatten().tolist() for row in mask] == [list(row) for row in expected]
    clean = torch.where(SPECIAL.isnan(), -INF, SPECIAL).double()
    torch.testing.assert_close(
        stats.logsumexp.double(), clean.masked_fill(~mask, -INF).logsumexp(-1), **LOGSUMEXP
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_are_read_where_they_are(backend):
    buffer = random_logits((3, 5, 2, 40), torch.bfloat16, 0)
    for view in (
        buffer[:, 1:4, 1, :33],
        buffer[1:, ::2, :, 3:],
        buffer[0, 2, 1],
        buffer[::2, 0, 1],
    ):
        filters = {"top_p": 0.7} if view.dim() < 3 else {}
        stats = row_stats(view, **filters, backend=backend)
        expected = row_stats(view.contiguous(), **filters, backend="reference")
        for name, field in vars(stats).items():
            assert field.shape == view.shape[:-1]
            torch.testing.assert_close(field, getattr(expected, name), **LOGSUMEXP)
        assert keep_mask(view, stats).shape == view.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_one_entry(backend):
    assert row_stats(torch.zeros(2, 0, 5), backend=backend).argmax.shape == (2, 0)
    stats = row_stats(torch.tensor([[7.0]]), top_k=1, top_p=0.1, min_p=1.0, backend=backend)
    assert (stats.argmax.item(), stats.logsumexp.item()) == (0, 7.0)


@pytest.mark.interpret
def test_a_row_does_not_depend_on_the_others():
    logits = random_logits((2, 4500), torch.float32, 1)
    together = row_stats(logits, top_p=0.8, backend="triton")
    alone = row_stats(logits[1:2], top_p=0.8, backend="triton")
    for name, field in vars(alone).items():
        assert torch.equal(field, getattr(together, name)[1:2])


# Rows lie 2**30 entries apart, so that 32 bits do not reach the third. The memory between is never
# touched; an index that wraps ends the process.
FAR = """
import torch
from selfspec_kernels.row_stats import row_stats
stride, vocab = 2**30, 40
logits = torch.zeros(1).to(torch.float16).new_empty(2 * stride + vocab).as_strided(
    (3, vocab), (stride, 1))
rows = torch.randn(3, vocab).half()
logits.copy_(rows)
for filters in ({}, {"top_p": 0.5}):
    far = row_stats(logits, **filters, backend=BACKEND)
    near = row_stats(rows, **filters, backend="reference")
    for name, field in vars(far).items():
        torch.testing.assert_close(field, getattr(near, name))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beyond_32_bits(backend):
    root = Path(selfspec_kernels.__file__).parent.parent
    script = f"import sys; sys.path.insert(0, {str(root)!r}); BACKEND = {backend!r}\n{FAR}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_transformers_in_float32_agrees():
    """The oracle above is float64 and stable; here the warpers run as `generate` runs them."""
    exact = 0
    for seed, options in itertools.product(range(3), COMBINATIONS):
        filters = {k: v for k, v in options.items() if k != "temperature"}
        temperature = options.get("temperature", 1.0)
        logits = planted_logits(200, torch.bfloat16, seed)
        scaled = scaled_rows(logits, temperature)
        left = warped(scaled, **filters, stable=False)
        mine = scaled.masked_fill(
            ~keep_mask(logits, row_stats(logits, **options), temperature), -math.inf
        )
        assert torch.equal(mine.sort(-1).values, left.sort(-1).values)
        exact += (mine == left).all(-1).sum()
    assert exact >= 0.8 * 3 * len(COMBINATIONS) * len(logits)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"logits": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "logits must be a float"),
        ({"logits": torch.tensor(1.0)}, ValueError, r"logits has shape \(\), expected \[..., V\]"),
        ({"logits": torch.zeros(2, 0)}, ValueError, r"logits has shape \(2, 0\)"),
        ({"logits": torch.zeros(3, 2).mT}, ValueError, "logits has stride 2"),
        ({"temperature": 0.0}, ValueError, "temperature=0.0 is not positive"),
        ({"temperature": math.inf}, ValueError, "temperature=inf"),
        ({"temperature": math.nan}, ValueError, "temperature=nan"),
        ({"top_k": -1}, ValueError, "top_k=-1 is negative"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int, got 2.0"),
        ({"top_k": True}, TypeError, "top_k must be an int"),
        ({"top_p": 1.5}, ValueError, r"top_p=1.5 is not in \[0, 1\]"),
        ({"top_p": math.nan}, ValueError, "top_p=nan"),
        ({"min_p": -0.1}, ValueError, r"min_p=-0.1 is not in \[0, 1\]"),
        ({"backend": "cpu"}, ValueError, "backend='cpu'"),
        ({"backend": "triton"}, ValueError, 'backend="triton" needs CUDA'),
    ],
)
def test_refuses_what_does_not_fit(changes, error, match):
    with pytest.raises(error, match=f"row_stats: {match}"):
        row_stats(**({"logits": torch.zeros(2, 3)} | changes))
