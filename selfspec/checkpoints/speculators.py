"""The layout of vllm-project/speculators (Apache-2.0), which vLLM serves: EAGLE-3 drafts.

The weights are EAGLE-3's with a layer called `layers.0` and a copy of the target's embeddings; the
config has the layer's sizes in `transformer_layer_config`. Layer ids name the layer whose input is
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from selfspec.checkpoints.base_model import embedding_rows
from selfspec.checkpoints.eagle import EMBEDDING, IDS, read_eagle, served
from selfspec.checkpoints.folder import CONFIG, WEIGHTS, card_of, with_card
from selfspec.checkpoints.tensors import write_folder
from selfspec.networks.feature import FeatureNetwork

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedModel

_FLAGS = ("norm_before_fc", "fc_norm", "norm_output", "target_hidden_size", "draft_vocab_size", IDS)
_VERSION = "0.9.0"  # the release whose loader read what is written here


def read_speculators(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    where: object,
    num_layers: int | None = None,
) -> FeatureNetwork:
    """Make a network of a draft of this layout; arguments and errors as for `read_eagle`."""
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise ValueError(f"{where}: speculators_model_type={kind!r} is not known, only 'eagle3'.")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{where}: config.json lacks transformer_layer_config.")
    if layer.get("model_type", "llama") != "llama":
        raise ValueError(
            f"{where}: a layer of model_type={layer['model_type']!r} is not known, only 'llama'."
        )
    if "norm_before_residual" not in config:
        raise ValueError(
            f"{where}: config.json lacks norm_before_residual, for which readers have different "
            "defaults. Set it to what the draft was trained with."
        )
    flags = {name: config[name] for name in (*_FLAGS, "norm_before_residual") if name in config}
    flat = {**layer, **flags, "architectures": ["Eagle3Speculator"]}
    network = read_eagle(flat, tensors, where, num_layers)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    card = card_of(network)
    if card is not None:
        base = replace(card.base, name=str(verifier.get("name_or_path") or ""))
        with_card(network, replace(card, base=base))
    return network


def export_speculators(
    network: FeatureNetwork,
    folder: str | PathLike[str],
    model: PreTrainedModel,
    num_draft_tokens: int = 3,
) -> Path:
    """Write a network in the layout of speculators, so that `vllm serve FOLDER` runs it.

    Args:
        network: As for `export_eagle3`.
        folder: Is made if need be.
        model: The base model. Its `name_or_path` is written: the engine loads it from there.
        num_draft_tokens: Tokens that the engine drafts a step.

    Returns:
        The folder.

    Raises:
        TypeError: If it is another network.
        ValueError: If no engine serves such a network, `model` is not its base, or
            `num_draft_tokens` is no number of tokens.
    """
    if type(num_draft_tokens) is not int or num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens={num_draft_tokens!r} must be an int of at least 1.")
    tensors, config = served(network, model, "layers.0")
    c = network.config
    # The package takes embeddings that are missing for loaded ones.
    tensors[EMBEDDING] = embedding_rows(model, c.vocab_size).to(network.fc.weight.dtype)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": str(model.name_or_path or "") or None,
        "architectures": list(
            getattr(model.config, "architectures", None) or [type(model).__name__]
        ),
    }
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "draft_vocab_size": c.draft_vocab_size or c.vocab_size,
        "norm_before_residual": c.norm_before_residual,
        IDS: list(c.taps),
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **config},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "torch_dtype": config["torch_dtype"],
    }
    return write_folder(Path(folder), (CONFIG, values), (WEIGHTS, tensors))
