"""Ask a drafter, check what it proposes, and fit that to what the model can verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.drafters.protocol import Drafter
    from selfspec.state import DecodeState


def propose(drafter: Drafter, state: DecodeState, budget: int) -> TokenTree:
    """The tree to verify in the next step.

    Args:
        drafter: Asked unless there is no budget.
        state: Where decoding stands.
        budget: Draft tokens a row may have; 0 makes a plain step.

    Returns:
        What was drafted; the first chain of every row for models that take chains only.

    Raises:
        TypeError: If the drafter returned something else than a tree.
        ValueError: If the tree does not belong to this state, or cannot be walked or resumed.
    """
    if budget == 0:
        return TokenTree.root_only(state.root)
    tree = drafter.draft(state, budget)
    if not isinstance(tree, TokenTree):
        raise TypeError(
            f"{type(drafter).__name__}.draft returned a {type(tree).__name__}; it must return a "
            "TokenTree (TokenTree.root_only(state.root) for no draft)."
        )
    if tree.given is not None and not getattr(drafter, "is_lossy", False):
        raise ValueError(
            f"{type(drafter).__name__} drafted tokens to be kept unseen (TokenTree.given), and it "
            "does not say `is_lossy = True` of itself; leave `given` out for exact text."
        )
    # Reading a tree back from a device stalls it; there, only drafts of strangers are worth that.
    if state.root.is_cpu or not getattr(drafter, "makes_valid_trees", False):
        try:
            tree.validate(state.root, state.target.vocab_size, budget)
            check_resume(tree, state.target.architecture.num_layers)
        except ValueError as error:
            raise ValueError(
                f"{type(drafter).__name__} drafted what cannot be verified: {error} "
                "selfspec.testing.check_drafter says which rule is broken."
            ) from error
    if state.target.architecture.support == "chain" and not tree.is_chain:
        return tree.first_chains()
    return tree


def check_taps(drafter: Drafter, num_layers: int) -> None:
    """Refuse taps of layers that the model does not have.

    Raises:
        ValueError: If a tap is outside 0..L.
    """
    for layer in drafter.hidden_taps:
        if not 0 <= layer <= num_layers:
            raise ValueError(
                f"hidden_taps of {type(drafter).__name__} has {layer}; the model has inputs of "
                f"layers 0..{num_layers - 1}, and {num_layers} is the last one's output."
            )


def check_resume(tree: TokenTree, num_layers: int) -> None:
    """Refuse a tree that verification cannot take over from.

    Raises:
        ValueError: If the layer does not exist, or not every node has its state.
    """
    resume = tree.resume
    if resume is None:
        return
    if not 1 <= resume.layer <= num_layers:
        raise ValueError(f"resume.layer is {resume.layer}; it must be in 1..{num_layers}.")
    if resume.hidden.ndim != 3 or resume.hidden.shape[:2] != tree.tokens.shape:
        raise ValueError(
            f"resume.hidden is {tuple(resume.hidden.shape)}; it must be [B, N, C] with B, N = "
            f"{tuple(tree.tokens.shape)}."
        )
