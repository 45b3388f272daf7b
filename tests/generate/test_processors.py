"""Processors and sampling: the text of plain `generate`, under the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
)

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, same
from tests.oracle import OracleDrafter


class Counting(LogitsProcessor):
    """A stateful processor: it bans what it has seen at every third call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        if len(self.calls) % 3 == 0:
            scores[:, input_ids[0, -1]] = -float("inf")
            scores[:, scores.argmax(-1)] = -float("inf")
        return scores


PROCESSORS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [7, 9]]},
    {"suppress_tokens": [3, 4, 5]},
    {"min_new_tokens": 9, "eos_token_id": list(range(20, 40))},
    {"prefix_allowed_tokens_fn": lambda b, ids: list(range(int(ids[-1]) % 3, 64, 3 - b))},
    {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 9},
    {"sequence_bias": {(11,): 2.0, (3, 4): -5.0}},
    {"renormalize_logits": True, "forced_eos_token_id": 2},
]
WARPERS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    {"do_sample": True, "top_k": 7, "min_p": 0.05},
    {"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 0.002, "eta_cutoff": 0.002},
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("warpers", WARPERS, ids=lambda d: "-".join(d))
@pytest.mark.parametrize("processors", PROCESSORS, ids=lambda d: next(iter(d), "none"))
def test_processors(
    model: Any, processors: dict[str, Any], warpers: dict[str, Any], batch: int
) -> None:
    """Sampled text, too: drafts do not even change which token a seed gives."""
    # A user's function may know the texts of its own row only.
    falls_back = "prefix_allowed_tokens_fn" in processors and batch > 1
    options = {"max_new_tokens": NEW, **processors, **warpers}
    stats = same(model, tiny.prompts(batch), falls_back, **options)
    if not warpers["do_sample"] and not falls_back:
        assert stats.accepted > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_generation_config_of_the_model_is_honoured(batch: int) -> None:
    model = tiny.build("qwen2")
    model.generation_config.repetition_penalty = 1.4
    try:
        same(model, tiny.prompts(batch), max_new_tokens=NEW)
    finally:
        model.generation_config.repetition_penalty = 1.0


def test_a_stateful_processor_sees_the_calls_it_expects(model: Any) -> None:
    prompt, plain, ours = tiny.prompts(1), Counting(), Counting()
    answers = model.generate(
        **prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([plain])
    )
    spec = selfspec.wrap(model, drafter=OracleDrafter(answers, 5))
    text = spec.generate(**prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([ours]))
    assert text.tolist() == answers.tolist()
    assert ours.calls == plain.calls
    assert spec.stats.accepted > 0


def test_a_stateful_processor_with_a_batch_goes_to_the_stock_loop(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, plain, ours = tiny.prompts(3), Counting(), Counting()
    answers = model.generate(
        **prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([plain])
    )
    spec = selfspec.wrap(model)
    for _ in range(2):
        ours.calls.clear()
        text = spec.generate(
            **prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([ours])
        )
        assert text.tolist() == answers.tolist()
    assert spec.stats.fallbacks == 2
    assert caplog.text.count("Counting may keep a state") == 1  # one line a reason


@pytest.mark.parametrize("temperature", [1e-7, 1e-5, 1e-2])
def test_tiny_temperatures(model: Any, temperature: float) -> None:
    prompt = tiny.prompts(2)
    same(model, prompt, max_new_tokens=NEW, do_sample=True, temperature=temperature)


def test_sampling_with_more_candidates_than_vocabulary(model: Any) -> None:
    same(model, tiny.prompts(1), max_new_tokens=NEW, do_sample=True, top_k=500)
