"""Several drafters as one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from selfspec.drafters.judge import Judge, judge_of
from selfspec.drafters.pool import BELIEF, Pool
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.drafters.protocol import Drafter
    from selfspec.state import Acceptance, DecodeState, TargetOutput


class CombinedDrafter:
    """Merges what several deterministic drafters propose into one tree: the best of all of it.

    What is verified are the most probable nodes, by what each drafter expects
    (`TokenTree.expected`) and how often it was right to, as many as pay by measured time. A later
    drafter is not asked where the first token of the others is so probable that what is left to it
    is worth less than the time it takes.

    Args:
        drafters: At least one, in the order in which they are asked.

    Raises:
        ValueError: If there is none, or one draws its tokens or is lossy.
    """

    sizes_itself = True  # by what pays, as measured

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
        self._names = names_of(self.drafters)
        # Of a request: how far each of them is to be believed, and what they drafted last.
        self._judges: list[Judge] = []
        self._pool: Pool | None = None

    def __copy__(self) -> CombinedDrafter:
        """For a request beside another one: parts that remember a text are not shared."""
        return CombinedDrafter([copy.copy(drafter) for drafter in self.drafters])

    def __getstate__(self) -> dict[str, Any]:
        """Without the request that is being decoded."""
        return {**self.__dict__, "_judges": [], "_pool": None}

    @property
    def hidden_taps(self) -> Sequence[int]:
        """Everything that any of them wants."""
        return sorted({layer for drafter in self.drafters for layer in drafter.hidden_taps})

    @property
    def makes_valid_trees(self) -> bool:
        """Whether all of them do."""
        return all(getattr(d, "makes_valid_trees", False) for d in self.drafters)

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """One tree with the best of what all that are worth asking have drafted."""
        costs, rows = state.costs, max(1, state.frozen.count(False))
        if not self._judges:
            self._judges = [judge_of(costs, f"{name} in a list", BELIEF) for name in self._names]
        self._pool = pool = Pool(state, self._judges)
        beside, gained, promise = state.of_a_pool(), 0.0, 0.0
        for at, (name, drafter) in enumerate(zip(self._names, self.drafters, strict=True)):
            rest = 1.0 - promise
            pays = not promise or costs.asking_pays(state.batch, name, rest)
            if not pays and not costs.looks_again(state.batch, f"asking {name}"):
                continue  # what is left to it is worth less than its time
            start = costs.now()
            tree = drafter.draft(beside, budget)
            costs.record_draft(state.batch, name, costs.now() - start)
            pool.add(at, tree)
            before, gained = gained, costs.gain(state.batch, pool.ranked(rows))
            if promise:
                costs.record_asking(name, gained - before, rest)
            promise = pool.promise(rows)
        count = min(costs.choose(state.batch, pool.ranked(rows)), budget)
        if not count:
            return TokenTree.root_only(state.root)
        return TokenTree.from_rows(state.root, pool.choose(count))

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Let all of them see, and learn who was right."""
        if self._pool is not None:
            if state.costs.adaptive:
                self._pool.learn(state)
            self._pool = None
        for drafter in self.drafters:
            drafter.observe(state, output, acceptance)

    def reset(self) -> None:
        """Let all of them forget."""
        self._judges, self._pool = [], None
        for drafter in self.drafters:
            drafter.reset()


def names_of(drafters: Sequence[Drafter]) -> list[str]:
    """Their classes, numbered where there are several of one."""
    names = [type(drafter).__name__ for drafter in drafters]
    return [
        name if names.count(name) == 1 else f"{name} {names[: at + 1].count(name)}"
        for at, name in enumerate(names)
    ]
