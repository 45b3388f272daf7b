"""Trained drafts in files: an own format, published layouts, and those that engines serve.

Names are imported when they are first used: none is needed to wrap a model without trained drafts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.checkpoints.base_model import BaseModel, check_base
    from selfspec.checkpoints.eagle import export_eagle3
    from selfspec.checkpoints.find import check_made_for, check_network, find_drafts, load, load_all
    from selfspec.checkpoints.folder import Card, card_of, save
    from selfspec.checkpoints.medusa import export_medusa
    from selfspec.checkpoints.pretrained import Pretrained
    from selfspec.checkpoints.skip_sets import FoundSkipSet, read_skip_set
    from selfspec.checkpoints.speculators import export_speculators

_PLACES = {
    "BaseModel": "base_model",
    "Card": "folder",
    "FoundSkipSet": "skip_sets",
    "Pretrained": "pretrained",
    "card_of": "folder",
    "check_base": "base_model",
    "check_made_for": "find",
    "check_network": "find",
    "export_eagle3": "eagle",
    "export_medusa": "medusa",
    "export_speculators": "speculators",
    "find_drafts": "find",
    "load": "find",
    "load_all": "find",
    "read_skip_set": "skip_sets",
    "save": "folder",
}

__all__ = [
    "BaseModel",
    "Card",
    "FoundSkipSet",
    "Pretrained",
    "card_of",
    "check_base",
    "check_made_for",
    "check_network",
    "export_eagle3",
    "export_medusa",
    "export_speculators",
    "find_drafts",
    "load",
    "load_all",
    "read_skip_set",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
