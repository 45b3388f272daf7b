# mypy: allow-untyped-defs
"""Triton kernels of the row statistics.

Without filters: a program a tile of logits gives its maximum, first index and mass (the sum of
`exp(x - maximum)`), and a second launch combines those of a row; a row of one tile needs no second.
Min-p adds a launch in which the tiles sum what is above its border, and top-k and top-p a selection
(`kernel_select.py`): four launches in all. No sort, no atomics, and every sum has a fixed order
that does not depend on other rows.
"""

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import device_guard
from .._specimen import Specimen
from ..tuning import part_of, rows
from .blocks import Blocks, choose_blocks
from .kernel_select import amount_over, bracket, gather_kernel, pivots_kernel, search, value_of
from .kernel_tile import LAST_INT, logsumexp, of_row, tile_of, weight_of
from .reference import RowStats


@triton.jit(do_not_specialize=["inner", "vocab", "tiles"])
def _partials_kernel(
    maximum_ptr,
    argmax_ptr,
    mass_ptr,
    threshold_ptr,
    ties_ptr,
    logits_ptr,
    temperature,
    inner,
    outer_stride,
    stride,
    vocab,
    tiles,
    BLOCK: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, index, inside = tile_of(
        logits_ptr, row, tile, inner, outer_stride, stride, vocab, temperature, BLOCK,
        HAS_TEMPERATURE,
    )  # fmt: skip
    maximum = tl.max(x, 0)
    mass = tl.sum(tl.where(inside, weight_of(x, maximum), 0.0), 0)
    at = row * tiles + tile
    tl.store(maximum_ptr + at, maximum)
    tl.store(argmax_ptr + at, tl.min(tl.where(inside & (x == maximum), index, vocab), 0))
    if WHOLE:
        tl.store(mass_ptr + at, logsumexp(maximum, mass))
        tl.store(threshold_ptr + at, float("-inf"))
        tl.store(ties_ptr + at, vocab)
    else:
        tl.store(mass_ptr + at, mass)


@triton.jit(do_not_specialize=["top_k", "vocab", "tiles"])
def _finish_kernel(
    maximum_ptr,
    argmax_ptr,
    logsumexp_ptr,
    threshold_ptr,
    ties_ptr,
    part_maximum_ptr,
    part_argmax_ptr,
    part_mass_ptr,
    candidates_ptr,
    counts_ptr,
    masses_ptr,
    top_k,
    top_p,
    log_min_p,
    vocab,
    tiles,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    maximum, argmax, mass = of_row(
        part_maximum_ptr, part_argmax_ptr, part_mass_ptr, row, tiles, TILES
    )
    tl.store(maximum_ptr + row, maximum)
    tl.store(argmax_ptr + row, argmax)
    threshold = tl.full([], float("-inf"), tl.float32)
    ties = vocab
    all_tiles = (row * tiles + tl.arange(0, TILES)) * PIVOTS
    there = tl.arange(0, TILES) < tiles
    if HAS_K or HAS_P:
        candidates_ptr += row * vocab
        _, _, sizes, base_count, base = bracket(
            counts_ptr, masses_ptr, row, tiles, top_k, top_p, TILES, PIVOTS, HAS_K, HAS_P
        )
        size = tl.sum(sizes, 0)
        key = tl.full([], -LAST_INT - 1, tl.int32)
        # `mass` becomes what top-p takes its share of: the mass of the top-k, or of all.
        if HAS_K:
            key = search(candidates_ptr, size, maximum, key, base_count, top_k, False, BLOCK)
            mass = base + amount_over(candidates_ptr, size, maximum, key, True, True, BLOCK)
        else:
            mass = tl.sum(tl.load(masses_ptr + all_tiles + PIVOTS - 1, mask=there, other=0.0), 0)
        if HAS_P:
            share = top_p * mass
            key = search(candidates_ptr, size, maximum, key, base, share, True, BLOCK)
            above = base + amount_over(candidates_ptr, size, maximum, key, False, True, BLOCK)
            equal = amount_over(candidates_ptr, size, maximum, key, True, False, BLOCK)
            equal -= amount_over(candidates_ptr, size, maximum, key, False, False, BLOCK)
            equal = equal.to(tl.float32)
            each = weight_of(value_of(key), maximum)
            # The last of them has `above` over it, the one before it one more, and so on.
            held = tl.where(each > 0, tl.ceil((share - above) / each), equal)
            held = tl.minimum(tl.maximum(held, 1.0), equal)
            mass = above + held * each
            ties = tl.where(held < equal, held.to(tl.int32), vocab)
        threshold = value_of(key)
    if HAS_MIN_P:
        floor = maximum + log_min_p
        floor_mass = tl.sum(tl.load(masses_ptr + all_tiles, mask=there, other=0.0), 0)
        mass = tl.where(floor > threshold, floor_mass, mass)
        ties = tl.where(floor > threshold, vocab, ties)
        threshold = tl.maximum(floor, threshold)
    dead = maximum == float("-inf")
    tl.store(logsumexp_ptr + row, logsumexp(maximum, mass))
    tl.store(threshold_ptr + row, tl.where(dead, float("-inf"), threshold))
    tl.store(ties_ptr + row, tl.where(dead, vocab, ties))


def row_stats_triton(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> RowStats:
    """Launch the kernels; see `selfspec_kernels.row_stats`."""
    *shape, vocab = logits.shape
    num_rows = math.prod(shape)
    device = logits.device
    blocks = choose_blocks(logits.element_size(), part_of(device))
    tiles = triton.cdiv(vocab, blocks.block)

    def new(dtype: torch.dtype, *size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    outputs = tuple(
        new(dtype, *shape)
        for dtype in (torch.float32, torch.int64, torch.float32, torch.float32, torch.int32)
    )
    if num_rows == 0:
        return RowStats(*outputs)
    # Rows as pairs of two dimensions, so that a slice of [B, N, V] is read where it is.
    rows_of = logits[(None,) * (3 - logits.dim())] if logits.dim() < 3 else logits.flatten(0, -3)
    inner = rows_of.shape[1]
    source = (rows_of, float(temperature))
    sizes = (inner, rows_of.stride(0), rows_of.stride(1), vocab, tiles)
    cut = {"BLOCK": blocks.block, "HAS_TEMPERATURE": temperature != 1.0}
    over = {"TILES": triton.next_power_of_2(tiles)}
    has = {"HAS_K": 0 < top_k < vocab, "HAS_P": top_p < 1}
    filters = (min(top_k, vocab), float(top_p))
    log_min_p = math.log(min_p) if min_p > 0 else 0.0
    grid = (num_rows, tiles)
    with device_guard(logits):
        if tiles == 1 and min_p == 0 and not any(has.values()):
            _partials_kernel[grid](
                *outputs, *source, *sizes, **cut, WHOLE=True, num_warps=blocks.warps
            )
            return RowStats(*outputs)
        parts = tuple(
            new(dtype, num_rows, tiles) for dtype in (torch.float32, torch.int32, torch.float32)
        )
        # What a launch without filters never touches stands for their scratch.
        candidates, counts, masses = parts
        over["PIVOTS"] = blocks.pivots if any(has.values()) else 1
        _partials_kernel[grid](
            *parts, *outputs[3:], *source, *sizes, **cut, WHOLE=False, num_warps=blocks.warps
        )
        if min_p > 0 or any(has.values()):
            counts = new(torch.int32, num_rows, tiles, over["PIVOTS"])
            masses = new(torch.float32, num_rows, tiles, over["PIVOTS"])
            pivots_kernel[grid](
                counts, masses, parts[0], *source, log_min_p, *sizes, **cut, **over,
                num_warps=blocks.warps,
            )  # fmt: skip
        if any(has.values()):
            candidates = new(torch.float32, num_rows, vocab)
            gather_kernel[grid](
                candidates, counts, masses, parts[0], *source, *filters, *sizes, **cut, **over,
                **has, num_warps=blocks.warps,
            )  # fmt: skip
        _finish_kernel[(num_rows,)](
            *outputs, *parts, candidates, counts, masses, *filters, log_min_p, vocab, tiles,
            BLOCK=blocks.select_block, **over, **has, HAS_MIN_P=min_p > 0,
            num_warps=blocks.select_warps if any(has.values()) else 1,
        )  # fmt: skip
    return RowStats(*outputs)


_TYPES = {
    **dict.fromkeys(("maximum_ptr", "mass_ptr", "logsumexp_ptr", "threshold_ptr"), "*fp32"),
    **dict.fromkeys(("part_maximum_ptr", "part_mass_ptr", "masses_ptr", "candidates_ptr"), "*fp32"),
    **dict.fromkeys(("ties_ptr", "part_argmax_ptr", "counts_ptr"), "*i32"),
    **dict.fromkeys(("temperature", "top_p", "log_min_p"), "fp32"),
}
# Of a row of 256k entries.
_TILES = 64


def specimens(part: str) -> Iterator[Specimen]:
    """What ships for `part`, with all options on."""
    for row in rows("row_stats", part):
        blocks = choose_blocks(row["item_size"], part)
        yield from _tile_specimens(blocks, "*bf16" if row["item_size"] == 2 else "*fp32")
    # Candidates are float32 whatever the logits were, so one row tells for all.
    yield from _finish_specimens(blocks)


def _tile_specimens(blocks: Blocks, item: str) -> Iterator[Specimen]:
    cut = {"BLOCK": blocks.block, "HAS_TEMPERATURE": True}
    over = {"TILES": _TILES, "PIVOTS": blocks.pivots}
    for label, kernel, argmax, constants in (
        ("whole", _partials_kernel, "*i64", {"WHOLE": True}),
        ("partials", _partials_kernel, "*i32", {"WHOLE": False}),
        ("pivots", pivots_kernel, "*i64", over),
        ("floor", pivots_kernel, "*i64", over | {"PIVOTS": 1}),
        ("gather-k", gather_kernel, "*i64", over | {"HAS_K": True, "HAS_P": False}),
        ("gather-p", gather_kernel, "*i64", over | {"HAS_K": False, "HAS_P": True}),
        ("gather-k-p", gather_kernel, "*i64", over | {"HAS_K": True, "HAS_P": True}),
    ):
        yield Specimen(
            label=f"{label}-{item[1:]}",
            kernel=kernel,
            types=_TYPES | {"logits_ptr": item, "argmax_ptr": argmax},
            constants=cut | constants,
            warps=blocks.warps,
        )


def _finish_specimens(blocks: Blocks) -> Iterator[Specimen]:
    for label, has_k, has_p, has_min_p in (
        ("combine", False, False, False),
        ("floor", False, False, True),
        ("k", True, False, True),
        ("p", False, True, True),
        ("k-p", True, True, True),
    ):
        selects = has_k or has_p
        yield Specimen(
            label=f"finish-{label}",
            kernel=_finish_kernel,
            types=_TYPES | {"argmax_ptr": "*i64"},
            constants={
                "BLOCK": blocks.select_block,
                "TILES": _TILES,
                "PIVOTS": blocks.pivots if selects else 1,
                "HAS_K": has_k,
                "HAS_P": has_p,
                "HAS_MIN_P": has_min_p,
            },
            warps=blocks.select_warps if selects else 1,
        )
