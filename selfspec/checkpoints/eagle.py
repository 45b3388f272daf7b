"""EAGLE's layouts: EAGLE-1 and 2 and EAGLE-3 read, EAGLE-3 written as vLLM and SGLang serve it.

Names and fields as published by SafeAILab/EAGLE, vllm-project/vllm and sgl-project/sglang (all
Apache-2.0). One decoder layer called `midlayer` (EAGLE-3) or `layers.0`; `d2t` has for every draft
token how much greater its id is than its index, `t2d` marks the tokens that can be drafted.

Two conventions of layer ids exist. Ids of the config itself, as vLLM reads them, name the layer
whose input is read, as `taps` do here. Ids inside `eagle_config`, as SGLang reads them, name the
layer whose output is read: one less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec.checkpoints.base_model import BaseModel, check_base, head_rows, sample
from selfspec.checkpoints.folder import (
    CONFIG,
    WEIGHTS,
    Card,
    card_of,
    check_kind,
    check_vocabulary,
    with_card,
)
from selfspec.checkpoints.tensors import fill, write_folder
from selfspec.networks.feature import FeatureConfig, FeatureNetwork

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedModel

logger = logging.getLogger("selfspec")

IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Parts that later drafts have and this network has not; each is a flag of their config.
_UNKNOWN_PARTS = ("add_para_norm", "norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
_SERVED_TAPS = 3
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads")


def read_eagle(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    where: object,
    num_layers: int | None = None,
) -> FeatureNetwork:
    """Make a network of a published draft.

    Args:
        config: Its config.json, flat.
        tensors: Its weights. The copy of the target's embeddings that some have is compared with
            the base model's later and otherwise dropped.
        where: The folder, for messages.
        num_layers: L of the target; needed if the config does not say which layers are read.

    Returns:
        The network, with a card that says what is known of the base model.

    Raises:
        ValueError: If something is missing, unknown, or does not fit.
    """
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    _refuse_unknown(config, where)
    embedding = tensors.pop(EMBEDDING, None)
    ids = _draft_ids(tensors, config, where)
    if ids is not None and HEAD in tensors and not bool((ids[1:] > ids[:-1]).all()):
        order = ids.argsort()
        ids, tensors[HEAD] = ids[order], tensors[HEAD][order]
    layer = "midlayer" if any(n.startswith("midlayer.") for n in tensors) else "layers.0"
    found = _config(config, tensors, layer, ids, where, num_layers)
    network = FeatureNetwork(found)
    names = foreign_names(network, layer)
    if ids is not None:
        tensors |= {names["head.ids"]: ids}
    fill(network, tensors, where, names)
    check_vocabulary(network, where)
    base = BaseModel(
        shape={"hidden_size": found.target_hidden_size, "vocab_size": found.vocab_size},
        embedding=sample(embedding, found.vocab_size),
    )
    with_card(network, Card(base, source=str(where)))
    return network


def foreign_names(network: FeatureNetwork, layer: str) -> dict[str, str]:
    """From names in the network's state to those of a layout whose decoder layer is `layer`."""
    renamed = {"head.weight": HEAD, "head.ids": "d2t"}
    in_attention = ("q_proj.", "k_proj.", "v_proj.", "o_proj.")
    in_layer = ("input_layernorm.", "hidden_norm.", "post_attention_layernorm.", "mlp.")
    for name in network.state_dict():
        if name.startswith(in_attention):
            renamed[name] = f"{layer}.self_attn.{name}"
        elif name.startswith(in_layer):
            renamed[name] = f"{layer}.{name}"
        else:
            renamed.setdefault(name, name)
    return renamed


def _refuse_unknown(config: Mapping[str, Any], where: object) -> None:
    missing = [name for name in _REQUIRED if name not in config]
    if missing:
        raise ValueError(f"{where}: config.json lacks {', '.join(missing)}.")
    parts = [name for name in _UNKNOWN_PARTS if config.get(name)]
    if parts:
        raise ValueError(
            f"{where}: {', '.join(parts)} of config.json asks for a part that this version of "
            "selfspec has not. Without it the draft would be wrong."
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"{where}: hidden_act={activation!r} is not known, only 'silu'.")


def _draft_ids(
    tensors: dict[str, Tensor], config: Mapping[str, Any], where: object
) -> Tensor | None:
    """Take `d2t` and `t2d` out of `tensors`: int64 [Vd] ids in the order of the head, or None."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        drafted, vocab = config.get("draft_vocab_size"), config.get("vocab_size")
        if t2d is not None or drafted not in (None, vocab):
            raise ValueError(
                f"{where}: missing d2t, with a draft vocabulary of {drafted} tokens of {vocab}. "
                "Without it draft tokens mean other tokens."
            )
        return None
    ids = d2t.long() + torch.arange(len(d2t))
    vocab_size = len(t2d) if t2d is not None else int(config.get("vocab_size", 0))
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(
            f"{where}: d2t leads to ids {ids.tolist()[:1]}... outside 0..{vocab_size - 1}; it must "
            "hold differences between the id of a token and its index."
        )
    if t2d is not None:
        marked = t2d.bool().nonzero().flatten()
        if not torch.equal(marked, ids.sort().values):
            raise ValueError(f"{where}: t2d and d2t do not name the same tokens.")
    return ids


def _config(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    layer: str,
    ids: Tensor | None,
    where: object,
    num_layers: int | None,
) -> FeatureConfig:
    """Sizes, of the config where it has them and of the tensors where it has not."""
    size, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    target_size = int(config.get("target_hidden_size") or size)
    if target_size != size:
        raise ValueError(
            f"{where}: hidden_size={size} is not the target's, {target_size}; such a draft has "
            "embeddings of its own, which this version of selfspec does not load."
        )
    if "fc.weight" not in tensors:
        raise ValueError(f"{where}: missing fc.weight, so this is no EAGLE draft.")
    eagle3 = _is_eagle3(config, tensors, layer)
    width = tensors["fc.weight"].shape[-1]
    taps = _taps(config, width // size, num_layers, where) if eagle3 else _last(num_layers, where)
    own_head = HEAD in tensors
    # Where the whole vocabulary can be drafted and no size is given the target's head is meant.
    if eagle3 and not own_head and (ids is not None or config.get("draft_vocab_size") is not None):
        raise ValueError(f"{where}: missing {HEAD}.")
    query = tensors.get(f"{layer}.self_attn.q_proj.weight")
    head_dim = config.get("head_dim") or (size if query is None else len(query)) // heads
    try:
        return FeatureConfig(
            target_hidden_size=size,
            vocab_size=_vocab_size(config, ids, tensors, where),
            taps=taps,
            hidden_size=size,
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            draft_vocab_size=None if ids is None else len(ids),
            own_head=own_head,
            layout="eagle3" if eagle3 else "eagle",
            norm_before_residual=eagle3 and bool(config.get("norm_before_residual", False)),
            bias=f"{layer}.self_attn.q_proj.bias" in tensors,
            fusion_bias="fc.bias" in tensors,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=int(config.get("max_position_embeddings") or 2048),
            rope=_rope(config, where),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _is_eagle3(config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str) -> bool:
    named = any("eagle3" in str(a).lower() for a in config.get("architectures") or ())
    marks = {"norm.weight", HEAD, f"{layer}.hidden_norm.weight"}
    return named or layer == "midlayer" or bool(marks & set(tensors))


def _vocab_size(
    config: Mapping[str, Any], ids: Tensor | None, tensors: Mapping[str, Tensor], where: object
) -> int:
    if "vocab_size" in config:
        return int(config["vocab_size"])
    if ids is None and HEAD in tensors:
        return len(tensors[HEAD])
    raise ValueError(f"{where}: config.json lacks vocab_size.")


def _taps(
    config: Mapping[str, Any], count: int, num_layers: int | None, where: object
) -> tuple[int, ...]:
    """Layers whose input is read, see the top of this file."""
    outer = config.get(IDS)
    inner = (config.get("eagle_config") or {}).get(IDS)
    inner = inner and [i + 1 for i in inner]
    if outer and inner and list(outer) != inner:
        raise ValueError(
            f"{where}: {IDS} is {outer}, and {inner} by eagle_config (ids of outputs, plus one). "
            "Remove the one that is wrong."
        )
    taps = outer or inner
    if not taps:
        if num_layers is None:
            raise ValueError(
                f"{where}: config.json does not say which layers are read. Pass model=, the model "
                "that is drafted for: the usual ones are counted from its last."
            )
        taps = (2, num_layers // 2, num_layers - 3)
    if len(taps) != count:
        raise ValueError(f"{where}: fc fuses {count} states, and {IDS} names {list(taps)}.")
    return tuple(int(tap) for tap in taps)


def _last(num_layers: int | None, where: object) -> tuple[int, ...]:
    if num_layers is None:
        raise ValueError(
            f"{where}: an EAGLE draft reads the model's last layer. Pass model=, the model that is "
            "drafted for."
        )
    return (num_layers,)


def _rope(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("type", None) or "default"
    rope.setdefault("rope_type", kind)
    rope.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor must be 1, others are not known here.")
    return rope


def served(
    network: FeatureNetwork, model: PreTrainedModel, layer: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and flat config of a network as engines serve it.

    Args:
        network: Of layout "eagle3".
        model: Its base model; lends the rows of its LM head if the network uses them.
        layer: What the decoder layer is called.

    Raises:
        TypeError: If it is another network.
        ValueError: If no engine serves such a network, or `model` is not its base.
    """
    check_kind(network, "feature", "the layout")
    c = network.config
    if c.layout != "eagle3":
        raise ValueError(f"network has layout={c.layout!r}; only 'eagle3' can be exported.")
    if len(c.taps) != _SERVED_TAPS:
        raise ValueError(f"network reads taps={c.taps}, and engines fuse {_SERVED_TAPS} states.")
    if c.bias or c.fusion_bias:
        raise ValueError("network has biases (bias, fusion_bias), which engines do not serve.")
    if c.hidden_size != c.target_hidden_size:
        raise ValueError(
            f"network has hidden_size={c.hidden_size} and reads embeddings of "
            f"{c.target_hidden_size}; engines serve networks as wide as their target."
        )
    card = card_of(network)
    if card is not None:
        check_base(card.base, model, card.strict_base)
    text = model.config.get_text_config(decoder=True)
    if c.norm_before_residual or {0, text.num_hidden_layers} & set(c.taps):
        logger.warning(
            "norm_before_residual=%s and taps=%s of %d layers: vLLM serves this draft, SGLang may "
            "compute something else.",
            c.norm_before_residual,
            c.taps,
            text.num_hidden_layers,
        )
    ids = network.head.ids
    tensors = {
        theirs: network.state_dict()[ours]
        for ours, theirs in foreign_names(network, layer).items()
        if ours in network.state_dict() and ours not in getattr(network, "optional_keys", ())
    }
    if not c.own_head:
        tensors[HEAD] = head_rows(model, ids, c.vocab_size).to(network.fc.weight.dtype)
    if ids is not None:
        ids = ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        marked = torch.zeros(c.vocab_size, dtype=torch.bool)
        tensors["t2d"] = marked.index_fill(0, ids, True)
    special = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id")}
    scaling = {key: value for key, value in c.rope.items() if key != "rope_theta"}
    dtype = str(network.fc.weight.dtype).removeprefix("torch.")
    config = {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_positions,
        # Three spellings of one thing, for transformers before 5 and since.
        "rope_theta": c.rope["rope_theta"],
        "rope_scaling": None if c.rope["rope_type"] == "default" else scaling,
        "rope_parameters": dict(c.rope),
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        **{name: value for name, value in special.items() if value is not None},
    }
    return tensors, config


def export_eagle3(
    network: FeatureNetwork, folder: str | PathLike[str], model: PreTrainedModel
) -> Path:
    """Write a network in the layout of EAGLE-3, as vLLM and SGLang serve it.

    The engines use the target's embeddings; the LM head is written in full. What only some of them
    serve (`norm_before_residual`, and taps before the first layer or behind the last) is logged.

    Args:
        network: Of layout "eagle3" with three taps, no biases, and as wide as the target.
        folder: Is made if need be.
        model: The base model.

    Returns:
        The folder.

    Raises:
        TypeError: If it is another network.
        ValueError: If no engine serves such a network, or `model` is not its base.
    """
    tensors, config = served(network, model, "midlayer")
    c = network.config
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **config,
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        "bias": False,
        IDS: list(c.taps),
        "eagle_config": {"use_aux_hidden_state": True, IDS: [tap - 1 for tap in c.taps]},
    }
    return write_folder(Path(folder), (CONFIG, values), (WEIGHTS, tensors))
