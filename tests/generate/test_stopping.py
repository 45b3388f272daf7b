"""Where rows end, inside accepted blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    StoppingCriteria,
    StoppingCriteriaList,
)

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, Columns, same
from tests.oracle import OracleDrafter, RandomTreeDrafter


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 2, 6, 7, 13])
def test_end_of_sequence_inside_a_block(model: Any, at: int, batch: int) -> None:
    """One of the tokens that plain greedy emits is declared to end a sequence."""
    prompt = tiny.prompts(batch)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    eos = int(answers[batch - 1, prompt["input_ids"].shape[1] + at])
    same(model, prompt, max_new_tokens=NEW, eos_token_id=[eos, 62])


@pytest.mark.parametrize("new", [1, 2, 3])
def test_few_new_tokens(model: Any, new: int) -> None:
    for batch in (1, 3):
        prompt = tiny.prompts(batch)
        answers = model.generate(**prompt, max_new_tokens=NEW)
        spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 8))
        assert spec.generate(**prompt, max_new_tokens=new).shape[1] == answers.shape[1] - NEW + new


class Every(StoppingCriteria):
    """Stops a row at its first token divisible by 7 after a few."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 7 == 0) & (input_ids.shape[1] > 20)


@pytest.mark.parametrize("eos", [None, 63])
@pytest.mark.parametrize("batch", [1, 3])
def test_stopping_criteria_of_the_user(model: Any, batch: int, eos: int | None) -> None:
    """In a batch one may look across the rows: those are left to transformers."""
    same(
        model,
        tiny.prompts(batch),
        batch > 1,
        max_new_tokens=NEW,
        stopping_criteria=StoppingCriteriaList([Every()]),
        eos_token_id=eos,
    )


class Counted(StoppingCriteria):
    """Stops everything at its ninth call, or when the first row says so."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        stop = self.calls == 9 or int(input_ids[0, -1]) == 63
        return torch.full((input_ids.shape[0],), stop)


@pytest.mark.parametrize("batch", [1, 3])
def test_stopping_criteria_that_count_or_compare(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    full = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(full, 5))
    plain, ours = Columns(), Columns()
    texts = [
        generate(
            **prompt,
            max_new_tokens=NEW,
            stopping_criteria=StoppingCriteriaList([Counted()]),
            streamer=streamer,
        )
        for generate, streamer in ((model.generate, plain), (spec.generate, ours))
    ]
    assert texts[0].equal(texts[1])
    assert texts[0].shape[1] == 17 + 9
    assert ours.columns == plain.columns  # not one token more than the answer has
    if batch == 1:
        assert spec.stats.emitted == 9


def test_max_time_stops_like_plain(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    assert spec.generate(**prompt, max_new_tokens=NEW, max_time=0.0).shape[1] == 18
