"""What a model can do, found out by looking and by measuring, not from a table of names.

Trees need a model that takes positions from `position_ids` and visibility from a 4-D mask. Whether
it does is measured on a call with a handful of tokens: the tree must reproduce the logits of every
path read as an ordinary sequence, and must *not* do so when positions or masks are deliberately
wrong. A model that passes for chains only is used with chains; a recurrent one not at all.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers.generation import GenerationMixin

from selfspec.attention import PREFIX, register_over
from selfspec.cache import AlignedCache, TreeCache
from selfspec.readout import Readout, find_readout
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from selfspec.target import Target

logger = logging.getLogger("selfspec")

Support = Literal["tree", "chain", "none"]

_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "fc2")


@dataclass(frozen=True, eq=False)
class Architecture:
    """What the rest of the library needs to know about a model.

    Attributes:
        layers: The decoder layers.
        sublayers: For every layer, its (module, is_attention) pairs that can be skipped alone.
        windows: Sliding window by layer type; 0 is full attention.
        cache_argument: "cache" (transformers >= 5.24) or "past_key_values".
        takes_position_ids: Whether `forward` has `position_ids`.
        takes_logits_to_keep: Whether `forward` has `logits_to_keep`.
        attention_names: (config, implementation name) pairs to set while generating; empty if the
            model does not consult transformers' attention interface.
        mask_dtype: dtype of explicit 4-D masks, used when it does not: bool, or the model's dtype
            for eager attention, which adds them.
        rope_limit: Position at which rotary frequencies change for a whole call ("longrope",
            "dynamic"), or None.
        rope_dynamic: True if frequencies keep changing after `rope_limit`.
        max_positions: Positions the model was made for.
        support: "tree", "chain" or "none".
        reason: Why not more.
        readout: From the last layer's output to draft tokens without the model's own head, or None.
    """

    layers: list[nn.Module]
    sublayers: list[list[tuple[nn.Module, bool]]]
    windows: dict[str, int]
    cache_argument: str
    takes_position_ids: bool
    takes_logits_to_keep: bool
    attention_names: list[tuple[Any, str]]
    mask_dtype: torch.dtype
    rope_limit: int | None
    rope_dynamic: bool
    max_positions: int
    support: Support = "none"
    reason: str = ""
    readout: Readout | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    def new_cache(self, batch: int, *, reserve: int, longest: int, extra: int = 64) -> TreeCache:
        """An empty cache of the layout that this model needs; arguments as for `TreeCache`."""
        kind = AlignedCache if self.support == "chain" else TreeCache
        return kind(self.num_layers, batch, reserve=reserve, longest=longest, extra=extra)


def agree(one: Architecture, other: Architecture) -> bool:
    """Whether two descriptions (nothing measured) are of the same layers, windows and configs."""

    def parts(found: Architecture) -> list[Any]:
        modules = [*found.layers, *(m for layer in found.sublayers for m, _ in layer)]
        configs = [(id(config), name) for config, name in found.attention_names]
        return [[id(m) for m in modules], configs, found.windows, found.rope_limit, found.reason]

    return parts(one) == parts(other)


def describe(model: PreTrainedModel) -> Architecture:
    """Look at `model` without running it; `support` is still to be measured.

    Returns:
        The description; `support` is "none" with a reason if looking was enough to rule it out.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = inspect.signature(model.forward).parameters
    layers = _decoder_layers(model, config)
    description = Architecture(
        layers=layers,
        sublayers=[_sublayers(layer) for layer in layers],
        windows={},
        cache_argument="cache" if "cache" in parameters else "past_key_values",
        takes_position_ids="position_ids" in parameters,
        takes_logits_to_keep="logits_to_keep" in parameters,
        attention_names=[],
        mask_dtype=torch.bool,
        rope_limit=None,
        rope_dynamic=False,
        max_positions=getattr(config, "max_position_embeddings", None) or 1 << 30,
    )
    reason = _ruled_out(model, config, layers, description.cache_argument in parameters)
    if reason:
        return replace(description, reason=reason)
    limit, dynamic = _rope_limit(config)
    # While another request runs on the model, its config names our implementation.
    original = (config._attn_implementation or "eager").removeprefix(PREFIX)
    name = register_over(original)
    configs = {id(c): c for c in (m.config for m in model.modules() if hasattr(m, "config"))}
    named = (
        []
        if name is None
        else [
            (c, name)
            for c in configs.values()
            if getattr(c, "_attn_implementation_internal", None) in (original, name)
        ]
    )
    return replace(
        description,
        windows=_windows(config),
        attention_names=named,
        mask_dtype=model.dtype if original == "eager" else torch.bool,
        rope_limit=limit,
        rope_dynamic=dynamic,
    )


def measure(target: Target) -> Architecture:
    """Find out by a few tiny forwards whether trees, chains or neither reproduce the model.

    Args:
        target: The model with its description; its weights are only read.

    Returns:
        The description with `support`, `reason`, `attention_names` and `readout` settled.
    """
    found = target.architecture
    if found.reason:
        return found
    settled = _measure_support(target, found)
    if settled.support == "none":
        return settled
    return replace(settled, readout=_measure_readout(target, settled))


def _measure_support(target: Target, found: Architecture) -> Architecture:
    if found.takes_position_ids:
        error = ""
        for names in [found.attention_names, []] if found.attention_names else [[]]:
            candidate = replace(found, support="tree", attention_names=names)
            try:
                error = _tree_fault(target, candidate)
            except Exception as exception:  # whatever a model's own code raises on a 4-D mask
                logger.debug("token trees", exc_info=True)
                error = f"a verification call raised {type(exception).__name__}"
            if not error:
                return candidate
        reason = f"token trees are not reproduced ({error})"
    else:
        reason = "its forward takes no position_ids, so positions come from cache slots"
    candidate = replace(found, support="chain", attention_names=[], reason=reason)
    try:
        error = _chain_fault(target, candidate)
    except Exception as exception:
        logger.debug("chains", exc_info=True)
        error = f"a verification call raised {type(exception).__name__}: {exception}"
    if not error:
        return candidate
    return replace(found, support="none", reason=f"{reason}; chains neither ({error})")


# ------------------------------------------------------------------------------- measuring

_PROMPT, _TREE, _PARENTS = (3, 11, 7, 19, 5), (2, 13, 6, 17, 9), (-1, 0, 0, 2, 2)


def _ids(tokens: tuple[int, ...] | list[int], target: Target) -> Tensor:
    return torch.tensor([[t % target.vocab_size for t in tokens]], device=target.device)


def _tree_fault(target: Target, candidate: Architecture) -> str:
    """Empty if a branching tree gives every path's own logits; else what was wrong."""
    root, tokens = _ids([_TREE[0]], target)[:, 0], _ids(list(_TREE), target)
    tree = TokenTree.from_topology(tokens, list(_PARENTS))
    rows = {n: _path(n) for n in range(len(_TREE))}
    truth = torch.stack(
        [target.plain(_ids([*_PROMPT, *(_TREE[i] for i in rows[n])], target)) for n in (1, 3, 4)]
    )
    with target.using(candidate):
        calls = target.attention_calls
        right = _verify(target, tree)[[1, 3, 4]]
        if candidate.attention_names and target.attention_calls - calls < candidate.num_layers:
            return "attention layers do not consult the attention interface"
        shift = max(1, min(37, candidate.max_positions - len(_PROMPT) - len(_TREE)))
        shifted = _verify(target, tree, shift)[[1, 3, 4]]
        chain = TokenTree.chain(root, tokens[:, 1:])
        unmasked = _verify(target, chain)[[1, 3, 4]]
    error = (right - truth).abs().amax()
    blind = [
        name
        for name, wrong in (("position_ids", shifted), ("the mask", unmasked))
        if not error < 0.5 * (wrong - truth).abs().amax()
    ]
    return f"{' and '.join(blind)} made no difference" if blind else ""


def _chain_fault(target: Target, candidate: Architecture) -> str:
    """Empty if a chain gives the logits of the sequence, wherever in the cache it stands.

    Rows of a batch are aligned by moving them, so their place must not matter: it does not to
    ALiBi, it does to learned positions that are read off the cache.
    """
    tokens = _ids(list(_TREE), target)
    truth = torch.stack(
        [target.plain(_ids([*_PROMPT, *_TREE[: n + 1]], target)) for n in range(len(_TREE))]
    )
    scale = (truth - truth.roll(1, 0)).abs().amax()
    chain = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
    with target.using(candidate):
        for slots in (0, 3):
            error = (_verify(target, chain, slots=slots) - truth).abs().amax()
            if not error < 0.1 * scale:
                where = f" {slots} slots further on" if slots else ""
                return f"logits{where} differ by {error:.2g}"
    return ""


def _measure_readout(target: Target, settled: Architecture) -> Readout | None:
    """The readout that reproduces the logits of a chain, here at the very beginning of a text."""
    if not settled.takes_logits_to_keep:
        logger.debug("drafts are read from the model's own logits: it always computes them.")
        return None
    tokens, last = _ids([*_PROMPT, *_TREE], target), settled.num_layers
    try:
        with target.using(settled):
            cache = settled.new_cache(1, reserve=32, longest=1 << 20)
            cache.settle([0])
            chain = TokenTree.chain(tokens[:, 0], tokens[:, 1:])
            output = target.verify(chain, cache, frozenset({last}))
        return find_readout(target.model, settled.layers, output.hidden[last][0], output.logits[0])
    except Exception:
        logger.debug("drafts are read from the model's own logits", exc_info=True)
        return None


def _verify(target: Target, tree: TokenTree, shift: int = 0, slots: int = 0) -> Tensor:
    cache = target.architecture.new_cache(1, reserve=32, longest=1 << 20)
    target.fill(_ids(list(_PROMPT), target), cache)
    if isinstance(cache, AlignedCache):
        cache.shift(slots)
    return target.verify(tree, cache, position_shift=shift).logits[0].float()


def _path(node: int) -> list[int]:
    path = [node]
    while _PARENTS[path[0]] >= 0:
        path.insert(0, _PARENTS[path[0]])
    return path


# ------------------------------------------------------------------------------- looking


def _decoder_layers(model: nn.Module, config: PretrainedConfig) -> list[nn.Module]:
    count = getattr(config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and "vision" not in name:
            return list(module)
    return []


def _sublayers(layer: nn.Module) -> list[tuple[nn.Module, bool]]:
    found = []
    for name, child in layer.named_children():
        is_attention = ("attn" in name or "attention" in name) and any(
            hasattr(m, "layer_idx") or hasattr(m, "layer_id") for m in child.modules()
        )
        if is_attention or name in _MLP_NAMES:
            found.append((child, is_attention))
    return found


def _ruled_out(
    model: PreTrainedModel, config: PretrainedConfig, layers: list[nn.Module], has_cache: bool
) -> str:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if not layers:
        return "its decoder layers were not found"
    types = set(getattr(config, "layer_types", None) or ())
    if other := sorted(types - {"full_attention", "sliding_attention"}):
        return f"it has layers of type {', '.join(other)}, whose state cannot be rolled back"
    if getattr(model, "_is_stateful", False) or not has_cache:
        return "its state is recurrent and cannot be rolled back"
    if type(model)._sample is not GenerationMixin._sample:
        return "its class decodes in a way of its own (it overrides _sample)"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is chunked"
    return ""


def _windows(config: PretrainedConfig) -> dict[str, int]:
    """Window by layer type, by the rules that transformers builds its own masks with."""
    size = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None)
    if types is None:
        return {"sliding_attention" if size else "full_attention": size}
    return {kind: size if kind == "sliding_attention" else 0 for kind in sorted(set(types))}


def _rope_limit(config: PretrainedConfig) -> tuple[int | None, bool]:
    """(position where frequencies switch for a whole call, whether they keep changing)."""
    found: list[dict[str, Any]] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("rope_type", value.get("type")) in ("longrope", "dynamic"):
                found.append(value)
            for inner in value.values():
                collect(inner)

    collect(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    if not found:
        return None, False
    limits = [
        rope.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for rope in found
    ]
    dynamic = any(rope.get("rope_type", rope.get("type")) == "dynamic" for rope in found)
    return int(min(limits)), dynamic
