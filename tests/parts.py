"""Drafters that run a fixed part of a model, by the names of those that choose it themselves."""

from __future__ import annotations

from typing import Any

import selfspec


def by_name(drafter: str) -> Any:
    """The drafter of that name, which drafts from the first step on."""
    if drafter == "early-exit":
        return selfspec.EarlyExitDrafter(1)
    return selfspec.LayerSkipDrafter([1]) if drafter == "layer-skip" else drafter
