"""From what a user passes as `drafter` to a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from selfspec.drafters.combined import CombinedDrafter
from selfspec.drafters.early_exit import EarlyExitDrafter
from selfspec.drafters.feature import FeatureDrafter
from selfspec.drafters.heads import HeadsDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.mtp import MtpDrafter
from selfspec.drafters.ngram import NGramDrafter
from selfspec.drafters.protocol import Drafter
from selfspec.drafters.suffix import SuffixDrafter

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_BY_NAME: dict[str, Callable[..., Drafter]] = {
    "suffix": SuffixDrafter,
    "ngram": NGramDrafter,
    "layer-skip": LayerSkipDrafter,
    "early-exit": EarlyExitDrafter,
    "heads": HeadsDrafter,
    "feature": FeatureDrafter,
    "mtp": MtpDrafter,
}
_KINDS = {
    "heads": "heads",
    "feature": "feature",
    "early-exit": "exit",
    "layer-skip": "skip_set",
}
_NEEDED = {"heads", "feature"}
_BY_LAYERS = {"early-exit", "layer-skip"}
_AUTO = ("feature", "heads")  # kinds, the best first

Drafts = Mapping[str, Any]


def networks_for(
    drafter: str | Drafter | Sequence[str | Drafter],
    model: PreTrainedModel,
    drafts: str | PathLike[str] | Mapping[str, nn.Module] | None,
    strict_base: bool,
) -> dict[str, nn.Module]:
    """The trained networks, and the skip set, that the names in `drafter` stand for, by kind.

    Args:
        drafter: As for `selfspec.wrap`, as the next ones.
        model: What is drafted for.
        drafts: Where they are.
        strict_base: Whether drafts that were made for another model are refused.

    Raises:
        TypeError: If `drafts` is of another type.
        ValueError: If a name is unknown, there is no draft where `drafts` says, or none of a kind
            that is used.
    """
    taken = _kinds_taken(drafter)
    if not isinstance(drafts, str | PathLike | Mapping | None) or drafts == "":
        raise TypeError(
            f"drafts={drafts!r} must be a folder, a repository, or networks by kind "
            '("feature", "heads", "exit"); a drafter is passed as drafter=.'
        )
    found: Mapping[Any, Any] = {}
    if isinstance(drafts, Mapping):
        found = drafts
        skip_set: Any = drafts.get("skip_set")
        if hasattr(skip_set, "base"):
            from selfspec.checkpoints import check_base

            check_base(skip_set.base, model, strict_base)
    elif taken:
        from selfspec.checkpoints import find_drafts  # costs time only where it is needed

        found = find_drafts(model, drafts, strict_base)
    used = {kind: found[kind] for kind in found if kind in taken}
    if drafts is not None and not used:
        what = "" if isinstance(drafts, Mapping) else f"={str(drafts)!r}"
        kinds = f" (of kind {', '.join(map(str, found))})" if found else ""
        raise ValueError(
            f"drafts{what}{kinds} has no use with drafter={drafter!r}: "
            '"feature", "heads" and "early-exit" use drafts of kind feature, heads and exit, '
            '"layer-skip" a skip_set, "auto" uses feature or heads.'
        )
    return used


def _kinds_taken(drafter: object) -> list[str]:
    """Kinds of trained drafts that names in `drafter` can stand for.

    Raises:
        ValueError: If a name is unknown.
    """
    if isinstance(drafter, str):
        if drafter == "auto":
            return list(_AUTO)
        _check_name(drafter)
        return [_KINDS[drafter]] if drafter in _KINDS else []
    if isinstance(drafter, Sequence):
        return [kind for part in drafter for kind in _kinds_taken(part)]
    return []


def resolve(
    drafter: str | Drafter | Sequence[str | Drafter], drafts: Drafts
) -> tuple[Drafter, bool]:
    """The drafter that is meant.

    Args:
        drafter: As for `selfspec.wrap`.
        drafts: Trained networks by kind.

    Returns:
        The drafter, and whether the off switch is on by default.

    Raises:
        ValueError: If a name is unknown, needs a draft that there is not, or a list is empty.
        TypeError: If an object lacks a member of the protocol, or is a class.
    """
    if isinstance(drafter, str):
        if drafter in ("auto", "none"):
            return _best_of(drafts if drafter == "auto" else {}), drafter == "auto"
        # Drafts by layers cost much of what they give: measured time has the last word.
        return _named(drafter, drafts), drafter in _BY_LAYERS
    if isinstance(drafter, Sequence):
        if "none" in drafter:
            raise ValueError("drafter='none' cannot be part of a list.")
        return CombinedDrafter([resolve(d, drafts)[0] for d in drafter]), False
    missing = [m for m in ("hidden_taps", "draft", "observe", "reset") if not hasattr(drafter, m)]
    if missing or isinstance(drafter, type):
        what = (
            "a class; pass an instance"
            if isinstance(drafter, type)
            else f"an instance of {type(drafter).__name__} without {', '.join(missing)}"
        )
        raise TypeError(
            f'drafter is {what}. Pass a name ("auto", "none", ...), a drafter or a list of them.'
        )
    return drafter, False


def _best_of(drafts: Drafts) -> Drafter:
    """Copies of the text, and the best of the trained drafts beside them."""
    for name in _AUTO:
        if name in drafts:
            return CombinedDrafter([SuffixDrafter(), _named(name, drafts)])
    return SuffixDrafter()


def _check_name(name: str) -> None:
    known = ("auto", *_BY_NAME, "none")
    if name not in known:
        listed = ", ".join(map(repr, known))
        raise ValueError(f"drafter={name!r} is unknown; choose one of {listed}, or pass a drafter.")


def _named(name: str, drafts: Drafts) -> Drafter:
    _check_name(name)
    network = drafts.get(_KINDS.get(name, ""))
    if network is not None and name == "layer-skip":
        return LayerSkipDrafter(network)
    if network is not None:
        return _BY_NAME[name](network=network)
    if name in _NEEDED:
        there = f"there are only {', '.join(drafts)}" if drafts else "none lie beside the model"
        raise ValueError(
            f"drafter={name!r} needs a trained draft, and {there}: pass drafts= a folder that has "
            "one, or train one (examples/train_drafts.py)."
        )
    return _BY_NAME[name]()


def label(argument: object, drafter: Drafter) -> str:
    """How a wrapper names its drafter."""
    if isinstance(argument, str):
        if argument != "auto":
            is_trained = getattr(drafter, "network", None) is not None
            return argument + (" (trained)" if is_trained else "")
        if isinstance(drafter, CombinedDrafter):
            return "suffix + " + label(None, drafter.drafters[1]) + " (auto: trained for the model)"
        return "suffix (auto: the one that needs no training)"
    if isinstance(drafter, CombinedDrafter):
        return " + ".join(type(d).__name__ for d in drafter.drafters)
    return type(drafter).__name__
