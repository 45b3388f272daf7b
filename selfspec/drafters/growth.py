"""How far chains go, and which of their leaves are verified."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.drafters.outlook import Outlook

if TYPE_CHECKING:
    from selfspec.state import DecodeState

# Of chains that are drawn: what is measured would make a seed's text another one every time.
DRAWN_CONFIDENCE = 0.5


class Growth:
    """Decides over one draft, one chain a row.

    What a row's token is worth is the probability that verification gets to it: the product of the
    draft's probabilities along the chain.

    Args:
        state: Where decoding stands.
        drafter: Its name, for what is known of its draft steps.
        confidence: Least probability of a chain that goes on; all leaves are kept. None: chains go
            on, and leaves are kept, while that pays by measured time.
    """

    def __init__(self, state: DecodeState, drafter: str, confidence: float | None) -> None:
        self._path = torch.ones(state.batch, device=state.root.device)  # of every row's chain
        self._each: list[Tensor] = []
        self._least = state.costs.node_price(state.batch) if confidence is None else confidence
        self._outlook = Outlook(state, drafter) if confidence is None else None
        self._costs, self._batch = state.costs, state.batch

    @property
    def asks(self) -> bool:
        """Whether it has to know probabilities."""
        return self._least > 0

    def after(self, probable: Tensor, growing: Tensor) -> Tensor:
        """Take the next tokens' probabilities.

        Args:
            probable: [B, k] of the token by which each chain goes on, then of its siblings.
            growing: bool [B], rows that could go on.

        Returns:
            bool [B], those that should, if any does.
        """
        each = self._path[:, None] * probable
        self._each.append(each)
        self._path = each[:, 0]
        return growing & (self._path >= self._least)

    def goes_on(self, growing: Tensor) -> bool:
        """Whether there should be another draft step, after `after`.

        The one host read of a step: going on for nobody costs more than asking.
        """
        if self._outlook is None:
            return bool(growing.any())
        worth = (self._each[-1] - self._least).clamp(min=0).sum()
        return self._outlook.goes_on(torch.stack([worth, (self._path * growing).sum()]))

    def leaves(self) -> list[int] | None:
        """How many siblings to keep of every token, the best first; None for all.

        One number for all rows, whose trees have one shape: by the mean over them.
        """
        if self._outlook is None or not self._each or self._each[0].shape[1] == 1:
            return None
        means = torch.stack([each[:, 1:].mean(0) for each in self._each]).tolist()
        best = sorted((probable for row in means for probable in row), reverse=True)
        count = self._costs.choose(self._batch, best, first=len(means))
        least = best[count - 1] if count else math.inf
        return [sum(probable >= least for probable in row) for row in means]
