"""Counters of what speculation did. Rates are derived when they are read."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.loop import Step


@dataclass(repr=False)
class SpecStats:
    """What happened, in counts and seconds; two of them can be added.

    Attributes:
        requests: Calls of `generate` that ran in the speculative loop.
        fallbacks: Calls that were left to transformers' own loop.
        emitted: New tokens, of all rows.
        verifies: Row-steps with a draft: one row in one verify forward counts 1.
        emitted_by_verifies: Tokens that those gave.
        drafted: Draft tokens proposed.
        accepted: Draft tokens kept.
        plain_tokens: Tokens of steps without a draft.
        given: LOSSY: tokens that were kept without asking the whole model.
        given_layers: Sum of the layers that each of them was drafted after.
        differing: Those of them of which the whole model says something else, after the same text.
        drafted_by_depth: Row-steps whose draft reached depth d, having been accepted up to d - 1.
        accepted_by_depth: Row-steps accepted at depth d.
        drafted_by: Draft tokens by drafter.
        accepted_by: Accepted draft tokens by drafter.
        forwards: Target forwards (verify and plain), the prefill not counted.
        plain_forwards: Those without a draft.
        seconds: Time by station: prefill, draft, verify, accept, commit.
        plain_seconds: Time of all steps without a draft, but for making drafts that were then found
            too dear to verify.
    """

    requests: int = 0
    fallbacks: int = 0
    emitted: int = 0
    verifies: int = 0
    emitted_by_verifies: int = 0
    drafted: int = 0
    accepted: int = 0
    plain_tokens: int = 0
    forwards: int = 0
    plain_forwards: int = 0
    given: int = 0
    given_layers: int = 0
    differing: int = 0
    plain_seconds: float = 0.0
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- rates

    @property
    def mean_accepted_length(self) -> float:
        """tau: tokens per row and verify, `next_token` included, so at least 1."""
        return self.emitted_by_verifies / self.verifies if self.verifies else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_depth(self) -> dict[int, float]:
        """P(depth d accepted, given that depth d - 1 was and that the draft went on)."""
        return {d: self.accepted_by_depth[d] / n for d, n in sorted(self.drafted_by_depth.items())}

    @property
    def disagreement(self) -> float:
        """Share of the tokens that are not the whole model's; 0 unless a drafter is lossy."""
        return self.differing / self.emitted if self.emitted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, the prefill not counted."""
        tokens = self.emitted_by_verifies + self.plain_tokens
        return tokens / self.decoding_seconds if self.decoding_seconds else 0.0

    @property
    def plain_tokens_per_second(self) -> float | None:
        """The same over steps without a draft, or None if there were none."""
        return self.plain_tokens / self.plain_seconds if self.plain_seconds else None

    @property
    def break_even(self) -> float | None:
        """Tau from which drafting pays: time of a step with a draft over that of one without.

        None until both kinds have been timed.
        """
        drafting = self.forwards - self.plain_forwards
        if not drafting or not self.plain_seconds:
            return None
        seconds = (self.decoding_seconds - self.plain_seconds) / drafting
        return seconds * self.plain_forwards / self.plain_seconds

    @property
    def decoding_seconds(self) -> float:
        """Time of all steps, the prefills not counted."""
        return sum(seconds for name, seconds in self.seconds.items() if name != "prefill")

    # ---------------------------------------------------------------- counting

    def count(self, step: Step) -> None:
        """Add one step of the loop."""
        tokens = sum(map(len, step.tokens))
        self.emitted += tokens
        for station, seconds in step.seconds.items():
            self.seconds[station] = self.seconds.get(station, 0.0) + seconds
        if step.is_prefill:
            return
        self.forwards += 1
        self.given += sum(step.num_given)
        self.given_layers += sum(step.given_layers)
        self.differing += sum(step.num_differing)
        if not any(step.num_drafted):
            self.plain_forwards += 1
            self.plain_tokens += tokens
            self.plain_seconds += sum(step.seconds.values()) - step.seconds.get("draft", 0.0)
            return
        for new, drafted, accepted, deepest in zip(
            step.tokens, step.num_drafted, step.num_accepted, step.draft_depth, strict=True
        ):
            if not new:
                continue
            self.verifies += 1
            self.emitted_by_verifies += len(new)
            self.drafted += drafted
            self.accepted += accepted
            self.drafted_by[step.drafter] += drafted
            self.accepted_by[step.drafter] += accepted
            for depth in range(1, min(accepted + 1, deepest) + 1):
                self.drafted_by_depth[depth] += 1
            for depth in range(1, accepted + 1):
                self.accepted_by_depth[depth] += 1

    def add(self, other: SpecStats) -> None:
        """Add another's counters to these, safely between threads."""
        more = other._values()
        with self._lock:
            for name, theirs in more.items():
                mine = getattr(self, name)
                if isinstance(mine, dict):
                    # A new one: whoever reads the old one meanwhile reads it to its end.
                    setattr(self, name, type(mine)(_sum(mine, theirs)))
                else:
                    setattr(self, name, mine + theirs)

    def __add__(self, other: SpecStats) -> SpecStats:
        total = SpecStats()
        total.add(self)
        total.add(other)
        return total

    def reset(self) -> None:
        """Set everything to zero."""
        with self._lock:
            fresh = SpecStats()
            for f in fields(self):
                setattr(self, f.name, getattr(fresh, f.name))

    def to_dict(self) -> dict[str, Any]:
        """Counters as plain numbers and dicts."""
        return {k: dict(v) if isinstance(v, dict) else v for k, v in self._values().items()}

    def _values(self) -> dict[str, Any]:
        """All counters as they are between two requests."""
        with self._lock:
            return {f.name: getattr(self, f.name) for f in fields(self)}

    # Locks can be neither copied nor pickled.
    __getstate__ = to_dict

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, value in values.items():
            setattr(self, name, type(getattr(self, name))(value))

    def __repr__(self) -> str:
        now = SpecStats()
        now.add(self)  # requests that end meanwhile do not count
        return now._line()

    def _line(self) -> str:
        left = f"{self.fallbacks} requests left to transformers' own loop" * bool(self.fallbacks)
        if not self.requests:
            return left or "no speculative generate yet"
        total = self.decoding_seconds or 1.0
        plain = self.plain_tokens_per_second
        parts = [
            f"tau {self.mean_accepted_length:.2f} · acceptance {self.acceptance_rate:.2f}"
            if self.verifies
            else "nothing drafted",
            f"drafts in {self.verifies} of {self.verifies + self.plain_tokens} steps",
            " / ".join(
                f"{name} {100 * self.seconds.get(name, 0.0) / total:.0f} %"
                for name in ("draft", "verify", "accept")
            ),
            f"{self.tokens_per_second:.0f} tok/s" + (f" (plain {plain:.0f})" if plain else ""),
        ]
        if self.given:
            unseen = f"LOSSY: {100 * self.given / self.emitted:.0f} % of tokens kept unseen"
            after = f"after {self.given_layers / self.given:.1f} layers in the mean"
            parts.append(f"{unseen} ({after}), {100 * self.disagreement:.1f} % differ")
        return " · ".join([*parts, *([left] if left else [])])


def _sum(a: dict[Any, Any], b: dict[Any, Any]) -> dict[Any, Any]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in [*a, *(k for k in b if k not in a)]}
