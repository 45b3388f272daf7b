"""The layout of vllm-project/speculators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from selfspec import checkpoints
from tests.checkpoints.drafts import attach, edit_config, feature, logits, write
from tests.checkpoints.test_eagle import CONFIG, TAPS, close, eagle3, eagle3_by_hand
from tests.families import tiny

_OWN = (TAPS, "architectures", "draft_vocab_size")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


def published(folder: Path) -> Path:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 8,
        "norm_before_residual": True,
        TAPS: [1, 3, 2],
        "transformer_layer_config": {k: v for k, v in CONFIG.items() if k not in _OWN},
        "speculators_config": {"verifier": {"name_or_path": "the/base"}},
    }
    return write(folder, config, eagle3("layers.0"))


def test_a_draft_computes_what_its_layout_says(tmp_path: Path) -> None:
    network = checkpoints.load(published(tmp_path))
    assert network.config.taps == (1, 3, 2)
    close(logits(network), eagle3_by_hand(eagle3("layers.0"), "layers.0", norm_before=True))
    card = checkpoints.card_of(network)
    assert card is not None
    assert card.base.name == "the/base"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash' is not known"),
        ({"transformer_layer_config__model_type": "qwen3"}, "model_type='qwen3' is not known"),
        ({"transformer_layer_config": 5}, "lacks transformer_layer_config"),
        ({"norm_before_residual": ...}, "readers have different defaults"),
        ({"fc_norm": True}, "fc_norm of config.json asks for a part"),
        ({"norm_output": True}, "norm_output of config.json asks for a part"),
    ],
)
def test_configs_that_are_not_known(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(published(tmp_path), **changes)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("drafted", [8, None])
@pytest.mark.parametrize("norm_before", [True, False])
def test_an_export_loads_and_computes_the_same(
    tmp_path: Path, model: Any, own: bool, drafted: int | None, norm_before: bool
) -> None:
    network = feature(own_head=own, draft_vocab_size=drafted, norm_before_residual=norm_before)
    attach(network, model)
    checkpoints.export_speculators(network, tmp_path, model, num_draft_tokens=5)
    loaded = checkpoints.load(tmp_path, model=model)
    assert loaded.config.taps == network.config.taps
    assert torch.equal(logits(loaded), logits(network))
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["embed_tokens.weight"], model.model.embed_tokens.weight)
    config = json.loads((tmp_path / "config.json").read_text())
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert (proposal["proposal_type"], proposal["speculative_tokens"]) == ("greedy", 5)
