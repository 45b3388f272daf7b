"""`draft_topk` against float64, by its reference and by its kernels in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch
from selfspec_kernels.draft_topk import blocks, draft_topk
from selfspec_kernels.tuning import PARTS
from torch import Tensor
from torch._subclasses import FakeTensorMode

from .head_cases import (
    CASES,
    EVERYTHING,
    Case,
    Inputs,
    allowed_error,
    build,
    in_order,
    oracle_logits,
)
from .trees import BACKENDS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

NEG_INF = float("-inf")


def assert_topk(ids: Tensor, log_probs: Tensor, inputs: Inputs, k: int) -> None:
    lead = inputs.hidden.shape[:-1]
    assert (ids.shape, ids.dtype) == ((*lead, k), torch.int64)
    assert (log_probs.shape, log_probs.dtype) == ((*lead, k), torch.float32)
    logits = oracle_logits(inputs)
    bound = allowed_error(inputs, logits)
    exact = logits.log_softmax(-1)
    tokens = inputs.options.get("token_ids")
    tokens = list(range(logits.shape[1])) if tokens is None else tokens.tolist()
    rows = zip(ids.view(-1, k).tolist(), log_probs.view(-1, k), exact, strict=True)
    for row, got, expected in rows:
        assert len(set(row)) == k
        assert set(row) <= set(tokens)
        positions = [tokens.index(token) for token in row]
        order = in_order(expected.tolist())[:k]
        if inputs.hidden.dtype in (torch.float32, torch.float64):
            assert positions == order
        # Rounded logits may change places, but not by more than the rounding.
        for wanted in (positions, order):
            torch.testing.assert_close(got.double(), expected[wanted], rtol=0, atol=bound)
        assert got.tolist() == sorted(got.tolist(), reverse=True)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_oracle(backend, case):
    inputs = build(case)
    before = [tensor.clone() for tensor in inputs.tensors]
    ids, log_probs = draft_topk(
        inputs.hidden, inputs.weight, case.k, **inputs.options, backend=backend
    )
    assert all(torch.equal(a, b) for a, b in zip(before, inputs.tensors, strict=True))
    assert_topk(ids, log_probs, inputs, case.k)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_tiles(backend, monkeypatch):
    monkeypatch.setattr(blocks, "_PROGRAMS", 1)
    inputs = build(Case((3,), 200, dtype=torch.bfloat16, reduced=150, bias=True))
    found = draft_topk(inputs.hidden, inputs.weight, 5, **inputs.options, backend=backend)
    assert_topk(*found, inputs, 5)


def test_float64_is_exact_and_needs_no_kernel():
    inputs = build(Case((3,), 200, k=7, dtype=torch.float64, bias=True, options=EVERYTHING))
    ids, log_probs = draft_topk(inputs.hidden, inputs.weight, 7, **inputs.options)
    exact = oracle_logits(inputs).log_softmax(-1).topk(7)
    assert torch.equal(ids, exact.indices)
    torch.testing.assert_close(log_probs, exact.values.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_equal_tokens_wins(backend, reduced, dtype):
    if (backend, dtype) == ("triton", torch.float64):
        backend = "auto"
    # Small integers, so that every logit is exact; five of them, on both sides of every border.
    vocab, size, k = 137, 16, 40
    weight = torch.tensor(
        [[(i * 29 % 5) - 2] + [0] * (size - 1) for i in range(vocab)], dtype=dtype
    )
    hidden = torch.tensor(
        [[1] + [3] * (size - 1), [-1] + [2] * (size - 1), [0] * size], dtype=dtype
    )
    tokens = torch.randperm(vocab, generator=torch.Generator().manual_seed(0)).tolist()
    tokens = tokens[:101] if reduced else range(vocab)
    ids, _ = draft_topk(
        hidden, weight, k, token_ids=torch.tensor(tokens) if reduced else None, backend=backend
    )
    for row, h in zip(ids.tolist(), hidden.double(), strict=True):
        logits = (weight.double() @ h).tolist()
        order = in_order([logits[token] for token in tokens])
        assert row == [tokens[position] for position in order[:k]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_of_either_sign_are_equal(backend):
    weight = torch.tensor([[-1e-30], [1e-30]] * 50)
    ids, log_probs = draft_topk(torch.ones(1), weight, 3, logit_scale=1e-30, backend=backend)
    assert ids.tolist() == [0, 1, 2]
    torch.testing.assert_close(log_probs, torch.full((3,), -math.log(100)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_are_not_finite(backend):
    hidden = torch.tensor([[1.0, 0.0], [math.nan, 1.0], [2.0, 0.0], [math.inf, 0.0]])
    weight = torch.zeros(70, 2)
    weight[3, 0], weight[40, 0], weight[41, 0], weight[42, 0] = 1.0, 2.0, math.nan, -math.inf
    bias = torch.zeros(70)
    bias[50], bias[64], bias[0] = -math.inf, math.nan, 1.0
    ids, log_probs = draft_topk(hidden, weight, 3, head_bias=bias, backend=backend)
    kept = [i for i in range(70) if i not in (41, 42, 50, 64)]
    for row, h in ((0, 1.0), (2, 2.0)):
        exact = (weight[kept, 0].double() * h + bias[kept]).log_softmax(0)
        order = in_order(exact.tolist())[:3]
        assert ids[row].tolist() == [kept[i] for i in order]
        torch.testing.assert_close(log_probs[row], exact[order].float(), rtol=0, atol=4e-6)
    # NaN everywhere: the first tokens. inf * 0 is NaN, so of the last row two are left.
    assert ids[1].tolist() == [0, 1, 2]
    assert log_probs[1].tolist() == [NEG_INF] * 3
    assert ids[3].tolist() == [3, 40, 0]
    torch.testing.assert_close(log_probs[3, :2], torch.full((2,), -math.log(2)))
    assert log_probs[3, 2] == NEG_INF


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_tokens_wanted_than_above_minus_infinity(backend):
    bias = torch.full((100,), NEG_INF)
    bias[77], bias[5] = 0.0, 1.0
    tokens = torch.arange(99, -1, -1)
    ids, log_probs = draft_topk(
        torch.zeros(1, 4),
        torch.zeros(100, 4),
        4,
        head_bias=bias,
        token_ids=tokens,
        backend=backend,
    )
    assert ids.tolist() == [[5, 77, 99, 98]]
    exact = torch.tensor([1.0, 0.0]).log_softmax(0)
    torch.testing.assert_close(log_probs[0, :2], exact)
    assert log_probs[0, 2:].tolist() == [NEG_INF] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_influence_each_other(backend):
    inputs = build(Case((4,), 100, 24))
    dirty = inputs.hidden.clone()
    dirty[1], dirty[2] = math.nan, 1e30
    clean, other = (
        draft_topk(hidden, inputs.weight, 5, **inputs.options, backend=backend)
        for hidden in (inputs.hidden, dirty)
    )
    assert all(torch.equal(a[::3], b[::3]) for a, b in zip(clean, other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend):
    ids, log_probs = draft_topk(torch.zeros(2, 0, 8), torch.zeros(5, 8), 3, backend=backend)
    assert ids.shape == log_probs.shape == (2, 0, 3)


@pytest.mark.interpret
def test_offsets_beyond_32_bits():
    # Never touched but for its rows, so that it takes no memory.
    step, size = 2**30, 16
    memory = torch.from_numpy(np.zeros(2 * step + size, dtype=np.float16))
    apart = memory.as_strided((3, size), (step, 1))
    apart.copy_(torch.arange(3)[:, None] + torch.arange(size) / 8)
    near = apart.clone()
    expected = draft_topk(near, near, 3, backend="reference")
    for hidden, weight in ((apart, near), (near, apart)):
        found = draft_topk(hidden, weight, 3, backend="triton")
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)


@pytest.mark.interpret
def test_ids_outside_of_the_vocabulary_are_no_address():
    tokens = torch.tensor([2**40, 1, -(2**40), 0])
    ids, log_probs = draft_topk(
        torch.ones(1, 4), torch.ones(2, 4), 2, token_ids=tokens, backend="triton"
    )
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(log_probs, torch.full((1, 2), -math.log(2)))


def test_reads_nothing_back():
    inputs = build(Case((3,), reduced=60, bias=True, options=EVERYTHING))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        hidden = mode.from_tensor(inputs.hidden)
        ids, log_probs = draft_topk(hidden, inputs.weight, 5, **inputs.options)
    assert ids.shape == log_probs.shape == (3, 5)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("item_size", [2, 4])
def test_tiles_suit_the_launch(item_size, part):
    for rows in (1, 16, 17, 64, 65, 1000):
        for tokens in (1, 8192, 128_256, 262_144):
            chosen = blocks.choose_blocks(part, rows, tokens, item_size)
            assert chosen.m >= min(rows, 64)
            # A reduced vocabulary still fills the multiprocessors; a large one is still combined
            # by one program a row.
            assert tokens < 8192 or rows > 64 or math.ceil(tokens / chosen.v) in range(64, 8193)
    assert blocks.choose_blocks(part, 1, 8192, item_size).v == 32


GOOD = {
    "hidden": torch.zeros(2, 3, 8),
    "head_weight": torch.zeros(10, 8),
    "k": 2,
    "norm_weight": torch.zeros(8),
    "head_bias": torch.zeros(10),
    "token_ids": torch.arange(4),
}
BAD_HEAD = [
    ({"hidden": torch.zeros(2, 8, dtype=torch.int64)}, TypeError, "hidden is torch.int64"),
    ({"head_weight": GOOD["head_weight"].half()}, TypeError, "head_weight is torch.float16"),
    ({"head_weight": torch.zeros(8)}, ValueError, r"head_weight has shape \(8,\)"),
    ({"head_weight": torch.zeros(0, 8)}, ValueError, r"head_weight has shape \(0, 8\)"),
    ({"hidden": torch.zeros(2, 7)}, ValueError, r"hidden has shape \(2, 7\)"),
    ({"hidden": torch.tensor(1.0)}, ValueError, r"hidden has shape \(\)"),
    ({"hidden": torch.zeros(8, 2).mT}, ValueError, "hidden has stride 2"),
    ({"head_weight": torch.zeros(8, 10).mT}, ValueError, "head_weight has stride 10"),
    ({"head_weight": GOOD["head_weight"].to("meta")}, ValueError, "head_weight is on meta"),
    ({"norm_weight": torch.zeros(7)}, ValueError, r"norm_weight has shape \(7,\)"),
    ({"norm_weight": torch.zeros(8).long()}, TypeError, "norm_weight is torch.int64"),
    ({"norm_weight": torch.zeros(8, device="meta")}, ValueError, "norm_weight is on meta"),
    ({"norm_eps": -1e-6}, ValueError, "norm_eps=-1e-06"),
    ({"norm_offset": math.nan}, ValueError, "norm_offset=nan"),
    ({"head_bias": torch.zeros(4)}, ValueError, r"head_bias has shape \(4,\)"),
    ({"head_bias": torch.zeros(10).bool()}, TypeError, "head_bias is torch.bool"),
    ({"head_bias": torch.zeros(10, device="meta")}, ValueError, "head_bias is on meta"),
    ({"logit_scale": math.inf}, ValueError, "logit_scale=inf"),
    ({"softcap": -1.0}, ValueError, r"softcap=-1.0"),
    ({"softcap": math.nan}, ValueError, "softcap=nan"),
    ({"token_ids": torch.arange(4).int()}, TypeError, "token_ids must be torch.int64"),
    ({"token_ids": torch.arange(0)}, ValueError, r"token_ids has shape \(0,\)"),
    ({"token_ids": torch.zeros(2, 2).long()}, ValueError, r"token_ids has shape \(2, 2\)"),
    ({"token_ids": torch.arange(4, device="meta")}, ValueError, "token_ids is on meta"),
    ({"backend": "cpu"}, ValueError, "backend='cpu'"),
    ({"backend": "triton"}, ValueError, 'backend="triton" needs CUDA'),
]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        *BAD_HEAD,
        ({"k": 0}, ValueError, r"k=0 is outside of 1\.\.4"),
        ({"k": True}, TypeError, "k must be an int, got True"),
        ({"k": 2.0}, TypeError, r"k must be an int, got 2\.0"),
        ({"k": 5}, ValueError, r"k=5 is outside of 1\.\.4"),
        (
            {"k": 65, "head_weight": torch.zeros(99, 8), "head_bias": None, "token_ids": None},
            ValueError,
            r"k=65 is outside of 1\.\.64",
        ),
    ],
)
def test_refuses_what_does_not_fit(changes, error, match):
    with pytest.raises(error, match=f"draft_topk: {match}"):
        draft_topk(**(GOOD | changes))


@pytest.mark.interpret
def test_the_kernel_has_no_float64():
    with pytest.raises(TypeError, match=r"draft_topk: hidden is torch.float64"):
        draft_topk(torch.zeros(1, 8).double(), torch.zeros(4, 8).double(), 1, backend="triton")
