"""Tiles of the LM head kernel, from the package's table."""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

from ..tuning import rows

# A draft step has few rows, so that only cuts of the vocabulary can fill a GPU: this many
# programs, if it is large enough.
_PROGRAMS = 512


class Blocks(NamedTuple):
    """How a launch is cut.

    `m` rows by `v` tokens a program, `c` channels a step of its loop, `warps` a program, `stages`
    of loads in flight, and the way float32 products are made.
    """

    m: int
    v: int
    c: int
    warps: int
    stages: int
    precision: Literal["ieee", "tf32x3"]


@lru_cache(maxsize=16)
def tiles(part: str, item_size: int) -> tuple[Blocks, ...]:
    """The tiles of a part for items of `item_size` bytes; ascending in `m`, then in `v`."""
    return tuple(
        sorted(
            Blocks(*(row[field] for field in Blocks._fields))
            for row in rows("draft_topk", part)
            if row["item_size"] == item_size
        )
    )


def choose_blocks(part: str, num_rows: int, num_tokens: int, item_size: int) -> Blocks:
    """The smallest `m` that takes all rows, and of its tiles the largest that fills a GPU."""
    known = tiles(part, item_size)
    m = min((b.m for b in known if b.m >= num_rows), default=known[-1].m)
    fitting = [blocks for blocks in known if blocks.m == m]
    row_blocks = math.ceil(num_rows / m)
    full = [b for b in fitting if row_blocks * math.ceil(num_tokens / b.v) >= _PROGRAMS]
    return full[-1] if full else fitting[0]
