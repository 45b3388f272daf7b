"""What is put on a model for the duration of a generate, and taken off again.

Three things. The config names our attention implementation. What `torch.compile` left on modules
is passed by: compiled code would be compiled anew for every width of tree and state of the cache,
until torch gives up on it, for the user's own calls, too. And, once a drafter wants to run some of
the layers or to see their states, every decoder layer (with its attention and MLP) gets a
dispatcher as instance `forward`. All of it does nothing unless the calling context is that of a
request of ours, so that other threads see an ordinary model. Patches are counted per model: two
wrappers, or two threads of one, share them, and the last one out restores whatever `forward` an
object had before (accelerate puts hooks there). What the user sets while a request runs is what the
object had before from then on.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter, defaultdict
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
    """Make `plan` the plan that the layers follow in this thread (None: run everything).

    Only inside `patched`; there the first plan puts the dispatchers on.
    """
    if plan is not None:
        scope = _SCOPE.get()
        assert scope is not None
        scope.take("layers")
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


# What modules return: (0 for a bare tensor or the length of the tuple, last dimension). Skipping a
# module has to imitate it; learnt when the model is probed.
_RETURNS: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()


class _StandIn:
    """Stands in for a callable of one module while the patch is on."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        self.forward = forward
        self.__wrapped__ = forward  # inspect.signature sees through
        self.retired = False  # taken off, but called by what the user has put over it

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model that is copied while a request runs gets its own `forward`, not our patch."""
        return copy.deepcopy(self.forward, memo)


class _Uncompiled(_StandIn):
    """Runs what was compiled, as it was before, for requests of ours."""

    def __init__(
        self, module: nn.Module, compiled: Callable[..., Any], original: Callable[..., Any]
    ) -> None:
        super().__init__(module, compiled)
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ours = _SCOPE.get() is not None and not self.retired
        return (self.original if ours else self.forward)(*args, **kwargs)


class _Dispatcher(_StandIn):
    """Stands in for the `forward` of one module, and learns what that returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, module.forward)
        self.tuple_length, self.size = _RETURNS.get(module, (0, 0))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self.forward(*args, **kwargs)
        if not self.size:
            is_tuple = isinstance(output, tuple)
            self.size = (output[0] if is_tuple else output).shape[-1]
            self.tuple_length = len(output) if is_tuple else 0
            _RETURNS[self.module] = self.tuple_length, self.size
        return output

    def like(self, hidden: Tensor) -> Any:
        return (hidden, *[None] * (self.tuple_length - 1)) if self.tuple_length else hidden


class _LayerDispatcher(_Dispatcher):
    """Passes a layer over, feeds it captured states, or records its input."""

    def __init__(self, module: nn.Module, index: int, count: int) -> None:
        super().__init__(module)
        self.index = index
        self.count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = None if self.retired else _PLAN.get()
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
        if plan.first == self.count == self.index + 1 and plan.resume is not None:
            output = self.like(plan.resume.to(hidden.device))
        for tap in plan.taps:
            if tap > self.index:  # the next layer may not be called: some only read images
                plan.captured[tap] = output[0] if isinstance(output, tuple) else output
        return output


class _SublayerDispatcher(_Dispatcher):
    """Lets an attention or MLP contribute zero to the residual stream."""

    def __init__(self, module: nn.Module, index: int, is_attention: bool) -> None:
        super().__init__(module)
        self.index = index
        self.is_attention = is_attention

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = None if self.retired else _PLAN.get()
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


class _Swap:
    """A value of ours in the place of the user's.

    Args:
        attributes: Of the object that has it.
        name: Of the attribute.
        make: Makes ours, while the user's is in its place.
    """

    def __init__(self, attributes: dict[str, Any], name: str, make: Callable[[], Any]) -> None:
        self.attributes, self.name, self.make = attributes, name, make
        self.put()

    @property
    def in_place(self) -> bool:
        """Whether the user has set nothing else meanwhile."""
        found = self.attributes.get(self.name)
        return found is self.ours or (isinstance(found, str) and found == self.ours)

    def put(self) -> None:
        """Put ours over what is there."""
        self.had, self.previous = self.name in self.attributes, self.attributes.get(self.name)
        self.ours = self.make()
        self.attributes[self.name] = self.ours

    def renew(self) -> None:
        """Put ours over what the user has set meanwhile."""
        if not self.in_place:
            self.retire()
            self.put()

    def undo(self) -> None:
        """Put the user's back, unless the user has set something else."""
        if not self.in_place:
            self.retire()
        elif self.had:
            self.attributes[self.name] = self.previous
        else:
            del self.attributes[self.name]

    def retire(self) -> None:
        """Make ours pass calls on: what the user has set may call it."""
        if isinstance(self.ours, _StandIn):
            self.ours.retired = True


class _Patch:
    """What is on one model, and how many generates need it, by kind."""

    def __init__(self) -> None:
        self.users: Counter[str] = Counter()
        self.swaps: dict[str, list[_Swap]] = defaultdict(list)

    def take(self, kind: str, install: Callable[[list[_Swap]], None]) -> None:
        self.users[kind] += 1
        if self.users[kind] == 1:
            try:
                install(self.swaps[kind])
            except BaseException:
                self.give_back(kind)
                raise

    def give_back(self, kind: str) -> None:
        self.users[kind] -= 1
        if self.users[kind] == 0:
            while self.swaps[kind]:
                self.swaps[kind].pop().undo()


class _Scope:
    """One generate's share of the patch; dispatchers come when its first plan does."""

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self.model = model
        self.architecture = architecture
        self.patch = _PATCHES.setdefault(model, _Patch())
        self.kinds: list[str] = []

    def take(self, kind: str) -> None:
        if kind in self.kinds:
            return
        install = {
            "attention": self._name_attention,
            "compiled": self._pass_compiled_by,
            "layers": self._install_dispatchers,
        }
        with _LOCK:
            self.patch.take(kind, install[kind])
        self.kinds.append(kind)

    def leave(self) -> None:
        with _LOCK:
            while self.kinds:
                self.patch.give_back(self.kinds.pop())

    def renew(self) -> None:
        """Have attention and layers ours again, whatever the user has set meanwhile."""
        kinds = [kind for kind in self.kinds if kind != "compiled"]
        if all(swap.in_place for kind in kinds for swap in self.patch.swaps[kind]):
            return
        with _LOCK:
            for kind in kinds:
                for swap in self.patch.swaps[kind]:
                    swap.renew()

    def _name_attention(self, swaps: list[_Swap]) -> None:
        for config, name in self.architecture.attention_names:
            # The property's setter would also walk into sub-configs that are listed or left out.
            attributes, make = vars(config), partial(str, name)
            swaps.append(_Swap(attributes, "_attn_implementation_internal", make))

    def _pass_compiled_by(self, swaps: list[_Swap]) -> None:
        for module, name, original in compiled_parts(self.model):
            make = partial(_Uncompiled, module, module.__dict__[name], original)
            swaps.append(_Swap(module.__dict__, name, make))

    def _install_dispatchers(self, swaps: list[_Swap]) -> None:
        layers = self.architecture.layers
        for i, layer in enumerate(layers):
            make: Callable[[], _StandIn] = partial(_LayerDispatcher, layer, i, len(layers))
            swaps.append(_Swap(layer.__dict__, "forward", make))
            for module, is_attention in self.architecture.sublayers[i]:
                make = partial(_SublayerDispatcher, module, i, is_attention)
                swaps.append(_Swap(module.__dict__, "forward", make))


_PATCHES: weakref.WeakKeyDictionary[nn.Module, _Patch] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()
_SCOPE: ContextVar[_Scope | None] = ContextVar("selfspec_patch_scope", default=None)


@contextmanager
def patched(model: nn.Module, architecture: Architecture) -> Iterator[None]:
    """Keep the patch on `model` while the block runs.

    Args:
        model: The user's model.
        architecture: Where its layers are, and which attention implementation to name.
    """
    with _LOCK:
        scope = _Scope(model, architecture)
    token = _SCOPE.set(scope)
    try:
        scope.take("attention")
        scope.take("compiled")
        yield
    finally:
        _SCOPE.reset(token)
        scope.leave()


def renew_patch() -> None:
    """Have the patch in place again after code of the user's has run inside `patched`."""
    scope = _SCOPE.get()
    if scope is not None:
        scope.renew()


def own_forward(module: nn.Module) -> object:
    """The `forward` in a module's own dictionary between requests, or None."""
    forward = _beneath(module.__dict__.get("forward"))
    return None if _is_class_forward(module, forward) else forward


def without_patch(module: nn.Module) -> list[tuple[str, object]]:
    """The attributes of a module's own dictionary as they are between requests."""
    with _LOCK:
        own = [(name, _beneath(value)) for name, value in module.__dict__.items()]
    return [
        (n, value) for n, value in own if n != "forward" or not _is_class_forward(module, value)
    ]


def _beneath(value: object) -> object:
    """What our stand-ins, if there are any, stand before."""
    while isinstance(value, _StandIn):
        value = value.forward
    return value


def _is_class_forward(module: nn.Module, forward: object) -> bool:
    """Whether nothing was there: a bound method is what a stand-in had found on the class."""
    return getattr(forward, "__self__", None) is module


def compiled_parts(model: nn.Module) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
    """(module, attribute, what was compiled) wherever `torch.compile` has been in a model.

    That is: `module.compile()`, `module.forward = torch.compile(module.forward)`, and a submodule
    replaced by `torch.compile(submodule)`.
    """
    found: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    for module in model.modules():
        own = module.__dict__
        if own.get("_compiled_call_impl") is not None:
            found.append((module, "_compiled_call_impl", module._call_impl))
        forward: Any = own.get("forward")
        # By its globals: accelerate copies the attributes of a `forward` onto the hook over it.
        if getattr(forward, "__globals__", {}).get("__name__") == "torch._dynamo.eval_frame":
            found.append((module, "forward", forward._torchdynamo_orig_callable))
    return found
