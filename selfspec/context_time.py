"""What a step takes longer because the text before it is longer.

Steps over long texts read more keys and values than steps over short ones, whatever their number of
nodes. So that steps can be compared, each is taken as it would have been over the first text: a
line through the times of steps of one size says what a token of context adds.
"""

from __future__ import annotations

_MEMORY = 512.0  # steps after which one counts for little
# Tokens by which texts have to differ before a slope is believed, over as many steps: noise over
# texts of like length has one, too.
_SPREAD, _STEPS = 256.0, 8.0
_OUTLIER = 0.5  # of the mean: a step that was interrupted tells nothing of its text
_LEAST = 0.2  # of a time, is left of it


class ContextTime:
    """Of batches of one size.

    Attributes:
        shift: Seconds that the present text adds to those of the first one.
    """

    def __init__(self) -> None:
        self.shift = 0.0
        self._first: float | None = None
        self._means: dict[int, list[float]] = {}  # by nodes: weight, context, seconds
        self._xx = self._xy = 0.0

    @property
    def slope(self) -> float:
        """Seconds a token of context; never less than none."""
        return max(self._xy / (self._xx + _STEPS * _SPREAD**2), 0.0)

    def longer_by(self, context: float) -> float:
        """Seconds that a text of `context` tokens adds to those of the first one."""
        return 0.0 if self._first is None else self.slope * (context - self._first)

    def as_first(self, nodes: int, context: float, seconds: float) -> float:
        """Seconds that a step would have taken over the first text; learns from it.

        Args:
            nodes: A row.
            context: Tokens of the text before the step.
            seconds: That it took.
        """
        if self._first is None:
            self._first = context
        self._learn(nodes, context, seconds)
        self.shift = self.longer_by(context)
        return max(seconds - self.shift, _LEAST * seconds)

    def _learn(self, nodes: int, context: float, seconds: float) -> None:
        mean = self._means.setdefault(nodes, [0.0, context, seconds])
        x, y = context - mean[1], seconds - mean[2]
        if abs(y) > _OUTLIER * mean[2] and mean[0] > 1:
            y = 0.0
        weight = mean[0] / (mean[0] + 1)
        decay = 1 - 1 / _MEMORY
        self._xx = decay * self._xx + weight * x * x
        self._xy = decay * self._xy + weight * x * y
        mean[0] = decay * mean[0] + 1
        mean[1] += x / mean[0]
        mean[2] += y / mean[0]
