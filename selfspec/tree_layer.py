"""Keys and values of one layer of a tree cache."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicLayer

    from selfspec.cache import TreeCache


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, K, capacity, D]; where they go is the cache's decision."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: TreeCache) -> None:
        super().__init__()
        # Weak: a cycle would keep all keys and values until the garbage collector looks for cycles,
        # which it does by the number of objects, not by their size.
        self._cache = weakref.ref(cache)
        self.filled = 0  # slots used while prefilling
        self._borrower: tuple[DynamicLayer, int] | None = None

    @property
    def cache(self) -> TreeCache:
        """The cache that this is a layer of."""
        cache = self._cache()
        assert cache is not None
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the device and in the dtype of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (self._allocate(s) for s in (key_states, value_states))
        self.is_initialized = True

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not empty: a masked slot is multiplied by 0, and 0 * NaN would reach real rows. Not
        # an inference tensor: a cache made inside `torch.inference_mode()` may outlive it.
        batch, heads, _, size = like.shape
        with torch.inference_mode(False):
            return like.new_zeros(batch, heads, self.cache.capacity, size)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new states where the cache directs them.

        Args:
            key_states: [B, K, M, D], keys of M tokens a row.
            value_states: [B, K, M, D].
            *args: Ignored, as by transformers' own layers.
            **kwargs: Likewise.

        Returns:
            Keys and values of every slot up to the last one written, each [B, K, T, D].
        """
        cache = self.cache
        if cache.window is None:  # prefill, possibly in chunks: append
            start, end, slots = self.filled, self.filled + key_states.shape[2], None
            cache.reserve(end)
            self.filled = end
        else:
            start, end, slots = cache.window
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < cache.capacity:
            self.keys = self._grow(self.keys)  # one at a time: the old ones go in between
            self.values = self._grow(self.values)
            self._renew_loan()
        self._promote(key_states, value_states)
        if slots is None:
            self.keys[:, :, start:end] = key_states
            self.values[:, :, start:end] = value_states
        else:
            rows, slots = cache.rows.to(self.device), slots.to(self.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _promote(self, key_states: Tensor, value_states: Tensor) -> None:
        """As `torch.cat` does where a user's cache has another dtype than the model."""
        ours = self.keys.dtype, self.values.dtype
        theirs = key_states.dtype, value_states.dtype
        if ours != theirs:
            keys, values = (torch.promote_types(*pair) for pair in zip(ours, theirs, strict=True))
            with torch.inference_mode(False):
                self.keys, self.values = self.keys.to(keys), self.values.to(values)
            self._renew_loan()
            self.cache.mix()

    def _grow(self, old: Tensor) -> Tensor:
        new = self._allocate(old)
        new[:, :, : old.shape[2]] = old
        return new

    def load(self, layer: DynamicLayer, lend: bool) -> None:
        """Copy a user's layer, and perhaps let it be a view of the copy: one of them is enough."""
        self.update(layer.keys, layer.values)
        if lend:
            self._borrower = layer, self.filled
            self._renew_loan()

    def _renew_loan(self) -> None:
        if self._borrower is not None:
            layer, length = self._borrower
            layer.keys, layer.values = self.keys[:, :, :length], self.values[:, :, :length]

    def release(self) -> None:
        """Drop keys and values."""
        del self.keys, self.values
        self.is_initialized = False

    def get_seq_length(self) -> int:
        """Slots before the tokens of the current call; 0 in a layer that never had any.

        Of the latter a model may ask whether there is anything to attend to (Mllama's layers for
        images, transformers 5.10).
        """
        return self._start if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of key slots the next call sees, offset of the first)."""
        return self._start + query_length, 0

    @property
    def _start(self) -> int:
        return self.filled if self.cache.window is None else self.cache.window[0]

    def get_max_length(self) -> int:
        """-1: grows as needed (the name since transformers 5.13)."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: grows as needed (the name up to transformers 5.12)."""
        return -1
