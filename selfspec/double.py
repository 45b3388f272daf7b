"""The object that `generate` runs on: the user's model in all but how it decodes.

`generate` looks its decoding loop up on the type. So a double is of a subclass with our loop, and
shares the model's one `__dict__`: everything that `generate` prepares (processors, criteria,
streamers, padding, pipelines) reaches the loop, and the model stays as it is. What delegates
`generate` to a model inside (PEFT) has a double, too, whose inside is the model's double.

A double lives for one call, and its class, which is shared, holds no wrapper: dropping the last
reference to a wrapper frees it at once, without the garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.generation import GenerationMixin

from selfspec.detours import detours

if TYPE_CHECKING:
    from torch import Tensor

_CALL, _INSIDE = "_selfspec_call", "_selfspec_inside"  # slots of doubles

# Classes by which torch shards weights over processes: fully_shard gives a model the second.
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")


@dataclass(frozen=True)
class Call:
    """What a double knows besides being the model.

    Attributes:
        model: The model.
        decode: Our loop: takes the model's class, the double, and what `_sample` takes.
        leave: Told why, when a request goes elsewhere.
    """

    model: Any
    decode: Callable[..., Any]
    leave: Callable[[str], None]


def inside(model: Any) -> nn.Module | None:
    """The module that `model` leaves `generate` to, if it is a shell of PEFT or `torch.compile`."""
    modules = getattr(model, "_modules", {})
    if "_orig_mod" in modules:
        return modules["_orig_mod"]
    name = _delegate(type(model))
    return modules.get(name) if name else None


def decoder_of(model: Any) -> Any:
    """The model whose `generate` runs when that of `model` is called."""
    while (inner := inside(model)) is not None:
        model = inner
    return model


@contextmanager
def doubled(model: Any, call: Call) -> Iterator[Any]:
    """A double of `model` for the block.

    Args:
        model: What the user wrapped.
        call: Reached from the double of the decoder inside.
    """
    doubles: list[Any] = []
    top = _double(model, call, doubles)
    before = [dict(double.__dict__) for double in doubles]
    try:
        yield top
    finally:
        for double, had in zip(doubles, before, strict=True):
            # PEFT puts methods of what it was called on here, and forgets them on an interrupt.
            for name, value in list(double.__dict__.items()):
                if any(getattr(value, "__self__", None) is one for one in doubles):
                    if name in had:
                        double.__dict__[name] = had[name]
                    else:
                        double.__dict__.pop(name, None)


def _double(model: Any, call: Call, made: list[Any]) -> Any:
    inner = inside(model)
    if inner is not None and "_orig_mod" in model._modules:
        return _double(inner, call, made)  # its `generate` is the inner one's
    name = _delegate(type(model)) if inner is not None else None
    kind: type = type(model)
    double: Any = object.__new__(_class(kind, name))
    object.__setattr__(double, "__dict__", model.__dict__)
    made.append(double)
    if name is None:
        object.__setattr__(double, _CALL, call)
    else:
        object.__setattr__(double, _INSIDE, _double(inner, call, made))
    return double


@cache
def _class(base: type, delegate: str | None) -> type:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    if delegate is not None:
        inner = property(lambda double: getattr(double, _INSIDE))
        return type(base.__name__, (base,), {**names, "__slots__": (_INSIDE,), delegate: inner})

    def _sample(double: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        return getattr(double, _CALL).decode(base, double, input_ids, **kwargs)

    methods = detours(base, lambda double: getattr(double, _CALL))
    return type(
        base.__name__, (base,), {**names, "__slots__": (_CALL,), "_sample": _sample} | methods
    )


def _delegate(kind: type) -> str | None:
    """Where a class of PEFT keeps the module that it delegates to."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "peft":
            shell = base.__module__ in ("peft.peft_model", "peft.mixed_model")
            return "base_model" if shell else "model"
    return None


def adapter_obstacle(model: Any, decoder: Any) -> str | None:
    """Why requests cannot be decoded in blocks with the adapters that are active, or None.

    The same for methods that do between steps what a block has no place for.
    """
    update = getattr(decoder, "_update_model_kwargs_for_generation")  # noqa: B009
    if not update.__module__.startswith("transformers."):
        return "the model updates its inputs between steps in a way of its own"
    prepare = decoder.__dict__.get("prepare_inputs_for_generation")
    own = type(decoder).prepare_inputs_for_generation
    if prepare is not None and getattr(prepare, "__func__", prepare) is not own:
        owner = type(getattr(prepare, "__self__", prepare)).__name__
        return f"{owner} prepares the model's inputs in a way of its own, as prompt learning does"
    if model is not decoder and hasattr(model, "peft_config"):
        for name in model.active_adapters:
            if getattr(model.peft_config[name], "alora_invocation_tokens", None):
                return f"adapter {name!r} is active from a token on (aLoRA)"
    return None


def check_model(model: Any) -> Any:
    """The model that decodes when `model.generate` is called.

    Raises:
        TypeError: If there is none, or it is replicated or sharded over devices or processes.
    """
    kind = type(model).__name__
    decoder = decoder_of(model)
    if isinstance(decoder, nn.Module) and isinstance(decoder, GenerationMixin):
        for module in decoder.modules():
            if any(base.__name__ in _SHARDED for base in type(module).__mro__):
                raise TypeError(
                    f"model is sharded over processes ({type(module).__name__}), which would have "
                    "to draft in step; wrap a model that one process holds whole."
                )
        return decoder
    if any(base.__name__ in _SHARDED for base in type(model).__mro__):
        raise TypeError(f"model is a {kind}, sharded over processes; wrap one that is whole.")
    if isinstance(getattr(model, "module", None), GenerationMixin):
        raise TypeError(f"model is a {kind}, which has no `generate`; wrap its .module.")
    raise TypeError(
        f"model is a {kind}; wrap takes a transformers model with `generate`, such as "
        "AutoModelForCausalLM gives, or one with adapters of PEFT."
    )
