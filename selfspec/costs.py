"""What steps take and give, measured while they run: the prices that drafts are made by.

A draft is as good as the tokens a second that come of it. By Dinkelbach's rule for such a ratio
(1967, https://doi.org/10.1287/mnsc.13.7.492) a part of a draft pays if the tokens expected of it
exceed the tokens that the time for it gives at the present rate. So the time of a verification by
its number of nodes, and that of a draft step, are turned into tokens, and sizes are chosen for
which the difference is largest. No acceptance rate is aimed at: where verification is nearly flat
in the number of nodes trees grow large, where it is not they stay small, and where nothing pays
nothing is verified.
"""

from __future__ import annotations

import copy
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.match_survival import MatchSurvival
from selfspec.recent import Rate, lately
from selfspec.step_times import TRIED, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HISTORY = "history"  # texts of earlier requests, in what is kept
# Until there are measurements: about what they are on hardware that multiplies matrices. Tokens
# that a node and a draft step have to be good for, and what a level is worth over the mass of the
# nodes that it starts from.
_NODE, _LEVEL, _WORTH = 0.03, 0.1, 0.5
_LEAST = 0.005  # of any price: noise may say that something costs nothing
_NEW = 0.03  # how much one more level counts for
AGAIN = 16  # one step in so many tries half or twice the best size, one no in so many is a yes
_POOLED = 0.5  # of the price of a node, from which a candidate of a pool is kept
_FAR = 12  # nodes ahead that a price looks: one step up in the curve may be worth it
_ASKED_ENOUGH = 8  # times that a drafter was asked, to know what it is worth


class StepCosts(StepTimes):
    """Kept by a wrapper across its requests; batches of different size are kept apart.

    What drafters learn over requests is here, too, and not in them: a drafter drafts the same from
    the same state.

    Args:
        adaptive: Whether prices follow the measurements; else they are what is assumed.
        keep: Recent steps that a median is taken over: one that was interrupted does not count.

    Attributes:
        matches: How often copies of the text are right.
        kept: What drafters have found out, by names of theirs.
        notes: What is to be said of it, likewise; part of the wrapper's `repr`.
    """

    def __init__(self, adaptive: bool = True, keep: int = 15) -> None:
        super().__init__(keep)
        self.adaptive = adaptive
        self.matches = MatchSurvival()
        self.kept: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        self._worths: dict[str, float] = {}
        self._sizes: dict[int, float] = {}
        self._askings: dict[str, Rate] = {}
        self._refused: dict[tuple[int, str], int] = {}
        self._is_pool = False

    def of_a_pool(self) -> StepCosts:
        """The same for a drafter whose drafts are candidates beside those of others.

        What is verified is chosen among all of them afterwards; so it gives also what would not
        pay alone, as two that say the same of a token may be right where one is not enough.
        """
        view = copy.copy(self)
        view._is_pool = True
        return view

    def _forget(self, batch: int) -> None:
        super()._forget(batch)
        self._sizes.pop(batch, None)

    def record_worth(self, drafter: str, of_mass: float) -> None:
        """Add what a level of a drafter's was worth, over the mass of the nodes it started from."""
        if self.adaptive and isfinite(of_mass):  # a draft may compute NaN
            usual = self._worths.get(drafter, _WORTH)
            self._worths[drafter] = usual + _NEW * (of_mass - usual)

    # ---------------------------------------------------------------- prices, in tokens a row

    def verify_prices(self, batch: int, most: int) -> np.ndarray:
        """What verifying n draft tokens a row takes beyond verifying none.

        Returns:
            float64 [most + 1] for n = 0..most, in tokens a row; not falling.
        """
        times, rate = self._verifies.get(batch), self._rate(batch)
        if times is None or rate is None or not times.is_known:
            return _NODE * np.arange(most + 1)
        seconds = times.seconds(most + 1)
        return rate * (seconds - seconds[0]) + _LEAST * np.arange(most + 1)

    def node_price(self, batch: int) -> float:
        """What one more node costs a tree of the usual size: about its least probability.

        In the cheapest of larger trees: where the curve has a step, those behind it share its cost.
        """
        usual = round(self._sizes.get(batch, 4.0))
        prices = self.verify_prices(batch, usual + _FAR)[usual:]
        return float(((prices[1:] - prices[0]) / np.arange(1, _FAR + 1)).min())

    def level_price(self, batch: int, drafter: str) -> float:
        """What one more draft step of a drafter costs, nodes not counted."""
        rate, usual = self._rate(batch), lately(self._levels.get((batch, drafter)), least=3)
        if rate is None or usual is None:
            return _LEVEL
        return max(rate * usual, _LEAST)

    def draft_price(self, batch: int, drafter: str) -> float:
        """What a draft of a drafter costs, nodes not counted; 0 while it is not known."""
        rate, usual = self._rate(batch), lately(self._drafts.get((batch, drafter)), least=3)
        return 0.0 if rate is None or usual is None else rate * usual

    def worth_of_mass(self, drafter: str) -> float:
        """What a level of a drafter's is worth, over the mass of the nodes it starts from."""
        return self._worths.get(drafter, _WORTH)

    def _rate(self, batch: int) -> float | None:
        """Tokens a second and row: of recent steps, or of plain steps if those are faster."""
        recent, plain = self._rates.get(batch), self._taken(batch, 1, least=3)
        if not self.adaptive:
            return None
        if recent is None or recent.steps < 4:
            # Before the first steps of a process that began with the times of another one.
            return 1 / plain if plain is not None and self.has_curve(batch) else None
        return recent.value if plain is None else max(recent.value, 1 / plain)

    # ---------------------------------------------------------------- what drafters find out

    def found_for(self, name: str, architecture: object, make: Callable[[], Any]) -> Any:
        """What is kept by a name for a model, which it has as its `architecture`; or a new one."""
        found = self.kept.get(name)
        if getattr(found, "architecture", None) is not architecture:
            self.kept[name] = found = make()
            self.notes.pop(name, None)
        return found

    def forget_texts(self) -> None:
        """Drop what drafters have kept of the texts of earlier requests."""
        self.kept.pop(HISTORY, None)

    # ---------------------------------------------------------------- choosing

    def choose(self, batch: int, probable: Sequence[float], first: int = 0) -> int:
        """How many of some draft tokens to verify.

        Args:
            batch: B.
            probable: What each of them is expected to give a row, the best first.
            first: Draft tokens a row that are verified anyway, before these.

        Returns:
            0..len(probable): what gives most beyond its price, or a size whose time is wanted.
        """
        most = len(probable)
        if self._is_pool:
            least = _POOLED * self.node_price(batch)
            return sum(value >= least for value in probable)
        tried = self._tried(batch)
        if tried is not None:
            return max(0, min(tried - first, most))
        prices = self.verify_prices(batch, first + most)[first:]
        count = int(np.argmax(np.cumsum([0.0, *probable]) - prices))
        size = self._sizes.get(batch, float(count))
        self._sizes[batch] = size + 0.1 * (first + count - size)
        return count

    def gain(self, batch: int, probable: Sequence[float]) -> float:
        """Tokens a row that the best number of some draft tokens gives beyond its price.

        Args:
            batch: B.
            probable: See `choose`.
        """
        prices = self.verify_prices(batch, len(probable))
        return float((np.cumsum([0.0, *probable]) - prices).max())

    def record_asking(self, drafter: str, gain: float, rest: float) -> None:
        """Add what a drafter gave beside others, and how probable it was that those were wrong."""
        if self.adaptive and isfinite(gain) and rest > 0:
            self._askings.setdefault(drafter, Rate()).add(gain, rest)

    def asking_pays(self, batch: int, drafter: str, rest: float) -> bool:
        """Whether a drafter is worth its time beside others, by what it gave so far.

        Args:
            batch: B.
            drafter: Its name.
            rest: Probability that the first token of the others is wrong.
        """
        known = self._askings.get(drafter)
        worth = known.value if known is not None and known.steps >= _ASKED_ENOUGH else 1.0
        return rest * worth >= self.draft_price(batch, drafter)

    def looks_again(self, batch: int, what: str, every: int = AGAIN) -> bool:
        """Whether what does not pay is done all the same, to see whether it still does not.

        Args:
            batch: B.
            what: Its name.
            every: One no in so many is a yes: the more, the more it costs.
        """
        if not self.adaptive:
            return False
        count = self._refused.get((batch, what), 0) + 1
        self._refused[batch, what] = count
        return count % every == 0

    def is_settled(self, batch: int) -> bool:
        """Whether the first sizes have been tried: before, some are larger than pays."""
        return not self.adaptive or self.has_curve(batch)

    def _tried(self, batch: int) -> int | None:
        """A size that should be timed in this step, or None."""
        if not self.adaptive:
            return None
        done = self._timed(batch)
        if not self.is_settled(batch):
            return TRIED[-1 - done % len(TRIED)]
        if done % AGAIN:
            return None
        usual = self._sizes.get(batch, 4.0)
        return round(2 * usual + 1 if done // AGAIN % 2 else usual / 2)


ASSUMED = StepCosts(adaptive=False)
