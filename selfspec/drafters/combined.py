"""Several drafters as one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.drafters.protocol import Drafter
    from selfspec.state import Acceptance, DecodeState, TargetOutput


class CombinedDrafter:
    """Merges what several deterministic drafters propose into one tree; earlier ones have priority.

    A drafter may say, by an attribute `promise`, how probable it is that the first token of what it
    drafted last is right (the mean over rows). Later ones are not asked if the rest is worth less
    than the time they take.

    Args:
        drafters: At least one.

    Raises:
        ValueError: If there is none, or one draws its tokens or is lossy.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("drafter=[] has no drafter; use drafter='none' to decode plainly.")
        for drafter in drafters:
            if getattr(drafter, "is_lossy", False):
                raise ValueError(
                    f"{type(drafter).__name__} is lossy, and no part of a list: pass it alone."
                )
            if getattr(drafter, "do_sample", False):
                raise ValueError(
                    f"{type(drafter).__name__}(do_sample=True) cannot be part of a list: which "
                    "siblings survive a merge would depend on the tokens that were drawn."
                )
        self.drafters = list(drafters)

    def __copy__(self) -> CombinedDrafter:
        """For a request beside another one: parts that remember a text are not shared."""
        return CombinedDrafter([copy.copy(drafter) for drafter in self.drafters])

    @property
    def hidden_taps(self) -> Sequence[int]:
        """Everything that any of them wants."""
        return sorted({layer for drafter in self.drafters for layer in drafter.hidden_taps})

    @property
    def makes_valid_trees(self) -> bool:
        """Whether all of them do."""
        return all(getattr(d, "makes_valid_trees", False) for d in self.drafters)

    @property
    def sizes_itself(self) -> bool:
        """Whether any of them chooses the size of its drafts."""
        return any(getattr(d, "sizes_itself", False) for d in self.drafters)

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """One tree with the drafts of all that are worth asking, cut to the budget."""
        trees, promise, nodes, costs = [], 0.0, 0, state.costs
        for drafter in self.drafters:
            name = type(drafter).__name__
            is_dear = promise > 0 and 1.0 - promise < costs.draft_price(state.batch, name)
            if is_dear and not costs.looks_again(state.batch, f"asking {name}"):
                continue  # what is left to it is worth less than its time
            start = perf_counter()
            trees.append(drafter.draft(state.priced_after(nodes), budget))
            costs.record_draft(state.batch, name, perf_counter() - start)
            promise = max(promise, _promise(drafter))
            nodes += trees[-1].width - 1
        return TokenTree.merge(trees, budget)

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Let all of them see."""
        for drafter in self.drafters:
            drafter.observe(state, output, acceptance)

    def reset(self) -> None:
        """Let all of them forget."""
        for drafter in self.drafters:
            drafter.reset()


def _promise(drafter: Drafter) -> float:
    """What it says of its last draft; None is not known.

    Raises:
        TypeError: If it is something else than a number.
    """
    promise = getattr(drafter, "promise", None)
    try:
        return 0.0 if promise is None else float(promise)
    except (TypeError, ValueError):
        raise TypeError(
            f"{type(drafter).__name__}.promise is {promise!r}; it must be a probability, or None."
        ) from None
