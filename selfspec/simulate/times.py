"""What steps take: as a trace has timed them, or as they would take elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from selfspec.context_time import ContextTime
from selfspec.options import check_int
from selfspec.verify_times import VerifyTimes

if TYPE_CHECKING:
    from selfspec.simulate.traces import Draft, Trace

_ALL = 1_000_000  # timed steps that count
_LEAST = 0.2  # of a time, over however short a text


@dataclass(frozen=True)
class WhatIf:
    """Conditions other than those of the trace.

    Attributes:
        batch: Texts that are decoded together, all of them like those of the trace. A batch that
            the trace has timed takes what it took; another is taken to need for n nodes a row the
            time that one text needs for all nodes of the batch, which is so where weights are read
            once for all of them, and leaves out that every text has keys and values of its own.
        max_draft_tokens: Longest draft.
        max_nodes: Largest tree, in draft tokens a row; None: as the drafts are.
        target: Time of a verification over that of the trace: a target of another size.
        networks: Time of drafts by networks over that of the trace. None: as `target`, since they
            grow with it. Copies of the text take what they took.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If one is out of range.
    """

    batch: int = 1
    max_draft_tokens: int = 31
    max_nodes: int | None = None
    target: float = 1.0
    networks: float | None = None

    def __post_init__(self) -> None:
        """Check values."""
        check_int("batch", self.batch, 1)
        check_int("max_draft_tokens", self.max_draft_tokens, 1)
        if self.max_nodes is not None:
            check_int("max_nodes", self.max_nodes, 1)
        for name in ("target", "networks"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"{name}={value!r} must be a positive number.")


class Times:
    """Seconds of the parts of a step, under given conditions.

    Args:
        trace: Says what was timed.
        what_if: The conditions.

    Raises:
        ValueError: If the trace has timed verifications of one size only.
    """

    def __init__(self, trace: Trace, what_if: WhatIf) -> None:
        self.what_if = what_if
        texts: dict[int, ContextTime] = {}
        for batch, nodes, seconds, context in trace.timed:
            if context is not None:
                texts.setdefault(batch, ContextTime()).as_first(nodes, context, seconds)
        known: dict[int, VerifyTimes] = {}
        for batch, nodes, seconds, context in trace.timed:
            longer = texts[batch].longer_by(context) if context is not None else 0.0
            if longer < seconds:
                known.setdefault(batch, VerifyTimes(_ALL)).add(nodes, seconds - longer)
        known = {batch: times for batch, times in known.items() if times.is_known}
        if not known:
            raise ValueError(
                "this trace has timed verifications of one size only: let the wrapper run some "
                "requests before it is traced, or read a trace of ordinary requests beside it."
            )
        nearest = min(known, key=lambda size: abs(np.log(size / what_if.batch)))
        self._same = nearest == what_if.batch
        self._least = min(known)
        base = nearest if self._same else self._least
        self._times, self._texts = known[base], texts.get(base, ContextTime())

    def verify(self, nodes: int, context: float | None = None) -> float:
        """Of a verification of `nodes` nodes a row, the root included.

        Args:
            nodes: A row.
            context: Tokens of the text before; None: as many as before the first step that was
                timed.
        """
        more = 1.0 if self._same else self.what_if.batch / self._least
        seconds = float(self._times.seconds(max(1, round(nodes * more)))[-1])
        longer = 0.0 if context is None else self._texts.longer_by(context) * more
        return max(seconds + longer, _LEAST * seconds) * self.what_if.target

    def plain(self, first: int, last: int) -> float:
        """Of steps without a draft, over texts of `first` to `last` tokens."""
        return (last - first + 1) * self.verify(1, (first + last) / 2)

    def draft(self, draft: Draft, depth: int) -> float:
        """Of a draft of `depth` levels, for a whole batch.

        Networks draft for all rows at once, as fast as the target verifies them; copies are looked
        for row by row.
        """
        seconds, batch = draft.seconds_to(depth), self.what_if.batch
        if not draft.network:
            return seconds * batch
        larger = self.what_if.target if self.what_if.networks is None else self.what_if.networks
        one = float(self._times.seconds(1)[0]) * self.what_if.target
        return seconds * larger * self.verify(1) / one
