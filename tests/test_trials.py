"""Skip sets and exits that are found while a text is generated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import selfspec
from selfspec.costs import StepCosts
from selfspec.drafters import exit_trials, skip_trials
from selfspec.drafters.exit_trials import ExitTrials
from selfspec.drafters.skip_trials import SkipTrials
from selfspec.layer_shares import LayerShares
from selfspec.side_work import SideWork
from selfspec.skip_set import SkipSet
from selfspec.target import Target
from tests.families import tiny
from tests.networks import random_exit
from tests.silent import silent
from tests.steps import step

NEW = {"max_new_tokens": 400, "do_sample": False}
EXITS, SETS = exit_trials.WORK, skip_trials.WORK


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that cost next to nothing, drafts as dear as their weights, and no end of time."""
    monkeypatch.setattr(StepCosts, "verify_ratios", lambda self, b, n: 1 + 0.02 * np.arange(n))
    monkeypatch.setattr(SideWork, "affords", lambda *args: True)
    # On a model as small as this no draft pays by measured time.
    monkeypatch.setattr(StepCosts, "speed_of", lambda *args: None)


def generate(model: Any, drafter: Any, batch: int = 1, **options: Any) -> Any:
    prompt = tiny.prompts(batch)
    spec = selfspec.wrap(model, drafter, off_switch=False, **options)
    plain = model.generate(**prompt, **NEW)
    assert spec.generate(**prompt, **NEW).equal(plain)
    assert spec.stats.fallbacks == 0
    return spec


# ------------------------------------------------------------------------------- skip sets


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("batch", [1, 3])
def test_a_set_is_found_and_drafted_with(batch: int) -> None:
    """Layers 2, 3 and 5 of eight say nothing: without them every draft is right."""
    whole = (2, 3, 5)
    spec = generate(silent(whole, whole, layers=8), "layer-skip", batch)
    trials = spec.costs.kept[SETS]
    assert isinstance(trials, SkipTrials)
    assert trials.pays
    assert "layer skip pays" in repr(spec)
    assert "is right 1.00 of the time" in trials.verdict
    assert spec.stats.accepted > 100
    best = trials._best
    assert best is not None
    assert best.attention & best.mlp <= set(whole)


@pytest.mark.usefixtures("scripted")
def test_a_model_without_spare_layers_is_left_to_decode_plainly(caplog: Any) -> None:
    with caplog.at_level("WARNING", "selfspec"):
        spec = generate(tiny.llama(num_hidden_layers=8), "layer-skip")
    assert caplog.text.count("layer skip does not pay") == 1
    assert "layer skip does not pay" in repr(spec)
    assert spec.stats.drafted == 0
    # Nothing more is tried, in this request or another one.
    spent = dict(spec.costs.side.spent)
    spec.generate(**tiny.prompts(1), **NEW)
    assert spec.costs.side.spent == spent
    assert caplog.text.count("layer skip does not pay") == 1


@pytest.mark.usefixtures("scripted")
def test_a_changed_model_is_searched_anew() -> None:
    model = tiny.llama(num_hidden_layers=8)
    spec = generate(model, "layer-skip")
    assert not spec.costs.kept[SETS].pays
    with torch.no_grad():
        for layer in (2, 3, 5):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    model.model.layers[1].mlp = type(model.model.layers[1].mlp)(model.config).eval()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
    for _ in range(2):
        spec.generate(**tiny.prompts(1), **NEW)
    assert spec.costs.kept[SETS].pays
    assert "does not pay" not in repr(spec)


def test_no_time_no_search() -> None:
    """Until three hundredths of what decoding took are enough for a window."""
    spec = selfspec.wrap(silent((2, 3), (2, 3)), "layer-skip")
    spec.generate(**tiny.prompts(1), max_new_tokens=24, do_sample=False)
    assert not spec.costs.side.spent
    assert spec.stats.drafted == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {"adaptive": False}), ("bloom", {})],
)
@pytest.mark.parametrize("drafter", ["layer-skip", "early-exit"])
def test_where_nothing_is_searched_a_fixed_part_drafts(
    name: str, options: Any, drafter: str
) -> None:
    spec = selfspec.wrap(tiny.build(name), drafter, **options)
    spec.generate(**tiny.prompts(1), max_new_tokens=20, do_sample=False)
    assert spec.stats.drafted > 0
    assert not {SETS, EXITS} & set(spec.costs.kept)


# ------------------------------------------------------------------------------- exits


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("batch", [1, 3])
def test_the_exit_that_is_right_is_drafted_with(batch: int) -> None:
    """Nothing is said after three of eight layers."""
    late = range(3, 8)
    spec = generate(silent(late, late, layers=8), "early-exit", batch)
    trials = spec.costs.kept[EXITS]
    assert isinstance(trials, ExitTrials)
    assert trials.exits == [1, 2, 3, 4, 5, 6]
    found = trials.acceptance()
    assert found[3] == found[6] == 1.0 > found[1]
    assert "early exit pays: after 3 of 8 layers" in repr(spec)
    assert spec.stats.accepted > 100
    assert spec.stats.acceptance_rate > 0.9


@pytest.mark.usefixtures("scripted")
def test_a_model_whose_exits_are_wrong_is_left_to_decode_plainly(caplog: Any) -> None:
    with caplog.at_level("WARNING", "selfspec"):
        spec = generate(tiny.llama(num_hidden_layers=8), "early-exit")
    assert caplog.text.count("early exit does not pay") == 1
    assert "early exit does not pay" in repr(spec)
    assert spec.stats.verifies < 40  # while a few windows had it seem to pay


@pytest.mark.usefixtures("scripted")
def test_a_text_that_changes_changes_the_exit() -> None:
    """What is known fades: exits that were right and are no more are left."""
    model = silent(range(3, 8), range(3, 8), layers=8)
    trials = ExitTrials(Target(model).architecture)
    state: Any = SimpleNamespace(costs=StepCosts(), batch=1)
    assert trials.best(state) is None
    state.costs.record(step(nodes=1, accepted=0, seconds=0.5))
    for exit_layer in trials.exits:
        trials._counts[exit_layer].right, trials._counts[exit_layer].of = 60.0, 64.0
    trials._windows = 9
    assert trials.best(state) == 1
    trials._windows = 21
    for _ in range(12):
        for exit_layer in trials.exits:
            count = trials._counts[exit_layer]
            count.right = 0.9 * count.right + (16 if exit_layer >= 4 else 1)
            count.of = 0.9 * count.of + 16
    assert trials.best(state) == 4


def test_a_named_exit_is_not_chosen_anew() -> None:
    spec = selfspec.wrap(tiny.build("llama"), selfspec.EarlyExitDrafter(1))
    spec.generate(**tiny.prompts(1), max_new_tokens=30, do_sample=False)
    assert not {SETS, EXITS} & set(spec.costs.kept)
    assert spec.stats.drafted > 0


# ------------------------------------------------------------------------------- accounts


def test_side_work_keeps_to_its_share() -> None:
    side = SideWork()
    assert not side.affords("a", 0.1, first=1.0)
    side.decoding = 10.0
    assert side.affords("a", 0.1, first=1.0)
    assert not side.affords("a", 0.1, first=1.1)
    side.spent["a"], side._last["a"] = 0.6, 0.6
    assert not side.affords("a", 0.1, first=0.0)  # it is known what it takes
    side.decoding = 12.0
    assert side.affords("a", 0.1, first=9.0)
    assert side.affords("b", 0.1, first=1.0)


def test_ways_to_draft_are_timed_apart() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.record(step(nodes=1, accepted=0, seconds=0.5))
    for part, seconds in {"a": 0.75, "b": 3.0}.items():
        assert costs.speed_of(1, part) is None
        for _ in range(10):
            costs.drafting_with(part)
            costs.record(step(nodes=4, accepted=2, seconds=seconds))
    # That one takes four times as long as the other is no sign of a machine that has changed.
    assert costs.speed_of(1, "a") == pytest.approx(2.0)
    assert costs.speed_of(1, "b") == pytest.approx(0.5)
    assert costs.speed_of(2, "a") is None
    costs.record(step(nodes=4, accepted=2, seconds=0.75))  # of somebody else
    assert costs.speed_of(1, "b") == pytest.approx(0.5)


@pytest.mark.parametrize("measured", [0.8, 1.3])
def test_measured_time_has_the_last_word(measured: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit and a set that ought to pay, and do not: one step in 128 looks again."""
    monkeypatch.setattr(StepCosts, "speed_of", lambda *args: measured)
    monkeypatch.setattr(StepCosts, "verify_ratios", lambda self, b, n: 1 + 0.02 * np.arange(n))
    architecture = Target(silent(range(3, 8), range(3, 8), layers=8)).architecture
    state: Any = SimpleNamespace(costs=StepCosts(), batch=1)
    state.costs.record(step(nodes=1, accepted=0, seconds=0.5))
    exits, sets = ExitTrials(architecture), SkipTrials(architecture)
    for exit_layer in exits.exits:
        exits._counts[exit_layer].right = exits._counts[exit_layer].of = 64.0
    exits._windows = 9
    sets._best = SkipSet.layers([3, 4, 5, 6])
    sets._counts[sets._best] = 64, 64
    for trials in (exits, sets):
        chosen = [trials.best(state) for _ in range(256)]
        assert len([one for one in chosen if one is not None]) == (256 if measured > 1 else 2)


def test_side_work_is_no_waste_of_a_drafter() -> None:
    costs = StepCosts()
    for _ in range(4):
        costs.record(step(nodes=1, accepted=0, seconds=0.5))
    busy = step(nodes=1, accepted=0, seconds=0.5, draft_seconds=0.3)
    costs.record(busy)
    assert costs.wasted(busy) == pytest.approx(0.6)
    costs.side._lap = 0.3
    costs.record(busy)
    assert costs.wasted(busy) == pytest.approx(0.0)
    costs.record(busy)
    assert costs.wasted(busy) == pytest.approx(0.6)


def test_side_work_is_booked_also_if_it_fails() -> None:
    side = SideWork()
    with pytest.raises(ValueError, match="x"), side("a", torch.device("cpu")):
        raise ValueError("x")
    assert side.spent["a"] > 0


def test_costs_know_how_long_decoding_took() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.record(step(nodes=1, accepted=0, seconds=0.5, draft_seconds=0.25))
    costs.record(step(nodes=1, accepted=0, seconds=9.0, is_prefill=True))
    assert costs.side.decoding == pytest.approx(2.25)
    assert costs.plain_seconds(1) == pytest.approx(0.5)
    assert costs.of_a_pool().side is costs.side


# ------------------------------------------------------------------------------- shares


def test_shares_are_those_of_the_weights() -> None:
    architecture = Target(tiny.build("llama")).architecture
    shares = LayerShares.of(architecture)
    layer = architecture.layers[0]
    sizes = [
        sum(p.numel() for p in part.parameters()) for part in (layer.self_attn, layer.mlp, layer)
    ]
    head = architecture.head()
    assert head is not None
    whole = 4 * sizes[2] + sum(p.numel() for p in head.parameters())
    assert shares.attention[0] == pytest.approx(sizes[0] / whole)
    assert shares.draft_step(SkipSet()) == 1.0
    some = SkipSet(frozenset({0, 2}), frozenset({2, 3}))
    expected = 1 - (sizes[0] + sizes[2] + sizes[1]) / whole
    assert shares.draft_step(some) == pytest.approx(expected)
    assert shares.exit_step(3) == pytest.approx(1 - sizes[2] / whole)
    assert shares.shared(2) == pytest.approx(2 * sizes[2] / whole)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("drafter", ["layer-skip", "early-exit"])
def test_requests_of_several_threads_share_a_search(drafter: str) -> None:
    model = silent((2, 3, 4, 5), (2, 3, 4, 5), layers=6)
    spec = selfspec.wrap(model, drafter, off_switch=False)
    prompts = [tiny.prompts(1, seed=seed) for seed in range(4)]
    plain = [model.generate(**prompt, max_new_tokens=80, do_sample=False) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(
            lambda prompt: spec.generate(**prompt, max_new_tokens=80, do_sample=False), prompts * 2
        )
        assert all(a.equal(b) for a, b in zip(found, plain * 2, strict=True))
    assert spec.stats.accepted > 0


@pytest.mark.parametrize(
    ("drafter", "switch"),
    [("layer-skip", True), ("early-exit", True), ("ngram", False)],
)
def test_what_is_estimated_is_held_to_measured_time(drafter: str, switch: bool) -> None:
    spec = selfspec.wrap(tiny.build("llama"), drafter)
    assert ("off switch on" in repr(spec)) == switch
    assert "off switch off" in repr(selfspec.wrap(tiny.build("llama"), drafter, off_switch=False))
    assert "off switch off" in repr(selfspec.wrap(tiny.build("llama"), drafter, adaptive=False))


def test_a_trained_exit_by_name_is_held_to_measured_time_too() -> None:
    drafts = {"exit": random_exit(64, 64, 2, attends=False)}
    assert "off switch on" in repr(selfspec.wrap(tiny.build("llama"), "early-exit", drafts=drafts))
