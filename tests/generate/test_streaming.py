"""Streamers and `stream`: every token once, none that the answer lacks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, Columns, snapshot
from tests.oracle import OracleDrafter


@pytest.mark.parametrize("batch", [1, 3])
def test_streamer_gets_what_plain_would_give_it(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    plain, ours = Columns(), Columns()
    answers = model.generate(**prompt, max_new_tokens=NEW, eos_token_id=7, streamer=plain)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 6, wrong_at=(0, 2)))
    spec.generate(**prompt, max_new_tokens=NEW, eos_token_id=7, streamer=ours)
    assert ours.columns == plain.columns
    assert ours.ends == 1


def test_after_an_exception_in_a_streamer_all_is_as_before(model: Any) -> None:
    prompt = tiny.prompts(1)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 6))
    before = snapshot(model)
    broken = Columns(fail_at=9)
    with pytest.raises(RuntimeError, match="the streamer fails"):
        spec.generate(**prompt, max_new_tokens=NEW, streamer=broken)
    assert broken.ends == 1  # a consumer in another thread must not wait for ever
    assert snapshot(model) == before
    assert model.generate(**prompt, max_new_tokens=NEW).tolist() == answers.tolist()
    assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == answers.tolist()


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
    with pytest.raises(ValueError, match="only greedy and sampled decoding has steps"):
        list(spec.stream(**tiny.prompts(1), max_new_tokens=4, num_beams=2))
