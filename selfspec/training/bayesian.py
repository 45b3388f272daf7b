"""A Gaussian process over sets: what a set that was not tried is likely to score."""

from __future__ import annotations

from math import erf, pi, sqrt

import numpy as np

_LENGTHS = (2.0, 4.0, 8.0, 16.0, 32.0)  # of the kernel, in elements that differ
_NOISE = 0.05  # share of the variance: scores are counted on few texts


class SetProcess:
    """Scores of sets as a Gaussian process whose kernel falls with the elements that differ.

    `exp(-d / l)` of the Hamming distance d is a kernel for every l > 0; l is the one of a few under
    which the scores seen are likeliest (Rasmussen and Williams 2006, chapter 5).

    Args:
        sets: bool [n, D], sets that were tried; n is at least 1.
        scores: float [n].
    """

    def __init__(self, sets: np.ndarray, scores: np.ndarray) -> None:
        self.sets = np.asarray(sets, float)
        scores = np.asarray(scores, float)
        self.mean, self.scale = float(scores.mean()), float(scores.std()) or 1.0
        values = (scores - self.mean) / self.scale
        distances = _distances(self.sets, self.sets)
        best = -np.inf
        for length in _LENGTHS:
            kernel = np.exp(-distances / length) + _NOISE * np.eye(len(values))
            factor = np.linalg.cholesky(kernel)
            weights = np.linalg.solve(factor.T, np.linalg.solve(factor, values))
            likelihood = -0.5 * values @ weights - np.log(np.diag(factor)).sum()
            if likelihood > best:
                best, self.length, self.factor, self.weights = likelihood, length, factor, weights

    def predict(self, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation [m] of the scores of `sets`, bool [m, D]."""
        kernel = np.exp(-_distances(np.asarray(sets, float), self.sets) / self.length)
        mean = kernel @ self.weights
        explained = np.linalg.solve(self.factor, kernel.T)
        variance = np.maximum(1.0 - (explained**2).sum(0), 1e-9)
        return self.mean + self.scale * mean, self.scale * np.sqrt(variance)

    def expected_improvement(self, sets: np.ndarray, best: float) -> np.ndarray:
        """How much better than `best` the sets are expected to be, where they are better; [m]."""
        mean, deviation = self.predict(sets)
        z = (mean - best) / deviation
        density = np.exp(-0.5 * z**2) / sqrt(2 * pi)
        below = 0.5 * (1 + np.array([erf(value / sqrt(2)) for value in z]))
        return np.asarray(deviation * (z * below + density))


def _distances(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.asarray(some @ (1 - others).T + (1 - some) @ others.T)
