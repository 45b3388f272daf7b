"""Checkpoints of trained drafts: H1, H3, H4, H6, H12, H13 and H15 of the table in README.md."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from selfspec import checkpoints
from tests.checkpoints.drafts import (
    IDS,
    MAKE,
    VOCAB,
    attach,
    edit_config,
    edit_tensors,
    feature,
    heads,
    logits,
    write,
)
from tests.checkpoints.test_eagle import CONFIG, close, eagle3, eagle3_by_hand
from tests.families import tiny

# Of each kind: a key of its weights, and one that another version might have called it.
KEYS = {
    "feature": "post_attention_layernorm.weight",
    "heads": "blocks.1.0.linear.weight",
    "exit": "mlp.up_proj.weight",
}


@pytest.fixture
def saved(tmp_path: Path, model: Any) -> Path:
    checkpoints.save(feature(), tmp_path, base=model)
    return tmp_path


@pytest.mark.parametrize("kind", MAKE)
def test_h1_a_draft_of_a_tied_model_has_none_of_its_weights(tmp_path: Path, kind: str) -> None:
    gpt2: Any = tiny.build("gpt2")
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
    network = MAKE[kind](own_head=False)
    attach(network, gpt2)
    checkpoints.save(network, tmp_path, base=gpt2)
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(network.state_dict())
    rows = {tuple(row) for row in gpt2.lm_head.weight.tolist()}
    for tensor in found.values():
        assert tensor.ndim < 2 or not rows & {tuple(row) for row in tensor.tolist()}
    loaded = checkpoints.load(tmp_path, model=gpt2)
    attach(loaded, gpt2)
    assert torch.equal(logits(loaded), logits(network))


def test_h1_a_weight_of_the_model_in_the_network_is_refused(tmp_path: Path, model: Any) -> None:
    network = heads(own_head=True, draft_vocab_size=None)
    network.heads[2].weight = model.lm_head.weight
    with pytest.raises(ValueError, match=r"heads\.2\.weight is the base model's lm_head\.weight"):
        checkpoints.save(network, tmp_path, base=model)
    assert not list(tmp_path.iterdir())


def _reshaped(tensors: dict[str, Any], name: str) -> None:
    tensors[name] = tensors[name][:-1].clone()


CHANGES: dict[str, Any] = {
    r"missing {}[^;]*\.": lambda t, n: t.pop(n),
    r"missing {}; unknown {}_1": lambda t, n: t.update({n + "_1": t.pop(n)}),
    r"unknown {}_2": lambda t, n: t.update({n + "_2": t[n].clone()}),
    r"{} has shape \[\d+(, \d+)?\], expected \[\d+(, \d+)?\]": _reshaped,
    r"{} is torch.int64, expected torch.float32": lambda t, n: t.update({n: t[n].long()}),
}


@pytest.mark.parametrize("message", CHANGES)
@pytest.mark.parametrize("kind", MAKE)
def test_h3_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, model: Any, kind: str, message: str
) -> None:
    checkpoints.save(MAKE[kind](), tmp_path, base=model)
    name = KEYS[kind]
    edit_tensors(tmp_path, lambda t: CHANGES[message](t, name))
    with pytest.raises(ValueError, match=message.replace("{}", name.replace(".", r"\."))):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"missing fc\.weight"),
        (lambda t: t.pop("norm.weight"), r"missing norm\.weight"),
        (lambda t: t.pop("lm_head.weight"), r"missing lm_head\.weight"),
        (lambda t: t.pop("d2t"), "missing d2t"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), r"missing midlayer\.hidden_norm\.weight"),
        (lambda t: t.update({"norms": t.pop("norm.weight")}), "missing norm.weight; unknown norms"),
        (lambda t: _reshaped(t, "norm.weight"), r"norm\.weight has shape \[63\], expected \[64\]"),
        (lambda t: _reshaped(t, "lm_head.weight"), r"lm_head\.weight has shape \[7, 64\]"),
    ],
)
def test_h3_published_weights_are_held_as_strictly(
    tmp_path: Path, change: Any, message: str
) -> None:
    write(tmp_path, CONFIG, eagle3())
    edit_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path)


def test_h4_draft_tokens_are_the_tokens_that_were_meant(tmp_path: Path) -> None:
    tensors = eagle3()
    network = checkpoints.load(write(tmp_path, CONFIG, tensors))
    drafted = network.head.tokens(logits(network).argmax(-1))[0]
    best = eagle3_by_hand(tensors, "midlayer").argmax(-1)
    assert drafted.tolist() == [int(IDS[i]) for i in best]
    assert network.head.indices()[IDS].tolist() == list(range(len(IDS)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["d2t"].add_(1), r"outside 0\.\.63"),  # the last is token 64 now
        (lambda t: t["d2t"].sub_(1), r"outside 0\.\.63"),
        (lambda t: t["d2t"][3].sub_(1), "t2d and d2t do not name the same tokens"),
        (lambda t: t["t2d"][5].logical_not_(), "t2d and d2t do not name the same tokens"),
        # Ids in place of differences, as another reader may want them.
        (lambda t: t["d2t"].copy_(IDS), "outside"),
        (lambda t: t.update(t2d=torch.ones(40, dtype=torch.bool)), r"outside 0\.\.39"),
    ],
)
def test_h4_maps_that_lead_elsewhere_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path, CONFIG, eagle3())
    edit_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize(
    "ids",
    [[0, 3, 4, 9, 17, 18, 40, 64], [3, 0, 4, 9, 17, 18, 40, 63], [0, 0, 4, 9, 17, 18, 40, 63]],
)
def test_h4_ids_of_the_own_format_are_ids_of_the_model(saved: Path, ids: list[int]) -> None:
    edit_tensors(saved, lambda t: t.update({"head.ids": torch.tensor(ids)}))
    with pytest.raises(ValueError, match=r"head\.ids: ids must be ascending and within 0\.\.63"):
        checkpoints.load(saved)


@pytest.mark.parametrize("vocab", [48, 72])
def test_h4_another_vocabulary_is_another_model(saved: Path, vocab: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size is 64 for the draft and {vocab} in the mode"):
        checkpoints.load(saved, model=tiny.llama(vocab_size=vocab))


def test_h6_the_states_that_are_read_are_written_down(saved: Path) -> None:
    taps = json.loads((saved / "config.json").read_text())["taps"]
    assert taps == {
        "convention": "input of the layer; L: output of the last layer, before the final norm",
        "layers": [1, 3, 2],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps__convention": "output of the layer"}, r"taps\.convention must be 'input of the la"),
        ({"taps__convention": ...}, r"taps\.convention must be"),
        ({"taps__layers": [0, 2, 1]}, r"taps\.layers is \[0, 2, 1\], and the network reads \[1, 3"),
        ({"network__taps": [1, 3, 5]}, "reads layer 5, and the base model has 4"),
    ],
)
def test_h6_other_states_are_refused(saved: Path, changes: Any, message: str) -> None:
    edit_config(saved, **changes)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(saved)


def test_h6_taps_are_the_inputs_of_layers_when_they_are_exported(
    tmp_path: Path, model: Any
) -> None:
    """vLLM's ids name the input of a layer, SGLang's the output: the same states by both."""
    name = "eagle_aux_hidden_state_layer_ids"
    checkpoints.export_eagle3(feature(), tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    seen: dict[str, list[Any]] = {"in": [], "out": []}
    layers = model.model.layers
    hooks = [
        layer.register_forward_pre_hook(lambda _, a: seen["in"].append(a[0])) for layer in layers
    ]
    hooks += [
        layer.register_forward_hook(lambda _, a, out: seen["out"].append(out)) for layer in layers
    ]
    model(torch.arange(5)[None])
    for hook in hooks:
        hook.remove()
    for tap, vllm, sglang in zip(
        feature().config.taps, config[name], config["eagle_config"][name], strict=True
    ):
        assert torch.equal(seen["in"][tap], seen["in"][vllm])
        assert torch.equal(seen["in"][tap], seen["out"][sglang])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2 of the format is not known.*Upgrade selfspec"),
        ({"version": ...}, "version None of the format is not known"),
        ({"kind": "lookahead"}, "kind 'lookahead' is not known, only feature, heads, exit"),
        ({"network__layout": "eagle9"}, "layout='eagle9' must be 'eagle3' or 'eagle'"),
        ({"network__window": 5}, "network: unknown window"),
        ({"network__taps": ...}, "network: missing taps"),
        ({"base": ...}, "missing base"),
        ({"base__hash": 1}, r"unknown fields \['hash'\]"),
        ({"tree": []}, "unknown tree"),
        ({"format": "selfspec-draft-2"}, "format 'selfspec-draft-2' is not known"),
    ],
)
def test_h12_an_unknown_layout_is_an_error(saved: Path, changes: Any, message: str) -> None:
    edit_config(saved, **changes)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(saved)


@pytest.mark.parametrize("kind", MAKE)
def test_h13_configs_without_what_came_later_get_defaults(
    tmp_path: Path, model: Any, kind: str
) -> None:
    plain: dict[str, Any] = {
        "own_head": type(MAKE[kind]().config).__dataclass_fields__["own_head"].default
    }
    network = MAKE[kind](**plain)
    checkpoints.save(network, tmp_path, base=model, license="mit")
    for name in ("license", "selfspec_version", "training", "evaluation"):
        edit_config(tmp_path, **{name: ...})
    edit_config(
        tmp_path, base__embedding=..., base__name=..., taps__layers=..., network__own_head=...
    )
    edit_tensors(tmp_path, lambda t: None)  # a file without our header
    loaded = checkpoints.load(tmp_path, model=model)
    assert loaded.config == network.config
    card = checkpoints.card_of(loaded)
    assert card is not None
    assert (card.license, card.training, card.evaluation) == (None, {}, {})


def test_h13_an_old_eagle_config_has_no_draft_vocabulary(tmp_path: Path) -> None:
    optional = ("draft_vocab_size", "num_key_value_heads", "head_dim", "hidden_act", "rope_scaling")
    tensors = eagle3()
    tensors["midlayer.self_attn.k_proj.weight"] = tensors[
        "midlayer.self_attn.q_proj.weight"
    ].clone()
    tensors["midlayer.self_attn.v_proj.weight"] = tensors[
        "midlayer.self_attn.q_proj.weight"
    ].clone()
    write(tmp_path, {k: v for k, v in CONFIG.items() if k not in optional}, tensors)
    config = checkpoints.load(tmp_path).config
    assert (config.draft_vocab_size, config.num_key_value_heads, config.head_dim) == (8, 4, 24)
    write(tmp_path, CONFIG, eagle3())
    close(logits(checkpoints.load(tmp_path)), eagle3_by_hand(eagle3(), "midlayer"))


def test_h15_a_vocabulary_that_was_resized_is_refused_and_its_new_weights_are_used(
    tmp_path: Path, model: Any
) -> None:
    network = heads(conditioned=False, own_head=False)
    checkpoints.save(network, tmp_path / "own", base=model)
    resized = copy.deepcopy(model)
    resized.resize_token_embeddings(VOCAB + 8)
    with pytest.raises(
        ValueError, match=r"vocab_size is 64 for the draft and 72 in the model.*strict"
    ):
        checkpoints.load(tmp_path / "own", model=resized)
    loaded = checkpoints.load(tmp_path / "own", model=resized, strict_base=False)
    # An export takes the rows that the model has now.
    resized.lm_head.weight.data += 1
    checkpoints.export_medusa(loaded, tmp_path / "out", resized)
    rows = load_file(tmp_path / "out/model.safetensors")["lm_head.weight"]
    assert torch.equal(rows, resized.lm_head.weight[IDS])
