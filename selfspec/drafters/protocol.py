"""What a drafter is. Anything with these members is one; there is nothing to inherit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from selfspec.state import Acceptance, DecodeState, TargetOutput
    from selfspec.tree import TokenTree


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens that the target then verifies.

    Whatever a drafter proposes, the output stays the target's; a bad draft only costs time.

    Optional members: `sizes_itself` (True if it chooses how much to draft, by `state.costs`),
    `makes_valid_trees` (True if its trees need no check on a device), `is_lossy` (True if some of
    its tokens are to be kept unseen, see `TokenTree.given`), and `bind(architecture)` (called
    when it is wrapped, to refuse a model that it does not fit). In a list of drafters, trees that
    say how probable their nodes are (`TokenTree.expected`) are chosen from best.
    """

    @property
    def hidden_taps(self) -> Sequence[int]:
        """Layers whose input (L: the last layer's output) `observe` wants; an attribute will do."""
        ...

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """Propose a tree that starts at `state.root`.

        Args:
            state: To be read, not changed. `state.tokens(b)` is row b; `state.target` runs layers;
                `state.costs.choose` says how many of some draft tokens are worth verifying.
            budget: Most draft tokens a row, and greatest depth, the root not counted; at least 1.

        Returns:
            The tree; one of the root alone is legal and makes a plain step.
        """
        ...

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """See what the target made of the draft; `state` is already committed.

        Called after every forward, the prefill first.
        """
        ...

    def reset(self) -> None:
        """Forget everything about the sequences seen; called before every request."""
        ...
