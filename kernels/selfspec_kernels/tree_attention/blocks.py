"""Tile sizes of the tree attention kernel: a fixed table, so that nothing is tuned at run time."""

from typing import Literal, NamedTuple


class Blocks(NamedTuple):
    """How a launch is cut.

    `m` rows (pairs of node and query head) and `n` slots a tile, `warps` a program, `stages` of
    loads in flight, and the way float32 products are made.
    """

    m: int
    n: int
    warps: int
    stages: int
    precision: Literal["ieee", "tf32x3"] = "ieee"


# By bytes an item and head size, padded to a power of two; ascending in `m`. The rows, all G heads
# of as many nodes as fit, share what is read of the cache, so more are better until they no longer
# stay in registers: heads of 256 and float32 leave room for few.
NVIDIA: dict[tuple[int, int], tuple[Blocks, ...]] = {
    (2, 64): (
        Blocks(16, 64, 4, 3),
        Blocks(32, 64, 4, 2),
        Blocks(64, 32, 4, 3),
        Blocks(128, 32, 8, 3),
    ),
    (2, 128): (
        Blocks(16, 64, 4, 3),
        Blocks(32, 32, 4, 3),
        Blocks(64, 32, 4, 2),
        Blocks(128, 64, 8, 2),
    ),
    (2, 256): (Blocks(16, 32, 4, 3), Blocks(32, 16, 4, 3), Blocks(64, 32, 8, 2)),
    (4, 64): (Blocks(16, 32, 4, 2, "tf32x3"), Blocks(32, 32, 4, 2, "tf32x3")),
    (4, 128): (Blocks(16, 32, 4, 2, "tf32x3"),),
    # Three TF32 products keep two halves of every query item in registers: too many of them here.
    (4, 256): (Blocks(16, 16, 8, 1),),
}
# 64 KiB of shared memory, and eight warps leave only half of the registers to each.
AMD: dict[tuple[int, int], tuple[Blocks, ...]] = {
    (2, 64): (Blocks(16, 64, 4, 2), Blocks(64, 64, 4, 2)),
    (2, 128): (Blocks(16, 64, 4, 2), Blocks(64, 32, 4, 2)),
    (2, 256): (Blocks(16, 32, 4, 2), Blocks(32, 32, 4, 2)),
    (4, 64): (Blocks(16, 32, 4, 2), Blocks(32, 32, 4, 2)),
    (4, 128): (Blocks(16, 32, 4, 2),),
    (4, 256): (Blocks(16, 16, 8, 2),),
}


def choose_blocks(rows: int, width: int, item_size: int, amd: bool) -> Blocks:
    """Pick the smallest tile that holds all rows, or else the largest there is.

    Args:
        rows: G * M, the rows of one key/value head.
        width: The larger head size of key and value, padded to a power of two; at most 256.
        item_size: Bytes an item, 2 or 4.
        amd: Whether the device is AMD's.
    """
    table = (AMD if amd else NVIDIA)[item_size, max(width, 64)]
    return next((blocks for blocks in table if blocks.m >= rows), table[-1])
