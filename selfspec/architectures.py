"""What a model can do: what looking at it tells, without a table of names.

The rest is measured, see `probes.py`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers.generation import GenerationMixin

from selfspec.attention import PREFIX, register_over
from selfspec.cache import AlignedCache, TreeCache
from selfspec.patch import own_forward
from selfspec.readout import Readout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PretrainedConfig, PreTrainedModel


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
        told_positions: Whether `generate` passes positions on to it, or lets it count by itself.
        takes_logits_to_keep: Whether `forward` has `logits_to_keep`.
        attention_names: (config, implementation name) pairs to set while generating; empty if the
            model does not consult transformers' attention interface.
        mask_dtype: dtype of explicit 4-D masks, used when it does not: bool, or the model's dtype
            for eager attention, which adds them.
        rope_limit: Position at which rotary frequencies change for a whole call ("longrope",
            "dynamic"), or None.
        rope_dynamic: True if frequencies keep changing after `rope_limit`.
        max_positions: Positions the model was made for.
        embeddings: Returns the input embeddings, which may be resized.
        head: Returns the LM head, or None.
        hidden_size: C of the states between layers, by the config; 0 if that does not say.
        support: "tree", "chain" or "none".
        reason: Why not more.
        readout: From the last layer's output to draft tokens without the model's own head, or None.
        resumable: Whether a forward can start at a later layer, given the states there.
        borrowers: Layers without keys and values of their own: they read those of earlier layers.
        padding_fault: Why padded batches are not for us; empty if they are.
        layers_fault: Why no layer can be left out; empty if layers can.
        states_fault: Why nothing can be trained on the states between layers; empty if it can.
        position_limit: Positions that drafts may have: those of the table, which may be learned.
            Where they are computed from frequencies there is no end to them.
        own_window: A window that no mask of ours knows, as "name=size" of the config; or "".
        overrides: What has been put over modules and methods (hooks, a `forward`), to be compared.
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
    embeddings: Callable[[], nn.Module]
    head: Callable[[], nn.Module | None]
    hidden_size: int
    support: Support = "none"
    reason: str = ""
    readout: Readout | None = None
    resumable: bool = True
    borrowers: frozenset[int] = frozenset()
    layers_fault: str = ""
    states_fault: str = ""
    told_positions: bool = True
    padding_fault: str = ""
    position_limit: int = 1 << 30
    own_window: str = ""
    overrides: tuple[Any, ...] = ()

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def vocabulary(self) -> range:
        """Ids that can be embedded."""
        weight: Any = self.embeddings().weight
        return range(weight.shape[0])

    def slides_past(self, slots: int) -> bool:
        """Whether a token after `slots` others no longer sees them all, in any layer.

        Where every layer slides a model may leave that to transformers' cache, which drops keys;
        ours keeps them, so that a mask has to say it.
        """
        window = self.windows.get("sliding_attention", 0)
        return len(self.windows) == 1 and 0 < window <= slots

    def new_cache(self, batch: int, *, reserve: int, longest: int, extra: int = 64) -> TreeCache:
        """An empty cache of the layout that this model needs; arguments as for `TreeCache`."""
        kind = AlignedCache if self.support == "chain" else TreeCache
        sizes = {"reserve": reserve, "longest": longest, "extra": extra}
        return kind(self.num_layers, batch, positions=self.position_limit, **sizes)


def agree(one: Architecture, other: Architecture) -> bool:
    """Whether two descriptions (nothing measured) are of the same layers, hooks and configs."""

    def parts(found: Architecture) -> list[Any]:
        modules = [*found.layers, *(m for layer in found.sublayers for m, _ in layer)]
        configs = [(id(config), name) for config, name in found.attention_names]
        takes = [found.takes_position_ids, found.told_positions, found.takes_logits_to_keep]
        kinds = [found.cache_argument, found.mask_dtype, found.rope_limit, found.reason]
        return [[id(m) for m in modules], configs, found.windows, takes, kinds, found.overrides]

    return parts(one) == parts(other)


def describe(model: PreTrainedModel) -> Architecture:
    """Look at `model` without running it; `support` is still to be measured.

    Returns:
        The description; `support` is "none" with a reason if looking was enough to rule it out.
    """
    config = model.config.get_text_config(decoder=True)
    own = inspect.signature(model.forward).parameters
    parameters: Mapping[str, inspect.Parameter] = own
    if any(p.kind is p.VAR_KEYWORD for p in own.values()):
        # One put over the class's, which passes on whatever it is given, takes as much.
        parameters = {**inspect.signature(type(model).forward).parameters, **own}
    place, layers = _decoder_layers(model, config)
    sublayers = [_sublayers(layer) for layer in layers]
    inner = [*layers, *(module for pairs in sublayers for module, _ in pairs)]
    description = Architecture(
        layers=layers,
        sublayers=sublayers,
        overrides=_overrides(model, [*_around(model, place), *inner]),
        windows={},
        cache_argument="cache" if "cache" in parameters else "past_key_values",
        takes_position_ids="position_ids" in parameters,
        # By the signature alone: transformers makes positions for a forward that names them.
        told_positions="position_ids" in own or "position_ids" not in parameters,
        takes_logits_to_keep="logits_to_keep" in parameters,
        attention_names=[],
        mask_dtype=torch.bool,
        rope_limit=None,
        rope_dynamic=False,
        max_positions=getattr(config, "max_position_embeddings", None) or 1 << 30,
        embeddings=model.get_input_embeddings,
        head=model.get_output_embeddings,
        hidden_size=getattr(config, "hidden_size", None) or 0,
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
        own_window=_own_window(config),
        attention_names=named,
        mask_dtype=model.dtype if original == "eager" else torch.bool,
        rope_limit=limit,
        rope_dynamic=dynamic,
        position_limit=1 << 30 if _computes_positions(model) else description.max_positions,
    )


def _decoder_layers(
    model: PreTrainedModel, config: PretrainedConfig
) -> tuple[str, list[nn.Module]]:
    """Name of the list, and what is in it.

    Towers for images or sound may have as many layers as the text decoder.
    """
    count = getattr(config, "num_hidden_layers", None)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and "vision" not in name
    ]
    if len(found) > 1:
        decoder = set((model.get_decoder() or model).modules())
        found.sort(key=lambda entry: entry[1] not in decoder)  # stable: the outermost stays first
    return (found[0][0], list(found[0][1])) if found else ("", [])


def _around(model: PreTrainedModel, place: str) -> Iterator[nn.Module]:
    """The model, what it has on the way to its layers, and what is beside them: norm and head."""
    owner: Any = model
    yield owner
    for name in place.split("."):
        yield from owner.children()
        owner = getattr(owner, name, owner)
    if (head := model.get_output_embeddings()) is not None:
        yield head


def _overrides(model: PreTrainedModel, modules: list[nn.Module]) -> tuple[Any, ...]:
    """What tells hooks and forwards of today from those of another day, without holding them.

    Hooks are numbered by torch, once and for all.
    """
    found: list[Any] = [id(type(model).prepare_inputs_for_generation)]
    for i, module in enumerate(modules):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if hooks:
                found.append((i, *hooks))
        if "forward" in module.__dict__ and (forward := own_forward(module)) is not None:
            found.append((i, id(forward)))
    return tuple(found)


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
    for name in ("sliding_window", "attention_chunk_size"):
        if _varies(config, name):
            return f"its layers differ in {name}"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is chunked, so that keys are dropped at once, not one by one"
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if other := sorted(set(types) - {"full_attention", "sliding_attention", "attention"}):
        return f"it has layers of type {', '.join(other)}, whose state cannot be rolled back"
    if getattr(model, "_is_stateful", False):
        return "its state is recurrent and cannot be rolled back"
    if not has_cache:
        return "its forward takes no cache of keys and values: it has none, or a state of its own"
    if type(model)._sample is not GenerationMixin._sample:
        return "its class decodes in a way of its own (it overrides _sample)"
    return ""


def _varies(config: PretrainedConfig, name: str) -> bool:
    """Whether the layers have values of their own, which the config as a whole refuses to give."""
    try:
        getattr(config, name, None)
    except RuntimeError:
        return True
    return False


def _windows(config: PretrainedConfig) -> dict[str, int]:
    """Window by layer type, by the rules that transformers builds its own masks with."""
    size = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None)
    if types is None:
        return {"sliding_attention" if size else "full_attention": size}
    return {kind: size if kind == "sliding_attention" else 0 for kind in sorted(set(types))}


def _own_window(config: PretrainedConfig) -> str:
    """A window that attention of the model's own may apply and no mask of ours knows, or "".

    It goes by cache slot (gpt_neo), and may be wider than anything that is measured.
    """
    known = ("sliding_window", "max_window_layers")
    for name, value in vars(config).items():  # to_dict would copy deeply, at every request
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if "window" in name and name not in known and is_number and value > 0:
            return f"{name}={value}"
    return ""


def _computes_positions(model: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for m in model.modules() for name in m._buffers)


def _rope_limit(config: PretrainedConfig) -> tuple[int | None, bool]:
    """(position where frequencies switch for a whole call, whether they keep changing)."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    found = [r for r in _dicts(scaling) if _kind(r) in ("longrope", "dynamic")]
    if not found:
        return None, False
    limits = [
        rope.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for rope in found
    ]
    return int(min(limits)), any(_kind(rope) == "dynamic" for rope in found)


def _kind(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """A dict and those inside it; a local function for it would be a cycle that stays."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _dicts(inner)
