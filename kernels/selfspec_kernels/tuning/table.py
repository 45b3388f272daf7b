"""Writing the table, one row a line, so that a change of a row is a change of a line."""

import json
import os
from pathlib import Path
from typing import Any

from . import TABLE, _table
from .parts import PARTS

Table = dict[str, dict[str, list[dict[str, Any]]]]


def formatted(table: Table) -> str:
    """The text of `table`."""

    def block(items: list[str], indent: str, brackets: str) -> str:
        lines = ",\n".join(f"{indent}  {item}" for item in items)
        return f"{brackets[0]}\n{lines}\n{indent}{brackets[1]}"

    return (
        block(
            [
                f'"{op}": '
                + block(
                    [
                        f'"{part}": ' + block([json.dumps(row) for row in rows], "    ", "[]")
                        for part, rows in parts.items()
                    ],
                    "  ",
                    "{}",
                )
                for op, parts in table.items()
            ],
            "",
            "{}",
        )
        + "\n"
    )


def replace(op: str, part: str, rows: list[dict[str, Any]], path: Path = TABLE) -> None:
    """Give `op` these rows for `part`, in the file and in this process."""
    table: Table = json.loads(path.read_text())
    changed = {**table.get(op, {}), part: rows}
    table[op] = {name: changed[name] for name in PARTS if name in changed}
    draft = path.with_suffix(".new")
    draft.write_text(formatted(table))
    os.replace(draft, path)
    _table.cache_clear()
