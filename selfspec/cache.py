"""Key/value cache for trees: preallocated, ragged, written in place.

Committed tokens of row b fill slots 0..lengths[b]-1, so that *slot == position* whatever the
padding was. Tree node n of the row is written to slot lengths[b] + n; committing keeps the accepted
nodes by moving them up against the prefix. Nothing is ever copied for the sake of growing by one
token, which is what `DynamicCache` does in every layer of every step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from selfspec_kernels.kv_commit import kv_commit
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer


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
        """Write new states and return every slot up to the last one written."""
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
            self.keys, self.values = (self._grow(t) for t in (self.keys, self.values))
        if slots is None:
            self.keys[:, :, start:end] = key_states
            self.values[:, :, start:end] = value_states
        else:
            rows, slots = cache.rows.to(self.device), slots.to(self.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, old: Tensor) -> Tensor:
        new = self._allocate(old)
        new[:, :, : old.shape[2]] = old
        return new

    def get_seq_length(self) -> int:
        """Slots before the tokens of the current call."""
        return self.filled if self.cache.window is None else self.cache.window[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of key slots the next call sees, offset of the first)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: grows as needed (the name since transformers 5.13)."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: grows as needed (the name up to transformers 5.12)."""
        return -1


class TreeCache(Cache):
    """A `Cache` whose rows have lengths of their own.

    Life: the model prefills it like any cache; `settle` squeezes left padding out; then every step
    opens a window for its nodes (`open`), the model writes them, and `commit` keeps the accepted
    path.

    Args:
        num_layers: L.
        batch: B.
        reserve: Slots to allocate at first (prompt, one tree and some room).
        longest: Slots that the longest sequence can come to fill.
        extra: Slots a tree may need beyond those; growth is geometric up to `longest + extra`.
    """

    def __init__(
        self, num_layers: int, batch: int, *, reserve: int, longest: int, extra: int = 64
    ) -> None:
        self.longest = longest
        self.limit = longest + extra
        self.capacity = min(reserve, self.limit)
        self.batch = batch
        self.lengths = [0] * batch
        self.pads = [0] * batch
        self.window: tuple[int, int, Tensor | None] | None = None
        self.rows = torch.arange(batch)[:, None]
        super().__init__(layers=[TreeLayer(self) for _ in range(num_layers)])

    @property
    def width(self) -> int:
        """Slots that committed tokens of the longest row fill."""
        return max(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows have the same length."""
        return len(set(self.lengths)) == 1

    def placement(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Committed tokens of every row, and the position of the last token it can come to have.

        Nodes beyond that position (padding, or drafts too long for their row) are never emitted,
        but must not run off a table of learned positions either.

        Returns:
            Two int32 [B] on `device`.
        """
        last = [self.longest - 1 - pad for pad in self.pads]
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return lengths.to(device), torch.tensor(last, dtype=torch.int32).to(device)

    @property
    def filled_layers(self) -> list[TreeLayer]:
        """Layers that hold anything (a layer that shares another's KV holds nothing)."""
        return [layer for layer in self.layers if layer.is_initialized]

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots; layers follow at their next write."""
        if slots > self.capacity:
            self.capacity = max(slots, min(2 * self.capacity, self.limit))

    def load(self, cache: Cache) -> None:
        """Start from a user's cache of plain full-attention layers (copied, not shared)."""
        # A cache that has not been used may not have its layers yet.
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if theirs.is_initialized and theirs.get_seq_length():
                mine.update(theirs.keys, theirs.values)

    def settle(self, pads: list[int]) -> None:
        """End the prefill: shift every row left over its padding, so that slot == position.

        Args:
            pads: Left padding of every row, in slots.
        """
        filled = max(layer.filled for layer in self.layers)
        self.pads = pads
        self.lengths = [filled - pad for pad in pads]
        if any(pads):
            for layer in self.filled_layers:
                for b, pad in enumerate(pads):
                    if pad:
                        for buffer in (layer.keys, layer.values):
                            buffer[b, :, : filled - pad] = buffer[b, :, pad:filled].clone()
                            buffer[b, :, filled - pad : filled] = 0
        self.open(0, 1)

    def open(self, offset: int, count: int) -> None:
        """Direct the next writes to nodes offset..offset+count-1 of every row."""
        start = self.width + offset
        self.reserve(start + count)
        slots = None
        if not self.is_even:
            slots = torch.tensor(self.lengths)[:, None] + offset + torch.arange(count)
        self.window = (start, start + count, slots)

    def commit(self, path: Tensor, counts: list[int], moved: bool) -> None:
        """Keep the root and the accepted nodes of every row.

        Args:
            path: int32 [B, P], node indices from the root on; -1 padded.
            counts: Nodes of the path to keep a row: the root and accepted ones, or 0 if the row
                stands still.
            moved: False if every path is 0, 1, 2, ...: the nodes are where they belong already.
        """
        if moved:
            prefix = torch.tensor(self.lengths, dtype=torch.int32)
            num_accepted = torch.tensor([max(count - 1, 0) for count in counts], dtype=torch.int32)
            self.move(path, num_accepted, prefix)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def move(self, path: Tensor, num_accepted: Tensor, prefix_len: Tensor) -> None:
        """Move accepted nodes up against the prefix in every layer; see `kv_commit`."""
        for device in {layer.device for layer in self.filled_layers}:
            layers = [layer for layer in self.filled_layers if layer.device == device]
            kv_commit(
                [layer.keys for layer in layers],
                [layer.values for layer in layers],
                *(t.to(device) for t in (path, num_accepted, prefix_len)),
            )

    def row(self, layer: TreeLayer, b: int) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one row, each [K, length, D]."""
        end = self.lengths[b]
        return layer.keys[b, :, :end], layer.values[b, :, :end]

    def padded(self, length: int) -> list[tuple[Tensor, Tensor] | None]:
        """Every layer's keys and values as transformers would hold them, [B, K, length, D].

        Rows start after their left padding; what a finished row lacks at the end is zero.
        """
        result: list[tuple[Tensor, Tensor] | None] = []
        for layer in self.layers:
            if not layer.is_initialized:
                result.append(None)
                continue
            pair = tuple(
                buffer.new_zeros(*buffer.shape[:2], length, buffer.shape[3])
                for buffer in (layer.keys, layer.values)
            )
            for b, pad in enumerate(self.pads):
                for out, kept in zip(pair, self.row(layer, b), strict=True):
                    out[b, :, pad : pad + kept.shape[1]] = kept[:, : length - pad]
            result.append(pair)
        return result

    def export(self, length: int, config: Any, into: Cache | None = None) -> Cache:
        """A standard cache holding the first `length` slots of every sequence, padding included.

        Args:
            length: Slots, as transformers counts them: length of the sequences minus one.
            config: The text config; sliding layers keep only their window.
            into: A user's cache to refill in place instead (plain full-attention layers).
        """
        result = DynamicCache(config=config) if into is None else into
        for i, pair in enumerate(self.padded(length)):
            if pair is None:
                continue
            if into is not None and i < len(into.layers):
                layer = into.layers[i]
                if not layer.is_initialized:
                    layer.lazy_initialization(*pair)
                layer.keys, layer.values = pair
            else:
                result.update(*pair, i)
        return result


class AlignedCache(TreeCache):
    """A tree cache for models that know positions by slot alone (ALiBi): chains only.

    Rows are aligned at their right end, so that a chain continues every row at the same slots and a
    2-D attention mask says where a row starts. After a step in which rows accepted different counts
    they are aligned anew; that copies no more than `DynamicCache` copies at every token.
    """

    def settle(self, pads: list[int]) -> None:
        """End the prefill; left padding is already what this layout needs."""
        self.end = max(layer.filled for layer in self.layers)
        self.pads = pads
        self.lengths = [self.end - pad for pad in pads]
        self.open(0, 1)

    @property
    def width(self) -> int:
        """Slots in use; row b fills the last lengths[b] of them."""
        return self.end

    def open(self, offset: int, count: int) -> None:
        """Direct the next writes to the same slots of every row."""
        start = self.end + offset
        self.reserve(start + count)
        self.window = (start, start + count, None)

    def shift(self, slots: int) -> None:
        """Move every row to the right; for probing whether a model minds."""
        if slots:
            self.reserve(self.end + slots)
            for layer in self.filled_layers:
                layer.keys, layer.values = (
                    torch.nn.functional.pad(t[:, :, : self.end], (0, 0, slots, 64))
                    for t in (layer.keys, layer.values)
                )
            self.capacity = max(self.capacity, self.end + slots + 64)
            self.end += slots

    def mask(self, extra: int, device: torch.device) -> Tensor:
        """int64 [B, width + extra]; 1 where a row's tokens are."""
        slots = torch.arange(self.end + extra, device=device)
        starts = self.end - torch.tensor(self.lengths, device=device)
        return (slots >= starts[:, None]).long()

    def commit(self, path: Tensor, counts: list[int], moved: bool) -> None:
        """Keep the accepted prefix of every chain and realign the rows at the longest one's end."""
        lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        end = max(lengths)
        for b, count in enumerate(counts):
            old = slice(self.end + count - lengths[b], self.end + count)
            new = slice(end - lengths[b], end)
            if old != new:
                for layer in self.filled_layers:
                    for buffer in (layer.keys, layer.values):
                        buffer[b, :, new] = buffer[b, :, old].clone()
        self.end, self.lengths = end, lengths

    def row(self, layer: TreeLayer, b: int) -> tuple[Tensor, Tensor]:
        """Committed keys and values of one row, each [K, length, D]."""
        start = self.end - self.lengths[b]
        return layer.keys[b, :, start : self.end], layer.values[b, :, start : self.end]


def continuable(cache: Cache) -> bool:
    """Whether a user's cache can be continued: every layer plain, full attention, on its device."""
    return (
        isinstance(cache, DynamicCache)
        and not getattr(cache, "offloading", False)
        and all(type(layer) is DynamicLayer for layer in cache.layers)
    )
