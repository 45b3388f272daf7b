"""`exit_confidence` against float64, by its reference and by its kernels in the interpreter.

Its inputs, logits and bounds are those of `draft_topk`'s tests. With every log-probability off by
at most d, a probability is off by about d of itself and the entropy by d of itself.
"""

import math

import pytest
import torch
from selfspec_kernels.exit_confidence import ExitConfidence, exit_confidence

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
from .test_draft_topk import BAD_HEAD, GOOD
from .trees import BACKENDS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def run(inputs: Inputs, backend: str) -> ExitConfidence:
    return exit_confidence(inputs.hidden, inputs.weight, **inputs.options, backend=backend)


def assert_confidence(found: ExitConfidence, inputs: Inputs) -> None:
    lead = inputs.hidden.shape[:-1]
    assert (found.token.shape, found.token.dtype) == (lead, torch.int64)
    for name in ("top1", "top2", "entropy"):
        number = getattr(found, name)
        assert (number.shape, number.dtype) == (lead, torch.float32)
    logits = oracle_logits(inputs)
    log_p = logits.log_softmax(-1)
    bound = allowed_error(inputs, logits)
    tokens = inputs.options.get("token_ids", torch.arange(logits.shape[1])).tolist()
    got = zip(*(x.reshape(-1).tolist() for x in vars(found).values()), strict=True)
    for (token, top1, top2, entropy), row in zip(got, log_p, strict=True):
        best, *others = in_order(row.tolist())[:2]
        if inputs.hidden.dtype in (torch.float32, torch.float64):
            assert token == tokens[best]
        assert row[tokens.index(token)].item() == pytest.approx(row[best].item(), abs=2 * bound)
        assert top1 == pytest.approx(row[best].exp().item(), rel=bound)
        assert top2 == pytest.approx(row[others].exp().sum().item(), rel=bound)
        exact = -(row.exp() * row).sum().item()
        assert entropy == pytest.approx(exact, abs=bound * max(1.0, exact))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_oracle(backend, case):
    inputs = build(case, seed=1)
    before = [tensor.clone() for tensor in inputs.tensors]
    found = run(inputs, backend)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs.tensors, strict=True))
    assert_confidence(found, inputs)


def test_float64_needs_no_kernel():
    inputs = build(Case((3,), 200, dtype=torch.float64, bias=True, options=EVERYTHING))
    found, log_p = run(inputs, "auto"), oracle_logits(inputs).log_softmax(-1)
    best = log_p.topk(2)
    assert torch.equal(found.token, best.indices[:, 0])
    torch.testing.assert_close(found.top1, best.values[:, 0].exp().float())
    torch.testing.assert_close(found.top2, best.values[:, 1].exp().float())
    torch.testing.assert_close(found.entropy, -(log_p.exp() * log_p).sum(-1).float())


@pytest.mark.parametrize(
    ("top", "second"), [(3, 3), (3, 31), (31, 32), (5, 64), (64, 5), (0, 99), (99, 0)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_and_places_of_the_two_best(backend, top, second):
    # Equal, in one block or on the two sides of a border; then unequal in either order.
    for gap in (0.0, 1.0):
        weight = torch.zeros(100, 1)
        weight[second], weight[top] = 4.0, 4.0 + gap
        found = exit_confidence(torch.ones(1), weight, backend=backend)
        assert found.token == (min(top, second) if gap == 0.0 else top)
        p = weight[:, 0].double().softmax(0).sort(descending=True).values
        torch.testing.assert_close(found.top1, p[0].float())
        torch.testing.assert_close(found.top2, p[1].float())
        torch.testing.assert_close(found.entropy, -(p * p.log()).sum().float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_are_not_finite(backend):
    hidden = torch.tensor([[1.0, 0.0], [math.nan, 0.0], [0.0, 1.0]])
    weight, bias = torch.zeros(70, 2), torch.zeros(70)
    weight[:, 0] = torch.arange(70) % 9 / 3
    weight[3, 0], weight[9, 0] = math.nan, -math.inf
    bias[32:64] = -math.inf
    found = exit_confidence(hidden, weight, head_bias=bias, backend=backend)
    left = [i for i in range(70) if i not in range(32, 64)]
    for row, exact in ((0, weight[:, 0].double()), (2, torch.zeros(70).double())):
        kept = [i for i in left if i not in (3, 9)]
        log_p = exact[kept].log_softmax(0)
        best, second = in_order(log_p.tolist())[:2]
        assert found.token[row] == kept[best]
        torch.testing.assert_close(found.top1[row], log_p[best].exp().float())
        torch.testing.assert_close(found.top2[row], log_p[second].exp().float())
        torch.testing.assert_close(found.entropy[row], -(log_p.exp() * log_p).sum().float())
    assert [x[1] for x in vars(found).values()] == [0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_as_far_apart_as_there_are(backend):
    weight, bias = torch.zeros(70, 1), torch.zeros(70)
    weight[40], bias[40], bias[:32] = 3e38, 3e38, -3e38
    found = exit_confidence(torch.ones(1, 1), weight, head_bias=bias, backend=backend)
    assert (found.token, found.top1, found.top2) == (40, 1.0, 0.0)
    assert found.entropy.item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_token(backend):
    found = exit_confidence(
        torch.ones(2, 8),
        torch.ones(9, 8),
        token_ids=torch.tensor([6]),
        norm_weight=torch.ones(8),
        backend=backend,
    )
    assert [x.tolist() for x in vars(found).values()] == [[6, 6], [1.0, 1.0], [0.0, 0.0], [0.0] * 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend):
    found = exit_confidence(torch.zeros(0, 8), torch.zeros(5, 8), backend=backend)
    assert all(x.shape == (0,) for x in vars(found).values())


@pytest.mark.parametrize(("changes", "error", "match"), BAD_HEAD)
def test_refuses_what_does_not_fit(changes, error, match):
    good = {name: value for name, value in GOOD.items() if name != "k"}
    with pytest.raises(error, match=f"exit_confidence: {match}"):
        exit_confidence(**(good | changes))


@pytest.mark.interpret
def test_the_kernel_has_no_float64():
    with pytest.raises(TypeError, match=r"exit_confidence: hidden is torch.float64"):
        exit_confidence(torch.zeros(1, 8).double(), torch.zeros(4, 8).double(), backend="triton")
