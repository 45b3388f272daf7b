# mypy: allow-untyped-defs
"""What the kernels of the row statistics share: a tile of logits, and sums of exponentials."""

import triton
import triton.language as tl

LAST_INT = tl.constexpr(2**31 - 1)


@triton.jit
def tile_of(logits_ptr, row, tile, inner, outer_stride, stride, vocab, temperature,
            BLOCK: tl.constexpr, HAS_TEMPERATURE: tl.constexpr):  # fmt: skip
    """Scaled logits of a tile, their indices, and which of them exist."""
    row = row.to(tl.int64)
    index = tile * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    base = logits_ptr + (row // inner) * outer_stride + (row % inner) * stride
    x = tl.load(base + index, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        x = tl.div_rn(x, tl.full([BLOCK], temperature, tl.float32))
    return tl.where(x == x, x, float("-inf")), index, inside


@triton.jit
def weight_of(x, maximum):
    """The exponential of `x - maximum`; of equal ones 1, where infinite ones would give NaN."""
    return tl.where(x == maximum, 1.0, tl.exp(x - maximum))


@triton.jit
def logsumexp(maximum, mass):
    """Of a row with this maximum, and this sum of weights."""
    return tl.where(maximum == float("-inf"), maximum, maximum + tl.log(mass))


@triton.jit
def of_row(part_maximum_ptr, part_argmax_ptr, part_mass_ptr, row, tiles, TILES: tl.constexpr):
    """Maximum, first index and mass of a row, from those of its tiles."""
    tile = tl.arange(0, TILES)
    there = tile < tiles
    at = row * tiles + tile
    maxima = tl.load(part_maximum_ptr + at, mask=there, other=float("-inf"))
    maximum = tl.max(maxima, 0)
    first = tl.load(part_argmax_ptr + at, mask=there & (maxima == maximum), other=LAST_INT)
    mass = tl.load(part_mass_ptr + at, mask=there, other=0.0) * weight_of(maxima, maximum)
    return maximum, tl.min(first, 0), tl.sum(mass, 0)
