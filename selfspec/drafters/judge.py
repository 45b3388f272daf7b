"""How far what is said of draft tokens can be believed."""

from __future__ import annotations

from math import exp
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from selfspec.acceptance_model import AcceptanceModel, logistic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from selfspec.costs import StepCosts
    from selfspec.tree_rows import GrowingRow

_FAR = 30.0  # of log-odds: as good as certain
_SHRINK = 2.0  # outcomes of even odds that have to speak against what all requests have shown


class Judge:
    """Of one drafter: what all requests have shown, and what this one does.

    Args:
        model: What all requests of a wrapper have shown.
    """

    def __init__(self, model: AcceptanceModel) -> None:
        self.model = model
        self._surprise = self._spread = 0.0  # of this request

    @property
    def tilt(self) -> float:
        """Log-odds by which this request differs from others: a step of Newton's method."""
        return self._surprise / (self._spread + _SHRINK / 4)

    def probabilities(self, described: np.ndarray) -> np.ndarray:
        """Of nodes with features [M, F], given that their parents are right."""
        return logistic(described @ self.model.weights + self.tilt)

    def of_one(self) -> Callable[[Sequence[float]], float]:
        """The same of one node with features [F], for what is found out node by node."""
        weights, tilt = self.model.weights.tolist(), self.tilt

        def probability(described: Sequence[float]) -> float:
            odds = tilt + sum(map(mul, weights, described))
            return 1.0 / (1.0 + exp(-max(min(odds, _FAR), -_FAR)))

        return probability

    def learn(self, described: np.ndarray, right: np.ndarray) -> None:
        """Add the children [k, F] of a node that was right, and which of them [k] were."""
        said = self.model.predict(described)
        self._surprise += float((right - said).sum())
        self._spread += float((said * (1 - said)).sum())
        self.model.add(described, right)


def judge_of(costs: StepCosts, name: str, belief: np.ndarray) -> Judge:
    """The judge of a drafter for one request.

    Args:
        costs: Where what all requests have shown is kept.
        name: Of the drafter.
        belief: Weights of the features before anything is known.
    """
    key = f"acceptance of {name}"
    known = costs.kept.get(key)
    model = known if isinstance(known, AcceptanceModel) else AcceptanceModel(belief)
    if costs.adaptive:
        costs.kept[key] = model
    return Judge(model)


def learn_from(
    tokens: Sequence[int],
    tree: GrowingRow,
    nodes: Sequence[int],
    parts: Sequence[int],
    described: np.ndarray,
    judges: Sequence[Judge],
) -> None:
    """Tell judges what became of a draft.

    Every child of a node that turned out right is an outcome, verified or not, for whoever drafted
    it: the text says it of each of them free of charge, so that no drafter has to be tried to be
    judged (full information, as in Liu et al. 2025, "Not-a-Bandit",
    https://arxiv.org/abs/2510.20064).

    Args:
        tokens: What the text went on with.
        tree: Of one row.
        nodes: Of each of M things that were said: the node.
        parts: Likewise: whose judge.
        described: [M, F], likewise.
        judges: By number.
    """
    children: dict[tuple[int, int], list[int]] = {}
    for entry, (node, part) in enumerate(zip(nodes, parts, strict=True)):
        children.setdefault((tree.parents[node], part), []).append(entry)
    at = 0
    for token in tokens:
        for part, judge in enumerate(judges):
            if entries := children.get((at, part)):
                right = [tree.tokens[nodes[entry]] == token for entry in entries]
                judge.learn(described[entries], np.asarray(right, float))
        found = tree.child(at, token)
        if found is None:
            return
        at = found
