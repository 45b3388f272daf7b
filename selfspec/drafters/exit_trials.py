"""Which layer to leave at: how often each would have been right, from the user's own text.

Entezari Zarch et al. 2025 (DEL), https://arxiv.org/abs/2504.05598: what every layer would have
said is known from states that verification computes anyway, so that all exits are known at once,
whichever one drafts. Read here in the request's own cache for a window of the last tokens at a
time, and paid from a small share of the time that decoding takes: a larger one until something is
known, then one that is enough to see the text change.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from selfspec.layer_shares import LayerShares
from selfspec.replay import replay_request
from selfspec.speedup import acceptance_needed, speed_by_counts

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.state import DecodeState

logger = logging.getLogger("selfspec")

WORK = "exits"  # in the accounts
_SHARE, _LATER = 0.03, 0.005  # of decoding time, until `_ENOUGH` windows are known and afterwards
_ENOUGH = 4
_WINDOW = 16
_EXITS = 8  # layers that are compared
_DEEPEST = 0.75  # share of the model: a draft by more of it is hardly faster than the whole
_AGAIN = 128  # steps, in one of which a draft is made though none pays, by measured time
_FRESH = 16  # steps for which what is expected of the exits is not computed anew
_DECAY = 0.9  # of what is known, a window
_SURE = 1.64  # standard deviations
_LONGEST = 16  # nodes of the chains that are weighed
_ASSUMED_NODE = 0.05  # of a plain step, until verifications have been timed


@dataclass
class _Count:
    right: float = 0.0
    of: float = 0.0


class ExitTrials:
    """How often every exit is right, and which one is worth drafting with.

    Args:
        architecture: Of the model.

    Attributes:
        verdict: What is known, for people; empty until there are a few windows.
    """

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.verdict = ""
        count = architecture.num_layers
        deepest = max(1, int(count * _DEEPEST))
        places = np.linspace(deepest / _EXITS, deepest, _EXITS).round().astype(int)
        self.exits = sorted({max(1, int(place)) for place in places if place < count}) or [1]
        self._shares = LayerShares.of(architecture)
        self._counts = {exit_layer: _Count() for exit_layer in self.exits}
        self._windows = 0
        self._reported: tuple[int, bool] | None = None
        self._expected: dict[int, float] = {}  # speeds, and how many windows they are by
        self._expected_at = self._asked = 0
        self._plain: float | None = None  # seconds of a plain step, as it was last known
        self._lock = threading.Lock()  # requests of several threads may share what is known

    # ------------------------------------------------------------------ what drafting asks

    def best(self, state: DecodeState) -> int | None:
        """The exit to draft with; None while none is expected to be faster than plain decoding."""
        costs, batch = state.costs, state.batch
        if not self._windows or costs.plain_seconds(batch) is None:
            return None  # a plain step, so that there is something to compare with
        if self._asked % _FRESH == 0 or self._windows != self._expected_at:
            self._expected = {e: self._speed(e, state) for e in self.exits}
            self._expected_at = self._windows
        self._asked += 1
        expected = self._expected
        measured = {e: costs.speed_of(batch, part_of(e)) for e in self.exits}
        best = max(self.exits, key=expected.__getitem__)
        if expected[best] <= 1:
            return None
        # What was measured is better than what is expected.
        known = {e: expected[e] if speed is None else speed for e, speed in measured.items()}
        found = max(self.exits, key=known.__getitem__)
        if known[found] > 1:
            return found
        return best if costs.looks_again(batch, WORK, _AGAIN) else None

    def acceptance(self) -> dict[int, float]:
        """By exit layer, how often it was right lately."""
        return {e: c.right / c.of for e, c in self._counts.items() if c.of}

    def step(self, state: DecodeState) -> None:
        """After a step of the loop: look at another window, if it is time."""
        plain = self._plain = state.costs.plain_seconds(state.batch) or self._plain
        share = _SHARE if self._windows < _ENOUGH else _LATER
        if plain is None or not state.costs.side.affords(WORK, share, 4 * plain):
            return
        replay = replay_request(state, _WINDOW)
        if replay is None or not self._lock.acquire(blocking=False):
            return
        try:
            with state.costs.side(WORK, state.target.device):
                hits = replay.exit_hits(self.exits)
                right, of = hits.sum((1, 2)).tolist(), hits[0].numel()
            self._add(right, of, state)
        finally:
            self._lock.release()

    def _add(self, right: list[int], of: int, state: DecodeState) -> None:
        """Take the outcomes of a window, by exit."""
        for exit_layer, found in zip(self.exits, right, strict=True):
            count = self._counts[exit_layer]
            count.right = _DECAY * count.right + found
            count.of = _DECAY * count.of + of
        self._windows += 1
        if self._windows >= _ENOUGH:
            self._report(state)

    def _report(self, state: DecodeState) -> None:
        """Say which exit is best, whenever that or whether it pays has changed."""
        best = max(self.exits, key=lambda exit_layer: self._speed(exit_layer, state))
        pays = self._speed(best, state) > 1
        if self._reported == (best, pays):
            return
        if self._reported is None and not pays and self._speed(best, state, _SURE) > 1:
            return  # not sure yet
        said = self._reported is not None
        self._reported = best, pays
        needed = acceptance_needed(*self._chain(best, state))
        take = "none would do" if needed is None else f"{needed:.2f} would do"
        says = "pays" if pays else f"does not pay ({take}; a trained exit may be right more often)"
        self.verdict = (
            f"early exit {says}: after {best} of {self.architecture.num_layers} layers a draft "
            f"token takes {self._shares.exit_step(best):.2f} of a plain step and is right "
            f"{self.acceptance()[best]:.2f} of the time"
        )
        state.costs.notes[WORK] = self.verdict
        logger.log(logging.INFO if pays or said else logging.WARNING, "selfspec: %s.", self.verdict)

    # ------------------------------------------------------------------ what an exit is worth

    def _speed(self, exit_layer: int, state: DecodeState, deviations: float = 0.0) -> float:
        count = self._counts[exit_layer]
        chain = self._chain(exit_layer, state)
        return speed_by_counts(count.right, count.of, chain, deviations)

    def _chain(self, exit_layer: int, state: DecodeState) -> tuple[float, np.ndarray, float]:
        ratios = state.costs.verify_ratios(state.batch, _LONGEST)
        if ratios is None:  # nothing was drafted so far
            ratios = 1 + _ASSUMED_NODE * np.arange(_LONGEST)
        shared = self._shares.shared(exit_layer) if self.architecture.resumable else 0.0
        return self._shares.exit_step(exit_layer), ratios, shared


def part_of(exit_layer: int, is_trained: bool = False) -> str:
    """How drafts by an exit are called in what is measured."""
    return f"the {'trained ' * is_trained}exit after {exit_layer} layers"


def exits_of(state: DecodeState) -> ExitTrials:
    """What is known to the wrapper that a request belongs to."""
    architecture = state.target.architecture
    found: ExitTrials = state.costs.found_for(WORK, architecture, partial(ExitTrials, architecture))
    return found
