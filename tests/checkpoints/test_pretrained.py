"""Saving, loading and sharing drafters."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from selfspec import checkpoints
from selfspec.drafters.early_exit import EarlyExitDrafter
from selfspec.drafters.feature import FeatureDrafter
from selfspec.drafters.heads import HeadsDrafter
from tests.checkpoints.drafts import exit_, feature, heads, logits
from tests.families import tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.mark.parametrize(
    ("cls", "make"),
    [(FeatureDrafter, feature), (HeadsDrafter, heads), (EarlyExitDrafter, exit_)],
)
def test_a_drafter_is_saved_and_loaded(tmp_path: Path, model: Any, cls: Any, make: Any) -> None:
    network = make(own_head=True)
    cls(network=network).save_pretrained(tmp_path, base=model, license="mit")
    drafter = cls.from_pretrained(tmp_path, model=model, do_sample=True)
    assert type(drafter) is cls
    assert drafter.do_sample
    assert torch.equal(logits(drafter.network), logits(network))
    drafter.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["license"] == "mit"


def test_a_drafter_without_a_network_cannot_be_saved(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ValueError, match="nothing to save"):
        EarlyExitDrafter().save_pretrained(tmp_path, base=model)


def test_a_drafter_takes_its_kind(tmp_path: Path, model: Any) -> None:
    checkpoints.save(exit_(), tmp_path, base=model)
    with pytest.raises(ValueError, match="no draft of kind='heads', only exit"):
        HeadsDrafter.from_pretrained(tmp_path)


def test_a_drafter_for_another_model_is_refused(tmp_path: Path, model: Any) -> None:
    HeadsDrafter(heads()).save_pretrained(tmp_path, base=model)
    tuned = tiny.llama()
    tuned.model.embed_tokens.weight.data += 0.1
    with pytest.raises(ValueError, match="strict_base=False"):
        HeadsDrafter.from_pretrained(tmp_path, model=tuned)
    assert HeadsDrafter.from_pretrained(tmp_path, model=tuned, strict_base=False)


def test_a_drafter_is_pushed(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: Any) -> None:
            seen["token"] = token

        def create_repo(self, repo_id: str, private: Any, exist_ok: bool) -> Any:
            seen.update(private=private, exist_ok=exist_ok)
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> str:
            seen["files"] = sorted(p.name for p in Path(folder_path).iterdir())
            seen["loaded"] = checkpoints.load(folder_path)
            return f"https://hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    drafter = HeadsDrafter(heads())
    address = drafter.push_to_hub("draft", base=model, private=True, token="t", license="mit")
    assert address == "https://hub/me/draft"
    assert seen["files"] == ["config.json", "model.safetensors"]
    assert (seen["token"], seen["private"], seen["exist_ok"]) == ("t", True, True)
    assert seen["loaded"].config == drafter.network.config
