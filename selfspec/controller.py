"""How much to draft in the next step, decided by measured time alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from selfspec.costs import StepCosts
    from selfspec.loop import Step
    from selfspec.state import DecodeState


class Controller(Protocol):
    """Sets the draft budget of every step of one request."""

    def budget(self, state: DecodeState) -> int:
        """Draft tokens a row may have in the next step; 0 is a plain step."""
        ...

    def observe(self, step: Step) -> None:
        """See what the step gave and took."""
        ...


class FixedBudget:
    """Always the same budget."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens

    def budget(self, state: DecodeState) -> int:
        """The same budget, whatever the state."""
        return self.max_draft_tokens

    def observe(self, step: Step) -> None:
        """Nothing to learn."""


class OffSwitch:
    """Doubles drafts that are accepted whole, shortens others, and stops while drafting loses time.

    The account is kept in tokens: a step earns what it emitted a row and pays what it took, in
    plain steps. When the balance falls below `-patience` drafting pauses, twice as long every time
    it fails again; one draft after every pause tries whether the text has changed.

    Args:
        costs: The wrapper's measurements.
        max_draft_tokens: Longest draft.
        sizes_itself: Whether the drafter chooses the size of its drafts: then the budget is always
            `max_draft_tokens`, or nothing.
        patience: Plain steps that may be lost before a pause.
    """

    shortest = 3  # with the root, a block of 4
    first_pause, longest_pause = 8, 64
    unnoticed = 0.02  # plain steps that a draft may take which then is not verified

    def __init__(
        self,
        costs: StepCosts,
        max_draft_tokens: int,
        sizes_itself: bool = False,
        patience: float = 0.6,
    ) -> None:
        self.costs = costs
        self.max_draft_tokens = max_draft_tokens
        self.patience = patience
        self.balance = 0.0
        self.sizes_itself = sizes_itself
        self.length = max_draft_tokens if sizes_itself else min(self.shortest, max_draft_tokens)
        self.pause = self.first_pause
        self.waiting = 0

    def budget(self, state: DecodeState) -> int:
        """0 while paused and until a plain step has been timed."""
        if self.costs.relative(state.batch, 1) is None:
            return 0
        if self.waiting > 0:
            self.waiting -= 1
            return 0
        return self.length

    def observe(self, step: Step) -> None:
        """Book the step, which the costs know already."""
        if step.is_prefill:
            return
        batch = len(step.tokens)
        if self.sizes_itself and not self.costs.is_settled(batch):
            return
        moving = [len(new) for new in step.tokens if new]
        paid = self.costs.relative(batch, step.num_nodes)
        if not moving or paid is None:
            return
        earned = sum(moving) / len(moving)
        if step.num_nodes == 1:
            wasted = self.costs.wasted(step)
            if wasted < self.unnoticed:
                return
            paid = earned + wasted
        self.balance = min(self.balance + earned - paid, 4 * self.patience)
        if self.balance < -self.patience:
            self.waiting = self.pause
            self.pause = min(2 * self.pause, self.longest_pause)
            self.balance = 0.1 - self.patience  # the next trial has to pay for itself
        elif earned > paid:
            self.pause = self.first_pause
        if self.sizes_itself:
            return
        longest = max(step.num_accepted)
        if longest >= max(step.draft_depth):
            length = 2 * (max(step.draft_depth) + 1) - 1
        else:
            length = (1 << (longest + 1).bit_length()) - 1
        self.length = min(max(length, self.shortest), self.max_draft_tokens)
