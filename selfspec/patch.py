"""What is put on a model for the duration of a generate, and taken off again.

Two things: the config names our attention implementation, and every decoder layer (with its
attention and MLP) gets a dispatcher as instance `forward`. A dispatcher does nothing unless the
calling context carries a `LayerPlan`, so that other threads see an ordinary model. Patches are
counted per model: two wrappers, or two threads of one, share them, and the last one out restores
whatever `forward` an object had before (accelerate puts hooks there).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from selfspec.architectures import Architecture


@dataclass
class LayerPlan:
    """Which layers a forward runs, and what it leaves behind.

    Attributes:
        first: Layers before this one are passed over; `resume` takes their place.
        last: Layers from this one on are passed over.
        skip_attention: Layers whose attention contributes nothing.
        skip_mlp: Layers whose MLP contributes nothing. A layer in both sets is passed over whole.
        resume: [B, M, C] input of layer `first` (output of the last layer if `first == L`).
        taps: Layers whose input is captured; L means the output of the last layer.
        captured: What was captured, {layer: [B, M, C]}.
    """

    first: int = 0
    last: int | None = None
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    resume: Tensor | None = None
    taps: frozenset[int] = frozenset()
    captured: dict[int, Tensor] = field(default_factory=dict)

    def passes_over(self, layer: int) -> bool:
        """Whether the whole layer is left out."""
        return (
            layer < self.first
            or (self.last is not None and layer >= self.last)
            or (layer in self.skip_attention and layer in self.skip_mlp)
        )


_PLAN: ContextVar[LayerPlan | None] = ContextVar("selfspec_layer_plan", default=None)


@contextmanager
def layer_plan(plan: LayerPlan | None) -> Iterator[None]:
    """Make `plan` the plan that the layers follow in this thread (None: run everything)."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


class _Dispatcher:
    """Stands in for the `forward` of one module while the patch is on."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.__wrapped__ = forward  # inspect.signature sees through
        self.module = weakref.ref(module)
        self.forward = forward
        self.tuple_length = 0  # what skipping must imitate: 0 is a bare tensor
        self.size = 0

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self.forward(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        self.tuple_length = len(output) if isinstance(output, tuple) else 0
        self.size = first.shape[-1]
        return output

    def like(self, hidden: Tensor) -> Any:
        return (hidden, *[None] * (self.tuple_length - 1)) if self.tuple_length else hidden


class _LayerDispatcher(_Dispatcher):
    """Passes a layer over, feeds it captured states, or records its input."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], index: int, count: int
    ) -> None:
        super().__init__(module, forward)
        self.index = index
        self.count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = _PLAN.get()
        if plan is None:
            return self.run(args, kwargs)
        hidden, args, kwargs = _take_hidden(args, kwargs)
        if self.index == plan.first and plan.resume is not None:
            hidden = plan.resume.to(hidden.device)
        if self.index in plan.taps:
            plan.captured[self.index] = hidden
        if plan.passes_over(self.index):
            output = self.like(hidden)
        else:
            output = self.run((hidden, *args), kwargs)
        if self.index == self.count - 1:
            if plan.first == self.count and plan.resume is not None:
                output = self.like(plan.resume.to(hidden.device))
            if self.count in plan.taps:
                plan.captured[self.count] = output[0] if isinstance(output, tuple) else output
        return output


class _SublayerDispatcher(_Dispatcher):
    """Lets an attention or MLP contribute zero to the residual stream."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], index: int, is_attention: bool
    ) -> None:
        super().__init__(module, forward)
        self.index = index
        self.is_attention = is_attention

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = _PLAN.get()
        if plan is not None:
            skipped = plan.skip_attention if self.is_attention else plan.skip_mlp
            if self.index in skipped:
                hidden, _, _ = _take_hidden(args, kwargs)
                return self.like(hidden.new_zeros(*hidden.shape[:-1], self.size))
        return self.run(args, kwargs)


def _take_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    kwargs = dict(kwargs)
    return kwargs.pop("hidden_states"), args, kwargs


class _Patch:
    """The dispatchers of one model and how many generates need them."""

    def __init__(self) -> None:
        self.users = 0
        self.undo: list[Callable[[], None]] = []


_PATCHES: weakref.WeakKeyDictionary[nn.Module, _Patch] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


@contextmanager
def patched(model: nn.Module, architecture: Architecture) -> Iterator[None]:
    """Keep the patch on `model` while the block runs.

    Args:
        model: The user's model.
        architecture: Where its layers are, and which attention implementation to name.
    """
    with _LOCK:
        patch = _PATCHES.setdefault(model, _Patch())
        if patch.users == 0:
            _install(patch, architecture)
        patch.users += 1
    try:
        yield
    finally:
        with _LOCK:
            patch.users -= 1
            if patch.users == 0:
                while patch.undo:
                    patch.undo.pop()()


def _install(patch: _Patch, architecture: Architecture) -> None:
    layers = architecture.layers
    for index, layer in enumerate(layers):
        _replace_forward(patch, layer, _LayerDispatcher(layer, layer.forward, index, len(layers)))
        for module, is_attention in architecture.sublayers[index]:
            dispatcher = _SublayerDispatcher(module, module.forward, index, is_attention)
            _replace_forward(patch, module, dispatcher)
    for config, name in architecture.attention_names:
        previous = config._attn_implementation_internal
        # The property's setter would also walk into sub-configs that we have listed or left out.
        config._attn_implementation_internal = name
        restore = partial(setattr, config, "_attn_implementation_internal", previous)
        patch.undo.append(restore)


def _replace_forward(patch: _Patch, module: nn.Module, dispatcher: _Dispatcher) -> None:
    had = "forward" in module.__dict__
    previous = module.__dict__.get("forward")
    module.__dict__["forward"] = dispatcher

    def undo() -> None:
        if had:
            module.__dict__["forward"] = previous
        else:
            del module.__dict__["forward"]

    patch.undo.append(undo)
