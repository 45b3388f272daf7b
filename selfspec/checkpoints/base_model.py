"""Which model a draft was made for, told by a few numbers of it.

A draft for another model changes no text, but hardly anything of it is accepted; so it is refused.
"""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("selfspec")

_SAMPLES = 256
# Steps through the columns of the embeddings; prime, so that no width is a multiple of it.
_STRIDE = 7919
# A weight that was rounded to bfloat16 on one side and to float16 and bfloat16 on the other differs
# by one unit in the last place; float16 has nothing between 0 and 6e-8.
_RELATIVE, _ABSOLUTE = 2.0**-7, 1e-7
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What the network is built for: with another of these it cannot run.
_BUILT_FOR = ("hidden_size", "num_hidden_layers")
_SHAPE = ("model_type", *_BUILT_FOR, "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class BaseModel:
    """A model that drafts are made for.

    Attributes:
        name: Hub id, or the last part of a path, for people.
        shape: Fields of its text config; those that are not known are left out.
        embedding: 256 weights spread over the input embeddings, as bfloat16 in base64; None where
            they are not known or are quantised. Loads of one checkpoint in any of the usual dtypes
            and on any device agree within rounding, which a hash of the bytes would not.
    """

    name: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    embedding: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> BaseModel:
        """Describe a model; reads 256 of its weights."""
        config = model.config.get_text_config(decoder=True)
        shape = {name: getattr(config, name, None) for name in _SHAPE}
        weight = getattr(model.get_input_embeddings(), "weight", None)
        return cls(
            name=_public(str(getattr(model, "name_or_path", "") or "")),
            shape={name: value for name, value in shape.items() if value is not None},
            embedding=sample(weight, shape["vocab_size"]),
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: object) -> BaseModel:
        """The inverse of `dataclasses.asdict`.

        Raises:
            ValueError: If a field is unknown or of another type.
        """
        if not isinstance(values, dict):
            raise ValueError(f"{where}: base must be an object, got {values!r}.")
        unknown = sorted(set(values) - {"name", "shape", "embedding"})
        shape, embedding = values.get("shape", {}), values.get("embedding")
        if unknown or not isinstance(shape, dict):
            raise ValueError(
                f"{where}: base has unknown fields {unknown} or a shape that is no object."
            )
        for name, value in shape.items():
            wanted = str if name == "model_type" else int
            if not isinstance(value, wanted):
                raise ValueError(
                    f"{where}: base.shape.{name}={value!r} must be of type {wanted.__name__}."
                )
        if not isinstance(embedding, str | None):
            raise ValueError(f"{where}: base.embedding must be a string, got {embedding!r}.")
        try:
            _decoded(embedding or "")
        except ValueError as error:
            raise ValueError(
                f"{where}: base.embedding is no base64 of 16-bit numbers: {error}."
            ) from error
        return cls(str(values.get("name", "")), dict(shape), embedding)

    def differences(self, other: BaseModel) -> list[str]:
        """What is known of both and not the same, in words; empty if nothing is."""
        found = [
            f"{name} is {self.shape[name]} for the draft and {other.shape[name]} in the model"
            for name in self.shape
            if name in other.shape and self.shape[name] != other.shape[name]
        ]
        if not found and self.embedding and other.embedding:
            mine, theirs = _decoded(self.embedding), _decoded(other.embedding)
            bound = _RELATIVE * np.maximum(abs(mine), abs(theirs)) + _ABSOLUTE
            apart = int((~(abs(mine - theirs) <= bound)).sum()) if len(mine) == len(theirs) else -1
            if apart:
                of = f"{apart} of {len(mine)}" if apart > 0 else "the number of"
                found.append(f"{of} sampled weights of the input embeddings differ")
        return found


def _public(name: str) -> str:
    """A name that may be published: where a folder lies on this machine is nobody's business."""
    is_path = name.startswith(("/", ".", "~")) or (name and Path(name).is_dir())
    return Path(name).resolve().name if is_path else name


def sample(weight: Any, vocab_size: int | None = None) -> str | None:
    """The `embedding` of a `BaseModel`, of weights [V, C]; None if they are not plain floats.

    Args:
        weight: Input embeddings.
        vocab_size: Rows that count, if there may be more.
    """
    if not _is_plain(weight):
        return None
    rows = min(weight.shape[0], vocab_size or weight.shape[0])
    steps = torch.arange(_SAMPLES, device=weight.device)
    picked = weight.detach()[steps * rows // _SAMPLES, steps * _STRIDE % weight.shape[1]]
    bits = picked.to("cpu", torch.bfloat16).view(torch.int16).numpy().astype("<i2")
    return base64.b64encode(bits.tobytes()).decode()


def _decoded(text: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    bits = np.frombuffer(base64.b64decode(text, validate=True), "<i2")
    values = torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16)
    return values.double().numpy()


_WARNED: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


def check_base(base: BaseModel, model: PreTrainedModel, strict_base: bool = True) -> None:
    """Refuse a draft that was made for another model.

    Args:
        base: The model that it was made for.
        model: The model that it is to draft for.
        strict_base: False: another model of the same sizes, as a fine-tune of that one, is let
            through with a warning.

    Raises:
        ValueError: If the models differ.
    """
    actual = BaseModel.of(model)
    found = base.differences(actual)
    if not found:
        if not (base.embedding and actual.embedding):
            logger.info(
                "the draft's model was compared by its config alone: the embeddings of one side "
                "are not known."
            )
        return
    message = f"the draft was made for {base.name or 'another model'}: {'; '.join(found)}."
    both = [n for n in _BUILT_FOR if n in base.shape and n in actual.shape]
    if any(base.shape[n] != actual.shape[n] for n in both):
        raise ValueError(f"{message} It cannot run here; load a draft for this model or train one.")
    if strict_base:
        raise ValueError(
            f"{message} Load a draft for this model or train one, or pass strict_base=False to use "
            "this one anyway (the text stays the model's; less of it may be drafted right)."
        )
    warned = _WARNED.setdefault(model, set())
    if message not in warned:  # a draft is looked at when it is loaded, and by every wrapper
        warned.add(message)
        logger.warning("%s It is used anyway, as asked for.", message)


def head_rows(model: PreTrainedModel, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Rows of a model's LM head.

    Args:
        model: Its output embeddings must be an ordinary linear layer.
        ids: int64 [Vd], which rows; None: the first `vocab_size`.
        vocab_size: V of the draft.

    Returns:
        A copy, [Vd, C].

    Raises:
        ValueError: If the head has a bias or quantised weights, or too few rows.
    """
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(
            "model's LM head has a bias, which the layout has not. Train the draft with "
            "own_head=True."
        )
    rows = _rows(head, "LM head", vocab_size)
    return rows.clone() if ids is None else rows[ids.to(rows.device)]


def embedding_rows(model: PreTrainedModel, vocab_size: int) -> Tensor:
    """A copy of a model's input embeddings, [vocab_size, C]; errors as for `head_rows`."""
    return _rows(model.get_input_embeddings(), "input embedding", vocab_size).clone()


def _rows(module: Any, what: str, vocab_size: int) -> Tensor:
    weight: Any = getattr(module, "weight", None)
    if not _is_plain(weight):
        raise ValueError(
            f"model's {what} is a {type(module).__name__} without plain weights, and they are to "
            "be written: load the model unquantised and in memory to export."
        )
    if weight.shape[0] < vocab_size:
        raise ValueError(
            f"model's {what} has {weight.shape[0]} rows, and the draft {vocab_size} tokens: export "
            "with the model that it was trained for."
        )
    rows: Tensor = weight.detach()[:vocab_size]
    return rows


def _is_plain(weight: Any) -> bool:
    """Whether it is a matrix of floats in memory, and no quantised, sharded or absent one."""
    return (
        isinstance(weight, Tensor)
        and type(weight.data) is Tensor
        and weight.dtype in _PLAIN
        and not weight.is_meta
        and weight.ndim == 2
    )
