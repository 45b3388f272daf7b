"""Times outlive a process: the same model on the same machine finds them again, and no other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import selfspec
from selfspec.costs import StepCosts
from selfspec.step_times import StepTimes
from selfspec.time_files import TimeFile
from tests.families import tiny
from tests.steps import step

IDS = torch.tensor([[5, 6, 7, 8] * 4])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    # Steps of a tiny model take as long as what else the machine does.
    monkeypatch.setattr(StepTimes, "_has_changed", lambda *_: False)
    return tmp_path / "cache"


def run(spec: Any) -> list[int]:
    mask = torch.ones_like(IDS)
    for _ in range(3):
        out = spec.generate(IDS, attention_mask=mask, do_sample=False, max_new_tokens=100)
    return out[0].tolist()


def measured(batch: int = 1, seconds: float = 0.04) -> StepCosts:
    costs = StepCosts()
    for _ in range(14):
        for nodes in (1, 2, 4, 8, 16):
            costs.record(step(nodes, 0, seconds + 0.001 * nodes, batch, draft_seconds=0.002))
    costs.record_level(batch, "Some", 0.003)
    for _ in range(3):
        costs.record_level(batch, "Other", 0.005)
        costs.record_draft(batch, "Other", 0.015)
    return costs


def test_the_next_process_begins_with_what_is_known(cache: Path) -> None:
    model = tiny.llama()
    first = selfspec.wrap(model, "suffix")
    assert not cache.exists()
    text = run(first)
    (file,) = (cache / "times").iterdir()
    assert first.costs.is_settled(1)
    second = selfspec.wrap(model, "suffix")
    assert second.costs.is_settled(1)
    known = json.loads(file.read_text())["batches"]["1"]
    assert second.costs.plain_seconds(1) == pytest.approx(known["plain"])
    sizes, seconds = zip(*second.costs.verify_points(1), strict=True)
    assert sizes == tuple(round(nodes) for nodes, _ in known["verify"])
    assert seconds == pytest.approx([time for _, time in known["verify"]])
    assert run(second) == text
    assert list((cache / "times").iterdir()) == [file]


@pytest.mark.parametrize("change", ["dtype", "threads", "weights", "attention"])
def test_others_begin_anew(change: str, cache: Path) -> None:
    model = tiny.llama()
    run(selfspec.wrap(model, "suffix"))
    threads = torch.get_num_threads()
    if change == "dtype":
        model = model.to(torch.float64)
    elif change == "threads":
        torch.set_num_threads(threads + 1)
    elif change == "weights":
        model = tiny.llama(num_hidden_layers=3)
    else:
        model.set_attn_implementation("eager")
    try:
        assert not selfspec.wrap(model, "suffix").costs.is_settled(1)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("options", [{"keep_times": False}, {"adaptive": False}])
def test_who_does_not_want_it(options: dict[str, Any], cache: Path) -> None:
    run(selfspec.wrap(tiny.llama(), "suffix", **options))
    assert not cache.exists()


def test_set_to_nothing_there_are_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SELFSPEC_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(StepTimes, "_has_changed", lambda *_: False)
    run(selfspec.wrap(tiny.llama(), "suffix"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("SELFSPEC_CACHE")
    run(selfspec.wrap(tiny.llama(), "suffix"))
    assert len(list((tmp_path / "selfspec" / "times").iterdir())) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"about": 1}', '{"batches": {}}', '{"about": null, "batches": 3}']
)
def test_broken_files_are_passed_over_and_replaced(text: str, cache: Path) -> None:
    model = tiny.llama()
    run(selfspec.wrap(model, "suffix"))
    (file,) = (cache / "times").iterdir()
    good = json.loads(file.read_text())
    file.write_text(text)
    spec = selfspec.wrap(model, "suffix")
    assert not spec.costs.is_settled(1)
    run(spec)
    assert json.loads(file.read_text())["about"] == good["about"]


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("verify", [["many", 0.1]]),
        ("verify", [[1, 0.1]]),
        ("verify", [[1, 0.1], [4, -0.1]]),
        ("plain", "long"),
        ("plain", float("nan")),
        ("levels", [1]),
        ("drafts", {"Some": None}),
    ],
)
def test_times_that_are_none_are_passed_over(what: str, value: object, cache: Path) -> None:
    model = tiny.llama()
    run(selfspec.wrap(model, "suffix"))
    (file,) = (cache / "times").iterdir()
    known = json.loads(file.read_text())
    known["batches"]["1"][what] = value
    file.write_text(json.dumps(known))
    spec = selfspec.wrap(model, "suffix")
    assert not spec.costs.is_settled(1)
    assert spec.costs.plain_seconds(1) is None
    run(spec)


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "file"))
    run(selfspec.wrap(tiny.llama(), "suffix"))
    assert os.listdir(tmp_path) == ["file"]


def test_batches_are_kept_beside_each_other(cache: Path) -> None:
    model = tiny.llama()
    file = TimeFile(model)
    file.write(measured(1))
    again = TimeFile(model)
    again.write(measured(8))
    found = StepTimes()
    TimeFile(model).read(found)
    assert found.has_curve(1)
    assert found.has_curve(8)
    assert not found.has_curve(2)
    (path,) = (cache / "times").iterdir()
    batches = json.loads(path.read_text())["batches"]
    assert set(batches) == {"1", "8"}
    assert set(batches["1"]) == {"plain", "verify", "levels", "drafts"}
    assert batches["1"]["levels"] == {"Other": 0.005}  # one measurement is none
    assert batches["1"]["drafts"] == {"Other": 0.015}


def test_what_was_measured_here_goes_before() -> None:
    costs, told = measured(seconds=0.04), measured(seconds=9.0).to_dict()
    before = costs.verify_points(1)
    costs.begin_with(told)
    assert costs.verify_points(1) == before


def test_prices_are_known_before_the_first_step() -> None:
    costs = StepCosts()
    costs.begin_with(measured().to_dict())
    # A plain step gives a token in 41 ms, and a node takes 1 ms.
    assert costs.verify_prices(1, 8)[8] == pytest.approx(8 * (0.001 / 0.041 + 0.005), rel=0.01)
    assert costs.level_price(1, "Other") == pytest.approx(0.005 / 0.041)
    assert costs.relative(1, 1) == pytest.approx(1.0)


def test_times_of_another_state_of_the_machine_are_forgotten() -> None:
    costs = StepCosts()
    costs.begin_with(measured(seconds=0.4).to_dict())
    for _ in range(8):
        assert costs.plain_seconds(1) is not None
        costs.record(step(1, 0, 0.041))
    assert costs.plain_seconds(1) == pytest.approx(0.041)
    assert not costs.is_settled(1)


def test_files_are_as_old_as_their_last_many_steps(cache: Path) -> None:
    file, costs = TimeFile(tiny.llama()), measured()
    for _ in range(40):
        costs.record(step(1, 0, 0.041))
    file.write(costs)
    (path,) = (cache / "times").iterdir()
    before = path.read_text()
    for _ in range(30):
        costs.record(step(1, 0, 0.05))
    file.write(costs)
    assert path.read_text() == before
    for _ in range(40):
        costs.record(step(1, 0, 0.05))
    file.write(costs)
    assert path.read_text() != before
