"""Move the keys and values of an accepted path to where a plain decode would have put them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch import Backend, use_triton
from .reference import kv_commit_reference

__all__ = ["kv_commit"]


def kv_commit(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    prefix_len: Tensor,
    *,
    block_table: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Compact the cache in place, so that the accepted path follows the prefix without gaps.

    For every row b and i in `1 .. num_accepted[b]`, slot `prefix_len[b] + i` gets what slot
    `prefix_len[b] + path[b, i]` holds. The root is in its place already; slots behind the accepted
    path keep what they held. `path` increases strictly, so that `path[b, i] >= i`
    and nothing is overwritten before it has been read.

    Args:
        keys: One buffer [B, K, S, D] a layer; K, S, D, dtype and device may differ between buffers.
        values: As many buffers as `keys`.
        path: int32 [B, max_depth + 1]; accepted nodes, root first, as `tree_accept` returns them.
        num_accepted: int32 [B]; accepted nodes without the root, at most max_depth.
        prefix_len: int32 [B]; slot of the root. These three are not checked against the buffers,
            which would read them back to the host: every slot they name must exist.
        block_table: int32 [B, P] if buffers are made of pages, [pages, K, page_size, D]: slot s of
            row b is then at `s % page_size` in page `block_table[b, s // page_size]`. No two rows
            may share a page that holds nodes.
        backend: "auto" takes the Triton kernel for CUDA tensors, one launch for all buffers that
            agree on device, item size, shape and strides; "triton" and "reference" insist.

    Raises:
        TypeError: If an index tensor has another dtype.
        ValueError: If counts or shapes disagree, or the index tensors are on several devices.
    """
    index = [("path", path, 2), ("num_accepted", num_accepted, 1), ("prefix_len", prefix_len, 1)]
    if block_table is not None:
        index.append(("block_table", block_table, 2))
    for name, tensor, ndim in index:
        if tensor.dtype is not torch.int32:
            raise TypeError(f"kv_commit: {name} must be torch.int32, got {tensor.dtype}")
        if tensor.dim() != ndim or tensor.shape[0] != path.shape[0]:
            raise ValueError(
                f"kv_commit: {name} has shape {tuple(tensor.shape)}, expected {ndim} dimension(s) "
                f"and the batch of path, {path.shape[0]}"
            )
        if tensor.device != path.device:
            raise ValueError(f"kv_commit: {name} is on {tensor.device}, path on {path.device}")
    if path.shape[1] == 0:
        raise ValueError("kv_commit: path has no column; its first is the root")
    if len(keys) != len(values):
        raise ValueError(f"kv_commit: {len(keys)} keys but {len(values)} values")
    rows = "pages" if block_table is not None else path.shape[0]
    by_device: dict[torch.device, list[Tensor]] = {}
    for name, layers in (("keys", keys), ("values", values)):
        for layer, buffer in enumerate(layers):
            if buffer.dim() != 4 or rows not in ("pages", buffer.shape[0]):
                raise ValueError(
                    f"kv_commit: {name}[{layer}] has shape {tuple(buffer.shape)}, expected "
                    f"[{rows}, K, S, D]"
                )
            by_device.setdefault(buffer.device, []).append(buffer)
    for device, buffers in by_device.items():
        here = [tensor.to(device) for _, tensor, _ in index]
        if use_triton("kv_commit", backend, buffers[0]):
            from .kernel import kv_commit_triton

            kv_commit_triton(buffers, *here)
        else:
            kv_commit_reference(buffers, *here)
