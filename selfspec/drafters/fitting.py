"""Drafters meet the model that they are to draft for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.drafters.protocol import Drafter

logger = logging.getLogger("selfspec")


def fit(
    drafters: Sequence[Drafter], model: Any, architecture: Architecture, checked: object
) -> None:
    """Refuse what was made for another model, and let drafters see this one.

    Args:
        drafters: One by one.
        model: Transformers' model.
        architecture: What it can do.
        checked: A skip set that was checked when it was loaded, or None.

    Raises:
        ValueError: If a network, a skip set or a calibration is another model's.
    """
    for drafter in drafters:
        for name in ("network", "found", "calibrated_for"):
            made = getattr(drafter, name, None)
            if made is not None and made is not checked:
                from selfspec.checkpoints import check_made_for  # costs time only where needed

                check_made_for(made, model)
        if hasattr(drafter, "bind"):
            drafter.bind(architecture)


def say_what_does_not_pay(drafters: Sequence[Drafter], notes: dict[str, str]) -> None:
    """A search may have found, earlier, that some drafts are not to be made: log and note it."""
    for drafter in drafters:
        found = getattr(drafter, "found", None)
        if found is not None and not found.pays:
            notes[type(drafter).__name__] = str(found)
            logger.warning("selfspec: %s", found)
