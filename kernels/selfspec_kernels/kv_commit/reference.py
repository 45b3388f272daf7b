"""Cache compaction in torch: the definition, and the path that CPU tensors take."""

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_commit_reference(
    buffers: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    prefix_len: Tensor,
) -> None:
    """See `selfspec_kernels.kv_commit`.

    Only nodes that change their slot are touched: an accepted chain costs no copy at all.
    """
    step = torch.arange(1, path.shape[1], dtype=torch.int32, device=path.device)
    moved = (step <= num_accepted[:, None]) & (path[:, 1:] != step)
    row, column = moved.nonzero(as_tuple=True)
    if row.numel() == 0:
        return
    base = prefix_len[row].long()
    target = base + column + 1
    source = base + path[row, column + 1]
    for buffer in buffers:
        # The right-hand side is a copy, so overlapping moves read what was there before.
        buffer[row, :, target] = buffer[row, :, source]
