"""A step over a long text is told from a slow one."""

from __future__ import annotations

import random

import pytest

from selfspec.context_time import ContextTime
from selfspec.costs import StepCosts
from tests.steps import step

TOKEN = 2e-6  # seconds that a token of context adds


def seconds(nodes: int, context: int) -> float:
    return 0.02 + 0.001 * (nodes - 1) + TOKEN * context


def test_the_slope_is_found_under_noise() -> None:
    texts, draw = ContextTime(), random.Random(1)
    for context in range(100, 6000, 3):
        nodes = draw.choice((1, 4, 8, 16))
        texts.as_first(nodes, context, seconds(nodes, context) * draw.gauss(1, 0.05))
    assert texts.slope == pytest.approx(TOKEN, rel=0.15)
    assert texts.shift == pytest.approx(TOKEN * 5900, rel=0.15)


def test_there_is_none_over_texts_of_like_length() -> None:
    texts, draw = ContextTime(), random.Random(2)
    for context in list(range(100, 228)) * 4:
        texts.as_first(1, context, 0.02 * draw.gauss(1, 0.1))
    assert texts.shift < 0.001


def test_an_interruption_is_no_slope() -> None:
    texts = ContextTime()
    for context in range(100, 3000):
        texts.as_first(1, context, 0.02 if context % 50 else 5.0)
    assert texts.slope < 1e-7


def test_a_shorter_text_takes_less() -> None:
    texts = ContextTime()
    for context in [*range(4000, 6000), *range(1000, 2000)]:
        found = texts.as_first(1, context, seconds(1, context))
    assert found == pytest.approx(seconds(1, 4000), rel=0.05)
    assert texts.shift < 0


def test_sizes_are_compared_over_the_same_text() -> None:
    """Plain steps were timed when the text was short, drafts while it grew by thousands."""
    costs = StepCosts()
    for context in range(100, 120):
        for nodes in (1, 2, 4, 8, 16):
            costs.record(step(nodes, 0, seconds(nodes, context)), context)
    for context in range(120, 20_000, 5):
        costs.record(step(8, 0, seconds(8, context)), context)
    now = 20_000
    assert costs.plain_seconds(1) == pytest.approx(seconds(1, now), rel=0.1)
    assert costs.relative(1, 8) == pytest.approx(seconds(8, now) / seconds(1, now), rel=0.05)
    ratios = costs.verify_ratios(1, 16)
    assert ratios is not None
    assert ratios[15] == pytest.approx(seconds(16, now) / seconds(1, now), rel=0.05)
    assert costs.is_settled(1)  # the machine has not changed: the text has
