"""Where drafts are found."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from selfspec import checkpoints
from tests.checkpoints.drafts import MAKE, edit_config, feature, heads, logits, write
from tests.checkpoints.test_medusa import medusa
from tests.families import tiny


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """As loaded from a folder with nothing beside it yet."""
    model = tiny.llama()
    model.config._name_or_path = str(tmp_path / "home")
    return model


def save_all(folder: Path, model: Any) -> None:
    for kind, make in MAKE.items():
        checkpoints.save(make(), folder / kind, base=model)


def test_drafts_beside_the_model_are_found(tmp_path: Path, model: Any) -> None:
    assert checkpoints.find_drafts(model) == {}
    save_all(tmp_path / "home/drafts", model)
    found = checkpoints.find_drafts(model)
    assert list(found) == ["feature", "heads", "exit"]
    model.config._name_or_path = ""
    assert checkpoints.find_drafts(model) == {}


def test_one_draft_beside_the_model(tmp_path: Path, model: Any) -> None:
    checkpoints.save(feature(), tmp_path / "home/drafts", base=model)
    found = checkpoints.find_drafts(model)
    assert list(found) == ["feature"]
    assert torch.equal(logits(found["feature"]), logits(feature()))


def test_what_lies_beside_and_does_not_fit_is_left_out(
    tmp_path: Path, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.save(heads(), tmp_path / "home/drafts", base=model)
    tuned = copy.deepcopy(model)
    tuned.model.embed_tokens.weight.data += 0.1
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        assert checkpoints.find_drafts(tuned) == {}
    assert "a draft beside the model is not used" in caplog.text
    with pytest.raises(ValueError, match="strict_base=False"):  # asked for, it is an error
        checkpoints.find_drafts(tuned, drafts=tmp_path / "home/drafts")
    assert list(checkpoints.find_drafts(tuned, strict_base=False)) == ["heads"]


def test_a_broken_draft_beside_the_model_leaves_the_others(
    tmp_path: Path, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(tmp_path / "home/drafts", model)
    (tmp_path / "home/drafts/feature/config.json").write_text("{")
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        assert list(checkpoints.find_drafts(model)) == ["heads", "exit"]
    assert "feature/config.json is no JSON" in caplog.text


def test_named_drafts_come_before_those_beside(tmp_path: Path, model: Any) -> None:
    save_all(tmp_path / "home/drafts", model)
    other = write(tmp_path / "m", {"medusa_num_heads": 3}, medusa(), "medusa_lm_head.pt")
    found = checkpoints.find_drafts(model, drafts=str(other))
    assert list(found) == ["heads"]
    assert found["heads"].config.own_head


def test_one_of_several(tmp_path: Path, model: Any) -> None:
    save_all(tmp_path, model)
    assert list(checkpoints.load_all(tmp_path, model=model)) == ["feature", "heads", "exit"]
    with pytest.raises(ValueError, match="several drafts: choose kind= from feature, heads, exit"):
        checkpoints.load(tmp_path)
    assert type(checkpoints.load(tmp_path, kind="exit")).__name__ == "ExitNetwork"
    shutil.rmtree(tmp_path / "exit")
    with pytest.raises(ValueError, match="no draft of kind='exit', only feature, heads"):
        checkpoints.load(tmp_path, kind="exit")
    (tmp_path / "heads").rename(tmp_path / "exit")
    with pytest.raises(ValueError, match="exit holds a draft of kind 'heads': rename the folder"):
        checkpoints.load_all(tmp_path)


def test_the_folder_of_a_training_run(tmp_path: Path, model: Any) -> None:
    """Its best draft, by the folder of the run and by the one that has several runs."""
    save_all(tmp_path, model)
    for kind in ("feature", "heads"):
        run = tmp_path / "runs" / kind
        run.mkdir(parents=True)
        (tmp_path / kind).rename(run / "best")
        (run / "log.jsonl").write_text("")
    assert list(checkpoints.load_all(tmp_path / "runs", model=model)) == ["feature", "heads"]
    assert list(checkpoints.load_all(tmp_path / "runs" / "heads")) == ["heads"]
    (tmp_path / "runs" / "heads").rename(tmp_path / "runs" / "exit")
    with pytest.raises(ValueError, match="best holds a draft of kind 'heads': rename the folder"):
        checkpoints.load_all(tmp_path / "runs")


def test_places_without_drafts(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ValueError, match=r"holds no drafts: looked for config\.json, feature/con"):
        checkpoints.load(tmp_path)
    with pytest.raises(ValueError, match="is no folder, and no name of a repository"):
        checkpoints.load(tmp_path / "missing")
    with pytest.raises(ValueError, match="is no folder, and no name of a repository"):
        checkpoints.load("./missing/folder")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ValueError, match=r"holds no weights: looked for model\.safetensors, model\."
    ):
        checkpoints.load(tmp_path)
    torch.save({"model.norm.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no draft in a layout that is known"):
        checkpoints.load(tmp_path)
    edit_config(tmp_path, format="other", version=1)
    with pytest.raises(ValueError, match="format 'other' is not known"):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_a_repository_is_fetched_without_what_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    write(tmp_path, {"medusa_num_heads": 3}, medusa(), file)
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoints.load("someone/heads").config.num_heads == 3
    assert asked[0] == (
        "someone/heads",
        ["*.json", "*.safetensors", "*/*.json", "*/*.safetensors"],
    )
    assert len(asked) == (1 if file.endswith("safetensors") else 2)
    assert all(not p.endswith((".bin", ".pt")) for p in asked[0][1])


def test_a_repository_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, allow_patterns: list[str]) -> str:
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match="'some/where' is no folder, and cannot be fetched: off"):
        checkpoints.load("some/where")


def test_shards_are_read_and_stay_in_their_folder(tmp_path: Path) -> None:
    import json

    tensors = medusa()
    names = sorted(tensors)
    for i, part in enumerate((names[:5], names[5:])):
        write(tmp_path, {}, {n: tensors[n] for n in part}, f"model-{i}.safetensors")
    index = {"weight_map": {n: f"model-{int(n not in names[:5])}.safetensors" for n in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    assert checkpoints.load(tmp_path).config.num_heads == 3
    index["weight_map"][names[0]] = "../model-0.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"must name \.safetensors files of this"):
        checkpoints.load(tmp_path)


def test_a_network_is_checked_when_a_wrapper_meets_it(tmp_path: Path, model: Any) -> None:
    checkpoints.check_network(heads(), model)
    checkpoints.save(heads(), tmp_path, base=model)
    tuned = copy.deepcopy(model)
    tuned.model.embed_tokens.weight.data += 0.1
    network = checkpoints.load(tmp_path)
    checkpoints.check_network(network, model)
    with pytest.raises(ValueError, match="strict_base=False"):
        checkpoints.check_network(copy.deepcopy(network), tuned)
    checkpoints.check_network(checkpoints.load(tmp_path, strict_base=False), tuned)
