"""Searching a skip set on the user's own text, while it is being generated.

Xia et al. 2024 (SWIFT), https://arxiv.org/abs/2410.06916: sets are scored by how many of the last
tokens they would have drafted right, in one pass. The pass runs in the request's own cache, so that
it is what a draft would have been; sets are compared by the tokens a second that they would give;
and the search is paid from a small share of the time that decoding takes. It ends, perhaps with the
result that no set pays.
"""

from __future__ import annotations

import logging
import math
import threading
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from selfspec.layer_shares import LayerShares
from selfspec.patch import LayerPlan
from selfspec.replay import replay_request
from selfspec.skip_set import SkipSet
from selfspec.speedup import acceptance_needed, speed_by_counts

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.replay import Replay
    from selfspec.state import DecodeState

logger = logging.getLogger("selfspec")

WORK = "skip sets"  # in the accounts
_SHARE = 0.03  # of decoding time
_WINDOW = 16  # tokens that a set is scored by at a time
_LEFT_OUT = (0.15, 0.25, 0.35, 0.45, 0.55, 0.7)  # shares of the layers in the first sets
_WINDOWS = 2  # that every set is scored by
_PATIENCE = 24  # sets without a better one, after which the search ends
_AGAIN = 128  # steps, in one of which a draft is made though it does not pay, as measured
_SURE = 1.64  # standard deviations
_LONGEST = 16  # nodes of the chains that are weighed


class SkipTrials:
    """One search: sets, and how often each was right.

    Args:
        architecture: Of the model.
        seed: Which sets are tried once the first ones have been.

    Attributes:
        verdict: What came out, for people; empty while it goes on.
        pays: Whether some set does; only once there is a verdict.
    """

    def __init__(self, architecture: Architecture, seed: int = 0) -> None:
        self.architecture = architecture
        self.verdict, self.pays = "", False
        self._shares = LayerShares.of(architecture)
        self._rng = np.random.default_rng(seed)
        self._counts: dict[SkipSet, tuple[int, int]] = {}  # right ones, of how many
        self._queue: list[SkipSet] = []
        self._first: list[SkipSet] | None = None
        self._window_ratio = 2.0  # time of a window through all layers, over a plain step
        self._best: SkipSet | None = None
        self._since = 0  # sets since there was a better one
        self._plain: float | None = None  # seconds of a plain step, as it was last known
        self._lock = threading.Lock()  # requests of several threads may share a search

    # ------------------------------------------------------------------ what drafting asks

    def best(self, state: DecodeState) -> SkipSet | None:
        """The set to draft with; None while none is expected to be faster than plain decoding."""
        skip = self._best
        if state.costs.plain_seconds(state.batch) is None:
            return None  # a plain step, so that there is something to compare with
        if skip is None or (self.verdict and not self.pays) or self._speed(skip, state) <= 1:
            return None
        # What was measured is better than what is expected; now and then it is measured again.
        measured = state.costs.speed_of(state.batch, part_of(skip))
        if measured is None or measured > 1 or state.costs.looks_again(state.batch, WORK, _AGAIN):
            return skip
        return None

    def step(self, state: DecodeState) -> None:
        """After a step of the loop: go on with the search, if it is time."""
        if self.verdict:
            return
        plain = self._plain = state.costs.plain_seconds(state.batch) or self._plain
        if plain is None or not state.costs.side.affords(WORK, _SHARE, 2 * plain):
            return
        replay = replay_request(state, _WINDOW)
        if replay is None or not self._lock.acquire(blocking=False):
            return
        try:
            with state.costs.side(WORK, state.target.device):
                if self._first is None:
                    self._look(replay, state, plain)
                elif not self.verdict:
                    self._try(replay, state)
        finally:
            self._lock.release()

    # ------------------------------------------------------------------ the search

    def _look(self, replay: Replay, state: DecodeState, plain: float) -> None:
        """Which layers change their input least; the first sets leave those out."""
        count = self.architecture.num_layers
        whole = LayerPlan(taps=frozenset(range(count + 1)))
        start = perf_counter()
        replay.run(whole, with_logits=False).sum().item()  # waits for a device
        self._window_ratio = (perf_counter() - start) / plain
        similar = []
        for layer in range(count):
            before, after = whole.captured[layer], whole.captured[layer + 1]
            pair = before.float(), after.to(before.device).float()
            similar.append(torch.cosine_similarity(*pair, dim=-1).mean())
        found = torch.stack([s.to(similar[0].device) for s in similar]).tolist()
        borrowers = self.architecture.borrowers
        # What makes states of embeddings, and what makes tokens of states, is not left out.
        usable = [i for i in range(1, count - 1) if not borrowers or i in borrowers]
        order = sorted(usable, key=lambda i: -found[i] if math.isfinite(found[i]) else 2.0)
        sizes = sorted({max(1, round(count * share)) for share in _LEFT_OUT})
        self._first = [SkipSet.layers(order[:size]) for size in sizes if size <= len(order)]
        self._queue = [skip for skip in self._first for _ in range(_WINDOWS)]
        if not self._queue:
            self._conclude(state)

    def _try(self, replay: Replay, state: DecodeState) -> None:
        """Score one set by one window."""
        if not self._queue:
            self._queue = [self._another()] * _WINDOWS
        skip = self._queue.pop(0)
        hits = replay.hits(skip.plan)
        right, of = self._counts.get(skip, (0, 0))
        self._counts[skip] = right + int(hits.sum()), of + hits.numel()
        if self._queue and self._queue[0] == skip:
            return
        if self._best is None or self._speed(skip, state) > self._speed(self._best, state):
            self._best, self._since = skip, 0
        else:
            self._since += 1
        if not self._queue and (self._is_hopeless(state) or self._since >= _PATIENCE):
            self._conclude(state)

    def _another(self) -> SkipSet:
        """The best set, but for one or two sublayers or layers."""
        assert self._best is not None
        attention, mlp = set(self._best.attention), set(self._best.mlp)
        borrowers = self.architecture.borrowers
        while True:
            for _ in range(int(self._rng.integers(1, 3))):
                layer = int(self._rng.integers(1, max(2, self.architecture.num_layers - 1)))
                alone = len(self.architecture.sublayers[layer]) == 2
                which = int(self._rng.integers(0, 3)) if alone else 2
                if which != 1 and (not borrowers or layer in borrowers):
                    attention ^= {layer}
                if which != 0 and (alone or not borrowers or layer in borrowers):
                    mlp ^= {layer}
            found = SkipSet(frozenset(attention), frozenset(mlp))
            if found not in self._counts or self._rng.random() < 0.05:
                return found

    def _is_hopeless(self, state: DecodeState) -> bool:
        """Whether no set would pay even if it were as good as it may be by chance."""
        return all(self._speed(skip, state, _SURE) <= 1 for skip in self._counts)

    def _conclude(self, state: DecodeState) -> None:
        skip = self._best
        self.pays = skip is not None and self._speed(skip, state) > 1
        if skip is None:
            self.verdict = "layer skip does not pay: no layer can be left out"
        else:
            step, acceptance = self._shares.draft_step(skip), self._acceptance(skip)
            needed = acceptance_needed(*self._chain(skip, state))
            take = "none would do" if needed is None else f"{needed:.2f} would do"
            says = "pays" if self.pays else f"does not pay ({take})"
            self.verdict = (
                f"layer skip {says}: without {skip} a draft token takes {step:.2f} of a plain step "
                f"and is right {acceptance:.2f} of the time; {len(self._counts)} skip sets tried"
            )
        state.costs.notes[WORK] = self.verdict
        logger.log(logging.INFO if self.pays else logging.WARNING, "selfspec: %s.", self.verdict)

    # ------------------------------------------------------------------ what a set is worth

    def _speed(self, skip: SkipSet, state: DecodeState, deviations: float = 0.0) -> float:
        right, of = self._counts[skip]
        return speed_by_counts(right, of, self._chain(skip, state), deviations)

    def _acceptance(self, skip: SkipSet) -> float:
        right, of = self._counts[skip]
        return right / of

    def _chain(self, skip: SkipSet, state: DecodeState) -> tuple[float, np.ndarray, float]:
        ratios = state.costs.verify_ratios(state.batch, _LONGEST)
        if ratios is None:  # nothing was drafted so far
            slope = max(self._window_ratio - 1, 0.0) / (_WINDOW - 1)
            ratios = 1 + slope * np.arange(_LONGEST)
        first = self.architecture.num_layers if skip.first is None else skip.first
        shared = self._shares.shared(first) if self.architecture.resumable else 0.0
        return self._shares.draft_step(skip), ratios, shared


def part_of(skip: SkipSet) -> str:
    """How drafts without some sublayers are called in what is measured."""
    return f"layers but {skip}"


def trials_of(state: DecodeState) -> SkipTrials:
    """The search of the wrapper that a request belongs to."""
    architecture = state.target.architecture
    found: SkipTrials = state.costs.found_for(WORK, architecture, partial(SkipTrials, architecture))
    return found
