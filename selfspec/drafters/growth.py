"""How far chains go, and which of their leaves are verified."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from selfspec.acceptance_model import AcceptanceModel, features
from selfspec.drafters.outlook import Outlook

if TYPE_CHECKING:
    from selfspec.drafters.candidates import Candidates
    from selfspec.state import DecodeState

_FAR = 16  # nodes whose prices are told apart
# Of chains that are drawn: what is measured would make a seed's text another one every time.
DRAWN_CONFIDENCE = 0.5


class Growth:
    """Decides over one draft, one chain a row: goes on where a chain is probable enough.

    A chain is as probable as its tokens are together, by what the draft says of them.

    Args:
        state: Where decoding stands.
        confidence: Least probability of a chain that goes on; all leaves are kept.
    """

    def __init__(self, state: DecodeState, confidence: float) -> None:
        self._path = torch.ones(state.batch, device=state.root.device)  # of every row's chain
        self._least = confidence

    @property
    def asks(self) -> bool:
        """Whether it has to know probabilities."""
        return self._least > 0

    def after(self, found: Candidates, growing: Tensor) -> Tensor:
        """Take the next tokens.

        Args:
            found: With probabilities; each chain goes on by the first of them.
            growing: bool [B], rows that could go on.

        Returns:
            bool [B], those that should, if any does.
        """
        assert found.probable is not None
        self._path = self._path * found.probable[:, 0]
        return growing & (self._path >= self._least)

    def goes_on(self, growing: Tensor) -> bool:
        """Whether there should be another draft step, after `after`.

        The one host read of a step: going on for nobody costs more than asking.
        """
        return bool(growing.any())

    def leaves(self) -> list[int] | None:
        """How many siblings to keep of every token, the best first; None for all.

        One number for all rows, whose trees have one shape.
        """
        return None

    def expected(self, counts: list[int] | None) -> Tensor | None:
        """float32 [B, N] of the chain and its leaves, see `TokenTree`; None if it is not known.

        Args:
            counts: How many leaves every token of the chain has, as `leaves` said.
        """
        return None

    def learn(self, state: DecodeState) -> None:
        """See what became of the draft; `state` is committed."""


class MeasuredGrowth(Growth):
    """The same by what pays, with probabilities as they turned out to be.

    Args:
        state: Where decoding stands.
        part: What drafts, for what is known of its draft steps and tokens.
    """

    def __init__(self, state: DecodeState, part: str) -> None:
        super().__init__(state, state.costs.node_price(state.batch))
        self._costs, self._batch = state.costs, state.batch
        self._nodes = np.diff(state.costs.verify_prices(state.batch, _FAR))  # of every next one
        self._outlook = Outlook(state, part)
        state.costs.drafting_with(part)
        self._chain = np.ones(state.batch)  # probability of every row's
        self._each: list[np.ndarray] = []
        self._lengths = list(state.length)
        self._seen: list[tuple[np.ndarray, np.ndarray]] = []  # features and ids of every depth
        self._worth = self._mass = 0.0
        key = f"acceptance of {part}"
        known = state.costs.kept.get(key)
        self._model = known if isinstance(known, AcceptanceModel) else AcceptanceModel()
        if state.costs.adaptive:
            state.costs.kept[key] = self._model

    @property
    def asks(self) -> bool:
        """Always."""
        return True

    def after(self, found: Candidates, growing: Tensor) -> Tensor:
        """See `Growth.after`; the one host read of a draft step is here."""
        assert found.probable is not None
        assert found.second is not None
        assert found.entropy is not None
        more = torch.stack([found.second, found.entropy, growing.to(found.second.dtype)], dim=1)
        k = found.ids.shape[1]
        # Ids are exact in 8 bytes, and one copy is enough for all.
        rows = torch.cat([found.ids.double(), found.probable.double(), more.double()], dim=1)
        numbers = rows.cpu().numpy()
        ids, probable = numbers[:, :k], numbers[:, k : 2 * k]
        second, entropy, was_growing = numbers[:, 2 * k :].T
        described = features(probable, second, entropy, len(self._each) + 1)
        self._seen.append((described, ids.astype(np.int64)))
        each = self._chain[:, None] * self._model.predict(described)
        self._each.append(each)
        self._chain = each[:, 0]
        # A chain alone has as many nodes as it is long, and each its own price; beside leaves, of
        # which as many are verified as pay, a node costs what one more costs the whole tree.
        this = following = self._least
        if k == 1:
            depth = min(len(self._each), _FAR - 1)
            this, following = self._nodes[depth - 1 : depth + 1]
        goes_on = (was_growing > 0) & (self._chain >= following)
        self._worth = float(np.maximum(each - this, 0).sum())
        self._mass = float((self._chain * goes_on).sum())
        return torch.from_numpy(goes_on).to(growing.device)

    def goes_on(self, growing: Tensor) -> bool:
        """See `Growth.goes_on`; nothing is read."""
        return self._outlook.goes_on(torch.tensor([self._worth, self._mass], device="cpu"))

    def leaves(self) -> list[int] | None:
        """See `Growth.leaves`; by the mean over rows."""
        if not self._each or self._each[0].shape[1] == 1:
            return None
        means = [each[:, 1:].mean(0).tolist() for each in self._each]
        best = sorted((probable for row in means for probable in row), reverse=True)
        count = self._costs.choose(self._batch, best, first=len(means))
        least = best[count - 1] if count else math.inf
        return [sum(probable >= least for probable in row) for row in means]

    def expected(self, counts: list[int] | None) -> Tensor | None:
        """See `Growth.expected`."""
        if not self._each:
            return None
        ones = np.ones_like(self._each[0][:, :1])
        chain = [each[:, :1] for each in self._each]
        few = counts or [each.shape[1] - 1 for each in self._each]
        leaves = [each[:, 1 : 1 + n] for each, n in zip(self._each, few, strict=True)]
        return torch.from_numpy(np.concatenate([ones, *chain, *leaves], axis=1)).float()

    def learn(self, state: DecodeState) -> None:
        """Every token that came is an outcome, as long as the chain before it was right.

        Also of tokens that were not verified: that they would have been right, or not, is known.
        """
        for b, before in enumerate(self._lengths):
            came = state.length[b] - before
            tokens = state.tokens(b)[len(state.tokens(b)) - came :] if came else ()
            for (described, ids), token in zip(self._seen, tokens, strict=False):
                accepted = ids[b] == token
                self._model.add(described[b], accepted)
                if not accepted[0]:
                    break
        self._seen = []


def growth_of(state: DecodeState, part: str, confidence: float | None) -> Growth:
    """What decides over a draft.

    Args:
        state: Where decoding stands.
        part: What drafts.
        confidence: See `Growth`; None: what pays, by measured time.
    """
    if confidence is None:
        return MeasuredGrowth(state, part)
    return Growth(state, confidence)
