"""Key/value cache for trees: preallocated, ragged, written in place.

Committed tokens of row b fill slots 0..lengths[b]-1, so that *slot == position* whatever the
padding was. Tree node n of the row is written to slot lengths[b] + n; committing keeps the accepted
nodes by moving them up against the prefix. Nothing is ever copied for the sake of growing by one
token, which is what `DynamicCache` does in every layer of every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from selfspec_kernels.kv_commit import kv_commit
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from selfspec.tree_layer import TreeLayer

_GRAIN = 256  # slots; shorter caches double, longer ones grow by no less


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
        positions: Positions that drafts may have.
    """

    keeps_slots = True  # a committed token stays where it is

    def __init__(
        self,
        num_layers: int,
        batch: int,
        *,
        reserve: int,
        longest: int,
        extra: int = 64,
        positions: int = 1 << 30,
    ) -> None:
        self.longest = longest
        self.positions = positions
        self.limit = longest + extra
        self.capacity = min(reserve, self.limit)
        self.batch = batch
        self.lengths = [0] * batch
        self.pads = [0] * batch
        self._ended = [False] * batch
        self.window: tuple[int, int, Tensor | None] | None = None
        self.rows = torch.arange(batch, device="cpu")[:, None]
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
        """Committed tokens of every row, and the last position that its nodes may have.

        Nodes beyond that position (padding, or drafts too long for their row) are never emitted,
        but must not run off a table of learned positions either.

        Returns:
            Two int32 [B] on `device`.
        """
        both = torch.tensor([self.lengths, self.last_positions()], dtype=torch.int32, device="cpu")
        lengths, last = both.to(device)
        return lengths, last

    def last_positions(self) -> list[int]:
        """See `placement`; a root stays where it is, and fails there if it fails in plain.

        But for the root of a row that has ended, which plain decoding never reads.
        """
        last = []
        for pad, length, ended in zip(self.pads, self.lengths, self._ended, strict=True):
            drafts = min(self.longest - pad, self.positions) - 1
            last.append(drafts if ended else max(drafts, length))
        return last

    def mark_ended(self, rows: list[bool]) -> None:
        """Say which rows take no more tokens."""
        self._ended = rows

    @property
    def filled_layers(self) -> list[TreeLayer]:
        """Layers that hold anything (a layer that shares another's KV holds nothing)."""
        return [layer for layer in self.layers if layer.is_initialized]

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots; layers follow one by one, at their next write.

        A long cache grows by an eighth: what is never filled stays small beside what is, and a slot
        is copied eight times or so in its life, where `DynamicCache` copies it at every token.
        """
        if slots > self.capacity:
            more = max(min(self.capacity, _GRAIN), self.capacity // 8)
            self.capacity = max(slots, min(self.capacity + more, self.limit))

    def load(self, cache: Cache, pads: list[int]) -> None:
        """Start from a user's cache of plain full-attention layers.

        Where tokens keep their slots its layers become views of ours: they hold what they held, and
        memory holds it once. After an exception they still do: what transformers would have added
        by then is a token at a time, what we have by then is not.

        Args:
            cache: The user's.
            pads: Left padding of every row, in slots.
        """
        lend = self.keeps_slots and not any(pads)
        # A cache that has not been used may not have its layers yet.
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if theirs.is_initialized and theirs.get_seq_length():
                mine.load(theirs, lend)

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

    @contextmanager
    def rewound(self, tokens: int) -> Iterator[None]:
        """Take the last tokens of every row for nodes, as long as the block runs."""
        lengths = self.lengths
        self.lengths = [max(length - tokens, 0) for length in lengths]
        try:
            yield
        finally:
            self.lengths = lengths

    def open(self, offset: int, count: int) -> None:
        """Direct the next writes to nodes offset..offset+count-1 of every row."""
        start = self.width + offset
        self.reserve(start + count)
        slots = None
        if not self.is_even:
            first = torch.tensor(self.lengths, device="cpu")[:, None] + offset
            slots = first + torch.arange(count, device="cpu")
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
            kept = [max(count - 1, 0) for count in counts]
            prefix, num_accepted = (
                torch.tensor(numbers, dtype=torch.int32, device="cpu")
                for numbers in (self.lengths, kept)
            )
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

    def padded(self, layer: TreeLayer, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as transformers would hold them, [B, K, length, D].

        Rows start after their left padding; what a finished row lacks at the end is zero.
        """
        keys, values = (
            buffer.new_zeros(*buffer.shape[:2], length, buffer.shape[3])
            for buffer in (layer.keys, layer.values)
        )
        for b, pad in enumerate(self.pads):
            for out, kept in zip((keys, values), self.row(layer, b), strict=True):
                out[b, :, pad : pad + kept.shape[1]] = kept[:, : length - pad]
        return keys, values

    def export(self, length: int, config: Any, into: Cache | None = None) -> Cache:
        """A standard cache holding the first `length` slots of every sequence, padding included.

        It is the end of this cache: layers are handed over one by one, so that memory holds all
        of them once and one of them twice.

        Args:
            length: Slots, as transformers counts them: length of the sequences minus one.
            config: The text config; sliding layers keep only their window.
            into: A user's cache to refill in place instead (plain full-attention layers).
        """
        result = DynamicCache(config=config) if into is None else into
        for i, mine in enumerate(self.layers):
            if not mine.is_initialized:
                continue
            pair = self.padded(mine, length)
            self.release(mine)
            if i < len(result.layers) and type(result.layers[i]) is DynamicLayer:
                layer = result.layers[i]
                if not layer.is_initialized:
                    layer.lazy_initialization(*pair)
                layer.keys, layer.values = pair
                continue
            result.update(*pair, i)
            layer = result.layers[i]
            if layer.keys.shape[2] < length:  # a window, as yet a view of everything
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return result

    def mix(self) -> None:
        """Learn that a layer has met states of another dtype than its own."""

    def release(self, layer: TreeLayer) -> None:
        """Drop what a layer holds, once it has been handed over."""
        layer.release()


class AlignedCache(TreeCache):
    """A tree cache for models that know positions by slot alone (ALiBi): chains only.

    Rows are aligned at their right end, so that a chain continues every row at the same slots and a
    2-D attention mask says where a row starts. After a step in which rows accepted different counts
    they are aligned anew; that copies no more than `DynamicCache` copies at every token.
    """

    keeps_slots = False

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
