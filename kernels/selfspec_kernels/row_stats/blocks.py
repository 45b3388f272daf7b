"""Launch parameters of the row statistics, from the table."""

from typing import NamedTuple

from ..tuning import rows


class Blocks(NamedTuple):
    """How a launch is cut.

    Logits of a row are cut into tiles of `block`, one a program of `warps` warps, whatever the
    number of rows: sums then do not depend on the rest of the batch. `pivots` thresholds are tried
    at once to leave few candidates; one program of `select_warps` warps a row searches those,
    `select_block` at a time.
    """

    block: int
    warps: int
    pivots: int
    select_block: int
    select_warps: int


def choose_blocks(item_size: int, part: str) -> Blocks:
    """The row for logits of `item_size` bytes; float64 takes that of float32."""
    row = next(row for row in rows("row_stats", part) if row["item_size"] == min(item_size, 4))
    return Blocks(**{name: row[name] for name in Blocks._fields})
