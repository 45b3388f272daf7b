"""MTP modules: loading what a checkpoint ships, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, modeling_layers

import selfspec
from tests.families import tiny
from tests.mtp import GREEDY, HAS_MTP, made, trained

# Transformers knows such keys by the layer counts of the published models alone.
KEYS = [r"model\.layers\.2.*", r"model\.layers\.3.*"]


def saved(folder: Path, model: Any, module: Any) -> None:
    """Save a model and its MTP module as checkpoints of GLM have them: one more layer."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    names = {"post_norm": "shared_head.norm"}
    for name, value in module.layers.state_dict().items():
        number, rest = name.split(".", 1)
        part, weight = rest.removeprefix("mtp_block.").rsplit(".", 1)
        key = f"model.layers.{2 + int(number)}.{names.get(part, part)}"
        if part == "mlp.experts":
            for i, expert in enumerate(value):
                split = {"down_proj": expert}
                if weight == "gate_up_proj":
                    split = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
                for what, one in split.items():
                    weights[f"{key}.{i}.{what}.weight"] = one.contiguous()
        else:
            weights[f"{key}.{weight}"] = value.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class TestCheckpoints:
    """Loading what a checkpoint ships."""

    __test__ = HAS_MTP

    def test_by_name_and_by_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, module = trained("glm4_moe", 2)
        saved(tmp_path, model, module)
        monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", KEYS)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        other = copy.deepcopy(model)
        other._keys_to_ignore_on_load_unexpected = KEYS
        name = other.config.name_or_path
        drafter = selfspec.MtpDrafter.from_model(other, str(tmp_path), max_draft_tokens=2)
        assert other.config.name_or_path == name
        for key, value in drafter.mtp_model.layers.state_dict().items():
            assert torch.equal(value, module.layers.state_dict()[key])
        stats = []
        for spec in (selfspec.wrap(loaded, "mtp"), selfspec.wrap(other, drafter)):
            spec.generate(**tiny.prompts(3), **GREEDY)
            stats.append((spec.stats.accepted, spec.stats.drafted))
        assert stats[0] == stats[1]
        assert stats[0][0] > 4

    def test_weights_are_missing(self, tmp_path: Path) -> None:
        model = copy.deepcopy(made("glm4_moe"))
        model._keys_to_ignore_on_load_unexpected = KEYS
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"could not be loaded from .*missing"):
            selfspec.MtpDrafter.from_model(model, str(tmp_path))

    def test_there_is_no_checkpoint(self) -> None:
        with pytest.raises(ValueError, match="could not be loaded from ''"):
            selfspec.wrap(tiny.build("glm4_moe"), "mtp")

    def test_keys_are_unknown(self) -> None:
        model = copy.deepcopy(tiny.build("glm4_moe"))
        model._keys_to_ignore_on_load_unexpected = None
        with pytest.raises(ValueError, match="knows no keys of MTP weights"):
            selfspec.wrap(model, "mtp")

    def test_model_has_none(self) -> None:
        with pytest.raises(
            ValueError, match=r"LlamaForCausalLM has no MTP module: .*num_mtp_layers"
        ):
            selfspec.wrap(tiny.build("llama"), "mtp")


class TestRefusals:
    """Modules that do not fit."""

    __test__ = HAS_MTP

    def test_of_another_model(self) -> None:
        _, module = trained("glm4_moe", 1)
        with pytest.raises(ValueError, match=r"embeddings \(64, 64\); .* are \(64, 96\)"):
            selfspec.wrap(tiny.build("llama_gqa3"), selfspec.MtpDrafter(module))

    def test_attention_without_masks(self) -> None:
        model, module = trained("glm4_moe", 1)
        other = copy.deepcopy(module)
        other.config._attn_implementation = "flex_attention"
        with pytest.raises(ValueError, match="set_attn_implementation"):
            selfspec.wrap(model, selfspec.MtpDrafter(other))

    def test_layers_that_see_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What we compute is compared with what transformers computes, once a model."""
        model, module = trained("glm4_moe", 1)
        other = copy.deepcopy(module)
        layer = type(other.layers[0])
        forward = layer.forward

        def blind(self: Any, *args: Any, attention_mask: Any, **kwargs: Any) -> Any:
            unmasked = attention_mask is not None and attention_mask.dtype == torch.bool
            mask = torch.ones_like(attention_mask) if unmasked else attention_mask
            return forward(self, *args, attention_mask=mask, **kwargs)

        monkeypatch.setattr(layer, "forward", blind)
        with pytest.raises(ValueError, match="mtp_model cannot be driven"):
            selfspec.wrap(model, selfspec.MtpDrafter(other))

    def test_layer_types(self) -> None:
        model, module = trained("glm4_moe", 1)
        other = copy.deepcopy(module)
        other.config.layer_types = ["linear_attention"]
        with pytest.raises(ValueError, match="linear_attention"):
            selfspec.wrap(model, selfspec.MtpDrafter(other))


def test_transformers_without_mtp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(modeling_layers, "MtpModel", raising=False)
    with pytest.raises(ValueError, match=r"needs a transformers with MtpModel, as 5\.24"):
        selfspec.wrap(tiny.build("llama"), "mtp")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_draft_tokens": 0}, ValueError),
        ({"max_draft_tokens": 2.0}, TypeError),
        ({"confidence": 2}, ValueError),
        ({"branches": 65}, ValueError),
        ({"do_sample": 1}, TypeError),
        ({"mtp_model": nn.Linear(2, 2)}, TypeError),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        selfspec.MtpDrafter(**options)
