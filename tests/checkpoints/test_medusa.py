"""Medusa's layouts, from files written by hand and back to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from selfspec import checkpoints
from tests.checkpoints.drafts import (
    IDS,
    SIZE,
    VOCAB,
    attach,
    feature,
    heads,
    inputs,
    logits,
    random,
    write,
)
from tests.families import tiny

HEADS, BLOCKS = 3, 2


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


def medusa(prefix: str = "") -> dict[str, Tensor]:
    tensors = {}
    for k in range(HEADS):
        for i in range(BLOCKS):
            tensors[f"{prefix}{k}.{i}.linear.weight"] = random(SIZE, SIZE, seed=9 * k + i)
            tensors[f"{prefix}{k}.{i}.linear.bias"] = random(SIZE, seed=90 + 9 * k + i)
        tensors[f"{prefix}{k}.{BLOCKS}.weight"] = random(VOCAB, SIZE, seed=190 + k)
    return tensors


def medusa_by_hand(t: dict[str, Tensor], prefix: str = "") -> Tensor:
    found = []
    for k in range(HEADS):
        x = inputs(SIZE)
        for i in range(BLOCKS):
            block = f"{prefix}{k}.{i}.linear"
            x = x + silu(x @ t[f"{block}.weight"].T + t[f"{block}.bias"])
        found.append(x @ t[f"{prefix}{k}.{BLOCKS}.weight"].T)
    return torch.stack(found)


def vllm(biases: bool, drafted: bool) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in medusa().items():
        k, i, *rest = name.split(".")
        if rest[0] == "linear" and (biases or rest[1] == "weight"):
            tensors[f"blocks.{k}.layers.{i}.{rest[1]}"] = tensor
        if rest[0] == "weight":
            tensors[f"lm_heads.{k}.weight"] = tensor[IDS] if drafted else tensor
    return tensors


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_computes_what_its_layout_says(tmp_path: Path, prefix: str, file: str) -> None:
    tensors = medusa(prefix)
    # The published configs name fewer heads than there are, and no sizes.
    config = {"medusa_num_heads": 2, "medusa_num_layers": BLOCKS, "base_model_name_or_path": "b"}
    network = checkpoints.load(write(tmp_path, config, tensors, file))
    torch.testing.assert_close(logits(network), medusa_by_hand(tensors, prefix))
    card = checkpoints.card_of(network)
    assert card is not None
    assert (card.base.name, card.base.shape["vocab_size"]) == ("b", VOCAB)


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_vllms_medusa_computes_what_its_layout_says(
    tmp_path: Path, biases: bool, drafted: bool
) -> None:
    tensors = vllm(biases, drafted)
    config: dict[str, Any] = {"model_type": "medusa", "hidden_size": SIZE, "vocab_size": VOCAB}
    config |= {"num_heads": HEADS, "num_hidden_layers": BLOCKS, "medusa_fc_bias": biases}
    if drafted:
        shuffle = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
        tensors["token_map"] = IDS[shuffle]
        for k in range(HEADS):
            tensors[f"lm_heads.{k}.weight"] = tensors[f"lm_heads.{k}.weight"][shuffle]
        config["truncated_vocab_size"] = len(IDS)
    network = checkpoints.load(write(tmp_path, config, tensors))
    truth = medusa()
    for name in truth:
        if name.endswith("bias") and not biases:
            truth[name].zero_()
    expected = medusa_by_hand(truth)
    torch.testing.assert_close(logits(network), expected[..., IDS] if drafted else expected)


def test_a_map_picks_rows_of_whole_heads(tmp_path: Path) -> None:
    tensors = {**vllm(True, False), "token_map": IDS}
    config = {"model_type": "medusa", "vocab_size": VOCAB, "truncated_vocab_size": len(IDS)}
    network = checkpoints.load(write(tmp_path, {**config, "medusa_fc_bias": True}, tensors))
    torch.testing.assert_close(logits(network), medusa_by_hand(medusa())[..., IDS])


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"medusa_num_heads": 4}, {}, r"missing 3\.0\.linear\.weight; missing 3\.0\.linear\.bias"),
        ({"medusa_num_heads": 3}, {"1.1.linear.bias": None}, r"missing 1\.1\.linear\.bias"),
        ({"medusa_num_heads": 3}, {"2.2.weight": None}, r"missing 2\.2\.weight"),
        ({"medusa_num_heads": 3}, {"1.0.up.weight": torch.zeros(1)}, r"unknown 1\.0\.up\.weight"),
        (
            {"medusa_num_heads": 3},
            {"0.2.weight": torch.zeros(63, SIZE)},
            r"1\.2\.weight has shape \[64, 64\], expected \[63, 64\]",
        ),
        (
            {"medusa_num_heads": 3, "truncated_vocab_size": 8},
            {},
            "truncated_vocab_size is 8 of vocab_size=64, and token_map has no tokens",
        ),
    ],
)
def test_heads_that_do_not_fit(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    tensors = {n: t for n, t in {**medusa(), **change}.items() if t is not None}
    write(tmp_path, config, tensors, "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("layout", ["vllm", "medusa"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("drafted", [len(IDS), None])
def test_an_export_loads_and_computes_the_same(
    tmp_path: Path, model: Any, layout: Any, own: bool, drafted: int | None
) -> None:
    network = heads(conditioned=False, own_head=own, draft_vocab_size=drafted)
    attach(network, model)
    if layout == "medusa" and drafted:
        with pytest.raises(ValueError, match=r"drafts 8 tokens of 64.*use layout='vllm'"):
            checkpoints.export_medusa(network, tmp_path, model, layout)
        return
    checkpoints.export_medusa(network, tmp_path, model, layout)
    assert not list(tmp_path.glob("*.pt"))
    assert not list(tmp_path.glob("*.bin"))
    loaded = checkpoints.load(tmp_path, model=model)
    attach(loaded, model)
    assert torch.equal(logits(loaded), logits(network))


def test_what_vllm_looks_at(tmp_path: Path, model: Any) -> None:
    checkpoints.export_medusa(heads(conditioned=False), tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["MedusaModel"], "medusa")
    # Its config class takes any field with these words for the number of heads or of layers.
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    assert [key for key in config if "num" in key and "layers" in key] == ["num_hidden_layers"]
    assert config["medusa_fc_bias"]
    assert config["original_lm_head"]
    assert (config["truncated_vocab_size"], config["vocab_size"]) == (len(IDS), VOCAB)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["token_map"], IDS)
    assert torch.equal(saved["lm_head.weight"], model.lm_head.weight[IDS])
    assert saved["blocks.2.layers.1.weight"].shape == (SIZE, SIZE)


def test_heads_that_cannot_be_exported(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ValueError, match="conditioned heads, which no engine's layout has"):
        checkpoints.export_medusa(heads(), tmp_path, model)
    with pytest.raises(ValueError, match="layout='onnx' must be"):
        checkpoints.export_medusa(heads(conditioned=False), tmp_path, model, "onnx")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a HeadsNetwork, got a FeatureNetwork"):
        checkpoints.export_medusa(feature(), tmp_path, model)  # type: ignore[arg-type]
    checkpoints.save(heads(conditioned=False), tmp_path / "own", base=model)
    network = checkpoints.load(tmp_path / "own")
    with pytest.raises(ValueError, match="num_hidden_layers is 4 for the draft and 2"):
        checkpoints.export_medusa(network, tmp_path, tiny.llama(num_hidden_layers=2))
