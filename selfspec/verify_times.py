"""How long a verification takes by its number of nodes, from the steps that were made."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

_PER_NODE = 0.03  # of the time of one, beyond what was measured


class VerifyTimes:
    """A curve through the medians of recent steps of like size.

    Small sizes are kept apart, since there the curve bends: one row of a matrix product is another
    computation than two, and tiles are filled in steps.

    Args:
        keep: Recent steps of a size that count.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        self._points: np.ndarray | None = None
        self.added = 0

    def add(self, nodes: int, seconds: float) -> None:
        """Add a step over `nodes` nodes a row, the root included."""
        self._steps.setdefault(_class(nodes), deque(maxlen=self._keep)).append((nodes, seconds))
        self.added += 1
        if self.added % 4 == 0:
            self._points = None

    @property
    def is_known(self) -> bool:
        """Whether there are two sizes to draw a curve through."""
        return sum(map(bool, list(self._steps.values()))) > 1

    def seconds(self, most: int) -> np.ndarray:
        """Of 1..`most` nodes, [most]; never less for more of them."""
        points = self._points  # once: other requests of the wrapper set it back
        if points is None:
            self._points = points = self._find()
        at, seconds = points
        wanted = np.arange(1, most + 1)
        found = np.interp(wanted, at, seconds)
        slope = _PER_NODE * seconds[0]
        if len(at) > 1:
            # Over the upper half of what is known: two neighbours may differ by noise alone.
            low = int(np.searchsorted(at, at[-1] / 2))
            low = min(low, len(at) - 2)
            slope = (seconds[-1] - seconds[low]) / (at[-1] - at[low])
        found += slope * np.maximum(wanted - at[-1], 0)
        first = at[0] - wanted
        return np.asarray(found - _PER_NODE * seconds[0] * np.maximum(first, 0))

    def points(self) -> list[list[float]]:
        """What the curve goes through, sizes and seconds."""
        points: list[list[float]] = self._find().T.tolist() if self.added else []
        return points

    def _find(self) -> np.ndarray:
        """[2, M] mean sizes and times, neither falling: the nearest such times (isotonic)."""
        points: list[tuple[float, float, int]] = []
        for steps in list(self._steps.values()):
            known = list(steps)
            if not known:  # another request is about to add the first
                continue
            times = [seconds for _, seconds in known]
            # The first step of a shape includes its set-up.
            usual = min(times) if len(times) < 3 else median(times)
            points.append((sum(nodes for nodes, _ in known) / len(known), usual, len(known)))
        points.sort()
        # Neighbours that fall share their mean: one size that was timed while the machine was slow
        # must not lift all larger ones.
        blocks: list[list[float]] = []  # time, weight, sizes
        for _, time, weight in points:
            blocks.append([time, weight, 1])
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (first, of_first, some), (second, of_second, more) = blocks[-2:]
                both = of_first + of_second
                mean = (first * of_first + second * of_second) / both
                blocks[-2:] = [[mean, both, some + more]]
        seconds = [time for time, _, sizes in blocks for _ in range(int(sizes))]
        return np.array([[nodes for nodes, _, _ in points], seconds])


def _class(nodes: int) -> int:
    """1, 2, 3, 4, then half powers of two: 5-6, 7-8, 9-12, 13-16, 17-24, ..."""
    if nodes <= 4:
        return nodes
    power = (nodes - 1).bit_length()
    middle = 3 << (power - 2)
    return middle if nodes <= middle else 1 << power
