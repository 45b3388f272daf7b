"""What a captured step depends on and cannot see change.

A graph replays addresses, and one way through Python code. It is void once the model has other
tensors or modules, or a switch is set otherwise: a training flag, an adapter's name or scale, a
hook, a replaced `forward`, a number in a config, autocast. In-place changes of weights a replay
sees.
"""

from __future__ import annotations

import weakref
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.attention import PREFIX
from selfspec.patch import without_patch

_DEPTH = 3  # containers in containers


class _Same:
    """Equal only to a reference to the very same object, as long as that lives."""

    def __init__(self, value: object) -> None:
        try:
            self._get: Any = weakref.ref(value)
        except TypeError:  # held, so that its address cannot become another's
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return isinstance(other, _Same) and mine is not None and mine is other._get()

    __hash__ = None  # type: ignore[assignment]


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """Equal to an earlier one if steps captured then are still good.

    What this library puts on a model for the time of a request does not count.
    """
    # Offloaded weights are on "meta", which computes nothing.
    device = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
    found: list[Any] = [
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    ]
    seen: set[int] = set()
    for module in list(model.modules()):
        found.append(type(module))
        found += [(name, _identity(value, _DEPTH, seen)) for name, value in without_patch(module)]
    return tuple(found)


def _identity(value: Any, depth: int, seen: set[int]) -> Any:
    """What tells a value from another; `seen` are objects that were looked into already."""
    if isinstance(value, str):
        return value.removeprefix(PREFIX)
    if value is None or isinstance(value, bool | int | float | complex | type | torch.dtype):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr(), value.dtype, value.shape, value.stride(), value.device
    if depth == 0 or isinstance(value, nn.Module | FunctionType | BuiltinFunctionType | MethodType):
        return _Same(value)
    if isinstance(value, dict | list | tuple | set | frozenset) and not value:
        return ()
    if isinstance(value, dict):
        return tuple((key, _identity(v, depth - 1, seen)) for key, v in list(value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_identity(v, depth - 1, seen) for v in list(value))
    inside = getattr(value, "__dict__", None)
    if inside is None or id(value) in seen:
        return _Same(value)
    seen.add(id(value))
    return _Same(value), tuple((k, _identity(v, 1, seen)) for k, v in list(inside.items()))
