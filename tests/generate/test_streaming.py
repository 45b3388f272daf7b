"""`stream`: every token once, none that the answer lacks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, snapshot
from tests.oracle import OracleDrafter


def test_stream_yields_steps(model: Any) -> None:
    prompt = tiny.prompts(3)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 4))
    rows: list[list[int]] = [[], [], []]
    for step in spec.stream(**prompt, max_new_tokens=NEW):
        for row, new in zip(rows, step.tokens, strict=True):
            row.extend(new)
    assert rows == answers[:, -NEW:].tolist()


def test_closing_a_stream_ends_the_generation(model: Any) -> None:
    before = snapshot(model)
    spec = selfspec.wrap(model)
    steps = spec.stream(**tiny.prompts(1), max_new_tokens=200)
    next(steps)
    steps.close()
    assert snapshot(model) == before
    assert threading.active_count() == 1 or not any(
        t.name == "selfspec-stream" for t in threading.enumerate()
    )


def test_stream_raises_what_generate_raises(model: Any) -> None:
    spec = selfspec.wrap(model)
    with pytest.raises(ValueError, match="not_an_option"):
        list(spec.stream(**tiny.prompts(1), max_new_tokens=4, not_an_option=1))
    with pytest.raises(ValueError, match="cannot be decoded in steps: use_cache is False"):
        list(spec.stream(**tiny.prompts(1), max_new_tokens=4, use_cache=False))
    with pytest.raises(ValueError, match="cannot be decoded in steps: num_beams is 2"):
        list(spec.stream(**tiny.prompts(1), max_new_tokens=4, num_beams=2))
