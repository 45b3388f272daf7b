"""Where captured steps live between requests: one fixed cache, its graphs, and who may use them.

A graph replays addresses. It stays valid while the cache is where it was and the model is what it
was: the same tensors, the same switches. Both are checked at every request; if either changed, the
arena is made anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from selfspec.fixed_cache import FixedCache
from selfspec.fixed_step import FixedSteps, bucket

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.target import Target

_GRAIN = 256  # slots; capacities are multiples


def graph_obstacle(architecture: Architecture, model: nn.Module) -> str | None:
    """Why the steps of a model cannot have fixed shapes, or None."""
    if architecture.support != "tree":
        return "it verifies chains only"
    if len({p.device for p in model.parameters()}) > 1:
        return "it is spread over several devices"
    return None


class Arena:
    """One fixed cache with its steps, lent to one request at a time.

    Args:
        target: The model.
        most_nodes: Nodes of the largest tree.
    """

    def __init__(self, target: Target, most_nodes: int) -> None:
        self.target = target
        self.most_nodes = bucket(most_nodes)
        self.steps: FixedSteps | None = None
        self._lock = threading.Lock()
        self._state: tuple[Any, ...] = ()

    @contextmanager
    def lend(self, batch: int, slots: int, longest: int) -> Iterator[FixedSteps | None]:
        """The steps of a cache for `batch` rows.

        Args:
            batch: B.
            slots: Slots that the prompt fills.
            longest: Slots that the longest sequence can come to fill.

        Yields:
            The steps, with their cache empty; None while another request has them.
        """
        if not self._lock.acquire(blocking=False):
            yield None
            return
        try:
            steps = self._fit(batch, slots, longest)
            steps.cache.restart(longest)
            yield steps
        finally:
            self._lock.release()

    def _fit(self, batch: int, slots: int, longest: int) -> FixedSteps:
        state = fingerprint(self.target.model)
        # Who allows for a hundred thousand tokens seldom takes them: the cache can grow.
        likely = min(longest, 2 * slots + 1024)
        steps = self.steps
        if steps is not None and state == self._state:
            cache = steps.cache
            if cache.batch == batch and cache.bound >= likely:
                return steps
        self.steps = steps = None  # gives its memory back first
        cache = FixedCache(
            self.target.architecture.num_layers,
            batch,
            capacity=-(-(likely + self.most_nodes) // _GRAIN) * _GRAIN,
            extra=self.most_nodes,
            device=self.target.device,
        )
        self.steps, self._state = FixedSteps(self.target, cache), state
        return self.steps


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """What a graph of `model` depends on and cannot see change: tensors by address, and switches.

    Switches are plain values in the modules (training flags, adapter names and scales, a replaced
    `forward`, numbers of hooks); in-place changes of weights need no new graph.
    """
    found: list[Any] = []
    for module in model.modules():
        found.append(type(module))
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers"):
                found += [(key, _identity(tensor)) for key, tensor in value.items()]
            elif isinstance(value, dict):
                found.append((name, tuple((key, _identity(v)) for key, v in value.items())))
            elif isinstance(value, list | tuple | set):
                found.append((name, tuple(map(_identity, value))))
            else:
                found.append((name, _identity(value)))
    return tuple(found)


def _identity(value: Any) -> Any:
    """What tells a value from another: itself if plain, an address otherwise."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr(), value.dtype, value.shape, value.device
    return id(value)
