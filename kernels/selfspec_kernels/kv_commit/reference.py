"""Cache compaction in torch: the definition, and the path that CPU tensors take."""

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_commit_reference(
    buffers: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """See `selfspec_kernels.kv_commit`.

    On a CPU only nodes that change their slot are touched: an accepted chain costs no copy at all.
    """
    step = torch.arange(1, path.shape[1], dtype=torch.int32, device=path.device)
    moved = (step <= num_accepted[:, None]) & (path[:, 1:] != step)
    if type(path) is Tensor and path.is_cpu:
        row, column = moved.nonzero(as_tuple=True)
        if row.numel() == 0:
            return
        base = prefix_len[row].long()
        target = base + column + 1
        source = base + path[row, column + 1]
    else:
        # Elsewhere a size that depends on data would be waited for, so that every node takes part:
        # one that stays, or is none, stands for the root, which moves onto itself.
        row = torch.arange(path.shape[0], device=path.device).repeat_interleave(path.shape[1] - 1)
        root = prefix_len.long()[:, None]
        target = (root + torch.where(moved, step, 0)).flatten()
        source = (root + torch.where(moved, path[:, 1:], 0)).flatten()
    for buffer in buffers:
        to_row, to_slot = _place(row, target, block_table, buffer.shape[2])
        from_row, from_slot = _place(row, source, block_table, buffer.shape[2])
        # The right-hand side is a copy, so overlapping moves read what was there before.
        buffer[to_row, :, to_slot] = buffer[from_row, :, from_slot]


def _place(
    row: Tensor, slot: Tensor, block_table: Tensor | None, page_size: int
) -> tuple[Tensor, Tensor]:
    """First and third index of a slot in a buffer."""
    if block_table is None:
        return row, slot
    return block_table[row, slot // page_size].long(), slot % page_size
