"""Breaking a source on purpose: a mutant is the file with one place changed.

A mutant that passes means that the cases it was run on are blind to that place.
"""

import importlib.util
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import selfspec_kernels

SOURCES = Path(selfspec_kernels.__file__).parent
_serial = count()


def load(op: str, file: str, changes: dict[str, str], folder: Path) -> ModuleType:
    """The module `op/file` with every key of `changes` replaced by its value."""
    source = (SOURCES / op / file).read_text()
    for old, new in changes.items():
        assert source.count(old) == 1, f"{op}/{file} has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    path = folder / file
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"selfspec_kernels.{op}.m{next(_serial)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed(mutants: dict[str, dict[str, str]]) -> list[object]:
    """Parameters of a test over mutants; the first is the source as it is, which must pass."""
    return [pytest.param(changes, id=name) for name, changes in {"none": {}, **mutants}.items()]
