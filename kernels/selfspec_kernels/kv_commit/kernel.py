# mypy: allow-untyped-defs
"""Triton kernel of cache compaction.

Buffers of one shape share a launch by a table of their addresses. A program owns BLOCK columns of
one row of one buffer, where a column is one item of one head; each lane moves its own column along
the path, first slot first. Since `path[i] >= i` increases, a slot is read before it is overwritten,
and no lane touches another's column: no barrier, no scratch. Items are moved as integers of their
size. Bytes moved: twice those of the nodes that change their slot, plus the path.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import device_guard

_BLOCK = 1024
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit(do_not_specialize=["path_len"])
def _kv_commit_kernel(
    table_ptr,
    path_ptr,
    num_accepted_ptr,
    prefix_len_ptr,
    path_len,
    columns,
    head_size,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    buffer = tl.load(table_ptr + tl.program_id(2)).to(tl.pointer_type(ITEM))
    b = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_column = column < columns
    head = (column // head_size).to(tl.int64)
    lane = buffer + b * stride_b + head * stride_h + (column % head_size) * stride_d

    prefix_len = tl.load(prefix_len_ptr + b).to(tl.int64)
    num_accepted = tl.minimum(tl.load(num_accepted_ptr + b), path_len - 1)
    for i in range(1, num_accepted + 1):
        node = tl.load(path_ptr + b * path_len + i)
        if node != i:
            item = tl.load(lane + (prefix_len + node) * stride_s, mask=in_column)
            tl.store(lane + (prefix_len + i) * stride_s, item, mask=in_column)


# Copying a table to the device would cost more than the kernel; buffers stay where they are for
# many steps. A table holds addresses only, so a stale one is never wrong, just unused.
@lru_cache(maxsize=64)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def kv_commit_triton(
    buffers: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    prefix_len: Tensor,
) -> None:
    """Launch the kernel for buffers on one device; see `selfspec_kernels.kv_commit`."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for buffer in buffers:
        kind = (buffer.element_size(), buffer.shape, buffer.stride())
        alike.setdefault(kind, []).append(buffer)
    path, num_accepted, prefix_len = (t.contiguous() for t in (path, num_accepted, prefix_len))
    with device_guard(path):
        for group in alike.values():
            first = group[0]
            batch, kv_heads, _, head_size = first.shape
            columns = kv_heads * head_size
            block = min(_BLOCK, triton.next_power_of_2(columns))
            _kv_commit_kernel[triton.cdiv(columns, block), batch, len(group)](
                _address_table(tuple(b.data_ptr() for b in group), path.device),
                path,
                num_accepted,
                prefix_len,
                path.shape[1],
                columns,
                head_size,
                *first.stride(),
                ITEM=_INTEGERS[first.element_size()],
                BLOCK=block,
            )
