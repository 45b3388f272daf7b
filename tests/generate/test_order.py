"""Processors, criteria and streamers meet in the order in which they meet in plain `generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

import selfspec
from tests.families import tiny
from tests.generate.common import NEW
from tests.oracle import OracleDrafter


class Grammar(LogitsProcessor):
    """Knows no way to go on after the end."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1 and int(input_ids[0, -1]) == self.end:
            raise AssertionError("the grammar is over")
        return scores


@pytest.mark.parametrize("by", ["eos", "criterion"])
@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_processor_hears_of_nothing_after_the_end(model: Any, at: int, by: str) -> None:
    """The draft goes on past it, as an n-gram of an earlier turn does."""
    prompt = tiny.prompts(1)
    whole = model.generate(**prompt, max_new_tokens=NEW)
    end = int(whole[0, 17 + at])
    options: dict[str, Any] = {"eos_token_id": end}
    if by == "criterion":
        options = {"stopping_criteria": [lambda ids, scores: ids[:, -1] == end]}
    texts, calls = [], []
    for generate in (model.generate, selfspec.wrap(model, OracleDrafter(whole, 7)).generate):
        grammar = Grammar(end)
        processors = LogitsProcessorList([grammar])
        texts.append(generate(**prompt, max_new_tokens=NEW, logits_processor=processors, **options))
        calls.append(grammar.calls)
    assert texts[0].equal(texts[1])
    assert calls[0] == calls[1] == texts[0].shape[1] - 17


class InLeague(LogitsProcessor, BaseStreamer):
    """Prefers tokens by how often it has been streamed to, or asked as a criterion."""

    def __init__(self) -> None:
        self.heard = 0

    def put(self, value: torch.Tensor) -> None:
        self.heard += 1

    def end(self) -> None: ...

    def ask(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.heard += 1
        return torch.tensor([False])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 3 * self.heard % 64] += 6
        return scores


@pytest.mark.parametrize("role", ["streamer", "criterion"])
def test_a_processor_in_league_with_a_streamer_or_a_criterion(model: Any, role: str) -> None:
    def text(generate: Any) -> torch.Tensor:
        one = InLeague()
        extra = {"streamer": one} if role == "streamer" else {"stopping_criteria": [one.ask]}
        result: torch.Tensor = generate(
            **tiny.prompts(1), max_new_tokens=NEW, logits_processor=[one], **extra
        )
        return result

    plain = text(model.generate)
    spec = selfspec.wrap(model, OracleDrafter(plain, 8))
    assert text(spec.generate).equal(plain)
    assert spec.stats.accepted > 0


@pytest.mark.parametrize("where", ["criterion", "processor"])
def test_stop_iteration_is_what_it_was(model: Any, where: str) -> None:
    def enough(ids: Any, scores: Any) -> Any:
        if ids.shape[1] > 20:
            raise StopIteration("enough")
        return torch.tensor([False]) if where == "criterion" else scores

    name = {"criterion": "stopping_criteria", "processor": "logits_processor"}[where]
    for generate in (model.generate, selfspec.wrap(model, "ngram").generate):
        with pytest.raises(StopIteration, match="enough"):
            generate(**tiny.prompts(1), max_new_tokens=NEW, **{name: [enough]})


@pytest.mark.parametrize("limit", [10, 17])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_limit_that_the_prompt_has_passed(model: Any, batch: int, limit: int) -> None:
    options = {
        "max_new_tokens": NEW,
        "stopping_criteria": [MaxLengthCriteria(limit)],
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    plain = model.generate(**tiny.prompts(batch), **options)
    ours = selfspec.wrap(model, "ngram").generate(**tiny.prompts(batch), **options)
    assert ours.sequences.equal(plain.sequences)
    assert ours.sequences.shape[1] == 18
    assert ours.scores[0].equal(plain.scores[0])


@pytest.mark.parametrize("limit", [int(1e30), 1 << 31, 25.5, float("inf")])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("graphs", [False, True])
def test_lengths_of_any_size(model: Any, limit: float, batch: int, graphs: bool) -> None:
    """`tokenizer.model_max_length` may be 1e30."""
    prompt = tiny.prompts(batch)
    whole = model.generate(**prompt, max_new_tokens=20)
    options = {"max_length": limit, "eos_token_id": int(whole[-1, 20])}
    if batch > 1:
        options["stopping_criteria"] = [MaxLengthCriteria(30)]
    plain = model.generate(**prompt, **options)
    spec = selfspec.wrap(model, OracleDrafter(whole, 4), cuda_graphs=graphs)
    assert spec.generate(**prompt, **options).equal(plain)
    assert spec.stats.fallbacks == 0


@pytest.mark.parametrize("graphs", [False, True])
def test_float64_chooses_in_float32_as_transformers_does(graphs: bool) -> None:
    """Two rows of the head that differ by less than float32 can tell: the first one is chosen."""
    model = copy.deepcopy(tiny.build("llama", dtype=torch.float64))
    prompt = tiny.prompts(1)
    with torch.no_grad():
        model.lm_head.weight[32:] = model.lm_head.weight[:32] * (1 + 1e-12)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    for drafter in ("none", OracleDrafter(plain, 5)):
        spec = selfspec.wrap(model, drafter, cuda_graphs=graphs)
        assert spec.generate(**prompt, max_new_tokens=NEW).equal(plain)
