"""Tile sizes of the tree attention kernel, chosen among the rows of the launch table."""

from functools import lru_cache
from typing import Literal, NamedTuple

from ..tuning import rows


class Blocks(NamedTuple):
    """How a launch is cut.

    `m` rows (pairs of node and query head) and `n` slots a tile, `warps` a program, `stages` of
    loads in flight, and the way float32 products are made.
    """

    m: int
    n: int
    warps: int
    stages: int
    precision: Literal["ieee", "tf32x3"]


@lru_cache(maxsize=16)
def tiles(part: str) -> dict[tuple[int, int], tuple[Blocks, ...]]:
    """The tiles of a part, by bytes an item and width; ascending in `m`.

    The rows of a tile, all G heads of as many nodes as fit, share what is read of the cache, so
    more are better until they no longer stay in registers: heads of 256 and float32 leave room for
    few.
    """
    found: dict[tuple[int, int], list[Blocks]] = {}
    for row in rows("tree_attention", part):
        blocks = Blocks(row["m"], row["n"], row["warps"], row["stages"], row["precision"])
        found.setdefault((row["item_size"], row["width"]), []).append(blocks)
    return {key: tuple(sorted(group)) for key, group in found.items()}


def padded(size: int) -> int:
    """A head size as the kernel holds it: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def choose_blocks(part: str, num_rows: int, width: int, item_size: int) -> Blocks:
    """Pick the smallest tile that holds all rows, or else the largest there is.

    Args:
        part: Key of the launch table.
        num_rows: G * M, the rows of one key/value head.
        width: The larger head size of key and value, padded; at most 256.
        item_size: Bytes an item, 2 or 4.
    """
    fitting = tiles(part)[item_size, max(width, 64)]
    return next((blocks for blocks in fitting if blocks.m >= num_rows), fitting[-1])
