"""How the package is cut, read from its sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kernels" / "selfspec_kernels"
SOURCES = sorted(PACKAGE.rglob("*.py"))
OPS = sorted(path.parent for path in PACKAGE.glob("*/kernel.py"))


def imports(path: Path) -> set[str]:
    """Top-level names that a file imports absolutely, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_the_source_root_is_no_package():
    # It would shadow the package `kernels`, which transformers imports.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_there_are_ops():
    assert {op.name for op in OPS} >= {"tree_attention", "tree_accept", "kv_commit"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports(path):
    allowed = {"torch", "einops"} | set(sys.stdlib_module_names)
    if path.name.startswith("kernel") or path == PACKAGE / "tuning" / "gate.py":
        allowed |= {"triton"}
    assert imports(path) <= allowed


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_op_is_complete(op):
    for name in ("__init__.py", "reference.py"):
        assert (op / name).exists()
    assert (ROOT / "tests" / "ops" / f"test_{op.name}.py").exists()
    assert f"`{op.name}`" in (ROOT / "kernels" / "README.md").read_text()


def test_runs_without_triton():
    program = """
import importlib, sys
sys.modules["triton"] = None  # any import of it now fails
import torch
for name in %r:
    importlib.import_module(name)
from selfspec_kernels import TreeLayout, kv_commit, tree_accept, tree_attention
one = torch.ones(1, dtype=torch.int32)
layout = TreeLayout(torch.ones(1, 1, 1, dtype=torch.int64), one[None] * 0, one, 1)
key = torch.ones(1, 1, 2, 8)
assert tree_attention(key[:, :, :1], key, key, layout).shape == (1, 1, 1, 8)
tokens = torch.zeros(1, 1, dtype=torch.int64)
path, count, _ = tree_accept(tokens, one[None] * -1, one, tokens, max_depth=2)
kv_commit([key], [key], path, count, one)
"""
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in SOURCES
        if not path.name.startswith(("kernel", "__main__"))
    ]
    subprocess.run(
        [sys.executable, "-c", program % modules],
        check=True,
        env={"PYTHONPATH": str(ROOT / "kernels"), "OMP_NUM_THREADS": "1"},
    )
