"""Prices in tokens and sizes of drafts, from scripted steps."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from selfspec.costs import ASSUMED, StepCosts
from selfspec.recent import lately
from selfspec.verify_times import VerifyTimes
from tests.steps import step

PLAIN, LEVEL = 0.040, 0.003
CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda nodes: PLAIN,
    "linear": lambda nodes: PLAIN * (1 + 0.05 * (nodes - 1)),
    # One row of a product, a few, and more than fit into registers.
    "jump": lambda nodes: PLAIN * (1 + 0.06 * (nodes - 1) + 0.4 * (nodes > 3)),
    "tiles": lambda nodes: PLAIN * (1.2 if nodes > 1 else 1.0) * (1.5 if nodes > 16 else 1.0),
}
SIZES = (1, 2, 3, 4, 5, 6, 8, 11, 12, 14, 16, 20, 24, 28, 32)


def run(
    costs: StepCosts,
    curve: Callable[[int], float],
    accepted: int,
    batch: int = 1,
    sizes: tuple[int, ...] = SIZES,
) -> None:
    """Steps of all sizes, timed with 1 % of noise; every 17th is interrupted."""
    draw = random.Random(0)
    for i in range(9 * len(sizes)):
        nodes = sizes[i % len(sizes)]
        seconds = curve(nodes) * draw.gauss(1, 0.01) + (0.5 if i % 17 == 5 else 0)
        costs.record(step(nodes, accepted, seconds, batch, draft_seconds=LEVEL))


def test_a_slow_step_now_and_then_changes_nothing() -> None:
    costs = StepCosts()
    for _ in range(9):
        costs.record(step(1, 0, 0.04))
        costs.record(step(8, 0, 0.05))
    costs.record(step(8, 0, 3.0))
    costs.record(step(1, 0, 2.0))
    assert costs.relative(1, 8) == pytest.approx(1.25)


def test_costs_are_kept_by_batch_and_bucket() -> None:
    costs = StepCosts()
    costs.record(step(1, 0, 9.0, is_prefill=True))
    assert costs.relative(1, 4) is None
    costs.record(step(1, 0, 0.1))
    assert costs.relative(1, 4) == pytest.approx(1.24)
    costs.record(step(7, 0, 0.2))
    costs.record(step(8, 0, 0.2))
    assert costs.relative(1, 5) == pytest.approx(2.0)
    assert costs.relative(2, 5) is None


@pytest.mark.parametrize("name", CURVES)
def test_times_are_those_that_were_measured(name: str) -> None:
    """At every size, between those measured, and neither falling nor bent by a slow step."""
    times, curve, draw = VerifyTimes(15), CURVES[name], random.Random(1)
    for i in range(12 * len(SIZES)):
        nodes = SIZES[i % len(SIZES)]
        times.add(nodes, curve(nodes) * draw.gauss(1, 0.02) + (0.9 if i % 13 == 0 else 0))
    found = times.seconds(32)
    assert (np.diff(found) >= 0).all()
    for nodes in SIZES:
        assert found[nodes - 1] == pytest.approx(curve(nodes), rel=0.1), nodes


def test_times_beyond_what_was_measured() -> None:
    times = VerifyTimes(15)
    for _ in range(8):
        for nodes in (2, 4, 8):
            times.add(nodes, CURVES["linear"](nodes))
    assert times.seconds(64)[[0, 63]] == pytest.approx(
        [CURVES["linear"](1), CURVES["linear"](64)], rel=0.1
    )
    one = VerifyTimes(15)
    for _ in range(8):
        one.add(4, PLAIN)
    assert not one.is_known
    assert (np.diff(one.seconds(9)) > 0).all()


def test_a_size_that_was_timed_while_slow_does_not_lift_all_larger_ones() -> None:
    times, curve = VerifyTimes(15), CURVES["linear"]
    for _ in range(12):
        for nodes in (1, 4, 8, 16, 24):
            times.add(nodes, curve(nodes))
    for _ in range(2):
        times.add(12, 3 * curve(12))
    found = times.seconds(24)
    assert (np.diff(found) >= 0).all()
    assert found[15] == pytest.approx(curve(16), rel=0.3)
    assert found[23] == pytest.approx(curve(24), rel=0.05)


def test_the_set_up_of_a_shape_is_not_its_time() -> None:
    times = VerifyTimes(15)
    for nodes in (1, 4):
        times.add(nodes, 5.0)
        times.add(nodes, CURVES["linear"](nodes))
    assert times.seconds(4)[3] == pytest.approx(CURVES["linear"](4))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("accepted", [0, 2, 6])
@pytest.mark.parametrize("name", ["linear", "jump"])
def test_a_node_costs_the_tokens_that_its_time_gives(name: str, accepted: int, batch: int) -> None:
    costs, curve = StepCosts(), CURVES[name]
    run(costs, curve, accepted, batch)
    rate = (accepted + 1) / (sum(map(curve, SIZES)) / len(SIZES) + LEVEL + 0.5 / 17)
    rate = max(rate, 1 / (PLAIN + LEVEL))  # plain steps may be faster
    prices = costs.verify_prices(batch, 31)
    assert prices[0] == 0
    for count in (1, 2, 3, 7, 15, 31):
        expected = rate * (curve(count + 1) - curve(1)) + 0.005 * count
        assert prices[count] == pytest.approx(expected, rel=0.2, abs=0.03 * (accepted + 1))
    assert costs.verify_prices(batch + 1, 4).tolist() == ASSUMED.verify_prices(1, 4).tolist()


def chosen(curve: Callable[[int], float], probable: list[float], first: int = 0) -> int:
    costs = StepCosts()
    run(costs, curve, 1)
    while costs._tried(1) is not None:
        costs.record(step(1, 0, PLAIN))
    return costs.choose(1, probable, first)


def test_the_size_that_gives_most_is_chosen() -> None:
    """Also over a step in the curve, if what is behind it makes up for it."""
    assert chosen(CURVES["flat"], [0.5, 0.4, 0.3, 0.2, 0.1]) == 5
    assert chosen(CURVES["linear"], [0.9, 0.5, 0.3, 0.02, 0.01]) == 3
    assert chosen(CURVES["jump"], [0.6, 0.4, 0.2, 0.1, 0.1]) == 2
    assert chosen(CURVES["jump"], [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.01]) >= 6
    assert chosen(CURVES["linear"], [0.01, 0.01]) == 0
    assert chosen(CURVES["linear"], []) == 0
    # Three are verified anyway: the step is paid.
    assert chosen(CURVES["jump"], [0.3, 0.2, 0.01]) == 2
    assert chosen(CURVES["jump"], [0.3, 0.2, 0.01], first=3) == 2
    assert chosen(CURVES["jump"], [0.3, 0.2, 0.01], first=1) == 1


def test_sizes_differ_until_the_curve_is_known_and_now_and_then_later() -> None:
    costs, sizes = StepCosts(), []
    for _ in range(170):
        sizes.append(costs.choose(1, [0.5] * 4 + [0.01] * 12))
        costs.record(step(1 + sizes[-1], 1, CURVES["linear"](1 + sizes[-1])))
    assert set(sizes[:5]) == set(sizes[5:10]) == {0, 1, 3, 7, 15}
    assert sizes[10:].count(4) == 150
    assert min(sizes[10:]) < 4 < max(sizes[10:])
    fixed = StepCosts(adaptive=False)
    run(fixed, CURVES["linear"], 1)
    assert {fixed.choose(1, [0.5, 0.2, 0.02]) for _ in range(40)} == {2}


def test_a_draft_step_costs_the_tokens_that_its_time_gives() -> None:
    costs = StepCosts()
    before = costs.level_price(1, "a")
    for _ in range(5):
        costs.record_level(1, "a", 2 * LEVEL)
        costs.record_level(1, "b", LEVEL)
    assert costs.level_price(1, "a") == before  # nothing is known of the rate
    run(costs, CURVES["flat"], 2)
    assert costs.level_price(1, "a") == pytest.approx(2 * costs.level_price(1, "b"))
    assert costs.level_price(1, "b") == pytest.approx(3 * LEVEL / (PLAIN + 0.033), rel=0.3)
    assert costs.level_price(1, "c") == costs.level_price(2, "a") == before


def test_where_plain_steps_are_faster_their_rate_is_the_price() -> None:
    """Drafts that are never right must not look cheap because drafting is slow."""
    costs = StepCosts()
    run(costs, CURVES["linear"], 0, sizes=(8, 12, 16))
    slow = costs.level_price(1, "a")
    for _ in range(5):
        costs.record_level(1, "a", LEVEL)
    slow = costs.level_price(1, "a")
    for _ in range(5):
        costs.record(step(1, 0, PLAIN / 2))
    assert costs.level_price(1, "a") > 2 * slow
    assert costs.level_price(1, "a") == pytest.approx(LEVEL / (PLAIN / 2), rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 0.4, 3.0])
def test_a_machine_that_has_changed_is_measured_anew(factor: float) -> None:
    """Also of sizes that are not drafted any more, and of draft steps that are not made."""
    costs = StepCosts()
    run(costs, CURVES["linear"], 1)
    for _ in range(20):
        costs.record_level(1, "d", LEVEL)
        costs.record_draft(1, "d", LEVEL)
    for _ in range(40):
        size = costs.choose(1, [0.5, 0.3, 0.1])
        costs.record(step(1 + size, 1, factor * CURVES["linear"](1 + size)))
        costs.record_level(1, "d", factor * LEVEL)
    curve = [factor * CURVES["linear"](nodes) for nodes in range(1, 17)]
    assert costs._verifies[1].seconds(16) == pytest.approx(curve, rel=0.1)
    rate = costs._rate(1)
    assert rate is not None
    assert costs.level_price(1, "d") == pytest.approx(rate * factor * LEVEL, rel=0.1)
    assert lately(costs._seconds[1, 1]) == pytest.approx(factor * PLAIN, rel=0.1)


def test_a_slow_step_in_three_does_not_mean_that_the_machine_has_changed() -> None:
    costs = StepCosts()
    run(costs, CURVES["linear"], 1)
    before = costs._verifies[1]
    for i in range(60):
        costs.record(step(4, 1, CURVES["linear"](4) * (3 if i % 3 == 0 else 1)))
    assert costs._verifies[1] is before


def test_where_the_curve_has_a_step_those_behind_it_share_its_cost() -> None:
    costs = StepCosts()
    run(costs, CURVES["jump"], 1)
    costs._sizes[1] = 2.0
    prices = costs.verify_prices(1, 14)
    assert prices[3] - prices[2] > 0.3
    assert costs.node_price(1) < 0.12


def test_requests_beside_each_other_add_and_drop() -> None:
    """Of one wrapper, in threads: what one reads, another changes."""
    costs, failed = StepCosts(), []
    before = sys.getswitchinterval()

    def request(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for i in range(3000):
                size = costs.choose(1, [0.5, 0.3, 0.1])
                seconds = CURVES["linear"](1 + size) * (4 if i // 40 % 2 else 1)
                costs.record(step(1 + size, draw.randrange(2), seconds, draft_seconds=LEVEL))
                costs.record_level(1, "d", LEVEL)
                costs.record_draft(1, "d", LEVEL)
                costs.relative(1, 4), costs.node_price(1), costs.level_price(1, "d")
                costs.draft_price(1, "d"), costs.wasted(step(1, 0, 0.04, draft_seconds=0.01))
        except Exception as error:  # whatever it is
            failed.append(error)

    threads = [threading.Thread(target=request, args=(seed,)) for seed in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed


def test_nothing_is_learned_of_assumed_costs() -> None:
    costs = StepCosts(adaptive=False)
    for _ in range(9):
        costs.record_level(1, "d", 9.0)
        costs.record_worth("d", 9.0)
        costs.record(step(8, 7, 0.01))
    for same in ("level_price", "worth_of_mass"):
        arguments = (1, "d") if same == "level_price" else ("d",)
        assert getattr(costs, same)(*arguments) == getattr(ASSUMED, same)(*arguments)
    assert costs.verify_prices(1, 9).tolist() == ASSUMED.verify_prices(1, 9).tolist()
