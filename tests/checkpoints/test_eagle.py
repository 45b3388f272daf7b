"""EAGLE's layouts, from files written by hand and back to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from selfspec import FeatureDrafter, checkpoints
from selfspec.checkpoints import BaseModel
from tests.checkpoints.drafts import (
    IDS,
    SIZE,
    VOCAB,
    attach,
    eagle_layer,
    edit_config,
    edit_tensors,
    exit_,
    feature,
    heads,
    inputs,
    layer_by_hand,
    logits,
    random,
    rms,
    write,
)
from tests.families import tiny

TAPS = "eagle_aux_hidden_state_layer_ids"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "draft_vocab_size": len(IDS),
    TAPS: [1, 3, 2],
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


def eagle3(layer: str = "midlayer") -> dict[str, Tensor]:
    """An EAGLE-3 draft as it is published; the head's rows in order of ids."""
    tensors = eagle_layer(layer, 2 * SIZE)
    for i, name in enumerate(("input_layernorm", "hidden_norm")):
        tensors[f"{layer}.{name}.weight"] = 1 + random(SIZE, seed=40 + i)
    tensors |= {
        "fc.weight": random(SIZE, 3 * SIZE, seed=50) / 4,
        "norm.weight": 1 + random(SIZE, seed=51),
        "lm_head.weight": random(len(IDS), SIZE, seed=52),
        "d2t": IDS - torch.arange(len(IDS)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True),
    }
    return tensors


def eagle3_by_hand(t: dict[str, Tensor], layer: str, norm_before: bool = False) -> Tensor:
    embedded, states = inputs(SIZE)[0], inputs(3 * SIZE, 1)[0]
    features = states @ t["fc.weight"].T
    normed = rms(features, t[f"{layer}.hidden_norm.weight"], 1e-3)
    x = torch.cat([rms(embedded, t[f"{layer}.input_layernorm.weight"], 1e-3), normed], -1)
    out = layer_by_hand(t, layer, x, normed if norm_before else features, 500.0, 1e-3)
    return rms(out, t["norm.weight"], 1e-3) @ t["lm_head.weight"].T


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.squeeze(0), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
@pytest.mark.parametrize("norm_before", [False, True])
def test_eagle3_computes_what_its_layout_says(
    tmp_path: Path, layer: str, norm_before: bool, file: str
) -> None:
    tensors = eagle3(layer)
    write(tmp_path, {**CONFIG, "norm_before_residual": norm_before}, tensors, file)
    network = checkpoints.load(tmp_path)
    assert network.config.taps == (1, 3, 2)
    assert torch.equal(network.head.ids, IDS)
    close(logits(network), eagle3_by_hand(tensors, layer, norm_before))


def test_a_draft_vocabulary_in_another_order_is_sorted(tmp_path: Path) -> None:
    tensors = eagle3()
    truth = eagle3_by_hand(tensors, "midlayer")
    shuffle = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    tensors["d2t"] = IDS[shuffle] - torch.arange(len(IDS))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][shuffle]
    network = checkpoints.load(write(tmp_path, CONFIG, tensors))
    assert torch.equal(network.head.ids, IDS)
    close(logits(network), truth)


def test_which_layers_are_read(tmp_path: Path, model: Any) -> None:
    outer = {k: v for k, v in CONFIG.items() if k != TAPS}
    write(tmp_path, {**outer, "eagle_config": {TAPS: [0, 2, 1]}}, eagle3())
    assert checkpoints.load(tmp_path).config.taps == (1, 3, 2)  # ids of outputs
    edit_config(tmp_path, eagle_config=...)
    with pytest.raises(ValueError, match=r"does not say which layers are read\. Pass model="):
        checkpoints.load(tmp_path)
    assert checkpoints.load(tmp_path, model=model).config.taps == (2, 2, 1)
    edit_config(tmp_path, **{TAPS: [1, 2]})
    with pytest.raises(ValueError, match=r"fc fuses 3 states, and .* names \[1, 2\]"):
        checkpoints.load(tmp_path)
    edit_config(tmp_path, eagle_config={TAPS: [1, 3, 2]}, **{TAPS: [1, 3, 2]})
    with pytest.raises(ValueError, match="Remove the one that is wrong"):
        checkpoints.load(tmp_path)


def test_the_targets_head_is_meant_where_there_is_none(tmp_path: Path, model: Any) -> None:
    tensors = eagle3()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    write(tmp_path, CONFIG, tensors)
    with pytest.raises(ValueError, match="missing d2t, with a draft vocabulary of 8 tokens of 64"):
        checkpoints.load(tmp_path)
    edit_config(tmp_path, draft_vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        checkpoints.load(tmp_path)
    edit_config(tmp_path, draft_vocab_size=...)
    network = checkpoints.load(tmp_path)
    assert not network.config.own_head
    attach(network, model)
    tensors["lm_head.weight"] = model.lm_head.weight.detach()
    close(logits(network), eagle3_by_hand(tensors, "midlayer"))


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("biases", [False, True])
def test_eagle_computes_what_its_layout_says(
    tmp_path: Path, model: Any, biases: bool, prefix: str
) -> None:
    tensors = eagle_layer("layers.0", SIZE, biases)
    tensors["fc.weight"] = random(SIZE, 2 * SIZE, seed=60)
    if biases:
        tensors["fc.bias"] = random(SIZE, seed=61)
    truth = _eagle_by_hand(tensors, model)
    embeddings = model.model.embed_tokens.weight.detach()
    published = {
        prefix + name: t for name, t in {**tensors, "embed_tokens.weight": embeddings}.items()
    }
    config = {
        k: v for k, v in CONFIG.items() if k not in ("architectures", "draft_vocab_size", TAPS)
    }
    write(tmp_path, config, published, "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"reads the model's last layer\. Pass model="):
        checkpoints.load(tmp_path)
    network = checkpoints.load(tmp_path, model=model)
    assert (network.config.layout, network.config.taps) == ("eagle", (4,))
    assert not [name for name in network.state_dict() if "embed" in name or "head" in name]
    attach(network, model)
    states, embedded = inputs(SIZE, 1), inputs(SIZE)
    assert network.fuse(states) is states
    assert embedded.shape == states.shape
    close(logits(network), truth)
    # The embeddings of the file tell the base.
    other = tiny.llama()
    other.model.embed_tokens.weight.data += 0.1
    with pytest.raises(ValueError, match="sampled weights of the input embeddings differ"):
        checkpoints.load(tmp_path, model=other)
    assert checkpoints.load(tmp_path, model=other, strict_base=False)


def _eagle_by_hand(t: dict[str, Tensor], model: Any) -> Tensor:
    x = torch.cat([inputs(SIZE)[0], inputs(SIZE, 1)[0]], -1) @ t["fc.weight"].T
    x = x + t.get("fc.bias", torch.zeros(SIZE))
    out = layer_by_hand(t, "layers.0", x, x, 500.0, 1e-3)
    return (out @ model.lm_head.weight.T).detach()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"norm_before_fc": True}, "norm_before_fc of config.json asks for a part"),
        ({"target_hidden_size": 32}, "hidden_size=64 is not the target's, 32"),
        ({"intermediate_size": ...}, "lacks intermediate_size"),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple"),
        ({"num_key_value_heads": 4}, r"midlayer\.self_attn\.k_proj\.weight has shape \[48, 128\]"),
        ({TAPS: [1, 2, 99]}, "reads layer 99, and the model has 4"),
    ],
)
def test_configs_that_do_not_fit(
    tmp_path: Path, model: Any, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path, CONFIG, eagle3())
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path, model=model)


def test_rotary_parameters_in_every_spelling(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    write(tmp_path, {**CONFIG, "rope_parameters": scaled}, eagle3())
    new = checkpoints.load(tmp_path)
    edit_config(tmp_path, rope_parameters=..., rope_scaling={"type": "linear", "factor": 2.0})
    old = checkpoints.load(tmp_path)
    assert old.config.rope == new.config.rope == scaled
    assert torch.equal(old.rotary.embedding.inv_freq, new.rotary.embedding.inv_freq)
    edit_config(tmp_path, rope_scaling=..., rope_theta=...)
    assert checkpoints.load(tmp_path).config.rope == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("drafted", [len(IDS), None])
def test_an_export_loads_and_computes_the_same(
    tmp_path: Path, model: Any, drafted: int | None, own: bool
) -> None:
    network = feature(own_head=own, draft_vocab_size=drafted)
    attach(network, model)
    checkpoints.export_eagle3(network, tmp_path, model)
    loaded = checkpoints.load(tmp_path, model=model)
    assert loaded.config.taps == network.config.taps
    assert torch.equal(logits(loaded), logits(network))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["lm_head.weight"].shape == (drafted or VOCAB, SIZE)
    assert "embed_tokens.weight" not in saved
    # What engines look at.
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == (drafted or VOCAB)
    assert config[TAPS] == [1, 3, 2]
    assert config["eagle_config"][TAPS] == [0, 2, 1]
    if drafted:
        assert torch.equal(saved["d2t"] + torch.arange(drafted), IDS)
        assert torch.equal(saved["t2d"].nonzero().flatten(), IDS)


def test_engines_read_the_config_as_a_llama(tmp_path: Path, model: Any) -> None:
    from transformers import AutoConfig

    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    checkpoints.export_eagle3(feature(rope=rope), tmp_path, model)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == "LlamaConfig"
    assert config.rope_parameters == rope
    assert (config.head_dim, config.num_key_value_heads) == (24, 2)
    assert config.eagle_config["use_aux_hidden_state"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "eagle", "taps": (4,)}, "layout='eagle'; only 'eagle3' can be exported"),
        ({"taps": (1, 2)}, r"taps=\(1, 2\), and engines fuse 3"),
        ({"bias": True}, "biases"),
        ({"fusion_bias": True}, "biases"),
        ({"hidden_size": 32}, "hidden_size=32 and reads embeddings of 64"),
    ],
)
def test_networks_that_no_engine_serves(
    tmp_path: Path, model: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        checkpoints.export_eagle3(feature(**changes), tmp_path, model)
    assert not list(tmp_path.iterdir())


def test_only_the_network_of_its_kind_is_written(tmp_path: Path, model: Any) -> None:
    drafter: Any = FeatureDrafter(feature())
    for other in (heads(), exit_(), drafter):
        for export in (checkpoints.export_eagle3, checkpoints.export_speculators):
            with pytest.raises(TypeError, match=r"takes a FeatureNetwork, got a .*`network`"):
                export(other, tmp_path, model)
    for count in (0, 1.5, "x", True):
        with pytest.raises(ValueError, match=f"num_draft_tokens={count!r} must be an int"):
            checkpoints.export_speculators(feature(), tmp_path, model, count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"norm_before_residual": True}, {"taps": (0, 1, 2)}, {"taps": (1, 2, 4)}]
)
def test_what_only_some_engines_serve_is_logged(
    tmp_path: Path, model: Any, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.export_eagle3(feature(), tmp_path, model)
    assert not caplog.records
    checkpoints.export_eagle3(feature(**changes), tmp_path, model)
    assert "SGLang may compute something else" in caplog.text


def test_an_export_needs_the_base(tmp_path: Path, model: Any) -> None:
    checkpoints.save(feature(), tmp_path / "own", base=model)
    network = checkpoints.load(tmp_path / "own")
    other = tiny.llama()
    other.model.embed_tokens.weight.data += 0.1
    with pytest.raises(ValueError, match="sampled weights of the input embeddings differ"):
        checkpoints.export_eagle3(network, tmp_path / "out", other)
    assert BaseModel.of(model) == BaseModel.of(tiny.llama())


def test_further_keys_are_named_as_in_the_file(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, eagle3())
    edit_tensors(tmp_path, lambda t: t.update({"midlayer.self_attn.o_proj.bias": torch.zeros(64)}))
    with pytest.raises(ValueError, match=r"unknown midlayer\.self_attn\.o_proj\.bias"):
        checkpoints.load(tmp_path)
