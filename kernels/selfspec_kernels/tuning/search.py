"""Candidates for rows of the table, and which of them the gate lets through; needs no GPU."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from . import gate, using

Row = dict[str, Any]

# By op, the fields that are free; the others of a row say what it is for.
SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    "tree_attention": {"n": (16, 32, 64), "warps": (4, 8, 16), "stages": (1, 2, 3, 4)},
    "draft_topk": {"c": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
    "row_stats": {
        "block": (2048, 4096, 8192),
        "warps": (4, 8),
        "pivots": (8, 16, 32),
        "select_block": (1024, 2048, 4096),
        "select_warps": (4, 8),
    },
    "tree_accept": {"block": (1024, 2048, 4096, 8192), "warps": (4, 8, 16)},
}


def candidates(op: str, row: Row) -> list[Row]:
    """Every row for what `row` is for, itself first."""
    space = SPACES[op]
    free = [name for name in space if name in row]
    tried = [
        {**row, **dict(zip(free, values, strict=True))}
        for values in product(*(space[name] for name in free))
    ]
    return [row, *(candidate for candidate in tried if candidate != row)]


def reports(op: str, part: str, row: Row) -> list[gate.Report]:
    """What `op` uses on `part` if `row` is its only one."""
    with using(op, part, [row]):
        return [gate.report(specimen, part, op) for specimen in gate.specimens(op, part)]


def passing(op: str, part: str, row: Row) -> Iterator[tuple[Row, list[gate.Report]]]:
    """The candidates for what `row` is for that may ship, with what they use."""
    for candidate in candidates(op, row):
        try:
            found = reports(op, part, candidate)
        except Exception as error:  # the compiler refuses some tiles by errors of many types
            if candidate == row:
                raise RuntimeError(
                    f"{op}: {part} has a row that does not compile: {row}"
                ) from error
            continue
        if not any(report.faults for report in found):
            yield candidate, found
