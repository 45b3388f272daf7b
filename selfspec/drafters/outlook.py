"""Whether another draft step pays."""

from __future__ import annotations

from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING

from selfspec.costs import AGAIN, ASSUMED

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.state import DecodeState


class Outlook:
    """Decides after every level of one draft.

    A level is worth the tokens it is expected to give beyond what its nodes cost. Of the level to
    come only the mass is known: how many of the nodes that it starts from are expected to be right.
    A mean of worth over mass takes one to the other. (To go by how sure the draft was one level
    before would stop too early: the next token may be certain where this one is not.)

    Args:
        state: Where decoding stands.
        name: Of the drafter, under which its draft steps are known.
        least: Tokens a row that a draft step has to be worth, by what levels are assumed to be
            worth. None: what is decoded in the time of one, and what they were worth, as measured;
            now and then a step is made that does not pay, to see whether that has changed: the more
        it costs, the less often.
    """

    _looking = 0.005  # tokens a draft that are spent on that at most

    def __init__(self, state: DecodeState, name: str, least: float | None = None) -> None:
        self._name = name
        self._costs, self._batch = state.costs, state.batch
        self._is_measured = least is None
        price = state.costs.level_price(state.batch, name) if least is None else least
        self._least = price * max(1, state.frozen.count(False))  # a step takes the time of one
        self._mass = 0.0
        self._since: float | None = None

    def goes_on(self, outlook: Tensor) -> bool:
        """After every level: whether there should be another.

        Args:
            outlook: float32 [2], worth of the level just made and mass of the one to come, summed
                over rows. The one host read of a level: where it costs, it costs less than a level.

        Returns:
            True to make another draft step.
        """
        worth, mass = outlook.tolist()
        now, costs = perf_counter(), self._costs
        if self._since is not None:
            costs.record_level(self._batch, self._name, now - self._since)
        if self._mass > 0 and self._is_measured:
            costs.record_worth(self._name, worth / self._mass)
        self._since, self._mass = now, mass
        if not self._is_measured:
            return float(mass * ASSUMED.worth_of_mass(self._name)) >= self._least
        if mass * costs.worth_of_mass(self._name) >= self._least:
            return True
        every = max(AGAIN, ceil(self._least / self._looking))
        return mass > 0 and costs.looks_again(self._batch, self._name, every)
