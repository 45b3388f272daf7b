"""When a row ends: every accepted prefix is asked in order, as plain `generate` asks each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers.generation import utils as hf_utils
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

if TYPE_CHECKING:
    from selfspec.state import DecodeState

# Whether transformers asks its criteria about a token before it streams it, or after.
_ASKED_FIRST = hasattr(hf_utils, "StopCheck")


class StopRules:
    """Stopping criteria applied to blocks of tokens.

    End-of-sequence ids and the maximum length are looked up, stop strings are searched for in all
    rows and prefixes of a step at once, and the time is looked at once a step. Any other criterion
    is called once per token, with the row cut at that token. A row that was asked to stop takes
    padding from then on if there is an end-of-sequence rule; without one, transformers lets it
    continue until all rows have been asked to stop, and so do we.

    Args:
        criteria: As transformers prepared them.
        batch: B.

    Attributes:
        others: The criteria that transformers did not make; they need a batch of one row.
        on_token: Called with every token of the only row when `generate` would stream it: a
            streamer may be in league with a criterion, or a processor.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int) -> None:
        self.eos: set[int] = set()
        self.others = StoppingCriteriaList()
        self.on_token: Callable[[int], None] | None = None
        self.pads_finished_rows = any(hasattr(c, "eos_token_id") for c in criteria)
        self.max_length: int | None = None
        self._lengths: list[MaxLengthCriteria] = []
        self._times: list[MaxTimeCriteria] = []
        self._strings: list[StopStringCriteria] = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                lengths = (criterion.max_length, self.max_length)
                self.max_length = min(x for x in lengths if x is not None)
                self._lengths.append(criterion)
            elif type(criterion) is MaxTimeCriteria:
                self._times.append(criterion)
            elif type(criterion) is StopStringCriteria:
                self._strings.append(criterion)
            else:
                self.others.append(criterion)
        self.batch = batch
        self.last_length: int | None = None  # of the sequences, once it is known before they end
        self.stopped_at: list[int | None] = [None] * batch
        # Within a step: answers by row and length, and whether time is up, the same for all rows.
        self._answers: dict[tuple[int, int], bool] = {}
        self._late: bool | None = None

    @property
    def may_look_across_rows(self) -> str | None:
        """Name of the first criterion that may keep a state or compare rows, or None."""
        return next((type(c).__name__ for c in self.others), None)

    def cut(self, state: DecodeState, proposed: list[list[int]]) -> list[list[int]]:
        """Cut every row's new tokens at the first one that ends it.

        Args:
            state: The rows before them.
            proposed: New tokens of every row; none for a frozen row.
        """
        rows = [
            tokens[: state.limit - length]
            for tokens, length in zip(proposed, state.length, strict=True)
        ]
        hits = self._string_ends(state, rows) if self._strings else set()
        kept = [self._cut_row(state, b, tokens, hits) for b, tokens in enumerate(rows)]
        self._answers.clear()
        self._late = None
        return kept

    def ends(self, state: DecodeState, b: int, new: list[int]) -> bool:
        """Whether the last of `new` tokens ends row b, for whoever needs to know before `cut`.

        Asked about every token in turn, so that a processor that keeps a state meets criteria and
        streamers in the order in which they meet in plain `generate`.

        Args:
            state: The rows before the step.
            b: Row.
            new: Its tokens in this step, up to the one in question.
        """
        if self.stopped_at[b] is not None and not self.pads_finished_rows:
            return False
        rows = [new if row == b else [] for row in range(self.batch)]
        hit = bool(self._strings) and (b, len(new) - 1) in self._string_ends(state, rows)
        return self._answer(state, b, new, hit) and (self.pads_finished_rows or self.batch == 1)

    def _cut_row(
        self, state: DecodeState, b: int, tokens: list[int], hits: set[tuple[int, int]]
    ) -> list[int]:
        if self.stopped_at[b] is not None and not self.pads_finished_rows:
            return tokens
        for i in range(len(tokens)):
            if self._answer(state, b, tokens[: i + 1], (b, i) in hits):
                self.stopped_at[b] = state.length[b] + i + 1
                if self.pads_finished_rows or self.batch == 1:
                    return tokens[: i + 1]
                break
        return tokens

    def _answer(self, state: DecodeState, b: int, new: list[int], hit: bool) -> bool:
        """Ask everything about the last of `new`, once; `hit`: whether a stop string ends there."""
        length = state.length[b] + len(new)
        if (b, length) not in self._answers:
            # All of them, whatever the first one says: one may count its calls.
            asked = self._ask_others(state, b, new)
            if self._late is None:
                self._late = any(bool(c(torch.empty(1, 0), None).all()) for c in self._times)
            at_end = self.max_length is not None and length >= self.max_length
            self._answers[b, length] = asked or self._late or at_end or hit or new[-1] in self.eos
        return self._answers[b, length]

    def _ask_others(self, state: DecodeState, b: int, new: list[int]) -> bool:
        if self.on_token is not None and not _ASKED_FIRST:
            self.on_token(new[-1])
        answer = False
        if self.others:
            answer = bool(self.others(state.prefix(b, new)[None], None).all())
        if self.on_token is not None and _ASKED_FIRST:
            self.on_token(new[-1])
        return answer

    def _string_ends(self, state: DecodeState, rows: list[list[int]]) -> set[tuple[int, int]]:
        """(row, token) wherever a stop string ends in that new token.

        On the CPU: it is a search in tables, a long row of tiny operations for a few prefixes.
        """
        reach = max(c.maximum_token_len for c in self._strings)  # all that a criterion looks at
        windows: dict[int, list[tuple[int, int]]] = {}
        ends: list[list[int]] = []
        for b, tokens in enumerate(rows):
            ends.append([*state.ending(b, reach), *tokens])
            for i in range(len(tokens)):
                width = min(len(ends[b]) - len(tokens) + i + 1, reach)
                windows.setdefault(width, []).append((b, i))
        found: set[tuple[int, int]] = set()
        for width, places in windows.items():
            ids = [
                ends[b][len(ends[b]) - len(rows[b]) + i + 1 - width :][:width] for b, i in places
            ]
            for criterion in self._strings:
                answers = criterion(torch.tensor(ids, device="cpu"), None).tolist()
                found.update(place for place, answer in zip(places, answers, strict=True) if answer)
        return found

    def freeze(self, state: DecodeState) -> None:
        """Mark the rows that need no more tokens."""
        longest = max(state.length)
        for criterion in self._lengths:  # warns of texts that outgrow the model
            limit = criterion.max_position_embeddings
            if limit is not None and longest > limit:
                criterion(torch.empty(1, limit + 1, device="meta"), None)
        ends = [end for end in self.stopped_at if end is not None]
        frozen = state.frozen
        if self.pads_finished_rows:
            frozen = [end is not None for end in self.stopped_at]
        elif len(ends) == state.batch:
            self.last_length = max(ends)
            frozen = [length >= self.last_length for length in state.length]
        state.freeze([a or b >= state.limit for a, b in zip(frozen, state.length, strict=True)])

    def final_length(self, state: DecodeState) -> int:
        """Length of the returned sequences."""
        return max(state.length) if self.last_length is None else self.last_length
