# mypy: allow-untyped-defs
"""The kernel that averages what the splits of a prefix found, each by its weight."""

import math

import triton
import triton.language as tl

_LN2 = tl.constexpr(math.log(2.0))


@triton.jit(do_not_specialize=["num_rows", "splits"])
def combine_kernel(
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    num_rows,
    splits,
    VALUE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Average partial results [splits, num_rows, Dv]; their weights are kept as logarithms, base 2.

    Splits are summed one after the other, and one that saw nothing adds exactly 0: further empty
    splits change no bit of a row.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_row = row < num_rows
    offs_s = tl.arange(0, 32).to(tl.int64)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_dv = offs_dv < VALUE_SIZE

    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for start in tl.range(0, splits, 32):
        split = start + offs_s
        some = tl.load(
            partial_lse_ptr + (split[:, None] * num_rows + row[None, :]),
            mask=(split < splits)[:, None] & in_row[None, :],
            other=float("-inf"),
        )
        top = tl.maximum(top, tl.max(some, 0))
    shift = tl.where(top == float("-inf"), 0.0, top)

    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    for start in tl.range(0, splits, UNROLL):
        for i in tl.static_range(UNROLL):
            split = start + i
            place = tl.cast(split, tl.int64) * num_rows + row
            in_part = row < tl.where(split < splits, num_rows, 0)
            lse = tl.load(partial_lse_ptr + place, mask=in_part, other=float("-inf"))
            # An empty split has left its part of the scratch unwritten.
            partial = tl.load(
                partial_ptr + (place * VALUE_SIZE)[:, None] + offs_dv[None, :],
                mask=(lse != float("-inf"))[:, None] & in_dv[None, :],
                other=0.0,
            )
            weight = tl.exp2(lse - shift)
            total += weight
            acc += weight[:, None] * partial

    total = tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + (row * VALUE_SIZE)[:, None] + offs_dv[None, :],
        (acc / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=in_row[:, None] & in_dv[None, :],
    )
    if HAS_LSE:
        tl.store(lse_ptr + row, (top + tl.log2(total)) * _LN2, mask=in_row)
