"""The GPU script on a CPU: every path runs, whatever its times are worth here."""

import json

import pytest
import torch

from . import gpu, gpu_attention
from .gpu_clock import Clock


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert gpu.main(["--cpu", "--output", str(folder)]) == 0
    return json.loads((folder / "gpu.json").read_text()), (folder / "gpu.md").read_text()


def test_every_section_has_entries(result):
    data, text = result
    assert data["failed"] == {}
    ops = {entry["op"] for entry in data["entries"]}
    assert ops == {
        "tree_attention",
        "row_stats",
        "tree_accept",
        "kv_commit",
        "exit_confidence",
        "draft_topk",
        "step",
    }
    for op in ops:
        assert f"## {op}\n" in text


def test_ours_and_the_peers_that_a_cpu_has_are_timed(result):
    data, _ = result
    for entry in data["entries"]:
        first, *_ = entry["times"]
        assert entry["times"][first]["us"] > 0, entry
        if entry["op"] == "tree_attention":
            for peer in ("transformers", "math", "flex", "copy"):
                assert entry["times"][peer].get("us"), entry["times"][peer]
        elif entry["op"] != "step":
            assert entry["times"]["eager"]["us"] > 0, entry


def test_a_peer_that_fails_says_why(monkeypatch):
    def method(*_):
        raise RuntimeError("not on this card\nand a long story")

    monkeypatch.setattr(gpu_attention, "PEERS", {"broken": method})
    clock = Clock(torch.device("cpu"), 60)
    entry = next(gpu_attention.measurements(clock, True))
    assert entry["times"]["broken"] == {"error": "RuntimeError: not on this card"}


def test_what_comes_too_late_is_left_out():
    clock = Clock(torch.device("cpu"), 0)
    assert clock.measure(lambda: pytest.fail("was run")) == {"error": "left out: no time"}


def test_every_real_case_has_a_name_of_its_own():
    names = [case.name for case in gpu_attention.CASES]
    assert len(set(names)) == len(names)


def test_needs_a_gpu_or_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--cpu"):
        gpu.main([])
