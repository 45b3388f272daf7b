"""How much of a draft would be accepted, told from states of texts that were not trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from selfspec.networks.exit import ExitNetwork

if TYPE_CHECKING:
    from selfspec.training.batches import Batch
    from selfspec.training.objectives import Objective


@dataclass(frozen=True)
class Estimate:
    """Of a draft on some texts; by depth, the tokens before being right.

    Attributes:
        acceptance: Share of draft tokens that are the target's likeliest one: those that greedy
            decoding accepts.
        overlap: Mean of sum(min(p, q)): the share that sampling accepts of tokens drawn from the
            draft (a little more, since p is known for its most probable tokens only).
        loss: The training loss.
        ranks: [R] share of positions where the target's token is the draft's first, second, ...
        positions: How many positions this is the mean of, at the first depth.
    """

    acceptance: tuple[float, ...]
    overlap: tuple[float, ...]
    loss: tuple[float, ...]
    ranks: tuple[tuple[float, ...], ...]
    positions: int

    @property
    def tau(self) -> float:
        """Mean accepted length of a greedy chain of this depth, with the target's next token."""
        total = share = 1.0
        for rate in self.acceptance:
            share *= rate
            total += share
        return total

    def to_dict(self) -> dict[str, Any]:
        """Numbers to be written down, tau with them."""
        return {**asdict(self), "tau": self.tau}


@torch.no_grad()
def estimate(objective: Objective, batches: Iterable[Batch], ranks: int = 10) -> Estimate:
    """Estimate the acceptance of a network.

    A batch with states that are not finite says nothing and does not count.

    Args:
        objective: The network's.
        batches: Texts that it was not trained on, on its device and in its dtype.
        ranks: R.
    """
    sums = torch.zeros(objective.depths, 4 + ranks, dtype=torch.float64)
    for batch in batches:
        of_batch = torch.zeros_like(sums)
        for depth, found in enumerate(objective(batch, ranks, prompt_weight=0.0)):
            if found.weight:
                means = [1.0, float(found.loss), found.hits, found.alpha, *found.ranks.tolist()]
                of_batch[depth] = found.weight * torch.tensor(means, dtype=torch.float64)
        if of_batch.isfinite().all():
            sums += of_batch
    means_by_depth = sums / sums[:, :1].clamp_min(1)
    if isinstance(objective.network, ExitNetwork):
        # It reads true states of whatever was drafted before, so that depth makes no difference.
        means_by_depth = means_by_depth.expand(objective.config.steps, -1)
    _, loss, hits, alpha, *_ = (tuple(column) for column in means_by_depth.t().tolist())
    rows = tuple(tuple(row) for row in means_by_depth[:, 4:].tolist())
    return Estimate(hits, alpha, loss, rows, int(sums[0, 0]))
