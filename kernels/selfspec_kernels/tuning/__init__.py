"""Launch parameters by part: a table that ships with the package. Nothing is tuned at run time.

`table.json` has, for every op and part, rows of launch parameters; an op's `blocks.py` picks among
its rows. Every row is compiled for its part by the tests, which refuse spills and too much shared
memory. `python -m selfspec_kernels.tuning` measures candidates on a GPU and rewrites rows.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .parts import PARTS, nearest_part

TABLE = Path(__file__).with_name("table.json")

__all__ = ["PARTS", "TABLE", "part_of", "rows"]


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, list[dict[str, Any]]]]:
    table: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(TABLE.read_text())
    return table


def rows(op: str, part: str) -> list[dict[str, Any]]:
    """The rows of `op` for `part`, in the order of the table; do not change them."""
    return _table()[op][part]


@lru_cache(maxsize=64)
def part_of(device: torch.device) -> str:
    """The part whose rows suit `device`; the interpreter, on a CPU, takes those of sm_90."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    return nearest_part(10 * major + minor)
