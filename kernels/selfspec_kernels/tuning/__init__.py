"""Launch parameters by part: a table that ships with the package. Nothing is tuned at run time.

`table.json` has, for every op and part, rows of launch parameters; an op's `blocks.py` picks among
its rows. Every row is compiled for its part by the tests, which refuse spills and too much shared
memory. `python -m selfspec_kernels.tuning` compiles rows and candidates without a GPU, and on one
measures candidates and rewrites rows.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .parts import PARTS, nearest_part

TABLE = Path(__file__).with_name("table.json")
_stand_ins: dict[tuple[str, str], list[dict[str, Any]]] = {}

__all__ = ["PARTS", "TABLE", "part_of", "rows", "using"]


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, list[dict[str, Any]]]]:
    table: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(TABLE.read_text())
    return table


def rows(op: str, part: str) -> list[dict[str, Any]]:
    """The rows of `op` for `part`, in the order of the table; do not change them."""
    return _stand_ins[op, part] if (op, part) in _stand_ins else _table()[op][part]


@contextmanager
def using(op: str, part: str, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Let `rows` stand for those of the table, in all threads; for trying candidates."""
    _stand_ins[op, part] = rows
    _forget(op)
    try:
        yield
    finally:
        del _stand_ins[op, part]
        _forget(op)


def _forget(op: str) -> None:
    """Drop what the modules of `op` remember, since it may follow from other rows."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{__package__.rpartition('.')[0]}.{op}."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@lru_cache(maxsize=64)
def part_of(device: torch.device) -> str:
    """The part whose rows suit `device`; the interpreter, on a CPU, takes those of sm_90."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    return nearest_part(10 * major + minor)
