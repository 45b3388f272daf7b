"""Medusa's layouts: those of FasterDecoding/Medusa and of vLLM read and written.

Names as published by FasterDecoding/Medusa and vllm-project/vllm (both Apache-2.0). In the former,
`k.i.linear` is residual block i of head k and `k.n` its LM head, n being the number of blocks, with
or without `medusa_head.` in front; in the latter, `blocks.k.layers.i` and `lm_heads.k`, or one
`lm_head` for all, and `token_map` has the draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from selfspec.checkpoints.base_model import BaseModel, check_base, head_rows
from selfspec.checkpoints.folder import (
    CONFIG,
    WEIGHTS,
    Card,
    card_of,
    check_kind,
    check_vocabulary,
    with_card,
)
from selfspec.checkpoints.tensors import SAFE, fill, write_folder
from selfspec.networks.heads import HeadsConfig, HeadsNetwork

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedModel

STEM = "medusa_lm_head"
Layout = Literal["vllm", "medusa"]
_BLOCK = {
    "medusa": re.compile(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)"),
    "vllm": re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)"),
}
_HEAD = {
    "medusa": re.compile(r"(\d+)\.\d+\.weight"),
    "vllm": re.compile(r"lm_heads\.(\d+)\.weight"),
}
_ONE_HEAD, _MAP = "lm_head.weight", "token_map"


def read_medusa(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: object
) -> HeadsNetwork:
    """Make a network of a published draft.

    How many heads there are the weights say: published configs are known to name fewer. A config
    that names more is refused. One LM head for all is the target's by definition of the layout, so
    that it is not kept.

    Args:
        config: Its config.json.
        tensors: Its weights.
        where: The folder, for messages.

    Returns:
        The network, with a card that says what is known of the base model.

    Raises:
        ValueError: If something is missing, unknown, or does not fit.
    """
    found = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in tensors.items()}
    vllm = any(name.startswith(("blocks.", "lm_head")) for name in found)
    layout: Layout = "vllm" if vllm else "medusa"
    blocks = [tuple(map(int, m.groups())) for n in found if (m := _BLOCK[layout].fullmatch(n))]
    heads = [int(m[1]) for n in found if (m := _HEAD[layout].fullmatch(n))]
    stated = int(config.get("medusa_num_heads") or config.get("num_heads") or 0)
    num_heads = max([stated, *(head + 1 for head in heads), *(block[0] + 1 for block in blocks)])
    num_layers = max((block[1] + 1 for block in blocks), default=0)
    one = found.pop(_ONE_HEAD, None)
    states = [one, *(tensor for tensor in found.values() if tensor.ndim == 2)]
    matrix = next((tensor for tensor in states if tensor is not None), None)
    if not (heads or blocks) or matrix is None:
        raise ValueError(f"{where}: no weight is named as in a Medusa draft.")
    size = int(matrix.shape[1])
    rows = next((found[n] for n in found if _HEAD[layout].fullmatch(n)), one)
    vocab_size = int(config.get("vocab_size") or (0 if rows is None else len(rows)))
    ids = _draft_ids(found, config, vocab_size, where)
    network = HeadsNetwork(
        HeadsConfig(
            hidden_size=size,
            vocab_size=vocab_size,
            num_heads=num_heads,
            num_layers=num_layers,
            conditioned=False,
            own_head=one is None,
            draft_vocab_size=None if ids is None else len(ids),
        )
    )
    names = foreign_names(network, layout)
    if vllm and not config.get("medusa_fc_bias", False):
        for name in names.values():
            if name.endswith(".bias"):
                found.setdefault(name, torch.zeros(size, dtype=matrix.dtype))
    fill(network, found, where, names)
    check_vocabulary(network, where)
    base = BaseModel(
        name=str(config.get("base_model_name_or_path") or ""),
        shape={"hidden_size": size, "vocab_size": vocab_size},
    )
    with_card(network, Card(base, source=str(where)))
    return network


def foreign_names(network: HeadsNetwork, layout: Layout) -> dict[str, str]:
    """From names in the network's state to those of a layout."""
    last = network.config.num_layers
    block, head = (
        (r"blocks.\1.layers.\2.", r"lm_heads.\1.weight")
        if layout == "vllm"
        else (r"\1.\2.linear.", rf"\1.{last}.weight")
    )
    renamed = {}
    for name in network.state_dict():
        theirs = re.sub(r"^blocks\.(\d+)\.(\d+)\.linear\.", block, name)
        theirs = re.sub(r"^heads\.(\d+)\.weight$", head, theirs)
        renamed[name] = re.sub(r"^heads\.\d+\.ids$", _MAP, theirs)
    return renamed


def _draft_ids(
    found: dict[str, Tensor], config: Mapping[str, Any], vocab_size: int, where: object
) -> Tensor | None:
    """Bring `token_map` into ascending order, and the rows of the LM heads with it."""
    ids = found.get(_MAP)
    size = int(config.get("truncated_vocab_size") or vocab_size)
    if size != (vocab_size if ids is None else len(ids)):
        raise ValueError(
            f"{where}: truncated_vocab_size is {size} of vocab_size={vocab_size}, and token_map "
            f"has {'no' if ids is None else len(ids)} tokens."
        )
    if ids is None:
        return None
    order = ids.long().argsort()
    for name, tensor in found.items():
        if _HEAD["vllm"].fullmatch(name):  # of all rows, or of those that are drafted
            found[name] = tensor[ids.long()[order]] if len(tensor) > len(ids) else tensor[order]
    found[_MAP] = ids.long()[order]
    return found[_MAP]


def export_medusa(
    network: HeadsNetwork,
    folder: str | PathLike[str],
    model: PreTrainedModel,
    layout: Layout = "vllm",
) -> Path:
    """Write heads in a layout that engines serve.

    Args:
        network: Heads that are not conditioned.
        folder: Is made if need be.
        model: The base model; lends its LM head if the heads use it.
        layout: "vllm", or "medusa": that of FasterDecoding, as text-generation-inference and
            TensorRT-LLM read it, where every head has an LM head over the whole vocabulary.

    Returns:
        The folder.

    Raises:
        TypeError: If it is another network.
        ValueError: If the layout has no such network, or `model` is not its base.
    """
    check_kind(network, "heads", "the layout")
    c = network.config
    if layout not in ("vllm", "medusa"):
        raise ValueError(f"layout={layout!r} must be 'vllm' or 'medusa'.")
    if c.conditioned:
        raise ValueError(
            "network has conditioned heads, which no engine's layout has: train heads with "
            "conditioned=False to export them."
        )
    if c.draft_vocab_size is not None and layout == "medusa":
        raise ValueError(
            f"network drafts {c.draft_vocab_size} tokens of {c.vocab_size}, which layout='medusa' "
            "cannot say: use layout='vllm'."
        )
    card = card_of(network)
    if card is not None:
        check_base(card.base, model, card.strict_base)
    state = network.state_dict()
    optional = getattr(network, "optional_keys", ())
    names = foreign_names(network, layout).items()
    tensors = {theirs: state[ours] for ours, theirs in names if ours not in optional}
    if not c.own_head:
        rows = head_rows(model, network.head(0).ids, c.vocab_size)
        rows = rows.to(next((p.dtype for p in network.parameters()), rows.dtype))
        if layout == "vllm":
            tensors[_ONE_HEAD] = rows
        else:
            tensors |= {f"{k}.{c.num_layers}.weight": rows for k in range(c.num_heads)}
    values = _vllm_config(network) if layout == "vllm" else _medusa_config(network, model)
    weights = WEIGHTS if layout == "vllm" else f"{STEM}{SAFE}"
    return write_folder(Path(folder), (CONFIG, values), (weights, tensors))


def _vllm_config(network: HeadsNetwork) -> dict[str, Any]:
    c = network.config
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "truncated_vocab_size": c.draft_vocab_size or c.vocab_size,
        "num_heads": c.num_heads,
        "num_hidden_layers": c.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not c.own_head,
    }


def _medusa_config(network: HeadsNetwork, model: PreTrainedModel) -> dict[str, Any]:
    c = network.config
    return {
        "medusa_num_heads": c.num_heads,
        "medusa_num_layers": c.num_layers,
        "base_model_name_or_path": str(model.name_or_path or ""),
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "version": "2",
    }
