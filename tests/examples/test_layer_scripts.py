"""The scripts about a model's own layers, from a model that is made to figures, all small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import benchmark_layers
import demo_model
import find_skip_set
import plot_layers
import small_code_model
import train_early_exits
from selfspec.checkpoints import read_skip_set
from tests.training.learnable import answers, target

TEXT = Path(__file__).read_text()


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"VOCAB": 280, "LAYERS": 6, "HIDDEN": 32, "LENGTH": 40}
    for name, value in sizes.items():
        monkeypatch.setattr(small_code_model, name, value)
    for module in (small_code_model, train_early_exits, benchmark_layers):
        monkeypatch.setattr(module, "sources", lambda held_out: [TEXT[:-900], TEXT[900:]])
    monkeypatch.setattr(benchmark_layers, "_CODE_PROMPT", 12)


@pytest.mark.usefixtures("_small")
def test_from_a_model_to_figures(tmp_path: Path, capsys: Any) -> None:
    made, run, layers = tmp_path / "small", tmp_path / "run", tmp_path / "layers.json"
    small_code_model.main(f"--out {made} --tokens 2000 --batch 2 --threads 1".split())
    assert "held out" in capsys.readouterr().out
    settings = "--set total_tokens=3000 tokens_per_batch=256 held_out=0.2"
    files = f"--model {made} --out {run} --output {tmp_path / 'training.json'} --held-out 8"
    train_early_exits.main(f"{files} --threads 1 {settings}".split())
    training = json.loads((tmp_path / "training.json").read_text())
    assert training["config"]["exits"] == [1, 2, 3, 4]
    for name in ("before", "after"):
        rows = training[name]["agreement by exit layer"]
        assert list(rows) == ["1", "2", "3", "4", "5", "6"]
        assert rows["6"] == 1.0
    sizes = "--count 12 --tokens 20 --learn 4 --exits 1 3 --lengths 1 2 --threads 1"
    sizes += " --lossy-exits 1 3"
    benchmark_layers.main(f"--model {run / 'model'} --output {layers} {sizes}".split())
    found = json.loads(layers.read_text())
    assert found["pays"]["layer-skip"]["identical texts"] == 12
    assert found["exits"]["identical texts"] == found["exits"]["of"] == 8 * 6
    assert 0 <= found["calibration"]["expected calibration error"] <= 1
    assert found["lossy"]["splits"] == 200
    assert len(found["lossy"]["thresholds"]) == 16
    paths = f"--training {tmp_path / 'training.json'} --layers {layers} --out {tmp_path / 'plots'}"
    plot_layers.main(paths.split())
    drawn = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert drawn == ["exits.svg", "layers.svg", "reliability.svg"]
    with pytest.raises(SystemExit, match="nothing to draw"):
        plot_layers.main(["--out", str(tmp_path)])


def test_a_search_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(demo_model, "load", lambda name, dtype: (target(), None))
    path = tmp_path / "answers.jsonl"
    rows = [vars(answer) for answer in answers()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = f"--answers {path} --out {tmp_path / 'drafts'} --texts 6 --evaluations 20"
    find_skip_set.main(options.split())
    said = capsys.readouterr().out
    assert "similarity: " in said
    assert "best right" in said
    found = read_skip_set(tmp_path / "drafts")
    assert str(found) in said
    assert found.tried <= 20
    with pytest.raises(SystemExit, match="texts=0"):
        find_skip_set.main([*options.split(), "--texts", "0"])
