"""Work beside decoding that must not take more than a share of its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class SideWork:
    """Keeps the accounts of a wrapper: what decoding took, and what was done beside it.

    Attributes:
        decoding: Seconds of all steps so far, side work among them.
        spent: Seconds of side work, by what it was.
    """

    def __init__(self) -> None:
        self.decoding = 0.0
        self.spent: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._lap = 0.0

    def lap(self) -> float:
        """Seconds of side work since the last lap."""
        seconds, self._lap = self._lap, 0.0
        return seconds

    def affords(self, what: str, share: float, first: float) -> bool:
        """Whether once more would keep this work within a share of all time.

        Args:
            what: Name of the work.
            share: Of decoding.
            first: Seconds that it is expected to take, until it has been done.
        """
        expected = self._last.get(what, first)
        return self.spent.get(what, 0.0) + expected <= share * self.decoding

    @contextmanager
    def __call__(self, what: str, device: torch.device) -> Iterator[None]:
        """Book the time of the block."""
        start = perf_counter()
        try:
            yield
            if device.type == "cuda":
                import torch

                torch.cuda.synchronize(device)
        finally:
            seconds = perf_counter() - start
            self.spent[what] = self.spent.get(what, 0.0) + seconds
            self._last[what] = seconds
            self._lap += seconds
