"""The fused losses against plain autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.training import losses
from selfspec.training.losses import _likeliest, distill

VOCAB, SIZE = 13, 5
KINDS = ("cross-entropy", "kl", "lk")


def problem(positions: int, k: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """States, a head, and targets of which some cannot be drafted and some do not count."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(positions, VOCAB + 3, generator=g, dtype=torch.float64)
    probs, tokens = logits.softmax(-1).topk(k)
    weights = torch.rand(positions, generator=g, dtype=torch.float64)
    weights[::5] = 0
    return {
        "states": torch.randn(positions, SIZE, generator=g, dtype=torch.float64),
        "matrix": torch.randn(VOCAB, SIZE, generator=g, dtype=torch.float64),
        "tokens": torch.where(tokens < VOCAB, tokens, -1),
        "probs": probs,
        "weights": weights,
    }


def plain(kind: str, states: Tensor, matrix: Tensor, **given: Tensor) -> Tensor:
    """The definition, over the whole vocabulary at once."""
    p = torch.zeros(len(states), VOCAB, dtype=states.dtype)
    inside = given["tokens"] >= 0
    row, column = inside.nonzero(as_tuple=True)
    p[row, given["tokens"][row, column]] = given["probs"][row, column]
    mass = p.sum(-1)
    weights = given["weights"] * (mass > 0)
    p = p / mass.clamp_min(1e-300)[:, None]
    log_q = (states @ matrix.t()).log_softmax(-1)
    soft = -(p * log_q).sum(-1)
    divergence = soft - torch.special.entr(p).sum(-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    slope = torch.exp(-3 * alpha).detach()
    values = {
        "cross-entropy": soft,
        "kl": divergence,
        "lk": slope * divergence + (1 - slope) * (1 - alpha),
    }
    return (weights * values[kind]).sum() / weights.sum().clamp_min(1e-300)


@pytest.mark.parametrize("k", [1, 4, VOCAB + 3])
@pytest.mark.parametrize(("chunk", "rows"), [(7, 3), (7, 7), (64, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(
    kind: Any, k: int, chunk: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_CHUNK", chunk)  # several, the last one short
    monkeypatch.setattr(losses, "_ROWS", rows)
    given = problem(23, k)
    found, expected = (
        {n: t.clone().requires_grad_(n in ("states", "matrix")) for n, t in given.items()}
        for _ in range(2)
    )
    loss = distill(**found, kind=kind).loss
    truth = plain(kind, **expected)
    torch.testing.assert_close(loss, truth)
    (3 * loss).backward()
    (3 * truth).backward()
    for name in ("states", "matrix"):
        torch.testing.assert_close(found[name].grad, expected[name].grad)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_without_weight_change_nothing(kind: Any) -> None:
    given = problem(20)
    counts = given["weights"] > 0
    kept = {n: t[counts] if n != "matrix" else t for n, t in given.items()}
    with_them, without = distill(**given, kind=kind, ranks=3), distill(**kept, kind=kind, ranks=3)
    torch.testing.assert_close(with_them.loss, without.loss)
    assert with_them.weight == pytest.approx(without.weight)
    assert with_them.alpha == pytest.approx(without.alpha)
    torch.testing.assert_close(with_them.ranks, without.ranks)


def test_counts_by_hand() -> None:
    # Logits are rows of the matrix for one-hot states.
    states = torch.eye(4, dtype=torch.float64)
    q = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.2, 0.3, 0.5], [0.4, 0.3, 0.3]]).double()
    tokens = torch.tensor([[0, 1], [0, 1], [-1, 2], [-1, -1]])
    probs = torch.tensor([[0.5, 0.4], [0.6, 0.3], [0.8, 0.1], [0.9, 0.1]]).double()
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0]).double()
    found = distill(states, q.log().t().contiguous(), tokens, probs, weights, ranks=3)
    assert found.weight == 4
    # Only the first row is a hit: what cannot be drafted is missed, though nothing was better.
    assert found.hits == pytest.approx(1 / 4)
    # The first row's token is the best of its q, the second row's the worst; the rest has none.
    assert found.ranks.tolist() == pytest.approx([1 / 4, 0, 1 / 4])
    # Of the target's own probabilities, not of those restricted to what can be drafted.
    alpha = (0.5 + 0.2) + (0.1 + 0.3) + 0.1 + 0
    assert found.alpha == pytest.approx(alpha / 4)


def test_nothing_counts() -> None:
    given = problem(6)
    given["weights"].zero_()
    states = given["states"].requires_grad_()
    found = distill(**given)
    found.loss.backward()
    assert (found.loss, found.weight, found.hits) == (0, 0, 0)
    assert states.grad is not None
    assert not states.grad.any()
    empty = {n: t[:0] if n != "matrix" else t for n, t in problem(6).items()}
    assert distill(**empty, ranks=2).loss == 0


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_close_to_float64(kind: Any) -> None:
    given = problem(40)
    low = {n: t.bfloat16() if n in ("states", "matrix") else t for n, t in given.items()}
    high = {n: t.double() if n in ("states", "matrix") else t for n, t in low.items()}
    gradients = []
    for terms in (low, high):
        states = terms["states"].requires_grad_()
        loss = distill(**terms, kind=kind).loss
        loss.backward()
        gradients.append(states.grad.double())
    # A rounding of the logits (2^-8 of numbers up to about 8), and one of the gradient.
    assert (gradients[0] - gradients[1]).abs().max() < 0.02 * gradients[1].abs().max()


@pytest.mark.parametrize("size", [8192, 64, 100, 97, 1])
def test_the_first_of_equals_is_the_likeliest(size: int) -> None:
    q = torch.randint(0, 8, (64, size)).float()
    assert _likeliest(q).tolist() == q.argmax(-1).tolist()
