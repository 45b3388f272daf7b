"""A drafter remembers one request at a time: who has it, and what others get."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.drafters.protocol import Drafter

_BUSY: set[int] = set()  # ids of the drafters that requests are using
_LOCK = threading.Lock()


@contextmanager
def borrowed(drafter: Drafter, parts: Sequence[Drafter]) -> Iterator[Drafter]:
    """The drafter, or a copy of it while another call (of any wrapper) has it.

    Args:
        drafter: Of a wrapper.
        parts: Those that it is made of.
    """
    ids = {id(drafter), *map(id, parts)}
    with _LOCK:
        is_free = ids.isdisjoint(_BUSY)
        if is_free:
            _BUSY.update(ids)
    try:
        yield drafter if is_free else copy.copy(drafter)
    finally:
        if is_free:
            with _LOCK:
                _BUSY.difference_update(ids)
