"""When a draft goes on, and which of its leaves are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import selfspec
from selfspec.costs import StepCosts
from selfspec.drafters.candidates import Candidates
from selfspec.drafters.dynamic_tree import DynamicTree
from selfspec.drafters.growth import Growth, MeasuredGrowth
from selfspec.drafters.outlook import Outlook
from tests.families import tiny
from tests.networks import random_feature
from tests.steps import step


def state(costs: StepCosts, batch: int = 1, frozen: int = 0) -> Any:
    return SimpleNamespace(
        costs=costs,
        batch=batch,
        frozen=[b < frozen for b in range(batch)],
        length=[0] * batch,
        root=torch.zeros(batch, dtype=torch.int64),
    )


def priced(node: float, level: float) -> StepCosts:
    """Costs where a node and a draft step have these prices."""
    costs: Any = StepCosts()
    costs.node_price = lambda batch: node
    costs.level_price = lambda batch, drafter: level
    costs.choose = lambda batch, probable, first=0: sum(one >= node for one in probable)
    return costs  # type: ignore[no-any-return]


@pytest.mark.parametrize(("level", "goes_on"), [(0.05, True), (0.2, True), (0.5, False)])
def test_a_step_is_made_while_its_tokens_are_worth_its_time(level: float, goes_on: bool) -> None:
    """0.8 nodes that are right, half of which another level follows: 0.4 tokens."""
    outlook = Outlook(state(priced(0.02, level)), "d")
    assert outlook.goes_on(torch.tensor([0.0, 0.8])) is goes_on


def test_a_step_takes_the_time_of_one_for_all_rows_that_go_on() -> None:
    for frozen, goes_on in ((0, False), (2, True)):
        where = state(priced(0.02, 0.2), 4, frozen)
        assert Outlook(where, "d").goes_on(torch.tensor([0.0, 1.2])) is goes_on


def test_what_levels_were_worth_is_what_they_are_thought_worth() -> None:
    costs, some = priced(0.02, 0.11), torch.tensor([0.9, 0.5])
    for _ in range(300):
        outlook = Outlook(state(costs), "d")
        outlook.goes_on(some)
        outlook.goes_on(torch.tensor([0.1, 0.5]))
    assert costs.worth_of_mass("d") == pytest.approx(0.2, abs=0.01)
    assert costs.worth_of_mass("another") == 0.5
    # Now and then a no is a yes, so that what has changed is seen: the dearer, the more seldom.
    for price, often in ((0.11, 22), (0.5, 100)):
        costs.level_price = lambda batch, drafter, price=price: price  # type: ignore[misc]
        yes = [Outlook(state(costs), "d").goes_on(some) for _ in range(5 * often)]
        assert yes.count(True) == 5
    costs.level_price = lambda batch, drafter: 0.09  # type: ignore[method-assign]
    assert all(Outlook(state(costs), "d").goes_on(some) for _ in range(16))


def test_a_number_fixes_how_far_a_draft_goes() -> None:
    costs = StepCosts()
    for _ in range(300):
        outlook = Outlook(state(costs), "d", 0.2)
        assert outlook.goes_on(torch.tensor([0.9, 0.5]))
        assert not outlook.goes_on(torch.tensor([0.0, 0.3]))
    assert costs.worth_of_mass("d") == 0.5


def test_a_draft_that_computes_nan_is_not_learned_from() -> None:
    costs = StepCosts()
    outlook = Outlook(state(costs), "d")
    assert outlook.goes_on(torch.tensor([0.5, 0.9]))
    assert not outlook.goes_on(torch.tensor([float("nan"), float("nan")]))
    assert costs.worth_of_mass("d") == 0.5


def test_a_tree_knows_what_a_level_is_worth_and_what_is_to_come() -> None:
    tree = DynamicTree(torch.tensor([7]), 2, [9], price=0.1)
    tree.grow(torch.tensor([[[1, 2, 3]]]), torch.tensor([[[0.6, 0.3, 0.05]]]).log())
    worth, mass = tree.outlook().tolist()
    assert worth == pytest.approx(0.5 + 0.2)
    assert mass == pytest.approx(0.6 + 0.3)
    tree.grow(
        torch.tensor([[[4, 5, 6], [4, 5, 6]]]),
        torch.tensor([[[0.9, 0.05, 0.01], [0.2, 0.1, 0.1]]]).log(),
    )
    worth, mass = tree.outlook().tolist()
    assert worth == pytest.approx(0.6 * 0.9 - 0.1)
    assert mass == pytest.approx(0.6 * 0.9)  # nothing is expanded that is not worth its own price
    assert tree.finish(31).tokens[0].tolist() == [7, 1, 2, 4]
    seen: list[Any] = []
    assert tree.finish(31, lambda sums: seen.append(sums) or 2).tokens[0].tolist() == [7, 1, 4]
    assert seen[0][:3] == pytest.approx([0.6, 0.54, 0.3], abs=1e-3)


def candidates(*probable: list[float]) -> Candidates:
    rows = torch.tensor(probable)
    ids = torch.arange(rows.shape[1]).expand(rows.shape)
    return Candidates(ids, rows, rows[:, 1], torch.ones(len(rows)))


def test_leaves_and_chains_that_do_not_pay_are_left_out() -> None:
    growth = MeasuredGrowth(state(priced(0.1, 0.1), 2), "a part")
    growing = torch.tensor([True, True])
    growing = growth.after(candidates([0.8, 0.15, 0.02], [0.7, 0.2, 0.05]), growing)
    assert growing.tolist() == [True, True]
    assert growth.goes_on(growing)
    growing = growth.after(candidates([0.9, 0.05, 0.01], [0.02, 0.01, 0.0]), growing)
    assert growing.tolist() == [True, False]
    assert growth.leaves() == [1, 0]
    fixed = Growth(state(StepCosts(), 2), 0.3)
    assert fixed.after(candidates([0.8, 0.1], [0.2, 0.1]), growing | True).tolist() == [1, 0]
    assert fixed.goes_on(torch.tensor([True, False]))
    assert not fixed.goes_on(torch.tensor([False, False]))
    assert fixed.leaves() is None


@pytest.mark.parametrize(
    ("second", "third", "goes_on"), [(0.1, 0.1, True), (0.1, 0.6, False), (0.6, 0.1, True)]
)
def test_a_node_of_a_chain_costs_what_it_does_at_its_place(
    second: float, third: float, goes_on: bool
) -> None:
    """The first draft token may be dear, the next ones for nothing, or the other way round."""
    costs = priced(0.3, 0.1)
    prices = np.cumsum([0.0, second, *[third] * 20])
    costs.verify_prices = lambda batch, most: prices[: most + 1]  # type: ignore[method-assign]
    growth = MeasuredGrowth(state(costs), "a part")
    one = Candidates(
        *(torch.tensor([[x]]) for x in (7, 0.5)), *(torch.tensor([x]) for x in (0.1, 1.0))
    )
    growing = growth.after(one, torch.tensor([True]))
    assert growing.tolist() == [goes_on]
    assert growth._worth == pytest.approx(max(0.5 - second, 0), abs=0.05)


DRAFTERS = {
    "ngram": lambda do_sample: selfspec.NGramDrafter(1),
    "feature": lambda do_sample: selfspec.FeatureDrafter(
        random_feature(64, 64), do_sample=do_sample
    ),
    "early-exit": lambda do_sample: selfspec.EarlyExitDrafter(2, branches=2, do_sample=do_sample),
    "layer-skip": lambda do_sample: selfspec.LayerSkipDrafter([1], 8, do_sample=do_sample),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_seed_gives_the_same_text_again_whatever_was_measured(name: str) -> None:
    """Of drafts that are drawn, too, though their size decides on which text it is."""
    model, prompt = tiny.build("llama"), tiny.prompts(2)
    spec = selfspec.wrap(model, DRAFTERS[name](True))
    texts = []
    for node in (0.0, 0.05, 0.4):
        for nodes in (4, 8, 16, 20) * 12:
            spec.costs.record(step(nodes, 0, 0.04 + 0.04 * node * nodes, batch=2))
        torch.manual_seed(3)
        texts.append(spec.generate(**prompt, max_new_tokens=24, do_sample=True, top_k=0))
    assert texts[0].equal(texts[1])
    assert texts[0].equal(texts[2])


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_follow_the_costs_and_the_text_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=48, do_sample=False)
    counts = []
    for price in (0.0, 0.1, 0.9):
        for kind in ("node_price", "level_price"):
            monkeypatch.setattr(StepCosts, kind, lambda *_, price=price: price)
        monkeypatch.setattr(
            StepCosts, "verify_prices", lambda _, __, most, price=price: price * np.arange(most + 1)
        )
        monkeypatch.setattr(StepCosts, "_tried", lambda *_: None)
        spec = selfspec.wrap(model, DRAFTERS[name](False))
        assert spec.generate(**prompt, max_new_tokens=48, do_sample=False).equal(plain)
        counts.append(spec.stats.drafted)
    assert counts[0] > counts[1] >= counts[2]
