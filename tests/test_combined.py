"""Which drafters of a list are asked, and at what prices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from selfspec import CombinedDrafter, TokenTree
from selfspec.costs import StepCosts
from tests.families import tiny
from tests.networks import random_feature
from tests.oracle import OracleDrafter
from tests.steps import step


class Chain:
    """One token, always the same; says what it is told to promise."""

    hidden_taps = ()

    def __init__(self, token: int, promise: float = 0.0, length: int = 1) -> None:
        self.token, self.promise, self.length = token, promise, length
        self.asked: list[Any] = []

    def draft(self, state: Any, budget: int) -> TokenTree:
        self.asked.append(state.costs.verify_prices(state.batch, 3).tolist())
        length = min(self.length, budget)
        return TokenTree.chain(state.root, torch.full((state.batch, length), self.token))

    def observe(self, state: Any, output: Any, acceptance: Any) -> None: ...

    def reset(self) -> None: ...


class Second(Chain):
    """Of another name, under which its time is known."""


def timed(seconds: float | None) -> StepCosts:
    """A token a row in 40 ms, and 2 ms a node; drafts of `Second` take `seconds`."""
    costs = StepCosts()
    for nodes in (1, 2, 3, 4, 6, 8) * 6:
        costs.record(step(nodes, 0, 0.040 + 0.002 * (nodes - 1)))
    if seconds is not None:
        for _ in range(3):
            costs.record_draft(1, "Second", seconds)
    return costs


@pytest.mark.parametrize(
    ("promise", "seconds", "asked"),
    [
        (0.0, 0.030, True),
        (0.5, 0.010, True),
        (0.9, 0.010, False),
        (0.9, 0.001, True),
        (0.9, None, True),  # never timed
        (0.0, 9.0, True),  # nothing else is drafted
    ],
)
def test_who_is_asked(promise: float, seconds: float | None, asked: bool) -> None:
    """The second gives a token at best, where the first is wrong, and takes its time anyway."""
    second = Second(4)
    state = _state(timed(seconds))
    tree = CombinedDrafter([Chain(3, promise), second]).draft(state, 9)
    assert bool(second.asked) is asked
    assert tree.tokens[0].tolist() == [7, 3, 4][: 3 if asked else 2]


def test_who_was_too_slow_is_asked_again() -> None:
    """Its first drafts, or those of a bad moment, do not decide for good."""
    costs, second = timed(9.0), Second(4)
    for _ in range(400):
        CombinedDrafter([Chain(3, 0.05), second]).draft(_state(costs), 9)
    assert len(second.asked) > 100


@pytest.mark.parametrize(("promise", "error"), [("x", True), ([1], True), (None, False)])
def test_promises_that_are_no_numbers(promise: Any, error: bool) -> None:
    first = Chain(3, promise)
    if error:
        with pytest.raises(TypeError, match=r"Chain\.promise is .*; it must be a probability"):
            CombinedDrafter([first, Second(4)]).draft(_state(timed(0.01)), 9)
    else:
        tree = CombinedDrafter([first, Second(4)]).draft(_state(timed(0.01)), 9)
        assert tree.tokens[0].tolist() == [7, 3, 4]


def test_later_ones_pay_what_nodes_cost_behind_those_that_are_there() -> None:
    first, second = Chain(3, length=3), Second(4)
    costs = StepCosts()
    for nodes in (1, 2, 3, 4, 5, 6, 8, 12) * 6:  # one of many nodes costs little
        costs.record(step(nodes, 0, 0.040 + 0.010 * min(nodes - 1, 3) + 0.001 * nodes))
    sizes = []
    second.draft = lambda state, budget: (  # type: ignore[method-assign]
        sizes.append((state.costs.choose(1, [0.1, 0.1]), costs.choose(1, [0.1, 0.1])))
        or TokenTree.root_only(state.root)
    )
    while costs._tried(1) is not None:
        costs.record(step(1, 0, 0.041))
    CombinedDrafter([first, second]).draft(_state(costs), 9)
    assert sizes == [(2, 0)]


def _state(costs: StepCosts) -> Any:
    class State:
        """What `draft` reads."""

        batch, frozen, root = 1, [False], torch.tensor([7])

        def __init__(self, costs: StepCosts) -> None:
            self.costs = costs

        priced_after = selfspec.DecodeState.priced_after

    return State(costs)


def test_a_drafter_that_is_not_asked_still_sees_every_step() -> None:
    """And drafts rightly when it is asked again."""
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    feature = selfspec.FeatureDrafter(random_feature(64, 64), min_gain=0.0, min_prob=0.0)
    oracle = OracleDrafter(plain, 3, wrong_at=(2, 0))
    turns = iter(range(1000))
    type(oracle).promise = property(lambda self: 0.99 if next(turns) % 3 else 0.0)  # type: ignore
    try:
        spec = selfspec.wrap(model, [oracle, feature])
        for _ in range(9):
            spec.costs.record_draft(1, "FeatureDrafter", 0.5)
        assert spec.generate(**prompt, max_new_tokens=40, do_sample=False).equal(plain)
    finally:
        del type(oracle).promise  # type: ignore[attr-defined]
