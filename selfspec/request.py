"""One call of `generate`, and why it may have to go to transformers' own loop."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from selfspec.generation_options import unknown_option
from selfspec.sampling import stateful_processor
from selfspec.stopping import StopRules
from selfspec.user_cache import continuable, is_dynamic

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

    from selfspec.architectures import Architecture

# What `generate` passes to `_sample` for any text decoder; anything else is for the stock loop.
_KNOWN_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "inputs_embeds",
    "cache_position",
    "tokenizer",
}


_ENDLESS = 1 << 30  # tokens: more than fit anywhere, and int32 positions hold a few more


class Request:
    """One call of `generate`, as it arrives at the decoding loop."""

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.input_ids = input_ids
        self.processors = processors
        self.criteria = StoppingCriteriaList(_with_whole_length(c) for c in criteria)
        self.generation_config = generation_config
        self.synced_gpus = synced_gpus
        self.model_kwargs = model_kwargs
        self.batch = input_ids.shape[0]
        embeds = model_kwargs.get("inputs_embeds")
        # Slots that the prompt fills: embeddings may stand before ids.
        self.slots = input_ids.shape[1] if embeds is None else embeds.shape[1]
        self.pads = [0] * self.batch
        self.cache = next(
            (
                model_kwargs[k]
                for k in ("cache", "past_key_values")
                if model_kwargs.get(k) is not None
            ),
            None,
        )

    @property
    def start(self) -> list[int]:
        """Left padding within `input_ids`, which may continue a cache that holds the padding."""
        cached = self.slots - self.input_ids.shape[1]
        return [max(0, pad - cached) for pad in self.pads]

    @property
    def user_cache(self) -> Any:
        """The cache that the user passed, or None."""
        cache = self.cache
        if cache is not None and (
            getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0
        ):
            return cache
        return None

    @property
    def limit(self) -> int:
        """Length at which every row ends, in ids: plain `generate` makes one before it looks."""
        lengths = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        limit = min(lengths, default=None) or _whole(self.generation_config.max_length)
        return max(limit, self.input_ids.shape[1] + 1)

    def obstacle(self, architecture: Architecture, training: bool) -> str | None:
        """Why this request must go to transformers' own loop, or None. Also settles `pads`."""
        config = self.generation_config
        if architecture.support == "none":  # only a model that has changed can come to this
            return architecture.reason
        if training:
            return "the model is in training mode"
        if self.synced_gpus:
            return "synced_gpus is on"
        if self.slots == 0:
            return "the prompt is empty"
        if not self.model_kwargs.get("use_cache", True):
            return "use_cache is False"
        if config.is_assistant:
            return "is_assistant is on"
        unknown = unknown_option(config)
        if unknown is not None:
            return f"{unknown} is set, which this version of selfspec does not know"
        for name in ("output_attentions", "output_hidden_states"):
            if config.return_dict_in_generate and getattr(config, name):
                return f"{name} is on"
        extra = sorted(
            k
            for k, v in self.model_kwargs.items()
            # An empty dict is what models for images, too, are given with a text alone.
            if v is not None and not (isinstance(v, dict) and not v)
            if k not in _KNOWN_ARGUMENTS
        )
        if extra:
            return f"the model is given {', '.join(extra)}"
        if config.cache_implementation not in (None, "dynamic"):
            return f"cache_implementation is {config.cache_implementation!r}"
        if self.cache is not None and not _is_default(self.cache, self.user_cache is not None):
            return f"a {type(self.cache).__name__} cannot be continued with trees"
        other = self._cache_obstacle()
        if other:
            return other
        stateful = stateful_processor(self.processors)
        if stateful is not None and self.batch > 1:
            return (
                f"{stateful} may keep a state, and rows of a batch advance unevenly (if it keeps "
                "none, give it an attribute stateless = True)"
            )
        stops = StopRules(self.criteria, self.batch)
        pad = getattr(config, "_pad_token_tensor", None)
        if stops.pads_finished_rows:
            # The stock loop embeds padding that we only write down: what it raises is its own.
            if pad is None:
                return "pad_token_id is not set, and a stopping criterion has eos_token_id"
            if self.batch > 1 and int(pad) not in architecture.vocabulary:
                return f"pad_token_id is {int(pad)}, which the model cannot embed"
        criterion = stops.may_look_across_rows
        if criterion is not None and self.user_cache is not None:
            return f"{criterion} (stopping_criteria) may look at the cache that you hold"
        if criterion is not None and config.return_dict_in_generate and config.output_scores:
            return f"{criterion} (stopping_criteria) may look at the scores"
        if criterion is not None and self.batch > 1:
            return (
                f"{criterion} (stopping_criteria) may look across the rows, which advance unevenly "
                "in a batch"
            )
        return self._padding_obstacle(architecture) or self._rope_obstacle(architecture)

    def _cache_obstacle(self) -> str:
        layers = getattr(self.user_cache, "layers", [])
        for layer in layers:
            if layer.is_initialized and layer.get_seq_length():
                rows = layer.keys.shape[0]
                return "" if rows == self.batch else f"the cache has {rows} rows, not {self.batch}"
        return ""

    def _rope_obstacle(self, architecture: Architecture) -> str | None:
        limit, end = architecture.rope_limit, self.criteria.max_length or 0
        if limit is None or end <= limit:
            return None
        shortest = self.slots - max(self.pads)
        if architecture.rope_dynamic or shortest <= limit or self.batch > 1:
            return f"rotary frequencies change at position {limit}"
        return None

    def _padding_obstacle(self, architecture: Architecture) -> str | None:
        mask = self.model_kwargs.get("attention_mask")
        if mask is not None:
            if mask.ndim != 2:
                return "attention_mask is not 2-D"
            lengths = mask.bool().sum(-1)
            width = mask.shape[1]
            left = torch.arange(width, device=mask.device) >= (width - lengths)[:, None]
            if not bool((mask.bool() == left).all()) or not bool(lengths.all()):
                return "attention_mask is not left padding"
            self.pads = (width - lengths).tolist()
        else:  # transformers drops a mask that hides nothing
            width = getattr(self.generation_config, "_mask_length", self.slots)
        # Of a continued text transformers takes all tokens or the new ones, by the mask's width.
        past = 0 if self.user_cache is None else self.user_cache.get_seq_length()
        if not (width == self.slots > past or (past and width == past + self.slots)):
            held = f" and {past} in the cache" if past else ""
            return f"attention_mask has {width} columns for {self.slots} tokens{held}"
        self.slots = width
        positions = self.model_kwargs.get("position_ids")
        if positions is not None:
            expected = [self.slots - pad - 1 for pad in self.pads]
            # Models for images have several axes of positions; along a text they are all the same.
            axes = positions[None] if positions.ndim == 2 else positions
            last = axes[..., -1].expand(*axes.shape[:-2], self.batch)
            if axes.ndim != 3 or any(axis != expected for axis in last.tolist()):
                return "position_ids are not the usual ones"
        return (architecture.padding_fault or None) if any(self.pads) else None


def _is_default(cache: Any, from_user: bool) -> bool:
    """Whether a cache can be replaced by ours: what `generate` makes by default, or continuable."""
    if from_user:
        return continuable(cache)
    return is_dynamic(cache)


def _with_whole_length(criterion: Any) -> Any:
    """A maximum length as transformers takes it (2.5, infinity) becomes one that can be a size."""
    if type(criterion) is not MaxLengthCriteria:
        return criterion
    return MaxLengthCriteria(_whole(criterion.max_length), criterion.max_position_embeddings)


def _whole(length: float) -> int:
    return math.ceil(length) if length < _ENDLESS else _ENDLESS
