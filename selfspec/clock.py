"""Time by station of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Clock:
    """Adds up seconds by station until `lap` is called.

    On a CUDA device work is asynchronous: the one host copy of a step falls into "commit", which
    therefore carries what earlier stations left running. The sum is right.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, station: str) -> Iterator[None]:
        """Add the time of the block to `station`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(station, perf_counter() - start)

    def add(self, station: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[station] = self._seconds.get(station, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Seconds by station since the last lap."""
        seconds, self._seconds = self._seconds, {}
        return seconds
