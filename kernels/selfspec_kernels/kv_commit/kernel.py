# mypy: allow-untyped-defs
"""Triton kernel of cache compaction.

Buffers of one shape share a launch by a table of their addresses. A program owns BLOCK columns of
one row of one buffer, where a column is one item of one head; each lane moves its own column along
the path, first slot first. Since `path[i] >= i` increases, a slot is read before it is overwritten,
and no lane touches another's column: no barrier, no scratch. Items are moved as integers of their
size. Bytes moved: twice those of the nodes that change their slot, plus the path and, with pages,
4 a moved node and end of its move.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import device_guard
from .._specimen import Specimen

_BLOCK = 1024
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _offset(slot, table_row_ptr, page_size, stride_b, stride_s, PAGED: tl.constexpr):
    """Where a slot is from the start of its row, or of all pages."""
    if PAGED:
        page = tl.load(table_row_ptr + slot // page_size).to(tl.int64)
        return page * stride_b + (slot % page_size) * stride_s
    else:
        return slot * stride_s


@triton.jit(do_not_specialize=["path_len", "table_len"])
def _kv_commit_kernel(
    addresses_ptr,
    path_ptr,
    num_accepted_ptr,
    prefix_len_ptr,
    block_table_ptr,
    path_len,
    table_len,
    page_size,
    columns,
    head_size,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    ITEM: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    buffer = tl.load(addresses_ptr + tl.program_id(2)).to(tl.pointer_type(ITEM))
    b = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_column = column < columns
    head = (column // head_size).to(tl.int64)
    lane = buffer + head * stride_h + (column % head_size) * stride_d
    table_row_ptr = block_table_ptr + b * table_len
    if not PAGED:
        lane += b * stride_b

    prefix_len = tl.load(prefix_len_ptr + b).to(tl.int64)
    num_accepted = tl.minimum(tl.load(num_accepted_ptr + b), path_len - 1)
    for i in range(1, num_accepted + 1):
        node = tl.load(path_ptr + b * path_len + i)
        if node != i:
            source = _offset(prefix_len + node, table_row_ptr, page_size, stride_b, stride_s, PAGED)
            target = _offset(prefix_len + i, table_row_ptr, page_size, stride_b, stride_s, PAGED)
            tl.store(lane + target, tl.load(lane + source, mask=in_column), mask=in_column)


# Copying a table to the device would cost more than the kernel; buffers stay where they are for
# many steps. A table holds addresses only, so a stale one is never wrong, just unused.
@lru_cache(maxsize=64)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


# A captured launch reads its table at every replay, whatever has been dropped since.
_captured: dict[int, Tensor] = {}


def _addresses(buffers: Sequence[Tensor], device: torch.device) -> Tensor:
    table = _address_table(tuple(buffer.data_ptr() for buffer in buffers), device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[table.data_ptr()] = table
    return table


def kv_commit_triton(
    buffers: Sequence[Tensor],
    path: Tensor,
    num_accepted: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """Launch the kernel for buffers on one device; see `selfspec_kernels.kv_commit`.

    A launch can be captured in a CUDA graph once one with the same buffers has run outside.
    """
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for buffer in buffers:
        kind = (buffer.element_size(), buffer.shape, buffer.stride())
        alike.setdefault(kind, []).append(buffer)
    path, num_accepted, prefix_len = (t.contiguous() for t in (path, num_accepted, prefix_len))
    table = path if block_table is None else block_table.contiguous()
    with device_guard(path):
        for group in alike.values():
            first = group[0]
            _, kv_heads, page_size, head_size = first.shape
            columns = kv_heads * head_size
            block = min(_BLOCK, triton.next_power_of_2(columns))
            _kv_commit_kernel[triton.cdiv(columns, block), path.shape[0], len(group)](
                _addresses(group, path.device),
                path,
                num_accepted,
                prefix_len,
                table,
                path.shape[1],
                table.shape[1],
                page_size,
                columns,
                head_size,
                *first.stride(),
                ITEM=_INTEGERS[first.element_size()],
                PAGED=block_table is not None,
                BLOCK=block,
            )


def specimens(part: str) -> Iterator[Specimen]:
    """Every size of item, with and without pages; the same for all parts."""
    types = {"addresses_ptr": "*i64"}
    types |= dict.fromkeys(("path_ptr", "num_accepted_ptr", "prefix_len_ptr"), "*i32")
    types["block_table_ptr"] = "*i32"
    for size, item in _INTEGERS.items():
        for paged in (False, True):
            yield Specimen(
                label=f"{8 * size}bit" + ("-paged" if paged else ""),
                kernel=_kv_commit_kernel,
                types=types,
                constants={"ITEM": item, "PAGED": paged, "BLOCK": _BLOCK},
            )
