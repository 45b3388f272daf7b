"""The script, from prompts to a draft that can be loaded, on a model in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import demo_model
import train_drafts
from selfspec.checkpoints import card_of, load
from selfspec.networks.feature import FeatureNetwork
from tests.training.learnable import target


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(demo_model, "load", lambda name, dtype: (target(), None))
    g = torch.Generator().manual_seed(0)
    with open(tmp_path / "prompts.jsonl", "w") as file:
        for i in range(24):
            ids = torch.randint(2, 64, (2 + i % 5,), generator=g).tolist()
            file.write(json.dumps({"id": i, "prompt_ids": ids}) + "\n")
    return tmp_path


def run(work: Path, step: str, *more: str) -> None:
    train_drafts.main([step, "--work", str(work), *more])


SETTINGS = ["--set", "total_tokens=2000", "dtype=float32", "tokens_per_batch=128", "taps=[1,2]"]


def test_step_by_step(work: Path, capsys: Any) -> None:
    run(work, "answers", "--prompts", str(work / "prompts.jsonl"), "--max-new-tokens", "10")
    assert "24 answers added" in capsys.readouterr().out
    run(work, "answers", "--prompts", str(work / "prompts.jsonl"), "--max-new-tokens", "10")
    assert "0 answers added" in capsys.readouterr().out
    run(work, "states")
    run(work, "train", *SETTINGS, "--license", "Apache-2.0")
    said = capsys.readouterr().out
    assert '"total_tokens": 2000' in said
    assert "held-out acceptance" in said
    network = load(work / "feature" / "best", model=target())
    assert isinstance(network, FeatureNetwork)
    assert network.config.taps == (1, 2)
    card = card_of(network)
    assert card is not None
    assert card.license == "Apache-2.0"
    longer = ["--set", "total_tokens=3000", *SETTINGS[2:]]
    with pytest.raises(SystemExit, match=r"total_tokens=3000 \(before: 2000\).*--initial"):
        run(work, "train", *longer)
    more = ["--initial", str(work / "feature"), "--out", str(work / "longer")]
    run(work, "train", *longer, *more)
    longer_card = card_of(load(work / "longer", model=target()))
    assert longer_card is not None
    losses = [one.evaluation["held_out"]["loss"][0] for one in (card, longer_card)]
    assert losses[1] < losses[0]  # it had seen more


def test_all_at_once_without_states_on_disk(work: Path) -> None:
    run(
        work, "all", "--streamed", "--kind", "exit", "--max-new-tokens", "6", *SETTINGS[:3],
        "exit_layer=2", "--prompts", str(work / "prompts.jsonl"),
    )  # fmt: skip
    assert not (work / "states").exists()
    assert (work / "exit" / "best" / "model.safetensors").is_file()


def test_prompts_are_asked_for(work: Path) -> None:
    with pytest.raises(SystemExit, match="--prompts is missing"):
        run(work, "all")
    with pytest.raises(SystemExit, match=r"nowhere\.jsonl does not exist"):
        run(work, "all", "--prompts", str(work / "nowhere.jsonl"))
    for step in (["states"], ["train", "--streamed"]):
        with pytest.raises(SystemExit, match=r"answers\.jsonl does not exist: let the model"):
            run(work, *step)
    with pytest.raises(SystemExit, match="--threads -1 must be at least 1"):
        run(work, "states", "--threads", "-1")
    with pytest.raises(SystemExit, match="unknown option nonsense"):
        run(work, "train", "--set", "nonsense=1")
