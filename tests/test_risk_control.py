"""Thresholds with a guarantee: that p-values are some, and that what is promised holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import numpy as np
import pytest

from selfspec.risk_control import (
    Guarantee,
    _count,
    betting,
    choose_threshold,
    fixed_sequence,
    hoeffding_bentkus,
    prompts_needed,
)

TESTS = ("hoeffding-bentkus", "betting")
DELTA = 0.1

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def beta(mean: float, deviation: float) -> Draw:
    both = mean * (1 - mean) / deviation**2 - 1
    return lambda draw, shape: draw.beta(mean * both, (1 - mean) * both, shape)


def two_points(low: float, high: float, mean: float) -> Draw:
    share = (mean - low) / (high - low)
    return lambda draw, shape: np.where(draw.random(shape) < share, high, low)


# Of expectation DELTA, where rejecting is most likely to be wrong and yet wrong.
BOUNDARY: dict[str, Draw] = {
    "binary": two_points(0, 1, DELTA),
    "narrow": beta(DELTA, 0.03),
    "wide": beta(DELTA, 0.25),
    "small": two_points(0, 0.2, DELTA),
    # Nearly without variance until the one loss that makes up for it.
    "rarely all": two_points(0.08, 1, DELTA),
}


def p_value(test: str, losses: np.ndarray, delta: float) -> float:
    if test == "betting":
        return betting(losses, delta)
    return hoeffding_bentkus(float(losses.mean()), len(losses), delta)


@pytest.mark.parametrize("n", [20, 120])
@pytest.mark.parametrize("name", BOUNDARY)
@pytest.mark.parametrize("test", TESTS)
def test_a_true_hypothesis_is_seldom_rejected(test: str, name: str, n: int) -> None:
    runs = 1000
    draws = BOUNDARY[name](np.random.default_rng(7), (runs, n))
    found = np.array([p_value(test, losses, DELTA) for losses in draws])
    assert ((found > 0) & (found <= 1)).all()
    for level in (0.02, 0.1, 0.3):
        noise = 3 * math.sqrt(level * (1 - level) / runs)
        assert (found <= level).mean() <= level + noise, level


# ---------------------------------------------------------------- Hoeffding and Bentkus


def by_hand(count: int, n: int, delta: float) -> float:
    """Of `count` losses of 1 among n losses of 0 and 1, with whole numbers and a comb."""
    a = min(count / n, delta)
    h1 = (1 - a) * math.log((1 - a) / (1 - delta)) + (a * math.log(a / delta) if a else 0)
    below = math.fsum(math.comb(n, i) * delta**i * (1 - delta) ** (n - i) for i in range(count + 1))
    return min(1.0, math.exp(-n * h1), math.e * below)


@pytest.mark.parametrize("delta", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("n", [1, 7, 49, 200])
def test_hoeffding_bentkus_is_the_formula(n: int, delta: float) -> None:
    for count in range(n + 1):
        mean = float(np.mean([1.0] * count + [0.0] * (n - count)))
        assert hoeffding_bentkus(mean, n, delta) == pytest.approx(
            by_hand(count, n, delta), rel=1e-9
        )


def test_either_part_may_be_the_lesser() -> None:
    h1 = 0.1 * math.log(0.1 / 0.2) + 0.9 * math.log(0.9 / 0.8)
    assert hoeffding_bentkus(0.1, 5, 0.2) == pytest.approx(math.exp(-5 * h1))
    exact = math.fsum(math.comb(100, i) * 0.2**i * 0.8 ** (100 - i) for i in range(11))
    assert math.e * exact < math.exp(-100 * h1)
    assert hoeffding_bentkus(0.1, 100, 0.2) == pytest.approx(math.e * exact)


def test_means_between_counts_go_to_the_next_and_rounding_does_not() -> None:
    for n in range(1, 300):
        assert [_count(count / n, n) for count in range(n + 1)] == list(range(n + 1))
    assert _count(3.001 / 40, 40) == 4
    above = math.fsum(math.comb(400, i) * 0.1**i * 0.9 ** (400 - i) for i in range(22))
    assert hoeffding_bentkus(20.5 / 400, 400, 0.1) == pytest.approx(math.e * above)


def test_hoeffding_bentkus_at_the_ends() -> None:
    assert hoeffding_bentkus(0, 40, 0.05) == pytest.approx(0.95**40)
    assert hoeffding_bentkus(1, 40, 0.05) == 1
    assert hoeffding_bentkus(0.05, 40, 0.05) == 1
    assert hoeffding_bentkus(0.3, 0, 0.05) == hoeffding_bentkus(math.nan, 0, 0.05) == 1
    assert hoeffding_bentkus(0.0, 10**6, 0.5) == 0
    for delta in np.linspace(0.01, 0.99, 99):  # where rounding may make a divergence negative
        just_below = float(np.nextafter(delta, 0))
        assert 0.999 < hoeffding_bentkus(just_below, 10**5, float(delta)) <= 1
    assert 0 < hoeffding_bentkus(0.0499, 10**5, 0.05) < 1


def test_more_loss_is_less_sure_and_more_room_more() -> None:
    by_mean = [hoeffding_bentkus(mean, 90, 0.2) for mean in np.linspace(0, 1, 400)]
    by_delta = [hoeffding_bentkus(0.1, 90, delta) for delta in np.linspace(0.01, 0.99, 400)]
    by_n = [hoeffding_bentkus(0.1, n, 0.2) for n in range(0, 400, 10)]
    for falling in (by_mean[::-1], by_delta, by_n):
        assert (np.diff(falling) <= 1e-12).all()
        assert falling[0] > falling[-1]


# ---------------------------------------------------------------- betting


def one_by_one(losses: list[float], delta: float, epsilon: float) -> float:
    """The papers' recursion, read off one loss after the other."""
    total, squares, variance, capital, most = 0.5, 0.25, 0.25, 1.0, 1.0
    for i, loss in enumerate(losses, 1):
        bet = min(1.0, math.sqrt(2 * math.log(1 / epsilon) / (len(losses) * variance)))
        capital *= 1 - bet * (loss - delta)
        most = max(most, capital)
        total += loss
        squares += (loss - total / (i + 1)) ** 2
        variance = squares / (i + 1)
    return 1 / most


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("name", BOUNDARY)
def test_betting_is_the_recursion(name: str, epsilon: float) -> None:
    for n in (1, 2, 30, 300):
        losses = 0.6 * BOUNDARY[name](np.random.default_rng(n), (n,))
        expected = one_by_one(losses.tolist(), DELTA, epsilon)
        assert betting(losses, DELTA, epsilon) == pytest.approx(expected, rel=1e-9)


def test_a_bet_is_placed_before_its_loss_is_seen() -> None:
    """So the capital is a straight line in the last loss."""
    capital = [1 / betting([0.0, 0.05] * 20 + [last], 0.3) for last in (0.0, 0.1, 0.2)]
    assert capital[0] - capital[1] == pytest.approx(capital[1] - capital[2])
    assert capital[0] > capital[1] * 1.02


def test_betting_at_the_ends() -> None:
    assert betting([], DELTA) == 1
    assert betting([1.0] * 9, DELTA) == betting([DELTA] * 9, DELTA) == 1
    assert betting([0.0] * 200, DELTA) < 1.1**-180
    assert betting([False, True, False], DELTA) == betting([0, 1, 0], DELTA)
    # What was won counts, though it is lost again.
    assert betting([0.0] * 60 + [1.0] * 60, DELTA) < 0.02
    assert betting([1.0] * 60 + [0.0] * 60, DELTA) == 1


def test_betting_needs_fewer_prompts_where_losses_vary_little() -> None:
    def power(test: str, draw: Draw, n: int) -> float:
        draws = draw(np.random.default_rng(3), (100, n))
        return float(np.mean([p_value(test, losses, 0.05) <= 0.1 for losses in draws]))

    for mean, n in ((0.02, 120), (0.03, 200)):
        assert power("betting", beta(mean, 0.03), n) > 0.95
        assert power("hoeffding-bentkus", beta(mean, 0.03), n) < 0.1


# ---------------------------------------------------------------- the sequence, and what is chosen


def test_the_sequence_ends_at_the_first_that_is_not_rejected() -> None:
    assert fixed_sequence([0.01, 0.1, 0.02], 0.1) == 3
    assert fixed_sequence([0.01, 0.11, 0.02], 0.1) == 1
    assert fixed_sequence(np.array([0.11, 0.0]), 0.1) == 0
    assert fixed_sequence([1.0], 0.1) == fixed_sequence([], 0.1) == 0
    assert fixed_sequence([0.0] * 4, 0.1) == 4


def pool(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses [N, K] of prompts, at thresholds whose losses are correlated, and the risks [K].

    Two that hold delta with ease, so that the next, which just exceeds it, is always reached.
    """
    draw = np.random.default_rng(0)
    risks = DELTA * np.array([0.1, 0.3, *[1.02] * 6, 1.3, 2.0])
    shared = draw.random((size, 1)), draw.random((size, len(risks)))
    ease = np.where(draw.random((size, len(risks))) < 0.5, *shared)
    even = np.argsort(np.argsort(ease, axis=0), axis=0) / size
    losses = (even < risks).astype(float)
    return losses, losses.mean(axis=0)


@pytest.mark.parametrize("test", TESTS)
def test_what_is_chosen_exceeds_delta_no_more_often_than_promised(test: Any) -> None:
    losses, risks = pool(5000)
    thresholds = np.linspace(0.95, 0.5, len(risks))
    risk_of = dict(zip(thresholds.tolist(), risks, strict=True))
    draw, runs, epsilon, reached, broken, naive = np.random.default_rng(1), 500, 0.2, 0, 0, 0
    for _ in range(runs):
        some = losses[draw.choice(len(losses), 150, replace=False)]
        found = choose_threshold(some, thresholds, DELTA, epsilon, test)
        reached += found is not None and found.threshold <= thresholds[1]
        broken += found is not None and risk_of[found.threshold] > DELTA
        good = np.flatnonzero(some.mean(axis=0) <= DELTA)
        naive += risks[good[-1]] > DELTA
    assert reached > 0.9 * runs
    assert broken <= runs * epsilon + 3 * math.sqrt(runs * epsilon * (1 - epsilon))
    assert naive > 0.8 * runs  # what the sequence guards against


@pytest.mark.parametrize("test", TESTS)
def test_the_loosest_that_is_certified_is_chosen(test: Any) -> None:
    draw = np.random.default_rng(5)
    losses = np.stack([beta(mean, 0.02)(draw, (300,)) for mean in (0.01, 0.04, 0.2, 0.01)], axis=1)
    found = choose_threshold(losses, (0.9, 0.8, 0.7, 0.6), 0.1, 0.05, test)
    assert found is not None
    assert (found.threshold, found.delta, found.epsilon) == (0.8, 0.1, 0.05)
    assert (found.prompts, found.test) == (300, test)
    assert found.mean_loss == pytest.approx(losses[:, 1].mean())
    if test == "hoeffding-bentkus":
        assert found.p_value == hoeffding_bentkus(float(losses[:, 1].mean()), 300, 0.1)
    assert 0 < found.p_value <= 0.05
    assert choose_threshold(losses[:, 2:], (0.7, 0.6), 0.1, 0.05, test) is None
    assert choose_threshold(losses[:9], (0.9, 0.8, 0.7, 0.6), 0.1, 0.05, test) is None


def test_bets_aim_at_the_level_that_is_asked_for() -> None:
    losses = 0.8 * BOUNDARY["binary"](np.random.default_rng(2), (400, 1))
    order = np.random.default_rng(0).permutation(400)
    for epsilon in (0.3, 0.6):
        found = choose_threshold(losses, [0.5], 0.15, epsilon, "betting")
        assert found is not None
        assert found.p_value == betting(losses[order, 0], 0.15, epsilon)
    assert betting(losses[order, 0], 0.15, 0.3) != betting(losses[order, 0], 0.15, 0.6)


def test_prompts_that_are_sorted_are_not_bet_on_in_that_order() -> None:
    """Easy ones first, capital grows before there is anything to lose."""
    losses = np.repeat([0.0, 0.5], 200)
    assert betting(losses, DELTA) < 1e-6
    assert choose_threshold(losses[:, None], [0.9], DELTA, 0.1, "betting") is None


def test_a_guarantee_is_plain_numbers() -> None:
    losses = np.zeros((60, 2), dtype=np.float32)
    found = choose_threshold(losses, np.array([0.9, 0.5], np.float32), 0.05, 0.1)
    assert found is not None
    assert Guarantee(**json.loads(json.dumps(asdict(found)))) == found
    assert {type(value) for value in asdict(found).values()} == {float, int, str}
    with pytest.raises(FrozenInstanceError):
        found.delta = 0.5  # type: ignore[misc]


# ---------------------------------------------------------------- how many prompts


@pytest.mark.parametrize(
    ("mean", "delta", "epsilon"),
    [
        (0, 0.05, 0.1),
        (0.02, 0.05, 0.1),
        (0.03, 0.05, 0.1),
        (0.1, 0.3, 0.05),
        (0.6, 0.9, 0.1),
        (0.2, 0.3, 0.9),
        (0.2, 0.5, 1e-15),
        (1e-9, 0.3, 1e-12),
    ],
)
def test_prompts_needed_is_the_least(mean: float, delta: float, epsilon: float) -> None:
    least = next(n for n in range(1, 5000) if hoeffding_bentkus(mean, n, delta) <= epsilon)
    assert prompts_needed(mean, delta, epsilon) == least


def test_prompts_needed_by_hand_and_where_none_are_enough() -> None:
    assert prompts_needed(0, 0.05, 0.1) == math.ceil(math.log(0.1) / math.log(0.95)) == 45
    assert prompts_needed(0.05, 0.05, 0.1) is None
    assert prompts_needed(1, 0.05, 0.1) is None
    assert prompts_needed(0.05 - 1e-12, 0.05, 0.1) is None  # more than a million


# ---------------------------------------------------------------- what users get wrong

GOOD = np.zeros((50, 2))
HOLE = np.zeros((50, 2))
HOLE[3, 1] = np.nan


@pytest.mark.parametrize("delta", [0, 1, -0.1, 1.5, math.nan, math.inf])
def test_shares_out_of_range(delta: float) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: hoeffding_bentkus(0.1, 9, delta),
        lambda: betting([0.1], delta),
        lambda: prompts_needed(0.1, delta, 0.1),
        lambda: choose_threshold(GOOD, [0.9, 0.8], delta, 0.1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"delta={delta}.* between 0 and 1, neither"):
            call()
    calls = [
        lambda: fixed_sequence([0.1], delta),
        lambda: betting([0.1], 0.1, delta),
        lambda: prompts_needed(0.1, 0.2, delta),
        lambda: choose_threshold(GOOD, [0.9, 0.8], 0.1, delta),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"epsilon={delta}.* between 0 and 1, neither"):
            call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: hoeffding_bentkus(0.1, 9, "5%"), TypeError, "delta='5%' must be a number"),
        (lambda: fixed_sequence([0.1], True), TypeError, "epsilon=True must be a number"),
        (lambda: hoeffding_bentkus(None, 9, 0.1), TypeError, "mean=None must be a number"),
        (lambda: hoeffding_bentkus(1.01, 9, 0.1), ValueError, r"mean=1.01 .* 0\.\.1: scale"),
        (lambda: hoeffding_bentkus(math.nan, 9, 0.1), ValueError, "mean=nan"),
        (lambda: prompts_needed(-0.1, 0.1, 0.1), ValueError, r"mean=-0.1 .* 0\.\.1: scale"),
        (lambda: hoeffding_bentkus(0.1, 9.0, 0.1), TypeError, r"n=9.0 must be an int: the number"),
        (lambda: hoeffding_bentkus(0.1, True, 0.1), TypeError, "n=True must be an int"),
        (lambda: hoeffding_bentkus(0.1, -1, 0.1), ValueError, "n=-1 must be at least 0"),
        (lambda: betting([0.1, 1.5], 0.1), ValueError, r"losses\[1\] is 1.5; .* 0\.\.1: scale"),
        (lambda: betting([[0.1]], 0.1), ValueError, r"losses is of shape \[1, 1\]; .* \[n\]: one"),
        (lambda: betting(["a"], 0.1), TypeError, "losses is an array of <U1; .* of numbers"),
        (lambda: betting([None], 0.1), TypeError, "losses is an array of object"),
        (lambda: fixed_sequence([0.1, -1], 0.1), ValueError, r"p_values\[1\] is -1.0; .* 0\.\.1"),
        (lambda: fixed_sequence([math.nan], 0.1), ValueError, r"p_values\[0\] is nan"),
        (lambda: fixed_sequence(0.1, 0.1), ValueError, r"p_values is of shape \[\]; .* \[K\]: one"),  # type: ignore[arg-type]
        (
            lambda: choose_threshold(HOLE, [0.9, 0.8], 0.1, 0.1),
            ValueError,
            r"losses\[3, 1\] is nan; .* leave out what could not be measured",
        ),
        (
            lambda: choose_threshold(GOOD[0], [0.9, 0.8], 0.1, 0.1),
            ValueError,
            r"losses is of shape \[2\]; .* \[n, K\]: a row a prompt, a column a threshold",
        ),
        (
            lambda: choose_threshold([[0.1], [0.1, 0.2]], [0.9], 0.1, 0.1),
            ValueError,
            "losses must be an array of numbers: .*inhomogeneous",
        ),
        (
            lambda: choose_threshold(GOOD[:0], [0.9, 0.8], 0.1, 0.1),
            ValueError,
            r"losses is of shape \[0, 2\]; it needs a prompt and a threshold at least",
        ),
        (
            lambda: choose_threshold(GOOD[:, :0], [], 0.1, 0.1),
            ValueError,
            r"losses is of shape \[50, 0\]; it needs a prompt and a threshold at least",
        ),
        (
            lambda: choose_threshold(GOOD, [0.9], 0.1, 0.1),
            ValueError,
            r"thresholds is of shape \[1\]; it must be \[2\]: .* shape \[50, 2\]",
        ),
        (
            lambda: choose_threshold(GOOD, ["high", "low"], 0.1, 0.1),  # type: ignore[list-item]
            TypeError,
            "thresholds is an array of <U4; it must be of numbers",
        ),
        (
            lambda: choose_threshold(GOOD, [math.inf, 0.5], 0.1, 0.1),
            ValueError,
            r"thresholds=\[inf, 0.5\] must be finite",
        ),
        (
            lambda: choose_threshold(GOOD, [0.8, 0.9], 0.1, 0.1),
            ValueError,
            r"thresholds=\[0.8, 0.9\] must fall, .* sort them, and the columns of losses",
        ),
        (
            lambda: choose_threshold(GOOD, [0.8, 0.8], 0.1, 0.1),
            ValueError,
            r"thresholds=\[0.8, 0.8\] must fall",
        ),
        (
            lambda: choose_threshold(GOOD, [0.9, 0.8], 0.1, 0.1, "wsr"),  # type: ignore[arg-type]
            ValueError,
            'test=\'wsr\' must be "hoeffding-bentkus" or "betting"',
        ),
        (
            lambda: choose_threshold(GOOD, [0.9, 0.8], 0.1, 0.1, []),  # type: ignore[arg-type]
            ValueError,
            r"test=\[\] must be",
        ),
    ],
)
def test_messages(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
