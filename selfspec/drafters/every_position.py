"""Drafters that are asked everywhere and followed nowhere: what each would have drafted."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from selfspec.drafters.combined import names_of
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.drafters.protocol import Drafter
    from selfspec.state import Acceptance, DecodeState, TargetOutput

_DIGITS = 4  # of a probability


class EveryPosition:
    """Lets drafters draft at every position, keeps what they say, and drafts nothing.

    Args:
        drafters: Deterministic ones.

    Raises:
        ValueError: If one draws its tokens or is lossy: what it would have drafted is not a fact.
    """

    makes_valid_trees = True

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        for drafter in drafters:
            if getattr(drafter, "is_lossy", False) or getattr(drafter, "do_sample", False):
                raise ValueError(
                    f"trace(every_position=True): {type(drafter).__name__} draws its tokens or is "
                    "lossy; trace its requests as they are, without every_position."
                )
        self.drafters = drafters
        self.names = names_of(drafters)
        self._drafts: list[dict[str, Any]] = []

    @property
    def hidden_taps(self) -> Sequence[int]:
        """Everything that any of them wants."""
        return sorted({layer for drafter in self.drafters for layer in drafter.hidden_taps})

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """A tree of the root alone; the drafts are kept."""
        pool = state.of_a_pool()
        layers = state.target.architecture.num_layers
        for name, drafter in zip(self.names, self.drafters, strict=True):
            start = perf_counter()
            tree = drafter.draft(pool, budget)
            seconds = perf_counter() - start
            shared = 0.0 if tree.resume is None else tree.resume.layer / layers
            if state.target.architecture.support == "chain" and not tree.is_chain:
                tree = tree.first_chains()
            self._drafts.append(
                {
                    "drafter": name,
                    "seconds": seconds,
                    "by_level": getattr(drafter, "drafts_by_level", False),
                    "network": bool(drafter.hidden_taps) or tree.resume is not None,
                    "shared": round(shared, _DIGITS),
                    "rows": [
                        {
                            "tokens": nodes.tokens,
                            "parents": nodes.parents,
                            "expected": nodes.expected
                            and [round(value, _DIGITS) for value in nodes.expected],
                        }
                        for nodes in tree.rows()
                    ],
                }
            )
        return TokenTree.root_only(state.root)

    def take(self) -> list[dict[str, Any]]:
        """What was drafted since the last call: nothing where there was no room for it."""
        drafts, self._drafts = self._drafts, []
        return drafts

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Let all of them see."""
        for drafter in self.drafters:
            drafter.observe(state, output, acceptance)

    def reset(self) -> None:
        """Let all of them forget."""
        self._drafts = []
        for drafter in self.drafters:
            drafter.reset()
