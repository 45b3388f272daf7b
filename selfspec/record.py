"""Scores and logits that `generate` was asked to return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from selfspec.step import Step


class Record:
    """Collects them row by row, since rows advance by different counts.

    Args:
        batch: B.
    """

    def __init__(self, batch: int) -> None:
        self.scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self.logits: list[list[Tensor]] = [[] for _ in range(batch)]

    def add(self, step: Step) -> None:
        """Keep what a step has."""
        for rows, new in ((self.scores, step.scores), (self.logits, step.logits)):
            for row, tensors in zip(rows, new or (), strict=False):
                row.extend(tensors)

    @staticmethod
    def columns(rows: list[list[Tensor]], count: int, pad: int) -> tuple[Tensor, ...]:
        """[B, V] per token; a row that has ended is certain of its padding."""
        some = next(row for row in rows if row)[0]
        certain = torch.full_like(some, float("-inf"))
        certain[pad] = 0
        return tuple(
            torch.stack([row[t] if t < len(row) else certain for row in rows]) for t in range(count)
        )
