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

from selfspec.fingerprint import fingerprint
from selfspec.fixed_cache import FixedCache
from selfspec.fixed_step import FixedSteps, bucket

if TYPE_CHECKING:
    from torch import nn

    from selfspec.architectures import Architecture
    from selfspec.target import Target

_GRAIN = 256  # slots; capacities are multiples


def graph_obstacle(architecture: Architecture, model: nn.Module) -> str | None:
    """Why the steps of a model cannot have fixed shapes, or None."""
    if architecture.support != "tree":
        return "it verifies chains only"
    if any(p.is_meta for p in model.parameters()):
        return "its weights are offloaded"
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
        # Who allows for a hundred thousand tokens seldom takes them: the cache can grow.
        likely = min(longest, 2 * slots + 1024)
        state = fingerprint(self.target.model)
        if state != self._state or not self._holds(batch, likely):
            self.steps = None  # gives its memory back first
            cache = FixedCache(
                self.target.architecture.num_layers,
                batch,
                capacity=-(-(likely + self.most_nodes) // _GRAIN) * _GRAIN,
                extra=self.most_nodes,
                device=self.target.device,
                positions=self.target.architecture.position_limit,
            )
            self.steps, self._state = FixedSteps(self.target, cache), state
        assert self.steps is not None
        return self.steps

    def _holds(self, batch: int, slots: int) -> bool:
        if self.steps is None:
            return False
        cache = self.steps.cache
        return cache.batch == batch and cache.bound >= slots
