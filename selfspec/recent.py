"""What has been usual of late."""

from __future__ import annotations

from collections import deque
from statistics import median


class Rate:
    """Tokens over seconds of recent steps, older ones counting less and less."""

    decay = 0.98

    def __init__(self) -> None:
        self.steps = 0
        self._tokens = self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Add a step."""
        self.steps += 1
        self._tokens = self.decay * self._tokens + tokens
        self._seconds = self.decay * self._seconds + seconds

    @property
    def value(self) -> float:
        """Tokens a second; 0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0


def lately(seconds: deque[float] | None, least: int = 1) -> float | None:
    """The median of `least` measurements or more; never nothing, whatever a clock says.

    Of a copy: other requests of the wrapper add to what is measured, and drop it.
    """
    known = list(seconds or ())
    return max(median(known), 1e-9) if len(known) >= least else None
