"""The model that most of these tests use."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families import tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")
