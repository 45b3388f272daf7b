"""The registry: rows of the table in README.md, and the tests that are named after them.

`python -m tests.scenarios.rows` writes the column "where" anew.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
README = HERE / "README.md"
_NAME = re.compile(r"test_((?:[a-j]\d+_)+)")
_ROW = re.compile(r"\| ([A-J]\d+) \| (.*) \| (.*) \| (.*) \|")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        id: A letter and a number.
        reports: Public reports, owner/repo#number.
        holds: What must hold.
        where: Files with tests; "gpu" behind a file whose tests of it need a GPU.
    """

    id: str
    reports: str
    holds: str
    where: str

    def __str__(self) -> str:
        return f"| {self.id} | {self.reports} | {self.holds} | {self.where} |"


def rows() -> list[Row]:
    """The table."""
    lines = README.read_text().splitlines()
    return [Row(*match.groups()) for line in lines if (match := _ROW.fullmatch(line))]


def places() -> dict[str, str]:
    """Where tests are found, by row: files relative to this folder."""
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for path in sorted(HERE.parent.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        inside = HERE in path.parents
        name = str(path.relative_to(HERE if inside else HERE.parent))
        file = f"`{name if inside else f'../{name}'}`"
        every = any(
            isinstance(node, ast.Assign)
            and "pytestmark" in ast.unparse(node.targets[0])
            and "mark.gpu" in ast.unparse(node.value)
            for node in tree.body
        )
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (match := _NAME.match(node.name)):
                continue
            gpu = every or any("mark.gpu" in ast.unparse(d) for d in node.decorator_list)
            for row in match[1].upper().rstrip("_").split("_"):
                found[row][file] = found[row].get(file, True) and gpu
    return {
        row: ", ".join(file + " gpu" * gpu for file, gpu in files.items())
        for row, files in found.items()
    }


def _write() -> None:
    found = places()
    text = README.read_text()
    for row in rows():
        fresh = Row(row.id, row.reports, row.holds, found.get(row.id, ""))
        text = text.replace(str(row), str(fresh))
    README.write_text(text)


if __name__ == "__main__":
    _write()
