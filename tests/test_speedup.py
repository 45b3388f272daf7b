"""What chains are expected to gain."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from selfspec.speedup import acceptance_needed, chain_speedup, speed_by_counts

FLAT = [1.0] * 9


def by_hand(acceptance: float, draft: float, verify: list[float], shared: float) -> float:
    best = 0.0
    for d in range(1, len(verify)):
        tokens = sum(acceptance**k for k in range(d + 1))
        best = max(best, tokens / (d * draft + verify[d] * (1 - shared) + shared))
    return best


@pytest.mark.parametrize(
    ("acceptance", "draft", "shared"),
    list(itertools.product((0.0, 0.3, 0.9, 1.0), (0.1, 0.7), (0.0, 0.25))),
)
def test_the_best_length(acceptance: float, draft: float, shared: float) -> None:
    verify = [1.0, 1.1, 1.15, 1.5, 1.6, 2.5]
    speed, length = chain_speedup(acceptance, draft, verify, shared)
    assert speed == pytest.approx(by_hand(acceptance, draft, verify, shared))
    tokens = sum(acceptance**k for k in range(length + 1))
    seconds = length * draft + verify[length] * (1 - shared) + shared
    assert tokens / seconds == pytest.approx(speed)


def test_known_values() -> None:
    """Always right, for a tenth of the time: 9 tokens in 1.8 steps; never right: all is lost."""
    assert chain_speedup(1.0, 0.1, FLAT) == (pytest.approx(5.0), 8)
    assert chain_speedup(0.0, 0.25, FLAT) == (pytest.approx(0.8), 1)
    # Layers that drafts run complete are not run again, but for the last token.
    assert chain_speedup(1.0, 0.5, FLAT, 0.5)[0] == pytest.approx(9 / 5)
    with pytest.raises(ValueError, match="two nodes"):
        chain_speedup(0.5, 0.1, [1.0])


@pytest.mark.parametrize("draft", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("verify", [FLAT, np.linspace(1, 2, 9)])
def test_what_is_needed_pays_and_less_does_not(draft: float, verify: np.ndarray) -> None:
    needed = acceptance_needed(draft, verify)
    assert needed is not None
    assert chain_speedup(needed + 1e-3, draft, verify)[0] > 1
    assert chain_speedup(needed - 2e-3, draft, verify)[0] <= 1


def test_what_can_never_pay() -> None:
    assert acceptance_needed(1.0, np.linspace(1, 3, 9)) is None
    assert acceptance_needed(0.1, FLAT, speed=6.0) is None
    assert acceptance_needed(0.1, FLAT, speed=4.0) == pytest.approx(0.94, abs=0.02)


def test_a_counted_acceptance_is_no_certain_one() -> None:
    chain = (0.25, FLAT, 0.0)
    assert speed_by_counts(0, 0, chain) == chain_speedup(0.5, *chain)[0]
    assert speed_by_counts(8, 8, chain) == chain_speedup(0.9, *chain)[0]
    assert speed_by_counts(998, 998, chain) == pytest.approx(chain_speedup(0.999, *chain)[0])
    # (6 + 1) / (12 + 2) = 0.5, whose deviation is sqrt(0.25 / 15).
    better = chain_speedup(0.5 + 2 * (0.25 / 15) ** 0.5, *chain)[0]
    assert speed_by_counts(6, 12, chain, 2.0) == pytest.approx(better)
    assert speed_by_counts(12, 12, chain, 9.0) == chain_speedup(1.0, *chain)[0]
