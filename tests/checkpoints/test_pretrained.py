"""Saving, loading and sharing drafters."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
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
from selfspec.drafters.named import _BY_NAME
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


class Hub:
    """Stands in for the Hub."""

    seen: dict[str, Any]
    has_card = False

    def __init__(self, token: Any) -> None:
        self.seen["token"] = token

    def create_repo(self, repo_id: str, private: Any, exist_ok: bool) -> Any:
        self.seen.update(private=private, exist_ok=exist_ok)
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def file_exists(self, repo_id: str, filename: str) -> bool:
        assert (repo_id, filename) == ("me/draft", "README.md")
        return self.has_card

    def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> str:
        self.seen["files"] = {p.name: p.read_bytes() for p in Path(folder_path).iterdir()}
        self.seen["loaded"] = checkpoints.load(folder_path)
        return f"https://hub/{repo_id}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "seen", {}, raising=False)
    return Hub


def test_a_drafter_is_pushed(model: Any, hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "has_card", True)
    drafter, seen = HeadsDrafter(heads()), hub.seen
    address = drafter.push_to_hub("draft", base=model, private=True, token="t", license="mit")
    assert address == "https://hub/me/draft"
    assert sorted(seen["files"]) == ["config.json", "model.safetensors"]
    assert (seen["token"], seen["private"], seen["exist_ok"]) == ("t", True, True)
    assert seen["loaded"].config == drafter.network.config


@pytest.mark.parametrize("make", [feature, heads, exit_])
@pytest.mark.parametrize("name", ["org/base", "folder", ""])
def test_a_repository_without_a_card_is_given_one(hub: type[Hub], make: Any, name: str) -> None:
    held_out = {"acceptance": [0.75, 0.5], "positions": 1200}
    base = replace(checkpoints.BaseModel.of(tiny.llama()), name=name)
    cls = {feature: FeatureDrafter, heads: HeadsDrafter, exit_: EarlyExitDrafter}[make]
    cls(network=make()).push_to_hub(
        "draft",
        base=base,
        license="apache-2.0",
        training={"learning_rate": 0.002},
        evaluation={"held_out": held_out},
    )
    page = huggingface_hub.ModelCard(hub.seen["files"]["README.md"].decode())
    assert page.data.base_model == (name if "/" in name else None)
    assert (page.data.license, page.data.library_name) == ("apache-2.0", "selfspec")
    assert "| 1 | 0.750 |\n| 2 | 0.500 |\n" in page.text
    assert "| learning_rate | 0.002 |" in page.text
    (code,) = re.findall("```python\n(.*?)```", page.text, re.DOTALL)
    call: Any = ast.parse(code).body[-1]
    call = call.value
    _, drafter = (ast.unparse(argument) for argument in call.args)
    assert _BY_NAME[ast.literal_eval(drafter)] is cls
    assert ast.literal_eval(call.keywords[0].value) == "me/draft"


def test_a_card_tells_what_is_known(hub: type[Hub], model: Any) -> None:
    HeadsDrafter(heads()).push_to_hub("draft", base=model)
    text = huggingface_hub.ModelCard(hub.seen["files"]["README.md"].decode()).text
    assert "None" not in text
    assert "Held-out" not in text
    assert "Training" not in text
