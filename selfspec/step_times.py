"""What steps took of late: by batch, by number of nodes, by drafter."""

from __future__ import annotations

import copy
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.context_time import ContextTime
from selfspec.recent import Rate, lately
from selfspec.side_work import SideWork
from selfspec.verify_times import VerifyTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from selfspec.step import Step

# Drafts of sizes that are tried at first, each twice, so that the curve is known where it bends.
TRIED = (0, 1, 3, 7, 15)
_ENOUGH = 8  # steps of one way of drafting, to know how fast it is
# The machine has changed if so many steps took, in the median, so much more or less than others of
# their size before.
_CHANGED, _FACTOR = 8, 1.4
_TOLD = 3  # measurements that one from an earlier process counts for


class StepTimes:
    """Kept by a wrapper across its requests; batches of different size are kept apart.

    Args:
        keep: Recent steps that a median is taken over: one that was interrupted does not count.

    Attributes:
        side: The accounts of what drafters measure beside decoding.
        now: The clock, in seconds; a simulation has its own.
        steps: That were timed.
    """

    def __init__(self, keep: int = 15) -> None:
        self.keep = keep
        self.side = SideWork()
        self.steps = 0
        self.now: Callable[[], float] = perf_counter
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._rates: dict[int, Rate] = {}
        self._verifies: dict[int, VerifyTimes] = {}
        self._contexts: dict[int, ContextTime] = {}
        self._ratios: dict[int, deque[float]] = {}
        self._levels: dict[tuple[int, str], deque[float]] = {}
        self._drafts: dict[tuple[int, str], deque[float]] = {}
        self._parts: dict[tuple[int, str], Rate] = {}
        self._part = ""  # what drafts the step that is being made
        self._beside = 0.0  # seconds of side work in the last step
        self._is_onlooker = False

    def of_an_onlooker(self) -> Self:
        """The same for steps that are made to look at drafts: their time does not count."""
        view = copy.copy(self)
        view._is_onlooker = True
        return view

    def record(self, step: Step, context: int = 0) -> None:
        """Add a step of the loop, and the length of the text before it."""
        if step.is_prefill or self._is_onlooker:
            return
        self.steps += 1
        batch, seconds = len(step.tokens), sum(step.seconds.values())
        self.side.decoding += seconds
        self._beside = self.side.lap()
        part, self._part = self._part, ""
        drafting = step.seconds.get("draft", 0.0)
        texts = self._contexts.setdefault(batch, ContextTime())
        # What was measured over long texts and over short ones is compared as if over the first.
        after_draft = texts.as_first(step.num_nodes, context, seconds - drafting)
        # Where drafts run layers that verification then does not, its time tells of the drafts.
        if not part and self._has_changed(batch, step.num_nodes, after_draft):
            self._forget(batch)
        key = batch, _bucket(step.num_nodes)
        # A plain step is one without a draft, though one may have been made and found too dear.
        taken = after_draft + (drafting if step.num_nodes > 1 else 0.0)
        self._seconds.setdefault(key, deque(maxlen=self.keep)).append(taken)
        moving = [len(new) for new in step.tokens if new]
        if not moving:
            return
        gained = sum(moving) / len(moving)
        self._rates.setdefault(batch, Rate()).add(gained, seconds)
        if part and step.num_nodes > 1:
            rate = self._parts.setdefault((batch, part), Rate())
            rate.add(gained, seconds - self._beside)
        self._verifies.setdefault(batch, VerifyTimes(self.keep)).add(step.num_nodes, after_draft)

    def _has_changed(self, batch: int, nodes: int, seconds: float) -> bool:
        times = self._verifies.get(batch)
        if times is None or not times.is_known or not self.has_curve(batch):
            return False
        ratios = self._ratios.setdefault(batch, deque(maxlen=_CHANGED))
        ratios.append(seconds / max(float(times.seconds(nodes)[-1]), 1e-9))
        usual = lately(ratios, least=_CHANGED)
        return usual is not None and not 1 / _FACTOR < usual < _FACTOR

    def _forget(self, batch: int) -> None:
        """Drop what was measured when the machine was faster or slower: all is tried anew."""
        for by_batch in (
            self._rates,
            self._verifies,
            self._contexts,
            self._ratios,
        ):
            by_batch.pop(batch, None)
        for key in [key for key in list(self._seconds) if key[0] == batch]:
            self._seconds.pop(key, None)
        for by_drafter in (self._levels, self._drafts, self._parts):
            for pair in [pair for pair in list(by_drafter) if pair[0] == batch]:
                by_drafter.pop(pair, None)

    def drafting_with(self, part: str) -> None:
        """Say what drafts in this step, where a drafter has several ways: each is timed apart."""
        self._part = part

    def speed_of(self, batch: int, part: str) -> float | None:
        """Tokens a second of steps drafted so, over plain decoding; None until there are a few."""
        rate, plain = self._parts.get((batch, part)), self.plain_seconds(batch)
        if rate is None or rate.steps < _ENOUGH or plain is None:
            return None
        return rate.value * plain

    def record_level(self, batch: int, drafter: str, seconds: float) -> None:
        """Add what one more draft step of a drafter took."""
        self._levels.setdefault((batch, drafter), deque(maxlen=self.keep)).append(seconds)

    def record_draft(self, batch: int, drafter: str, seconds: float) -> None:
        """Add what a whole draft of a drafter took."""
        self._drafts.setdefault((batch, drafter), deque(maxlen=self.keep)).append(seconds)

    def wasted(self, step: Step) -> float:
        """Plain steps that the draft of a step took whose nodes were all found too dear."""
        plain = self.plain_seconds(len(step.tokens))
        if step.num_nodes > 1 or plain is None:
            return 0.0
        return max(step.seconds.get("draft", 0.0) - self._beside, 0.0) / plain

    def relative(self, batch: int, nodes: int) -> float | None:
        """Time of a step with `nodes` nodes over that of a plain one; None if plain is unknown.

        Sizes share a bucket up to the next power of two.
        """
        plain = self.plain_seconds(batch)
        if plain is None:
            return None
        # The first of a shape includes its set-up.
        measured = self._taken(batch, _bucket(nodes), least=1 if nodes == 1 else 2)
        if measured is None:
            # A cautious guess until then: verification is nearly flat in the number of nodes.
            return 1.2 + 0.01 * batch * nodes
        return measured / plain

    def plain_seconds(self, batch: int) -> float | None:
        """Of a step without a draft; None if there was none."""
        return self._taken(batch, 1)

    def _taken(self, batch: int, bucket: int, least: int = 1) -> float | None:
        """Time of steps of a size over the present text; None until so many were timed."""
        usual, texts = lately(self._seconds.get((batch, bucket)), least), self._contexts.get(batch)
        return usual if usual is None or texts is None else max(usual + texts.shift, 1e-9)

    def verify_ratios(self, batch: int, most: int) -> np.ndarray | None:
        """Time of verifying 1..`most` nodes a row over that of one; None if it is not known."""
        times = self._verifies.get(batch)
        if times is None or not times.is_known:
            return None
        texts = self._contexts.get(batch)
        seconds = times.seconds(most) + (0.0 if texts is None else texts.shift)
        return np.asarray(seconds / max(float(seconds[0]), 1e-9))

    def verify_points(self, batch: int) -> list[list[float]]:
        """Sizes and times that were measured: nodes a row and seconds, neither falling."""
        times = self._verifies.get(batch)
        return [] if times is None else times.points()

    def has_curve(self, batch: int) -> bool:
        """Whether as many steps were timed as it takes to try the first sizes."""
        return self._timed(batch) >= 2 * len(TRIED)

    def _timed(self, batch: int) -> int:
        times = self._verifies.get(batch)
        return 0 if times is None else times.added

    def speeds(self) -> dict[int, float]:
        """Tokens a second over plain decoding of recent steps, by batch, where both are known."""
        found = {}
        for batch, rate in sorted(self._rates.items()):
            plain = self.plain_seconds(batch)
            if rate.steps >= _ENOUGH and plain is not None:
                found[batch] = rate.value * plain
        return found

    # ---------------------------------------------------------------- between processes

    def to_dict(self) -> dict[str, Any]:
        """Times of batches whose curve is known, as JSON has them; nothing of any text."""
        batches = {}
        for batch in sorted(self._verifies):
            plain = self.plain_seconds(batch)
            if not self.has_curve(batch) or plain is None:
                continue
            batches[str(batch)] = {
                "plain": plain,
                "verify": self.verify_points(batch),
                "levels": _usual_of(self._levels, batch),
                "drafts": _usual_of(self._drafts, batch),
            }
        return batches

    def begin_with(self, batches: Mapping[str, Any]) -> None:
        """Take what an earlier process measured for what is usual, until measurements say else.

        Args:
            batches: As `to_dict` gives it. Batches that were measured here already keep that.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: If it is something else.
        """
        for name, known in batches.items():
            batch = int(name)
            if batch in self._verifies:
                continue
            times = VerifyTimes(self.keep)
            for nodes, seconds in known["verify"]:
                for _ in range(_TOLD):
                    times.add(round(_positive(nodes)), _positive(seconds))
            if not times.is_known:
                continue
            times.added = max(times.added, 2 * len(TRIED))
            plain = [_positive(known["plain"])] * _TOLD
            levels, drafts = (
                {(batch, name): [_positive(seconds)] * _TOLD for name, seconds in known[of].items()}
                for of in ("levels", "drafts")
            )
            self._verifies[batch] = times
            self._seconds[batch, 1] = deque(plain, maxlen=self.keep)
            for measured, told in ((self._levels, levels), (self._drafts, drafts)):
                for key, values in told.items():
                    measured[key] = deque(values, maxlen=self.keep)


def _positive(value: float) -> float:
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{value!r} is no time.")
    return float(value)


def _usual_of(measured: dict[tuple[int, str], deque[float]], batch: int) -> dict[str, float]:
    found = {name: lately(measured[of, name], _TOLD) for of, name in list(measured) if of == batch}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _bucket(nodes: int) -> int:
    return 1 << (nodes - 1).bit_length()
