"""A tree cache that stays in place and whose bookkeeping lies on the device.

That is what a step needs to be captured as a CUDA graph: the same addresses and shapes at every
replay, whatever the lengths of the rows. Every layer sees all slots; visibility is left to the
layout of the tree, which reads the lengths where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from selfspec.cache import TreeCache, TreeLayer


class FixedCache(TreeCache):
    """A `TreeCache` that outlives requests.

    Attributes:
        prefix_len: int32 [B], `lengths` on the device.
        last: int32 [B], last position of every row, see `placement`.
        generation: Counts how often the slots have moved because there had to be more of them.

    Args:
        num_layers: L.
        batch: B.
        capacity: Slots of a row.
        extra: The last so many slots are for the nodes of trees alone.
        device: Where the bookkeeping lies: the device of all layers.
        positions: Positions that drafts may have.
    """

    is_even = False  # the lengths may differ at the next replay
    keeps_slots = False  # the next request will fill them

    def __init__(
        self,
        num_layers: int,
        batch: int,
        *,
        capacity: int,
        extra: int,
        device: torch.device,
        positions: int = 1 << 30,
    ) -> None:
        sizes = {"reserve": capacity, "longest": capacity - extra, "extra": extra}
        super().__init__(num_layers, batch, positions=positions, **sizes)
        self.extra = extra
        self.generation = 0
        self._mixed = False
        self._told: list[int] = []  # what `last` holds
        # They outlive a user's `torch.inference_mode()`.
        with torch.inference_mode(False):
            self.prefix_len = torch.zeros(batch, dtype=torch.int32, device=device)
            self.last = torch.zeros(batch, dtype=torch.int32, device=device)
            self.rows = torch.arange(batch, device=device)[:, None]

    def restart(self, longest: int) -> None:
        """Forget a request. What its tokens left in the slots is never visible again.

        Args:
            longest: Slots that the longest sequence of the next request can come to fill.
        """
        self.longest = longest
        self.window = None
        self._ended = [False] * self.batch
        if self._mixed:  # for a user's cache; the next request is of the model's dtype again
            for layer in self.filled_layers:
                layer.release()
            self.mix()
            self._mixed = False
        for layer in self.layers:
            layer.filled = 0

    def mix(self) -> None:
        """Void what was captured: slots may have been made anew."""
        self.generation += 1
        self._mixed = True

    @property
    def bound(self) -> int:
        """Most committed tokens that a row can have as things are."""
        return self.capacity - self.extra

    @property
    def width(self) -> int:
        """`bound`: what is known of the lengths without reading them."""
        return self.bound

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots; what was captured before is void then."""
        if slots > self.capacity:
            self.capacity = max(slots, min(2 * self.capacity, self.longest + self.extra))
            self.generation += 1

    def release(self, layer: TreeLayer) -> None:
        """Nothing: what was captured reads and writes these slots at every replay."""

    def make_room(self, nodes: int = 0) -> None:
        """Grow if the next tree, of the usual size or of `nodes`, would not fit; host work only."""
        self.reserve(max(self.lengths) + max(self.extra, nodes))

    def settle(self, pads: list[int]) -> None:
        """End the prefill; see `TreeCache.settle`."""
        super().settle(pads)
        self._tell()

    def placement(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """As `TreeCache.placement`; the tensors stay, their content follows `commit`."""
        return self.prefix_len, self.last

    def open(self, offset: int, count: int) -> None:
        """Direct the next writes to nodes offset..offset+count-1 of every row."""
        self.make_room(offset + count)
        nodes = torch.arange(offset, offset + count, device=self.prefix_len.device)
        slots = self.prefix_len[:, None] + nodes
        self.window = (self.capacity - count, self.capacity, slots)

    @contextmanager
    def rewound(self, tokens: int) -> Iterator[None]:
        """See `TreeCache.rewound`."""
        with super().rewound(tokens):
            self._tell()
            yield
        self._tell()

    def commit(self, path: Tensor, counts: list[int], moved: bool) -> None:
        """Keep the root and the accepted nodes of every row; see `TreeCache.commit`."""
        super().commit(path, counts, moved)
        self._tell()

    def mark_ended(self, rows: list[bool]) -> None:
        """See `TreeCache.mark_ended`."""
        if rows != self._ended:
            super().mark_ended(rows)
            self._tell()

    def _tell(self) -> None:
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device="cpu")
        self.prefix_len.copy_(lengths, non_blocking=True)
        last = self.last_positions()
        if last != self._told:  # seldom: at the start, and past the end of a table
            self.last.copy_(torch.tensor(last, dtype=torch.int32, device="cpu"))
            self._told = last
