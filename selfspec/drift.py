"""Noticing that a text has become another one than a threshold was calibrated on.

The test is a bet against the calibration: a capital that grows with every token that differs and
shrinks with every one that does not, and that cannot be expected to grow as long as no more than
delta of them differ. It starts anew whenever it falls below what it started with (an e-detector,
Shin, Ramdas and Rinaldo 2022, https://arxiv.org/abs/2203.03532), so that the mean time to a false
alarm is at least the threshold of the alarm, in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

DRIFT = "drift of lossy exits"  # the name of the one that a wrapper keeps
_ALARM = 10_000.0


class DriftMonitor:
    """Counts tokens that differ, and says when there are too many.

    Args:
        delta: Share of tokens that may differ.
        alarm: Mean number of tokens, at least, to an alarm without a cause.

    Attributes:
        capital: Of the bet; 1 at the start.
        alarms: How often there was an alarm.
    """

    def __init__(self, delta: float, alarm: float = _ALARM) -> None:
        self.delta, self.alarm = delta, alarm
        self.capital, self.alarms = 1.0, 0

    def add(self, differs: Iterable[bool]) -> bool:
        """See what some tokens gave.

        Args:
            differs: Of each whether the whole model says something else, in the order in which
                they came: sorted ones would make alarms of their own.

        Returns:
            Whether this is an alarm; then counting starts anew.
        """
        stake = 1 / (1 - self.delta)  # what grows fastest where twice as many differ
        up, down = 1 + stake * (1 - self.delta), 1 - stake * self.delta
        for one in differs:
            self.capital = max(1.0, self.capital * (up if one else down))
        if self.capital < self.alarm:
            return False
        self.capital, self.alarms = 1.0, self.alarms + 1
        return True
