"""The off switch, on scripted steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from selfspec.controller import OffSwitch
from selfspec.costs import StepCosts
from selfspec.step import Step
from tests.steps import step

STATE: Any = SimpleNamespace(batch=1)


def cost(nodes: int) -> float:
    """43 ms for one token, as on a small CPU; 20 % more for a block of 8."""
    return 0.043 * (1.0 if nodes == 1 else 1.15 + 0.01 * nodes)


def observe(switch: OffSwitch, seen: Step) -> None:
    """As the loop does."""
    switch.costs.record(seen)
    switch.observe(seen)


def run(switch: OffSwitch, accepts: Any, steps: int) -> tuple[int, float, list[int]]:
    """Tokens, seconds, and the drafts' lengths; `accepts(length, step)` says how many hold."""
    tokens, seconds, lengths = 0, 0.0, []
    for i in range(steps):
        budget = switch.budget(STATE)
        accepted = min(budget, accepts(budget, i)) if budget else 0
        observe(switch, step(budget + 1, accepted, cost(budget + 1)))
        tokens, seconds = tokens + accepted + 1, seconds + cost(budget + 1)
        lengths.append(budget)
    return tokens, seconds, lengths


def test_a_plain_step_is_timed_first() -> None:
    switch = OffSwitch(StepCosts(), 31)
    assert switch.budget(STATE) == 0
    observe(switch, step(1, 0, 0.04))
    assert switch.budget(STATE) == OffSwitch.shortest


def test_drafts_that_hold_grow_to_the_limit() -> None:
    _, _, lengths = run(OffSwitch(StepCosts(), 31), lambda length, i: length, 8)
    assert lengths == [0, 3, 7, 15, 31, 31, 31, 31]


@pytest.mark.parametrize("every", [0, 9])
def test_drafts_that_fail_cost_little(every: int) -> None:
    """Never more than five percent of plain decoding over 128 steps."""
    switch = OffSwitch(StepCosts(), 31)
    tokens, seconds, lengths = run(switch, lambda n, i: int(every and i % every == 0), 128)
    assert tokens / seconds > 0.95 / cost(1)
    assert 0 in lengths[1:]


def test_it_notices_when_the_text_changes() -> None:
    switch = OffSwitch(StepCosts(), 31)
    run(switch, lambda n, i: 0, 60)
    _, _, lengths = run(switch, lambda n, i: n, 90)
    assert lengths[-1] == 31


def test_sizes_that_are_tried_are_not_held_against_the_draft() -> None:
    """The first ten of a drafter that lets the costs choose; then it pauses as any other."""
    switch = OffSwitch(StepCosts(), 31, sizes_itself=True)
    observe(switch, step(1, 0, cost(1)))
    for _ in range(8):
        assert switch.budget(STATE) == 31
        observe(switch, step(16, 0, cost(16)))
    for _ in range(3):
        observe(switch, step(16, 0, cost(16)))
    assert switch.budget(STATE) == 0


@pytest.mark.parametrize(("draft_seconds", "pauses"), [(0.008, True), (0.0004, False)])
def test_drafts_that_are_made_and_not_verified_are_paid_for(
    draft_seconds: float, pauses: bool
) -> None:
    """Where nothing pays, making drafts does not either, unless they cost nothing."""
    switch = OffSwitch(StepCosts(), 31, sizes_itself=True)
    waiting = 0
    for _ in range(64):
        asked = switch.budget(STATE) > 0
        waiting += not asked
        observe(switch, step(1, 0, cost(1), draft_seconds=draft_seconds if asked else 0.0))
    assert (waiting > 30) is pauses
    assert switch.costs.relative(1, 1) == 1.0
    assert switch.costs._rate(1) == pytest.approx(1 / cost(1))


def test_rows_of_a_batch_are_averaged() -> None:
    """Seven rows that gain nothing outvote one that gains."""
    switch = OffSwitch(StepCosts(), 31)
    observe(switch, step(1, 0, 0.04, batch=8))
    for _ in range(4):
        one = step(4, 0, 0.06, batch=8)
        one.tokens[0] = [1, 1]
        observe(switch, one)
    assert switch.waiting > 0
