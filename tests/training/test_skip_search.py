"""The search finds what says nothing, goes on after a kill, and can say that nothing pays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import selfspec
from selfspec.checkpoints import FoundSkipSet, read_skip_set
from selfspec.layer_times import LayerTimes, measure_layer_times
from selfspec.replay import ready, replay_texts
from selfspec.skip_set import SkipSet
from selfspec.target import Target
from selfspec.training import Answer, find_skip_set
from selfspec.training.bayesian import SetProcess
from selfspec.training.skip_similarity import similar_sets
from tests.families import tiny
from tests.silent import silent

SILENT = SkipSet(frozenset({1, 4}), frozenset({1, 3}))
# Each attention and each MLP takes as long as the next, blocks hardly longer than one token.
TIMES = LayerTimes(
    num_layers=6,
    empty=1.0,
    attention=1.0,
    mlp=1.0,
    rest=0.0,
    nodes=(1, 2, 9),
    verify=(13.0, 13.1, 14.0),
)


def answers(count: int = 16, length: int = 9) -> list[Answer]:
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(1, tiny.VOCAB, (count, 12 + length), generator=g).tolist()
    return [Answer(str(i), row[: 3 + i % 9], row[12:]) for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def model() -> Any:
    return silent(SILENT.attention, SILENT.mlp)


@pytest.mark.parametrize(
    ("methods", "evaluations"),
    [
        (("similarity",), 18),
        (("greedy",), 60),
        (("bayesian",), 120),
        (("similarity", "greedy"), 60),
    ],
)
def test_finds_what_says_nothing(model: Any, methods: Any, evaluations: int) -> None:
    lines: list[str] = []
    found = find_skip_set(
        model,
        answers(),
        methods=methods,
        evaluations=evaluations,
        texts=8,
        window=4,
        times=TIMES,
        say=lines.append,
    )
    # All of it, if it can; with it no token is wrong, and four sublayers of twelve are saved.
    assert found.skip_set == SILENT
    assert found.acceptance == 1.0
    assert found.pays
    assert found.speedup == pytest.approx(TIMES.speedup(found.skip_set, 1.0)[0])
    assert found.tried <= evaluations
    assert found.compared == 8 * 4
    assert "pays" in lines[-1]
    assert len(lines) == len(methods) + 1


def test_says_that_nothing_pays_and_what_would() -> None:
    found = find_skip_set(
        tiny.build("llama"), answers(), evaluations=40, texts=8, window=4, times=times(4)
    )
    assert not found.pays
    assert found.speedup < 1
    assert found.needed is not None
    assert found.acceptance < found.needed
    assert "does not pay" in str(found)
    assert f"{found.needed:.2f} would do" in str(found)
    assert len(found.frontier) > 2
    assert all(needed is None or seen < needed for _, seen, needed in found.frontier)
    assert f"{found.frontier[0][1]:.2f}" in found.table()


def times(layers: int) -> LayerTimes:
    whole = 1.0 + 2 * layers
    verify = (whole, 1.05 * whole, 1.2 * whole)
    return replace(TIMES, num_layers=layers, verify=verify)


def test_goes_on_after_a_kill(model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    options: dict[str, Any] = {"texts": 8, "window": 4, "evaluations": 50}
    whole = find_skip_set(model, answers(), times=TIMES, log=tmp_path / "whole.jsonl", **options)
    log = tmp_path / "deep" / "log.jsonl"
    run, count = _stopping_after(20)
    monkeypatch.setattr("selfspec.training.skip_search._acceptance", run)
    with pytest.raises(KeyboardInterrupt):
        find_skip_set(model, answers(), times=TIMES, log=log, **options)
    monkeypatch.undo()
    with log.open("a") as file:
        file.write('{"skip_set": {"atten')  # half written
    run, count = _stopping_after(10**6)
    monkeypatch.setattr("selfspec.training.skip_search._acceptance", run)
    again = find_skip_set(model, answers(), times=TIMES, log=log, **options)
    assert again == whole
    assert count[0] == 50 - 19 + 8  # what had been tried is not tried again, finalists are
    assert log.read_text() == (tmp_path / "whole.jsonl").read_text()
    with pytest.raises(ValueError, match="other texts"):
        find_skip_set(model, answers(20), times=TIMES, log=log, **{**options, "window": 3})
    for other in (tiny.build("llama"), tiny.llama(num_hidden_layers=6)):
        with pytest.raises(ValueError, match="is of a search on another model"):
            find_skip_set(other, answers(), times=TIMES, log=log, **options)


@pytest.mark.parametrize(
    "line",
    ["garbage", "[]", "3", '{"search": "x"}', '{"skip_set": {}, "acceptance": 7.0}', '{"a": 1}'],
)
def test_a_log_that_is_none(model: Any, tmp_path: Path, line: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"log='.*log.jsonl', line 1, is none of a search"):
        find_skip_set(model, answers(), times=TIMES, log=log, texts=8, window=4, evaluations=5)


def _stopping_after(most: int) -> Any:
    from selfspec.training import skip_search

    real, count = skip_search._acceptance, [0]

    def run(*args: Any) -> float:
        count[0] += 1
        if count[0] == most:
            raise KeyboardInterrupt
        return real(*args)

    return run, count


def test_times_are_kept_with_what_was_tried(model: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    options: dict[str, Any] = {"texts": 8, "window": 4, "evaluations": 5, "log": log}
    first = find_skip_set(model, answers(), **options)
    assert find_skip_set(model, answers(), **options).times == first.times


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ["best"]}, "methods has 'best'; choose from 'similarity'"),
        ({"evaluations": 0}, "evaluations=0"),
        ({"texts": 2.5}, "texts=2.5"),
        ({"window": 33}, r"window=33 must be an int in 1\.\.32"),
        ({"texts": 9}, "16 prompts with answers of 8 tokens or more are too few: 18"),
        ({"window": 10, "texts": 8}, "0 prompts with answers of 10"),
    ],
)
def test_what_cannot_be_searched(model: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_skip_set(model, answers(), times=TIMES, **{"evaluations": 3, **change})


@pytest.mark.parametrize("seed", [None, -1, "a"])
def test_what_is_no_seed(model: Any, seed: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="seed="):
        find_skip_set(model, answers(), times=TIMES, texts=8, window=4, seed=seed)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        find_skip_set(tiny.llama().train(), answers(), texts=2)


# ------------------------------------------------------------------------------- similarity


def test_the_most_similar_way_leaves_out_what_says_nothing(model: Any) -> None:
    found = replay_texts(Target(model), [a.prompt_ids + a.response_ids for a in answers(6)], 4)
    ticks: list[int] = []
    with ready([found]):
        sets = similar_sets(found, 6, lambda: ticks.append(1))
    assert len(ticks) == 6
    assert [len(skip) for skip in sets] == [1, 2, 3, 4, 5, 6]
    for skip in sets[:4]:
        assert skip.attention <= SILENT.attention
        assert skip.mlp <= SILENT.mlp
    assert sets[3] == SILENT


def test_layers_whose_halves_are_not_told_apart_are_left_out_whole() -> None:
    model = silent((2, 3), (2, 3))
    target = Target(model)
    whole = [[] for _ in target.architecture.sublayers]
    target.architecture = replace(target.architecture, sublayers=whole)
    found = replay_texts(target, [a.prompt_ids + a.response_ids for a in answers(6)], 4)
    with ready([found]):
        sets = similar_sets(found, 6)
    assert [len(skip) for skip in sets] == [2, 4, 6]
    assert sets[1] == SkipSet.layers([2, 3])


# ------------------------------------------------------------------------------- the process


def test_the_process_goes_through_what_it_saw() -> None:
    rng = np.random.default_rng(0)
    sets = rng.random((30, 12)) < 0.5
    weights = rng.normal(size=12)
    scores = sets @ weights
    process = SetProcess(sets, scores)
    mean, deviation = process.predict(sets)
    assert np.corrcoef(mean, scores)[0, 1] > 0.99
    new = rng.random((200, 12)) < 0.5
    guessed, unsure = process.predict(new)
    assert np.corrcoef(guessed, new @ weights)[0, 1] > 0.7
    assert unsure.mean() > 1.5 * deviation.mean()
    # By hand, of one set that was seen: k (k + 0.05)^-1 of its distance from the mean.
    one = SetProcess(sets[:1], np.array([3.0]))
    assert one.predict(sets[:1])[0] == pytest.approx(3.0)


def test_expected_improvement_is_that_of_draws() -> None:
    rng = np.random.default_rng(1)
    sets = rng.random((20, 8)) < 0.5
    process = SetProcess(sets, sets.sum(1) + 0.1 * rng.normal(size=20))
    new = rng.random((5, 8)) < 0.5
    mean, deviation = process.predict(new)
    draws = mean + deviation * rng.normal(size=(200_000, 5))
    expected = np.maximum(draws - 4.5, 0).mean(0)
    assert process.expected_improvement(new, 4.5) == pytest.approx(expected, rel=0.05, abs=2e-3)


# ------------------------------------------------------------------------------- times, files


def test_times_of_a_model_are_measured() -> None:
    found = measure_layer_times(Target(tiny.build("llama")), list(range(1, 20)), rounds=3)
    assert found.num_layers == 4
    assert found.nodes[0] == 1
    assert 0 < found.empty <= found.plain * 3
    assert min(found.attention, found.mlp, found.rest) >= 0
    assert found.draft_step(SkipSet.layers(range(4))) < found.draft_step(SkipSet())
    ratios = found.verify_ratios
    assert ratios[0] == 1
    assert (np.diff(ratios) >= 0).all()
    assert len(ratios) == found.nodes[-1]
    assert LayerTimes.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_what_parts_take() -> None:
    assert TIMES.draft_step(SkipSet()) == 1.0
    assert TIMES.draft_step(SILENT) == pytest.approx(9 / 13)
    assert TIMES.draft_step(SkipSet.layers(range(6))) == pytest.approx(1 / 13)
    assert TIMES.exit_step(2) == pytest.approx(5 / 13)
    assert TIMES.shared(2) == pytest.approx(4 / 13)
    slow = replace(TIMES, rest=0.5, empty=-2.0)  # norms are saved where a whole layer is left out
    assert slow.draft_step(SkipSet.layers([1])) == pytest.approx((13 - 2.5) / 13)
    assert slow.draft_step(SkipSet(frozenset({1}))) == pytest.approx((13 - 1) / 13)


@pytest.fixture
def found(model: Any) -> FoundSkipSet:
    return FoundSkipSet.of(
        model, SILENT, acceptance=0.9, compared=100, length=3, times=TIMES, tried=7,
        frontier=((0.5, 0.2, 0.7), (0.9, 0.8, None)),
    )  # fmt: skip


def test_a_file_says_what_was_found(found: FoundSkipSet, tmp_path: Path) -> None:
    path = found.save(tmp_path / "drafts")
    assert path == tmp_path / "drafts" / "skip_set.json"
    assert read_skip_set(path) == read_skip_set(path.parent) == found
    path.write_text(path.read_text().replace('"acceptance"', '"accept"'))
    with pytest.raises(ValueError, match="cannot be read"):
        read_skip_set(path)
    written = json.loads(found.save(tmp_path / "drafts").read_text())
    for name, value in (
        ("speedup", "a"),
        ("speedup", None),
        ("speedup", float("nan")),
        ("acceptance", "0.5"),
        ("skip_set", {"attention": [-1], "mlp": []}),
        ("times", {**written["times"], "more": 1}),
        ("times", []),
    ):
        path.write_text(json.dumps({**written, name: value}))
        with pytest.raises(ValueError, match=r"skip_set\.json cannot be read"):
            read_skip_set(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no selfspec-skip-set of version 1"):
        read_skip_set(path)
    with pytest.raises(ValueError, match="does not exist"):
        read_skip_set(tmp_path)


def test_wrap_finds_it(model: Any, found: FoundSkipSet, tmp_path: Path, caplog: Any) -> None:
    found.save(tmp_path)
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    for drafts in (tmp_path, {"skip_set": found}, {"skip_set": SILENT}):
        spec = selfspec.wrap(model, "layer-skip", drafts=drafts)
        assert spec.generate(**prompt, max_new_tokens=20, do_sample=False).equal(plain)
        assert spec.stats.accepted > 0
        assert spec.stats.acceptance_rate == 1.0
    # Beside the model, and refused for another one.
    model.save_pretrained(tmp_path / "model")
    found.save(tmp_path / "model" / "drafts")
    beside = type(model).from_pretrained(tmp_path / "model")
    assert selfspec.wrap(beside, "layer-skip")._drafter.skip_set == SILENT
    with pytest.raises(ValueError, match="was made for"):
        selfspec.wrap(tiny.build("llama"), "layer-skip", drafts=tmp_path)
    for made in ("layer-skip", {"skip_set": found}), (selfspec.LayerSkipDrafter(found), None):
        with pytest.raises(ValueError, match="was made for"):
            selfspec.wrap(tiny.build("llama"), *made)
    selfspec.wrap(model, selfspec.LayerSkipDrafter(found))
    with pytest.raises(ValueError, match="has no use with drafter='ngram'"):
        selfspec.wrap(model, "ngram", drafts={"skip_set": found})
    assert not caplog.records


def test_a_set_that_does_not_pay_is_reported_and_not_drafted_with(
    model: Any, found: FoundSkipSet, tmp_path: Path, caplog: Any
) -> None:
    replace(found, acceptance=0.3, speedup=0.8).save(tmp_path)
    with caplog.at_level("WARNING", "selfspec"):
        spec = selfspec.wrap(model, "layer-skip", drafts=tmp_path)
    assert "layer skip does not pay" in caplog.text
    assert "layer skip does not pay" in repr(spec)
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert spec.generate(**prompt, max_new_tokens=20, do_sample=False).equal(plain)
    assert spec.stats.drafted == 0
    # Whoever names a set has it drafted with.
    asked = selfspec.wrap(model, selfspec.LayerSkipDrafter(SILENT))
    asked.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert asked.stats.drafted > 0
