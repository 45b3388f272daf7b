"""Stopping criteria of the user's own: asked about every token, in order, as plain asks them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, Columns, same, snapshot
from tests.oracle import OracleDrafter

PROMPT = 17


class Every(StoppingCriteria):
    """Stops a row at its first token divisible by 7 after a few; answers in various ways."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        assert scores is None
        return self.answer((input_ids[:, -1] % 7 == 0) & (input_ids.shape[1] > 20))


@pytest.mark.parametrize(
    "answer",
    [
        lambda rows: rows,
        lambda rows: bool(rows.all()),
        lambda rows: rows.all(),
        lambda rows: int(rows.all()),
    ],
)
def test_c1_criteria_of_the_user(model: Any, answer: Any) -> None:
    """Old ones answer with a Python bool. In a batch they may look across rows: stock loop."""
    for batch, eos in ((1, 63), (3, None)):
        same(
            model,
            tiny.prompts(batch),
            batch > 1,
            max_new_tokens=NEW,
            stopping_criteria=StoppingCriteriaList([Every(answer)]),
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
def test_c1_criteria_that_count_or_compare(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 5))
    plain, ours = Columns(), Columns()
    texts = [
        generate(
            **prompt,
            max_new_tokens=NEW,
            stopping_criteria=StoppingCriteriaList([Counted(), Counted()]),
            streamer=streamer,
        )
        for generate, streamer in ((model.generate, plain), (spec.generate, ours))
    ]
    assert texts[0].equal(texts[1])
    assert texts[0].shape[1] == PROMPT + 9
    assert ours.columns == plain.columns  # not one token more than the answer has
    assert spec.stats.emitted == (9 if batch == 1 else 0)


class InLeague(StoppingCriteria, BaseStreamer):
    """A streamer that has seen enough tells the criterion; both note the order of events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(("streamed", value.numel() + int(value.flatten()[-1])))

    def end(self) -> None:
        self.events.append(("end", 0))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        self.events.append(("asked", int(input_ids[0, -1])))
        return sum(kind == "streamed" for kind, _ in self.events) > 8


def test_c1_c13_a_criterion_and_a_streamer_in_league(model: Any) -> None:
    """Asked and streamed token by token, in the order of the transformers that are installed."""
    prompt = tiny.prompts(1)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 6))
    events = []
    for generate in (model.generate, spec.generate):
        both = InLeague()
        out = generate(
            **prompt,
            max_new_tokens=NEW,
            streamer=both,
            stopping_criteria=StoppingCriteriaList([both]),
        )
        events.append((out.tolist(), both.events))
    assert events[0] == events[1]
    assert spec.stats.accepted > 0


def test_c1_a_criterion_that_raises_leaves_all_as_it_was(model: Any) -> None:
    class Fails(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
            if input_ids.shape[1] == PROMPT + 5:
                raise ZeroDivisionError("the criterion fails")
            return False

    prompt = tiny.prompts(1)
    answers = model.generate(**prompt, max_new_tokens=NEW)
    before = snapshot(model)
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 8))
    streamer = Columns()
    with pytest.raises(ZeroDivisionError, match="the criterion fails"):
        spec.generate(
            **prompt,
            max_new_tokens=NEW,
            stopping_criteria=StoppingCriteriaList([Fails()]),
            streamer=streamer,
        )
    assert streamer.ends == 1
    assert snapshot(model) == before
    assert spec.generate(**prompt, max_new_tokens=NEW).equal(answers)
