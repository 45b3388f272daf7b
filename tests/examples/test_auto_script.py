"""The benchmark of "auto" on the demo model, with next to nothing of everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import benchmark_auto


def test_every_part_gives_its_figures(tmp_path: Path, capsys: Any) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    rows = [
        {"task": "copy", "prompt": "Say this three times: one two three four five."},
        {"task": "chat", "prompt": "Why is the sky blue?"},
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = "--per-task 1 --tokens 24 --batches 1 2 --rounds 1 --wrong 1 --threads 1"
    benchmark_auto.main(f"--prompts {prompts} --output {out} --dtype float32 {sizes}".split())
    found = json.loads(out.read_text())
    methods = ["auto", "suffix", "feature", *benchmark_auto.THEIRS]
    assert list(found["tasks"]["summary"]) == ["copy", "chat", "all"]
    for task in found["tasks"]["summary"].values():
        assert list(task) == methods
        assert all(0.05 < value < 20 for value in task.values())
    assert found["tasks"]["texts that part from plain"] == 0
    assert found["tasks"]["rows"][0]["tau"]["auto"] >= 1
    assert list(found["batches"]) == ["1", "2", "break-even batch"]
    assert set(found["batches"]["2"]) == {"auto", "auto without off switch"}
    assert found["wrong"]["each"] == [found["wrong"]["speed after the first 20 steps"]]
    assert list(found["oracle"]["summary"]) == ["copy", "chat", "all"]
    for task in found["oracle"]["summary"].values():
        together = task["oracle: together"]
        assert 1 <= max(task["oracle: SuffixDrafter"], task["oracle: FeatureDrafter"]) <= together
        assert 0 < task["share of the oracle of branches"] <= task["share of the oracle"]
        assert 0 < task["simulated"] <= together + 1e-9
    assert found["remembers earlier prompts"] is True
    assert found["machine"]["threads"] == 1
    benchmark_auto.main(["--table", str(out)])
    assert (
        "| task | auto | suffix | feature | transformers: prompt lookup" in capsys.readouterr().out
    )
