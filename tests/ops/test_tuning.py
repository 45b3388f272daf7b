"""The table of launch parameters, and the choice of its rows with a clock that is made up."""

import json
from pathlib import Path

import pytest
import torch
from selfspec_kernels import tuning
from selfspec_kernels.tuning import PARTS, parts, rows, table, using
from selfspec_kernels.tuning.problems import launches
from selfspec_kernels.tuning.search import SPACES, candidates
from selfspec_kernels.tuning.tune import tuned

ROOT = Path(__file__).parents[2]
SHIPPED = json.loads(tuning.TABLE.read_text())
ROW = {"item_size": 2, "width": 64, "m": 16, "n": 64, "warps": 4, "stages": 3, "precision": "ieee"}


def test_the_shipped_table_is_as_the_tuner_writes_it():
    assert tuning.TABLE.read_text() == table.formatted(SHIPPED)


@pytest.mark.parametrize("op", SHIPPED)
def test_every_part_has_rows_none_twice(op):
    assert list(SHIPPED[op]) == list(PARTS)
    for found in SHIPPED[op].values():
        assert found
        assert all(row not in found[:i] for i, row in enumerate(found))


@pytest.mark.parametrize(
    ("capability", "part"),
    [(70, "sm_80"), (80, "sm_80"), (86, "sm_86"), (89, "sm_89"), (90, "sm_90"), (121, "sm_120")],
)
def test_nearest_part(capability, part):
    assert parts.nearest_part(capability) == part


def test_stand_ins_end_with_their_block():
    shipped = rows("tree_attention", "sm_90")
    with using("tree_attention", "sm_90", [ROW]):
        assert rows("tree_attention", "sm_90") == [ROW]
        assert rows("tree_attention", "sm_80") == SHIPPED["tree_attention"]["sm_80"]
    assert rows("tree_attention", "sm_90") == shipped


def test_candidates_vary_what_is_free_and_nothing_else():
    found = candidates("tree_attention", ROW)
    assert found[0] == ROW
    assert len(found) == len({json.dumps(row, sort_keys=True) for row in found})
    for row in found:
        assert row.keys() == ROW.keys()
        assert {name for name in row if row[name] != ROW[name]} <= SPACES["tree_attention"].keys()
    assert {**ROW, "n": 16, "warps": 8, "stages": 1} in found


def few(op, part, row):
    """Three candidates, without compiling any."""
    yield from ((candidate, None) for candidate in candidates(op, row)[:3])


def clock(times):
    """A timer that gives these in turn, over and over, and checks which rows are in use."""
    calls = []

    def timer(op, row):
        assert rows(op, "sm_90") == [row]
        calls.append(row)
        return times[(len(calls) - 1) % len(times)]

    return timer


@pytest.mark.parametrize(
    ("times", "chosen", "ratio"),
    [
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([2.0, 1.0, 3.0], 1, 0.5),
        ([2.0, 1.5, 1.0], 2, 0.5),
        ([1.0, 0.99, 3.0], 0, 1.0),
    ],
    ids=["stays", "second", "third", "noise"],
)
def test_the_fastest_row_is_chosen(times, chosen, ratio):
    result = list(tuned("tree_attention", "sm_90", clock(times), few))
    assert [old for old, _, _ in result] == rows("tree_attention", "sm_90")
    for old, new, found in result:
        assert new == candidates("tree_attention", old)[chosen]
        assert found == ratio


def test_a_row_that_does_not_pass_gives_way():
    def sieve(op, part, row):
        yield from list(few(op, part, row))[1:]

    for old, new, _ in tuned("tree_attention", "sm_90", clock([5.0, 4.0]), sieve):
        assert new == candidates("tree_attention", old)[2]


def test_nothing_passes():
    for old, new, _ in tuned("tree_attention", "sm_90", clock([1.0]), lambda *_: iter(())):
        assert new == old


def test_rows_are_replaced_in_the_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(tuning.TABLE.read_text())
    new = [new for _, new, _ in tuned("tree_attention", "sm_90", clock([2.0, 1.0, 3.0]), few)]
    table.replace("tree_attention", "sm_90", new, path)
    after = json.loads(path.read_text())
    assert after["tree_attention"].pop("sm_90") == new
    assert after["tree_attention"] == {
        part: found for part, found in SHIPPED["tree_attention"].items() if part != "sm_90"
    }
    assert path.read_text().count("\n") == tuning.TABLE.read_text().count("\n")
    table.replace("tree_attention", "sm_90", SHIPPED["tree_attention"]["sm_90"], path)
    assert path.read_text() == tuning.TABLE.read_text()


def test_a_new_op_is_written_in_the_order_of_parts(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{}\n")
    for part in ("gfx942", "sm_80"):
        table.replace("some_op", part, [{"m": 1}], path)
    assert list(json.loads(path.read_text())["some_op"]) == ["sm_80", "gfx942"]


@pytest.mark.parametrize("op", SPACES)
def test_what_the_tuner_times_runs(op):
    for row in SHIPPED[op]["sm_90"][:1]:
        for launch in launches(op, row, torch.device("cpu"), divisor=64):
            launch()


def test_tune_needs_a_gpu(monkeypatch):
    from selfspec_kernels.tuning.__main__ import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        main(["tune", "--op", "tree_attention"])


def test_the_readme_shows_what_the_gate_found():
    from selfspec_kernels.tuning.__main__ import summary
    from selfspec_kernels.tuning.gate import Report

    found = json.loads((ROOT / "tests" / "benchmarks" / "results" / "gate.json").read_text())
    reports = [Report(**entry) for entry in found["configurations"]]
    assert all(report.faults == [] for report in reports)
    assert {report.part for report in reports} == set(PARTS)
    readme = (ROOT / "kernels" / "README.md").read_text()
    assert summary(reports) in readme
    assert f"Triton {found['triton']}" in readme
