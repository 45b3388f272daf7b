"""When a row ends: every accepted prefix is asked in order, as plain `generate` asks each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

if TYPE_CHECKING:
    from selfspec.state import DecodeState


class StopRules:
    """Stopping criteria applied to blocks of tokens.

    End-of-sequence ids and the maximum length are looked up; other criteria are called once per
    token, with the row cut at that token. A row that was asked to stop takes padding from then on
    if there is an end-of-sequence rule; without one, transformers lets it continue until all rows
    have been asked to stop, and so do we.

    Args:
        criteria: As transformers prepared them.
        batch: B.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int) -> None:
        self.eos: set[int] = set()
        self.others = []
        self.pads_finished_rows = any(hasattr(c, "eos_token_id") for c in criteria)
        self.max_length: int | None = None
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                lengths = (criterion.max_length, self.max_length)
                self.max_length = min(x for x in lengths if x is not None)
            else:
                self.others.append(criterion)
        self.batch = batch
        self.last_length: int | None = None  # of the sequences, once it is known before they end
        self.stopped_at: list[int | None] = [None] * batch

    @property
    def may_look_across_rows(self) -> str | None:
        """Name of the first criterion that may keep a state or compare rows, or None."""
        known = (MaxTimeCriteria, StopStringCriteria)
        return next((type(c).__name__ for c in self.others if type(c) not in known), None)

    def cut(self, state: DecodeState, b: int, tokens: list[int]) -> list[int]:
        """Cut new tokens of row b at the first one that ends it."""
        if self.stopped_at[b] is not None and not self.pads_finished_rows:
            return tokens[: state.limit - state.length[b]]
        tokens = tokens[: state.limit - state.length[b]]
        for i, token in enumerate(tokens):
            length = state.length[b] + i + 1
            asked = self.others and self._asked(state, b, tokens[: i + 1])
            at_end = self.max_length is not None and length >= self.max_length
            if asked or at_end or token in self.eos:
                self.stopped_at[b] = length
                if self.pads_finished_rows or self.batch == 1:
                    return tokens[: i + 1]
                break
        return tokens

    def _asked(self, state: DecodeState, b: int, new: list[int]) -> bool:
        # All of them, whatever the first one says: one may count its calls.
        row = state.prefix(b, new)[None]
        answers = [bool(c(row, None).all()) for c in self.others]
        return any(answers)

    def freeze(self, state: DecodeState) -> None:
        """Mark the rows that need no more tokens."""
        ends = [end for end in self.stopped_at if end is not None]
        if self.pads_finished_rows:
            state.frozen = [end is not None for end in self.stopped_at]
        elif len(ends) == state.batch:
            self.last_length = max(ends)
            state.frozen = [length >= self.last_length for length in state.length]
        state.frozen = [
            frozen or length >= state.limit
            for frozen, length in zip(state.frozen, state.length, strict=True)
        ]

    def final_length(self, state: DecodeState) -> int:
        """Length of the returned sequences."""
        return max(state.length) if self.last_length is None else self.last_length
