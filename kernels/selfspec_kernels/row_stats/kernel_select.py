# mypy: allow-untyped-defs
"""Selection by rank or mass: the largest threshold at and above which there is enough.

`pivots_kernel` counts and sums what is at or above each of some pivots, spread downwards from the
maximum; the two between which the threshold lies leave few candidates. `gather_kernel` writes them
side by side, each tile knowing from the counts where its own begin. `search`, by one program a row,
quarters a range of keys, integers in the order of floats, and shrinks it each time to the keys that
are there: exact, after at most 16 rounds.
"""

import triton
import triton.language as tl

from .kernel_tile import LAST_INT, tile_of, weight_of

# Between pivots, in scaled logits. A power of two, so that every kernel rounds a pivot alike.
_STEP = tl.constexpr(1.0)


@triton.jit
def pivot_of(maximum, log_min_p, j, PIVOTS: tl.constexpr):
    """Pivot 0 is the border of min-p; the others fall from the maximum to -inf."""
    value = tl.where(j == PIVOTS - 1, float("-inf"), maximum - (j - 1) * _STEP)
    return tl.where(j == 0, maximum + log_min_p, value)


@triton.jit
def key_of(x):
    """int32 in the order of floats; zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & LAST_INT)


@triton.jit
def value_of(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & LAST_INT)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["inner", "vocab", "tiles"])
def pivots_kernel(
    counts_ptr,
    masses_ptr,
    part_maximum_ptr,
    logits_ptr,
    temperature,
    log_min_p,
    inner,
    outer_stride,
    stride,
    vocab,
    tiles,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Count and mass of what a tile has at or above every pivot of its row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = tl.arange(0, TILES)
    maxima = part_maximum_ptr + row * tiles + part
    maximum = tl.max(tl.load(maxima, mask=part < tiles, other=float("-inf")), 0)
    x, _, inside = tile_of(
        logits_ptr, row, tile, inner, outer_stride, stride, vocab, temperature, BLOCK,
        HAS_TEMPERATURE,
    )  # fmt: skip
    weight = weight_of(x, maximum)
    at = (row * tiles + tile) * PIVOTS
    for j in tl.static_range(PIVOTS):
        above = inside & (x >= pivot_of(maximum, log_min_p, j, PIVOTS))
        tl.store(counts_ptr + at + j, tl.sum(above.to(tl.int32), 0))
        tl.store(masses_ptr + at + j, tl.sum(tl.where(above, weight, 0.0), 0))


@triton.jit
def bracket(counts_ptr, masses_ptr, row, tiles, top_k, top_p, TILES: tl.constexpr,
            PIVOTS: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr):  # fmt: skip
    """Where the candidates lie: from pivot `first` up to pivot `over`, or all up if that is 0.

    Also the candidates of every tile, and count and mass of what lies above them. Both filters at
    once leave all candidates of top-k, since the share of top-p is one of what top-k keeps.
    """
    tile = tl.arange(0, TILES)[:, None]
    j = tl.arange(0, PIVOTS)
    at = (row * tiles + tile) * PIVOTS + j[None, :]
    counts = tl.load(counts_ptr + at, mask=tile < tiles, other=0)
    masses = tl.load(masses_ptr + at, mask=tile < tiles, other=0.0)
    count, mass = tl.sum(counts, 0), tl.sum(masses, 0)
    if HAS_K:
        reached = count >= top_k
    else:
        reached = mass >= top_p * tl.sum(tl.where(j == PIVOTS - 1, mass, 0.0), 0)
    first = tl.min(tl.where(reached & (j > 0), j, PIVOTS - 1), 0)
    over = 0 if HAS_K and HAS_P else first - 1
    above = (j == over) & (j > 0)
    own = (j == first).to(tl.int32) - above.to(tl.int32)
    return (
        first,
        over,
        tl.sum(counts * own[None, :], 1),
        tl.sum(tl.where(above, count, 0), 0),
        tl.sum(tl.where(above, mass, 0.0), 0),
    )


@triton.jit(do_not_specialize=["top_k", "inner", "vocab", "tiles"])
def gather_kernel(
    candidates_ptr,
    counts_ptr,
    masses_ptr,
    part_maximum_ptr,
    logits_ptr,
    temperature,
    top_k,
    top_p,
    inner,
    outer_stride,
    stride,
    vocab,
    tiles,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    PIVOTS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
):
    """Write the candidates of a tile behind those of the tiles before it."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = tl.arange(0, TILES)
    maxima = part_maximum_ptr + row * tiles + part
    maximum = tl.max(tl.load(maxima, mask=part < tiles, other=float("-inf")), 0)
    first, over, candidates, _, _ = bracket(
        counts_ptr, masses_ptr, row, tiles, top_k, top_p, TILES, PIVOTS, HAS_K, HAS_P
    )
    x, _, inside = tile_of(
        logits_ptr, row, tile, inner, outer_stride, stride, vocab, temperature, BLOCK,
        HAS_TEMPERATURE,
    )  # fmt: skip
    mine = inside & (x >= pivot_of(maximum, 0.0, first, PIVOTS))
    # A block, since a scalar of one bit does not broadcast in the interpreter.
    unbounded = tl.full([BLOCK], 0, tl.int32) + over == 0
    mine = mine & (unbounded | (x < pivot_of(maximum, 0.0, over, PIVOTS)))
    offset = tl.sum(tl.where(part < tile, candidates, 0), 0)
    at = row * vocab + offset + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(candidates_ptr + at, x, mask=mine)


@triton.jit
def _shrunk(candidates_ptr, size, low, high, BLOCK: tl.constexpr):
    """The smallest and the largest key of the candidates in [low, high]."""
    lane = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], LAST_INT, tl.int32)
    most = -least - 1
    for start in range(0, size, BLOCK):
        inside = start + lane < size
        key = key_of(tl.load(candidates_ptr + start + lane, mask=inside, other=0.0))
        inside = inside & (key >= low) & (key <= high)
        least = tl.where(inside, tl.minimum(least, key), least)
        most = tl.where(inside, tl.maximum(most, key), most)
    return tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _amount(x, maximum, chosen, WEIGHTED: tl.constexpr):
    if WEIGHTED:
        return tl.where(chosen, weight_of(x, maximum), 0.0)
    else:
        return chosen.to(tl.int32)


@triton.jit
def amount_over(candidates_ptr, size, maximum, key,
                INCLUDED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Count or mass of the candidates above an int32 key, with those at it or without."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32 if WEIGHTED else tl.int32)
    for start in range(0, size, BLOCK):
        inside = start + lane < size
        x = tl.load(candidates_ptr + start + lane, mask=inside, other=0.0)
        chosen = key_of(x) >= key if INCLUDED else key_of(x) > key
        total += _amount(x, maximum, inside & chosen, WEIGHTED)
    return tl.sum(total, 0)


@triton.jit
def search(candidates_ptr, size, maximum, low, base, target,
           WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The largest key from `low` on with at least `target` at or above it, `base` included."""
    lane = tl.arange(0, BLOCK)
    low, high = _shrunk(candidates_ptr, size, low, tl.full([], LAST_INT, tl.int32), BLOCK)
    while low < high:
        # In (low, high], so that every answer shrinks the range; it may be wider than an int32.
        width = (high - low).to(tl.uint32, bitcast=True)
        quarter = low + ((width >> 2) + ((width & 3) > 0).to(tl.uint32)).to(tl.int32)
        half = low + ((width >> 1) + (width & 1)).to(tl.int32)
        last = high - (width >> 2).to(tl.int32)
        over_quarter = tl.zeros([BLOCK], tl.float32 if WEIGHTED else tl.int32)
        over_half = over_quarter
        over_last = over_quarter
        for start in range(0, size, BLOCK):
            inside = start + lane < size
            x = tl.load(candidates_ptr + start + lane, mask=inside, other=0.0)
            key = key_of(x)
            over_quarter += _amount(x, maximum, inside & (key >= quarter), WEIGHTED)
            over_half += _amount(x, maximum, inside & (key >= half), WEIGHTED)
            over_last += _amount(x, maximum, inside & (key >= last), WEIGHTED)
        if base + tl.sum(over_last, 0) >= target:
            low = last
        elif base + tl.sum(over_half, 0) >= target:
            low = half
            high = last - 1
        elif base + tl.sum(over_quarter, 0) >= target:
            low = quarter
            high = half - 1
        else:
            high = quarter - 1
        low, high = _shrunk(candidates_ptr, size, low, high, BLOCK)
    return low
