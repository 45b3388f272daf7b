"""From what a user passes as `drafter` to a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.drafters.combined import CombinedDrafter
from selfspec.drafters.early_exit import EarlyExitDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.ngram import NGramDrafter
from selfspec.drafters.protocol import Drafter

_BY_NAME: dict[str, Callable[[], Drafter]] = {
    "ngram": NGramDrafter,
    "layer-skip": LayerSkipDrafter,
    "early-exit": EarlyExitDrafter,
}


def resolve(drafter: str | Drafter | Sequence[str | Drafter]) -> tuple[Drafter, bool]:
    """The drafter that is meant.

    Args:
        drafter: As for `selfspec.wrap`.

    Returns:
        The drafter, and whether the off switch is on by default.

    Raises:
        ValueError: If a name is unknown or a list is empty.
        TypeError: If an object lacks a member of the protocol, or is a class.
    """
    if isinstance(drafter, str):
        if drafter in ("auto", "none"):
            return NGramDrafter(), drafter == "auto"
        if drafter not in _BY_NAME:
            known = ", ".join(repr(k) for k in ("auto", *_BY_NAME, "none"))
            raise ValueError(
                f"drafter={drafter!r} is unknown; choose one of {known}, or pass a drafter."
            )
        return _BY_NAME[drafter](), False
    if isinstance(drafter, Sequence):
        if "none" in drafter:
            raise ValueError("drafter='none' cannot be part of a list.")
        return CombinedDrafter([resolve(d)[0] for d in drafter]), False
    missing = [m for m in ("hidden_taps", "draft", "observe", "reset") if not hasattr(drafter, m)]
    if missing or isinstance(drafter, type):
        what = (
            "a class; pass an instance"
            if isinstance(drafter, type)
            else (f"a {type(drafter).__name__} without {', '.join(missing)}")
        )
        raise TypeError(
            f'drafter is {what}. Pass a name ("auto", "none", ...), a drafter or a list of them.'
        )
    return drafter, False


def label(argument: object, drafter: Drafter) -> str:
    """How a wrapper names its drafter."""
    if isinstance(argument, str):
        return "ngram (auto: the one that needs no training)" if argument == "auto" else argument
    if isinstance(drafter, CombinedDrafter):
        return " + ".join(type(d).__name__ for d in drafter.drafters)
    return type(drafter).__name__
