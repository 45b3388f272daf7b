"""Drafts of several drafters: which of them are asked, and what of it all is verified."""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import selfspec
from selfspec import CombinedDrafter, TokenTree
from selfspec.costs import ASSUMED, StepCosts
from selfspec.drafters.judge import judge_of
from selfspec.drafters.pool import BELIEF, Pool
from selfspec.tree_rows import Nodes
from tests.families import tiny
from tests.networks import random_feature, random_heads
from tests.oracle import OracleDrafter
from tests.steps import step

ROOT = 7


class Says:
    """Always the same tree: paths, each with what it expects of its nodes."""

    hidden_taps = ()

    def __init__(self, *paths: tuple[list[int], list[float] | None]) -> None:
        self.paths = paths
        self.asked = 0

    def draft(self, state: Any, budget: int) -> TokenTree:
        self.asked += 1
        tree = TokenTree.from_paths(state.root, [[p for p, _ in self.paths]] * state.batch, budget)
        known = {
            tuple(path[: d + 1]): value
            for path, values in self.paths
            for d, value in enumerate(values or ())
        }
        if not known:
            return tree
        expected = torch.ones(tree.batch, tree.width)
        for b, nodes in enumerate(tree.rows()):
            ways: list[tuple[int, ...]] = [()]
            for n in range(1, len(nodes.tokens)):
                ways.append((*ways[nodes.parents[n]], nodes.tokens[n]))
                expected[b, n] = known[ways[n]]
        return replace(tree, expected=expected)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None: ...

    def reset(self) -> None: ...


class Other(Says):
    """Of another name, under which its time is known."""


def timed(seconds: float | None = None, node: float = 0.002) -> StepCosts:
    """A token a row in 40 ms, and 2 ms a node; drafts of `Other` take `seconds`."""
    costs = StepCosts()
    for nodes in (1, 2, 3, 4, 6, 8, 12) * 6:
        costs.record(step(nodes, 0, 0.040 + node * (nodes - 1)))
    while costs._tried(1) is not None:
        costs.record(step(1, 0, 0.040))
    if seconds is not None:
        for _ in range(3):
            costs.record_draft(1, "Other", seconds)
    return costs


def state_of(costs: StepCosts, batch: int = 1, support: str = "tree", frozen: Any = None) -> Any:
    found = SimpleNamespace(
        costs=costs,
        batch=batch,
        frozen=frozen or [False] * batch,
        root=torch.full((batch,), ROOT),
        length=[5] * batch,
        target=SimpleNamespace(architecture=SimpleNamespace(support=support)),
    )
    found.of_a_pool = lambda: replaced(found, costs.of_a_pool())
    return found


def replaced(state: Any, costs: StepCosts) -> Any:
    return SimpleNamespace(**{**vars(state), "costs": costs})


def goes_on(state: Any, *rows: list[int]) -> Any:
    """The same after these tokens."""
    return SimpleNamespace(
        **{
            **vars(state),
            "length": [before + len(new) for before, new in zip(state.length, rows, strict=True)],
            "ending": lambda b, count: rows[b][-count:],
        }
    )


# ---------------------------------------------------------------------------- what is verified


def test_the_best_of_all_is_verified() -> None:
    """8 nodes of 16 at 0.05 tokens each: those that are probable enough, of whomever."""
    one = Says(([1, 2, 3, 4], [0.4, 0.3, 0.2, 0.01]), ([5], [0.02]))
    two = Other(([1, 6], [0.5, 0.15]), ([8, 9], [0.3, 0.02]))
    tree = CombinedDrafter([one, two]).draft(state_of(timed()), 20)
    assert sorted(tree.paths()[0]) == [[1, 2, 3], [1, 6], [8]]
    assert tree.expected is not None
    nodes = tree.rows()[0]
    assert nodes.tokens == [ROOT, 1, 2, 3, 6, 8]
    # 1 as the more convinced says; 2 and 6 by what is said of them after 1, no more than 1 in all.
    two_, six = 0.75 / 1.05, 0.3 / 1.05
    expected = [1, 0.5, 0.5 * two_, 0.5 * two_ * 0.2 / 0.3, 0.5 * six, 0.3]
    assert nodes.expected == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("budget", [1, 2, 3, 20])
def test_the_budget_is_kept_by_the_most_probable(budget: int) -> None:
    one, two = Says(([1, 2], [0.5, 0.2])), Other(([3, 4], [0.4, 0.35]))
    tree = CombinedDrafter([one, two]).draft(state_of(timed(node=0.0)), budget)
    best = [[1], [3], [3, 4], [1, 2]][:budget]
    assert sum(tree.num_nodes.tolist()) == 1 + min(budget, 4)
    assert {tuple(p) for p in tree.paths()[0]} == {
        tuple(p) for p in best if not any(q[: len(p)] == p and q != p for q in best)
    }


def test_siblings_are_not_all_right_at_once() -> None:
    pool = Pool(state_of(ASSUMED), [judge_of(ASSUMED, name, BELIEF) for name in "ab"])
    pool.add(0, Says(([1], [0.9]), ([2], [0.05])).draft(state_of(ASSUMED), 9))
    pool.add(1, Says(([3], [0.85])).draft(state_of(ASSUMED), 9))
    expected = pool.expected[0]
    assert expected.tolist() == pytest.approx([1, 0.5, 0.05 / 1.8, 0.85 / 1.8], abs=1e-3)
    assert pool.promise(1) == pytest.approx(1.0)


def test_rows_have_as_many_nodes_as_pay_in_the_mean() -> None:
    class Rows(Says):
        def draft(self, state: Any, budget: int) -> TokenTree:
            rows = [
                Nodes([ROOT, 1, 2, 3], [-1, 0, 1, 2], [1.0, 0.9, 0.8, 0.7]),
                Nodes([ROOT, 4], [-1, 0], [1.0, 0.5]),
                Nodes([ROOT], [-1], [1.0]),
            ]
            return TokenTree.from_rows(state.root, rows)

    costs = StepCosts(adaptive=False)  # 0.03 a node
    tree = CombinedDrafter([Rows()]).draft(state_of(costs, 3), 9)
    assert tree.num_nodes.tolist() == [4, 2, 1]
    # A frozen row takes nothing, and does not make the others' tokens count for less.
    tree = CombinedDrafter([Rows()]).draft(state_of(costs, 3, frozen=[False, True, True]), 2)
    assert tree.num_nodes.tolist() == [3, 2, 1]


def test_a_model_that_takes_chains_gets_the_best_one() -> None:
    one, two = Says(([1, 2], [0.4, 0.3])), Other(([3, 4], [0.6, 0.5]))
    tree = CombinedDrafter([one, two]).draft(state_of(ASSUMED, support="chain"), 9)
    assert tree.paths() == [[[3, 4]]]
    assert tree.is_chain


def test_of_who_says_nothing_every_second_token_is_believed() -> None:
    one, two = Says(([1, 2, 3, 4, 5, 6, 8], None)), Other(([9], [0.2]))
    tree = CombinedDrafter([one, two]).draft(state_of(ASSUMED), 20)
    assert sorted(tree.paths()[0]) == [[1, 2, 3, 4, 5], [9]]  # 0.03 a node; 1/32 is more
    assert tree.rows()[0].expected[:6] == pytest.approx([0.5**d for d in range(6)])  # type: ignore


# ---------------------------------------------------------------------------- who is asked


@pytest.mark.parametrize(
    ("promise", "seconds", "asked"),
    [
        (0.5, 0.010, True),
        (0.9, 0.010, False),
        (0.9, 0.001, True),
        (0.9, None, True),  # never timed
        (None, 9.0, True),  # nothing else is drafted
    ],
)
def test_who_is_asked(promise: float | None, seconds: float | None, asked: bool) -> None:
    """The second gives a token at best, where the first is wrong, and takes its time anyway."""
    first = Says() if promise is None else Says(([3], [promise]))
    second = Other(([4], [0.09]))
    state = state_of(timed(seconds))
    tree = CombinedDrafter([first, second]).draft(state, 9)
    assert bool(second.asked) is asked
    tokens = [ROOT, *([] if promise is None else [3]), *([4] if asked else [])]
    assert tree.tokens[0].tolist() == tokens


def test_who_was_too_slow_is_asked_again() -> None:
    """Its first drafts, or those of a bad moment, do not decide for good."""
    costs, second = timed(9.0), Other(([4], [0.3]))
    for _ in range(400):
        CombinedDrafter([Says(([3], [0.05])), second]).draft(state_of(costs), 9)
    assert second.asked > 100


def test_who_gives_little_beside_others_is_not_worth_a_tenth_of_a_step(monkeypatch: Any) -> None:
    """Or is, if he gives much: by what he gave, where the others promised little."""
    monkeypatch.setattr(StepCosts, "draft_price", lambda *_: 0.1)
    for gives, asked in (([0.08], False), ([0.5, 0.5, 0.5, 0.5], True)):
        costs, second = timed(), Other((list(range(10, 10 + len(gives))), gives))
        drafter = CombinedDrafter([Says(([3], [0.3])), second])
        for _ in range(40):
            drafter.draft(state_of(costs), 9)
        before = second.asked
        for _ in range(30):
            drafter.draft(state_of(costs), 9)
        assert (second.asked - before > 20) is asked


# ---------------------------------------------------------------------------- who is believed


def test_who_is_right_more_often_than_he_says_is_believed_more() -> None:
    costs = timed()
    shy, bold = Says(([1], [0.3])), Other(([2], [0.6]))
    said = []
    for at in range(300):
        drafter = CombinedDrafter([shy, bold])  # every request begins anew
        state = state_of(costs)
        drafter.draft(state, 9)
        said.append(drafter._pool.expected[0][1:].tolist())  # type: ignore[union-attr]
        right = [1, 3] if at % 10 < 7 else [2, 3]
        drafter.observe(goes_on(state, right), None, None)  # type: ignore[arg-type]
    assert said[0] == pytest.approx([0.3, 0.6])
    assert said[-1] == pytest.approx([0.7, 0.3], abs=0.05)
    assert "acceptance of Says in a list" in costs.kept


def test_a_request_that_differs_is_noticed_at_once() -> None:
    costs = timed()
    drafter = CombinedDrafter([Says(([1], [0.5]))])
    said = []
    for _ in range(7):  # too few to be learned for all requests
        state = state_of(costs)
        drafter.draft(state, 9)
        said.append(float(drafter._pool.expected[0][1]))  # type: ignore[union-attr]
        drafter.observe(goes_on(state, [1, 3]), None, None)  # type: ignore[arg-type]
    assert said == sorted(said)
    assert said[-1] > 0.75
    drafter.reset()
    drafter.draft(state_of(costs), 9)
    assert float(drafter._pool.expected[0][1]) == said[0]  # type: ignore[union-attr]


def test_nodes_count_whose_parents_were_right_verified_or_not() -> None:
    costs = timed()
    one = Says(([1, 2, 3], [0.9, 0.8, 0.7]), ([1, 4], [0.9, 0.001]), ([5, 6], [0.001, 0.0005]))
    drafter = CombinedDrafter([one])
    state = state_of(costs)
    drafter.draft(state, 9)
    learned: list[tuple[float, float]] = []
    judge = drafter._judges[0]
    judge.learn = lambda described, right: learned.extend(  # type: ignore[method-assign]
        zip(described[:, 2].tolist(), right.tolist(), strict=True)
    )
    drafter.observe(goes_on(state, [1, 4]), None, None)  # type: ignore[arg-type]
    # At depth 1: 1 was right and 5 was not; after 1: 2 was not, 4 was; after 4 nothing is known.
    assert sorted(learned) == [(1.0, 0.0), (1.0, 1.0), (2.0, 0.0), (2.0, 1.0)]


def test_two_who_agree_are_believed_more_if_that_proves_true() -> None:
    costs, rng = timed(), np.random.default_rng(0)
    for _ in range(600):
        first, second = rng.integers(1, 3, 2).tolist()
        truth = first if first == second or rng.random() < 0.2 else 3
        drafter = CombinedDrafter([Says(([first], [0.5])), Other(([second], [0.4]))])
        state = state_of(costs)
        drafter.draft(state, 9)
        drafter.observe(goes_on(state, [truth, 9]), None, None)  # type: ignore[arg-type]
    for second, low, high in ((1, 0.85, 1.0), (2, 0.05, 0.3)):
        drafter = CombinedDrafter([Says(([1], [0.5])), Other(([second], [0.4]))])
        drafter.draft(state_of(costs), 9)
        assert low < drafter._pool.expected[0][1] < high  # type: ignore[union-attr]


def test_a_wrapper_that_does_not_adapt_learns_nothing() -> None:
    costs = StepCosts(adaptive=False)
    drafter = CombinedDrafter([Says(([1], [0.5]))])
    for _ in range(50):
        state = state_of(costs)
        tree = drafter.draft(state, 9)
        assert tree.rows()[0].expected == pytest.approx([1.0, 0.5])
        drafter.observe(goes_on(state, [2]), None, None)  # type: ignore[arg-type]
    assert not costs.kept


# ---------------------------------------------------------------------------- on models


def test_a_drafter_that_is_not_asked_still_sees_every_step(monkeypatch: Any) -> None:
    """And drafts rightly when it is asked again."""
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    feature = selfspec.FeatureDrafter(random_feature(64, 64), min_gain=0.0, min_prob=0.0)
    turns = itertools.count()
    monkeypatch.setattr(StepCosts, "asking_pays", lambda *_: next(turns) % 3 == 0)
    spec = selfspec.wrap(model, [OracleDrafter(plain, 3, wrong_at=(2, 0)), feature])
    assert spec.generate(**prompt, max_new_tokens=40, do_sample=False).equal(plain)
    assert next(turns) > 5


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3"])
@pytest.mark.parametrize("rows", [1, 3])
def test_all_together(family: str, rows: int, adaptive: bool) -> None:
    model, prompt = tiny.build(family), tiny.prompts(rows)
    hidden = model.config.get_text_config().hidden_size
    drafters = [
        "ngram",
        selfspec.HeadsDrafter(random_heads(hidden, tiny.VOCAB)),
        selfspec.FeatureDrafter(random_feature(hidden, tiny.VOCAB)),
        selfspec.EarlyExitDrafter(1, branches=2),
        selfspec.EarlyExitDrafter(2, confidence=0.1),
    ]
    plain = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    spec = selfspec.wrap(model, drafters, adaptive=adaptive, off_switch=False)
    for _ in range(2):
        assert spec.generate(**prompt, max_new_tokens=40, do_sample=False).equal(plain)
    assert spec.stats.drafted > 0


def test_a_copy_has_nothing_of_a_request_that_was_broken_off() -> None:
    model, prompt = tiny.llama(), tiny.prompts(1)
    drafter = CombinedDrafter([selfspec.SuffixDrafter(), selfspec.EarlyExitDrafter(1)])
    spec = selfspec.wrap(model, drafter)
    for at, _ in enumerate(spec.stream(**prompt, max_new_tokens=40, do_sample=False)):
        if at == 5:
            break
    drafter._pool = Pool(state_of(ASSUMED), drafter._judges)
    for other in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert other._pool is None
        assert other._judges == other.drafters[0]._drafts == []
        plain = model.generate(**prompt, max_new_tokens=20, do_sample=False)
        found = selfspec.wrap(model, other).generate(**prompt, max_new_tokens=20, do_sample=False)
        assert found.equal(plain)
