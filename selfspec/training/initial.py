"""A network to start from: sized after the target, with the target's weights where they fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from selfspec.networks.blocks import GatedMLP, RMSNorm
from selfspec.networks.exit import ExitConfig, ExitNetwork
from selfspec.networks.feature import FeatureConfig, FeatureNetwork
from selfspec.networks.heads import HeadsConfig, HeadsNetwork
from selfspec.networks.vocabulary import DraftHead
from selfspec.training.answers import end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.architectures import Architecture
    from selfspec.training.config import TrainConfig

Network: TypeAlias = FeatureNetwork | HeadsNetwork | ExitNetwork

_STD = 0.02
# What is added to a copied weight: small beside it.
_NOISE = 0.002
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@torch.no_grad()
def initial_network(
    config: TrainConfig, model: PreTrainedModel, architecture: Architecture, token_counts: Tensor
) -> Network:
    """A network of `config.kind` in float32 on the CPU.

    Args:
        config: What to train.
        model: The target.
        architecture: Of it, measured.
        token_counts: int64 [V], how often tokens were answered; they choose the draft vocabulary.

    Raises:
        ValueError: If the model has no LM head that rows can be taken of.
    """
    ids = _vocabulary(config, model, token_counts)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        network = _made(config, model, architecture, None if ids is None else len(ids))
        for module in network.modules():
            if isinstance(module, DraftHead):
                if ids is not None:
                    module.choose(ids)
                if module.weight is not None:
                    nn.init.normal_(module.weight, std=_STD)
        attach_head(network, architecture)
        if config.start != "random":
            _copy_head(network, architecture)
            if not isinstance(network, HeadsNetwork) and hasattr(network, "norm"):
                _copy_final_norm(architecture, network.norm)
        if config.start == "layer":
            if isinstance(network, FeatureNetwork):
                _copy_layer(network, architecture)
            if isinstance(network, ExitNetwork):
                _copy_mlp(network.mlp, architecture.layers[-1])
    return network


def attach_head(network: Network, architecture: Architecture) -> None:
    """Give heads that use rows of the target's LM head these rows, in their own dtype."""
    weight = _head_weight(architecture)
    like = next(network.parameters())
    for module in network.modules():
        if isinstance(module, DraftHead):
            module.attach(weight)
            if module.rows is not None:
                module.rows = module.rows.to(like.device, like.dtype)


def _vocabulary(config: TrainConfig, model: PreTrainedModel, token_counts: Tensor) -> Tensor | None:
    size = config.draft_vocab_size
    if size is None or size >= len(token_counts):
        return None
    counts = token_counts.clone()
    # A draft that cannot end a text would go on behind every end.
    counts[[token for token in end_tokens(model) if token < len(counts)]] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def _made(
    config: TrainConfig, model: PreTrainedModel, architecture: Architecture, vocabulary: int | None
) -> Network:
    text = model.config.get_text_config(decoder=True)
    layers, size = architecture.num_layers, text.hidden_size
    inner = config.intermediate_size or getattr(text, "intermediate_size", None) or 4 * size
    eps = getattr(text, "rms_norm_eps", None) or 1e-5
    if config.kind == "heads":
        return _heads(config, size, text.vocab_size, vocabulary)
    if config.kind == "exit":
        exit_layer = config.exit_layer or max(1, layers // 3)
        attention: dict[str, Any] = {}
        if config.exit_attention:
            attention = _attention(text, architecture)
        made = ExitConfig(
            size, text.vocab_size, exit_layer, inner, vocabulary, config.own_head, eps, **attention
        )
        network = ExitNetwork(made)
        for name, weight in network.named_parameters():
            if weight.ndim == 2 and not name.startswith("head"):
                # The exit starts as the target's own head on an early state.
                ends = ("down_proj.weight", "o_proj.weight")
                nn.init.normal_(weight, std=0 if name.endswith(ends) else _STD)
        return network
    feature = FeatureNetwork(
        FeatureConfig(
            target_hidden_size=size,
            vocab_size=text.vocab_size,
            taps=config.taps or _default_taps(layers),
            hidden_size=size,
            intermediate_size=inner,
            draft_vocab_size=vocabulary,
            own_head=config.own_head,
            rms_norm_eps=eps,
            **_attention(text, architecture),
        )
    )
    for weight in feature.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=_STD)
    return feature


def _attention(text: Any, architecture: Architecture) -> dict[str, Any]:
    """Sizes of the target's attention."""
    heads = text.num_attention_heads
    return {
        "num_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "max_positions": min(architecture.max_positions, 1 << 20),
        "rope": _rope(text),
    }


def _heads(config: TrainConfig, size: int, vocab_size: int, vocabulary: int | None) -> HeadsNetwork:
    network = HeadsNetwork(
        HeadsConfig(
            size,
            vocab_size,
            config.num_draft_heads,
            config.num_layers,
            config.conditioned,
            config.own_head,
            vocabulary,
        )
    )
    for module in network.fuse.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=_NOISE)
            nn.init.zeros_(module.bias)
    return network


def _default_taps(layers: int) -> tuple[int, ...]:
    """Early, middle, late, as EAGLE-3 has them."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))


def _rope(text: Any) -> dict[str, Any]:
    """The target's rotary parameters, if they are of a kind that turns whole heads."""
    found = dict(getattr(text, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in found.values()):  # by layer type
        found = dict(found.get("full_attention") or next(iter(found.values())))
    if found.get("rope_type", "default") not in _ROPE_TYPES:
        found = {k: v for k, v in found.items() if k == "rope_theta"}
    found.pop("partial_rotary_factor", None)
    return {"rope_type": "default", "rope_theta": 10000.0, **found}


def _head_weight(architecture: Architecture) -> Tensor:
    head: Any = architecture.head()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.is_meta:
        raise ValueError(
            f"the model's LM head ({type(head).__name__}) has no plain weight to start from: load "
            "the model unquantised."
        )
    return weight.detach()


def _copy_head(network: Network, architecture: Architecture) -> None:
    weight = _head_weight(architecture)
    scale = architecture.readout.scale if architecture.readout is not None else 1.0
    for module in network.modules():
        if isinstance(module, DraftHead) and module.weight is not None:
            rows = weight[: module.vocab_size]
            if module.ids is not None:
                rows = rows[module.ids.to(rows.device)]
            if rows.shape == module.weight.shape:
                module.weight.copy_(rows * scale)


def _copy_layer(network: FeatureNetwork, architecture: Architecture) -> None:
    """The last decoder layer, to start as one more of it that reads the last tap."""
    config, layer = network.config, architecture.layers[-1]
    size = config.hidden_size
    attention = getattr(layer, "self_attn", None)
    sources = [_weight(attention, n) for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    mine = [network.q_proj, network.k_proj, network.v_proj, network.o_proj]
    eagle3 = config.layout == "eagle3"
    # The embedding comes first, then the feature, which takes the place of the layer's input.
    parts = [m.weight[:, -size:] if eagle3 and m is not network.o_proj else m.weight for m in mine]
    pairs = [(s, p) for s, p in zip(sources, parts, strict=True) if s is not None]
    if len(pairs) < len(mine) or any(s.shape != p.shape for s, p in pairs):
        return
    for (source, part), module in zip(pairs, mine, strict=True):
        module.weight.mul_(0.5)
        part.copy_(source)
        own, bias = module.bias, _weight(attention, _name(network, module), "bias")
        if own is not None and bias is not None:
            own.copy_(bias)
    _copy_mlp(network.mlp, layer)
    if eagle3:
        _copy_norm(architecture, layer, "input_layernorm", network.hidden_norm)
        network.fc.weight.normal_(std=_NOISE)
        network.fc.weight[:, -size:].add_(torch.eye(size))
    _copy_norm(architecture, layer, "post_attention_layernorm", network.post_attention_layernorm)


def _name(network: nn.Module, module: nn.Module) -> str:
    return next(name for name, child in network.named_children() if child is module)


def _weight(owner: Any, name: str, what: str = "weight") -> Tensor | None:
    value = getattr(getattr(owner, name, None), what, None)
    return value.detach() if isinstance(value, Tensor) and value.is_floating_point() else None


def _copy_mlp(mlp: GatedMLP, layer: nn.Module) -> None:
    parts = {"gate_proj": mlp.gate_proj, "up_proj": mlp.up_proj, "down_proj": mlp.down_proj}
    for name, module in parts.items():
        source = _weight(getattr(layer, "mlp", None), name)
        # What an exit's block adds starts at zero; a layer's is the target's.
        if source is None or source.shape != module.weight.shape or not module.weight.any():
            continue
        module.weight.copy_(source)


def _copy_final_norm(architecture: Architecture, norm: RMSNorm) -> None:
    readout = architecture.readout
    if readout is not None and readout.offset == 0:
        _copy_norm(architecture, readout.owner, readout.name, norm)


def _copy_norm(architecture: Architecture, owner: nn.Module, name: str, norm: RMSNorm) -> None:
    """A weight, where the target's norms are RMS norms that multiply by it as it is."""
    readout, source = architecture.readout, _weight(owner, name)
    plain = readout is not None and readout.offset == 0
    if plain and source is not None and source.shape == norm.weight.shape:
        norm.weight.copy_(source)
