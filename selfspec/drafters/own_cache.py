"""Keys and values of a draft network in one request, and the angles of its positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from selfspec_kernels import TreeLayout, tree_attention
from torch import Tensor

from selfspec.cache import TreeCache
from selfspec.networks.attention import Angles, Attend
from selfspec.topology import chain_topology

_ENDLESS = 1 << 30


class OwnCache(TreeCache):
    """One layer of keys and values: entries for what is committed, behind them those of a draft.

    Args:
        batch: B.
        reserve: Slots to allocate at first.
        rotary: Angles of int64 positions [B, T] in a dtype.
    """

    def __init__(
        self, batch: int, reserve: int, rotary: Callable[[Tensor, torch.dtype], Angles]
    ) -> None:
        super().__init__(1, batch, reserve=reserve, longest=_ENDLESS)
        self._rotary = rotary
        self._table: Angles | None = None

    def open_next(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Open the next `length` slots of every row.

        Returns:
            int64 [B, length] positions, and int32 [B] entries before them.
        """
        prefix, _ = self.placement(device)
        self.open(0, length)
        return prefix[:, None].long() + torch.arange(length, device=device), prefix

    def append(self, length: int, device: torch.device) -> tuple[Tensor, Attend]:
        """Open the next `length` slots of every row, to be attended to causally.

        Returns:
            int64 [B, length] positions, and the attention of the tokens there.
        """
        positions, prefix = self.open_next(length, device)
        _, _, bits = chain_topology(length, device)
        depth = torch.zeros(self.batch, length, dtype=torch.int32, device=device)
        layout = TreeLayout(bits.expand(self.batch, -1, -1), depth, prefix, self.width)
        return positions, self._attend(layout)

    def expand(self, nodes: int, ancestors: Tensor, prefix: Tensor) -> Attend:
        """Open slots behind the entries and `nodes` nodes of a draft.

        Args:
            nodes: How many of the draft there are.
            ancestors: int64 [B, W, ceil((nodes + W) / 64)], which nodes each new one sees.
            prefix: int32 [B], entries of every row.

        Returns:
            The attention of the W new nodes.
        """
        width = ancestors.shape[1]
        self.open(nodes, width)
        depth = torch.zeros(self.batch, nodes + width, dtype=torch.int32, device=prefix.device)
        return self._attend(TreeLayout(ancestors, depth, prefix, self.width))

    def _attend(self, layout: TreeLayout) -> Attend:
        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            kept_keys, kept_values = self.layers[0].update(keys, values)
            return tree_attention(queries, kept_keys, kept_values, layout)

        return attend

    def keep(self, counts: list[int]) -> None:
        """Take the first `counts[b]` of what was appended as entries."""
        self.lengths = [have + new for have, new in zip(self.lengths, counts, strict=True)]

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Of positions [B, T], out of a table that grows with the text."""
        slots = self.capacity + 1
        if self._table is None or self._table[0].shape[0] < slots:
            every = torch.arange(2 * slots, device=positions.device)[None]
            cos, sin = self._rotary(every, dtype)
            self._table = cos[0, 0], sin[0, 0]
        cos, sin = (rows[positions][:, None] for rows in self._table)
        return cos, sin
