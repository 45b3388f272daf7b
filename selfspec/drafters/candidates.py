"""The best tokens of a draft step, and how sure the draft is of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from selfspec.drafters.exit_readout import ExitReadout
    from selfspec.readout import Readout


@dataclass(frozen=True, eq=False)
class Candidates:
    """Of one position of every row.

    Attributes:
        ids: int64 [B, k], the best first.
        probable: float32 [B, k], their probabilities; None if nobody asked.
        second: float32 [B], probability of the second best token; None likewise.
        entropy: float32 [B], of the distribution, in nats; None likewise.
    """

    ids: Tensor
    probable: Tensor | None = None
    second: Tensor | None = None
    entropy: Tensor | None = None

    def to(self, device: torch.device) -> Candidates:
        """On `device`."""
        parts = (self.ids, self.probable, self.second, self.entropy)
        return Candidates(*(None if p is None else p.to(device) for p in parts))  # type: ignore[arg-type]


def best_of(logits: Tensor, k: int, measured: bool) -> Candidates:
    """Of logits [B, V]; with probabilities if they are asked for."""
    if not measured:
        if k == 1:
            return Candidates(logits.argmax(-1, keepdim=True))
        return Candidates(logits.topk(min(k, logits.shape[-1])).indices)
    log_probs = logits.float().log_softmax(-1)
    best = log_probs.topk(min(max(k, 2), logits.shape[-1]))
    probable = best.values.exp()
    second = probable[:, min(1, probable.shape[1] - 1)]
    entropy = torch.special.entr(log_probs.exp()).sum(-1)  # 0 where there is no probability
    return Candidates(best.indices[:, :k], probable[:, :k], second, entropy)


def best_after(
    hidden: Tensor, readout: Readout | ExitReadout, k: int, measured: bool
) -> Candidates:
    """Of the last layer's output [B, C], as `readout` reads it."""
    if k == 1 and measured:
        found = readout.best(hidden)
        return Candidates(found.token[:, None], found.top1[:, None], found.top2, found.entropy)
    ids, log_probs = readout.top(hidden, k)
    if not measured:
        return Candidates(ids)
    probable = log_probs.exp()
    return Candidates(
        ids, probable, probable[:, min(1, ids.shape[1] - 1)], _entropy(log_probs, readout.size)
    )


def _entropy(log_probs: Tensor, size: int) -> Tensor:
    """Of distributions of which the best [B, k] are known; the rest is taken to be even."""
    probable = log_probs.exp()
    rest = (1 - probable.sum(-1)).clamp(0, 1)
    others = max(size - log_probs.shape[-1], 1)
    return torch.special.entr(probable).sum(-1) + torch.special.entr(rest / others) * others
