"""Requests that are not decoded by greedy search or sampling: told, and run on the model itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from selfspec.facade import Facade
from selfspec.generation_options import other_loop

if TYPE_CHECKING:
    from selfspec.double import Call


def detours(base: type, call_of: Callable[[Any], Call]) -> dict[str, Any]:
    """Methods for a subclass of the model's class, which `generate` looks up on the type.

    Beam search and assisted decoding are announced. They run with the model itself for `self`, as
    does token healing, because they may call `generate` again: an early exit of transformers' would
    draft with our loop, on a model that has been cut short for the time being. A `custom_generate`
    is given the model, too, and a wrapper that is to assist is its model.

    Args:
        base: The model's class.
        call_of: The call that an object of the subclass runs; told the reason before the work.
    """

    def on_the_model(name: str, announced: bool) -> Any:
        method = getattr(base, name)

        @functools.wraps(method)  # `generate` looks at the signature
        def run(double: Any, *args: Any, **kwargs: Any) -> Any:
            call = call_of(double)
            if announced:
                config = kwargs.get("generation_config")
                call.leave(other_loop(lambda o: kwargs.get(o, getattr(config, o, None))))
            return method(call.model, *args, **kwargs)

        return run

    kind: Any = base  # its `generate` may be replaced later on

    @functools.wraps(kind.generate)
    def generate(double: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(assistant := kwargs.get("assistant_model"), Facade):
            kwargs["assistant_model"] = assistant.model
        if kwargs.get("custom_generate") is None:
            return kind.generate(double, *args, **kwargs)
        call = call_of(double)
        call.leave(other_loop(kwargs.get))
        return kind.generate(call.model, *args, **kwargs)

    names = {"_beam_search": True, "_assisted_decoding": True, "heal_tokens": False}
    found = {n: on_the_model(n, told) for n, told in names.items() if hasattr(base, n)}
    return {**found, "generate": generate}


def option_of_call(model: Any, kwargs: dict[str, Any]) -> Callable[[str], Any]:
    """What an option is for `model.generate(**kwargs)`: the argument, or a field of the configs."""
    configs = (kwargs.get("generation_config"), model.generation_config)

    def option(name: str) -> Any:
        values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    return option
