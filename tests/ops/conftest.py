"""Which tests of the kernels this process can run, and poison for what kernels leave unwritten."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from selfspec_kernels._dispatch import interpreting

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Triton chooses between interpreter and compiler once a process, so a test of the other kind
    # cannot run here at all: it is deselected, and the process started for it selects it.
    kept, dropped = [], []
    for item in items:
        mine = HERE not in item.path.parents or interpreting() == any(
            item.iter_markers("interpret")
        )
        (kept if mine else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what `torch.empty` returns a content that shows when a kernel does not overwrite it."""
    empty: Callable[..., torch.Tensor] = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)
