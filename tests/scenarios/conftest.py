"""The model of most scenarios, and which of them this machine can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import tiny

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU there is nothing to run for tests that are about one: deselected."""
    if torch.cuda.is_available():
        return
    dropped = [i for i in items if HERE in i.path.parents and any(i.iter_markers("gpu"))]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")
