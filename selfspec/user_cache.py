"""Which caches of a user's can be continued with trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


def continuable(cache: Cache) -> bool:
    """Whether a user's cache can be continued: every layer plain, full attention, on its device."""
    return is_dynamic(cache) and all(type(layer) is DynamicLayer for layer in cache.layers)


def is_dynamic(cache: Cache) -> bool:
    """Whether a cache is transformers' own, with nothing replaced, and on its device."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return False
    return not any(_overridden(part) for part in (cache, *cache.layers))


def _overridden(thing: object) -> bool:
    """Whether an instance has methods of its own."""
    return any(callable(getattr(type(thing), name, None)) for name in vars(thing))
