"""How probable it is that a draft token will be accepted, learned from those that were or were not.

What a draft says of its own tokens is too sure or not sure enough, and differently so from model to
model and text to text. A logistic regression on a few numbers corrects it, as the confidence of
assistants is corrected elsewhere (Mamou et al. 2024, DISCO, https://arxiv.org/abs/2405.04304): over
the latest outcomes, drawn towards believing the draft, so that few outcomes, or outcomes that are
all alike, change little.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_KEEP = 2048  # outcomes that count
_EVERY = 8  # outcomes between two fits at least, and a quarter of those that are known
_PRIOR = 4.0  # weight of the belief before any outcome, in outcomes of even odds
_STEPS = 8  # of Newton's method
_LEAST = 1e-6  # of a probability
_BINS = 10
# Before anything is known: the draft's own probability, and nothing else.
_BELIEF = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
FEATURES = len(_BELIEF)


def features(
    probable: np.ndarray, second: np.ndarray, entropy: np.ndarray, depth: int
) -> np.ndarray:
    """What acceptance is judged by.

    Args:
        probable: [B, k] the draft's probabilities of its best tokens, the best first.
        second: [B], of the second best, which `probable` may not hold.
        entropy: [B] of the draft's distribution, in nats.
        depth: Of these tokens, 1 for the first of a draft.

    Returns:
        float64 [B, k, 5]: one; log-odds; margin over the best other token (the log of their ratio);
        entropy; depth.
    """
    p = np.clip(np.asarray(probable, float), _LEAST, 1 - _LEAST)
    other = np.repeat(p[:, :1], p.shape[1], axis=1)
    other[:, 0] = second
    found = np.ones((*p.shape, len(_BELIEF)))
    found[..., 1] = np.log(p) - np.log1p(-p)
    found[..., 2] = np.log(p) - np.log(np.maximum(other, _LEAST))
    found[..., 3] = np.asarray(entropy, float)[:, None]
    found[..., 4] = depth
    return np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Reliability:
    """What was said beforehand, beside what came out.

    Attributes:
        predicted: Mean probability of every bin; bins are tenths of the probability.
        observed: Share of every bin that was accepted.
        counts: Outcomes of every bin; bins without any are left out.
    """

    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def expected_calibration_error(self) -> float:
        """Mean distance of the two, every bin weighing as much as it has outcomes."""
        total = sum(self.counts)
        bins = zip(self.predicted, self.observed, self.counts, strict=True)
        return sum(n * abs(p - o) for p, o, n in bins) / total if total else 0.0

    def __str__(self) -> str:
        """A table."""
        rows = zip(self.predicted, self.observed, self.counts, strict=True)
        lines = [f"{p:9.2f}  {o:8.2f}  {n:6d}" for p, o, n in rows]
        return "\n".join(["predicted  accepted  tokens", *lines])


class AcceptanceModel:
    """Of one drafter, kept by a wrapper across its requests.

    Args:
        belief: Weights of the features before anything is known.
    """

    def __init__(self, belief: np.ndarray = _BELIEF) -> None:
        self.belief = np.asarray(belief, float)
        self.weights = self.belief.copy()
        self._rows = np.zeros((_KEEP, len(belief)))
        self._outcomes = np.zeros(_KEEP)
        self._count = self._fitted = 0  # outcomes so far, and when the weights were fitted to them
        self._bins = np.zeros((_BINS, 3))  # predicted, observed, counts; of likeliest tokens

    def predict(self, found: np.ndarray) -> np.ndarray:
        """Probabilities [...] of what features [..., F] describe."""
        return logistic(found @ self.weights)

    def add(self, found: np.ndarray, accepted: np.ndarray) -> None:
        """Learn what became of the tokens of one place, whose predecessors had been accepted.

        Args:
            found: [k, F] features of each; the likeliest first.
            accepted: bool [k].
        """
        said = float(self.predict(found[0]))
        self._bins[min(int(said * _BINS), _BINS - 1)] += said, float(accepted[0]), 1.0
        places = (self._count + np.arange(len(found))) % _KEEP
        self._rows[places], self._outcomes[places] = found, accepted
        self._count += len(found)
        if self._count - self._fitted >= max(_EVERY, min(self._count, _KEEP) // 4):
            self._fitted = self._count
            self.fit()

    @property
    def reliability(self) -> Reliability:
        """Of all that was predicted of the likeliest tokens before it was known."""
        bins = self._bins[self._bins[:, 2] > 0]
        predicted, observed = (bins[:, i] / bins[:, 2] for i in (0, 1))
        counts = tuple(int(n) for n in bins[:, 2])
        return Reliability(tuple(predicted.tolist()), tuple(observed.tolist()), counts)

    def forget_reliability(self) -> None:
        """Begin anew to compare; what was learned stays."""
        self._bins[:] = 0

    def fit(self) -> None:
        """The weights under which what is known is likeliest, drawn towards the belief."""
        known = min(self._count, _KEEP)
        rows, outcomes = self._rows[:known], self._outcomes[:known]
        weights = self.weights.copy()
        # What varies much needs small weights to say the same: the pull is the same for all.
        pull = _PRIOR / 4 * np.maximum((rows**2).mean(0), 1e-3)
        for _ in range(_STEPS):
            said = logistic(rows @ weights)
            slope = rows.T @ (said - outcomes) + pull * (weights - self.belief)
            curve = (rows * (said * (1 - said))[:, None]).T @ rows + np.diag(pull)
            change = np.linalg.solve(curve, slope)
            weights = weights - change * min(1.0, 4.0 / max(float(np.abs(change).max()), 1e-9))
            if float(np.abs(change).max()) < 1e-6:
                break
        if np.isfinite(weights).all():
            self.weights = weights


def logistic(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -40, 40))))
