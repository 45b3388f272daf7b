"""The architecture of the repository, read off its files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import selfspec

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "selfspec").rglob("*.py"))


def layers() -> list[set[str]]:
    """Rows of the table in CONTRIBUTING.md: who may import whom, lower rows from higher ones."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| row | modules |") :].split("\n\n")[0].splitlines()[2:]
    return [set(re.findall(r"`(\w+)`", row)) for row in table]


RANK = {name: rank for rank, names in enumerate([*layers(), {"__init__"}]) for name in names}


def imports(path: Path) -> set[str]:
    """Modules of selfspec that `path` imports at run time (annotations do not count)."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("selfspec."):
            found.add(str(node.module).split(".")[1])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def rank(path: Path) -> int:
    relative = path.relative_to(ROOT / "selfspec")
    return RANK[relative.parts[0].removesuffix(".py")]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    own = path.relative_to(ROOT / "selfspec").parts[0].removesuffix(".py")
    for name in imports(path) - {own}:
        assert RANK[name] <= rank(path), f"{own} imports {name}"


def test_every_module_has_a_layer() -> None:
    assert {p.relative_to(ROOT / "selfspec").parts[0].removesuffix(".py") for p in MODULES} == set(
        RANK
    )


def test_sizes() -> None:
    assert len((ROOT / "selfspec/loop.py").read_text().splitlines()) <= 100
    for path in [*MODULES, *(ROOT / "kernels").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path


def test_kernels_is_a_source_root() -> None:
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not (ROOT / "tests/kernels").exists()


def test_a_script_beside_a_clone_gets_the_library(tmp_path: Path) -> None:
    """And not the clone's folder, which has its name, as a package without anything in it.

    So an editable install has to be entries of the path.
    """
    (tmp_path / "selfspec").symlink_to(ROOT)
    (tmp_path / "first.py").write_text("import selfspec\nprint(selfspec.wrap.__name__)\n")
    command = [sys.executable, "first.py"]
    done = subprocess.run(
        command, check=True, cwd=tmp_path, env=_environment(), capture_output=True, text=True
    )
    assert done.stdout == "wrap\n"
    assert 'dev-mode-dirs = [".", "kernels"]' in (ROOT / "pyproject.toml").read_text()


def test_public_names_are_the_documented_ones() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in selfspec.__all__:
        assert hasattr(selfspec, name)
        assert re.search(rf"\b{name}\b", readme), f"README.md does not name selfspec.{name}"


def test_importing_changes_nothing_in_transformers() -> None:
    """Registering attention happens when a model is wrapped, not at import."""
    code = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as f\n"
        "before = set(f)\nimport sys\nhad = 'triton' in sys.modules\nimport selfspec\n"
        "assert set(f) == before\nassert had == ('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=_environment())


def _environment() -> dict[str, str]:
    import os

    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}
