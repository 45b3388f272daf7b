"""Processors of the user's own: with a state, marked stateless, ill-behaved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, raised, snapshot
from tests.oracle import OracleDrafter, RandomTreeDrafter


class Grammar(LogitsProcessor):
    """A state for every row, advanced by the token since the last call, as grammar libraries do."""

    def __init__(self) -> None:
        self.states: list[int] = []
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = input_ids.tolist()
        if self.states:
            assert [row[:-1] for row in rows] == self.calls[-1], "not one token after the last call"
            self.states = [(2 * s + row[-1]) % 5 for s, row in zip(self.states, rows, strict=True)]
        else:
            self.states = [0] * len(rows)
        self.calls.append(rows)
        ids = torch.arange(scores.shape[1])
        for row, state in zip(scores, self.states, strict=True):
            row[ids % 5 == state] = -float("inf")
        return scores


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("drafter", ["oracle", "trees", "early-exit"])
def test_a_grammar_sees_the_calls_that_plain_makes(
    model: Any, drafter: str, do_sample: bool, graphs: bool
) -> None:
    """Every token once and in order, never one that is thrown away."""
    prompt, plain, ours = tiny.prompts(1), Grammar(), Grammar()
    options = {"max_new_tokens": NEW, "do_sample": do_sample}
    torch.manual_seed(3)
    text = model.generate(**prompt, **options, logits_processor=LogitsProcessorList([plain]))
    drafters = {
        "oracle": OracleDrafter(text, 5, wrong_at=(0, 3)),
        "trees": RandomTreeDrafter(),
        "early-exit": selfspec.EarlyExitDrafter(2, confidence=0.0, do_sample=do_sample),
    }
    spec = selfspec.wrap(model, drafter=drafters[drafter], cuda_graphs=graphs)
    torch.manual_seed(3)
    out = spec.generate(**prompt, **options, logits_processor=LogitsProcessorList([ours]))
    assert out.tolist() == text.tolist()
    assert ours.calls == plain.calls
    assert spec.stats.drafted > 0
    if drafter == "oracle":
        assert spec.stats.accepted > NEW // 2


def test_a_grammar_over_a_batch_goes_to_the_stock_loop(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, plain = tiny.prompts(3), Grammar()
    text = model.generate(
        **prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([plain])
    )
    spec = selfspec.wrap(model)
    for _ in range(2):
        ours = Grammar()
        out = spec.generate(
            **prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([ours])
        )
        assert out.tolist() == text.tolist()
        assert ours.calls == plain.calls
    assert spec.stats.fallbacks == 2
    assert caplog.text.count("Grammar (logits_processor) may keep a state") == 1


class Parity(LogitsProcessor):
    """Bans tokens by the last two of a row, and gives its scores back in some form or other."""

    stateless = True

    def __init__(self, form: str) -> None:
        self.form = form

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        key = input_ids[:, -2:].sum(1, keepdim=True)
        banned = (torch.arange(scores.shape[1]) + key) % 3 == 0
        if self.form == "in place":
            return scores.masked_fill_(banned, -float("inf"))
        scores = scores.masked_fill(banned, -float("inf"))
        if self.form == "view":
            return scores.T.contiguous().T
        if self.form == "narrower":
            return scores[:, :50]
        return scores.to(getattr(torch, self.form))


FORMS = ["float32", "float64", "bfloat16", "in place", "view", "narrower"]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_marked_stateless(model: Any, form: str, batch: int, do_sample: bool) -> None:
    """Rows of a batch then advance as far as their drafts are right."""
    prompt, processors = tiny.prompts(batch), LogitsProcessorList([Parity(form)])
    options = {"max_new_tokens": 12, "do_sample": do_sample, "logits_processor": processors}
    returned = {"return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(3)
    plain = model.generate(**prompt, **options, **returned)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain.sequences, 4, wrong_at=(0, 2, 0)))
    torch.manual_seed(3)
    ours = spec.generate(**prompt, **options, **returned)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for a, b in zip(ours.scores, plain.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4 if b.dtype != torch.bfloat16 else 0.1)
    assert spec.stats.fallbacks == 0
    assert spec.stats.accepted > 0


def test_marked_stateless_with_drafts_that_are_drawn(model: Any) -> None:
    """Every node is scored after its own path."""
    spec = selfspec.wrap(model, drafter=selfspec.EarlyExitDrafter(3, confidence=0, do_sample=True))
    out = spec.generate(
        **tiny.prompts(3),
        max_new_tokens=12,
        do_sample=True,
        logits_processor=LogitsProcessorList([Parity("float32")]),
    )
    assert spec.stats.fallbacks == 0
    for row in out.tolist():
        for t in range(17, len(row)):
            assert (row[t] + row[t - 1] + row[t - 2]) % 3


def test_a_mark_that_is_not_true_is_none(model: Any) -> None:
    processor = Parity("float32")
    processor.stateless = "no"  # type: ignore[assignment]
    spec = selfspec.wrap(model, drafter="ngram")
    spec.generate(
        **tiny.prompts(2), max_new_tokens=3, logits_processor=LogitsProcessorList([processor])
    )
    assert spec.stats.fallbacks == 1


class Remembering(RepetitionPenaltyLogitsProcessor):
    """A subclass of one that keeps no state may keep one."""


def test_a_subclass_of_transformers_own_is_the_users(model: Any) -> None:
    options = {"max_new_tokens": 6, "logits_processor": LogitsProcessorList([Remembering(1.5)])}
    spec = selfspec.wrap(model, drafter="ngram")
    out = spec.generate(**tiny.prompts(3), **options)
    assert out.equal(model.generate(**tiny.prompts(3), **options))
    assert spec.stats.fallbacks == 1


class Failing(LogitsProcessor):
    stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 20:
            raise ValueError("no token fits")
        return scores


@pytest.mark.parametrize("batch", [1, 3])
def test_a_processor_that_raises(model: Any, batch: int) -> None:
    prompt, before = tiny.prompts(batch), snapshot(model)
    text = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(text, 6), cuda_graphs=True)
    options = {"max_new_tokens": NEW, "logits_processor": LogitsProcessorList([Failing()])}
    assert raised(lambda: spec.generate(**prompt, **options)) == "ValueError: no token fits"
    assert snapshot(model) == before
    assert spec.generate(**prompt, max_new_tokens=NEW).equal(text)


def test_returned_logits_are_the_models_even_if_a_processor_writes_into_them(model: Any) -> None:
    """As documented; transformers' loop returns what such a processor left of them."""
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    prompt = tiny.prompts(1)
    clean, written = (
        model.generate(**prompt, **options, logits_processor=LogitsProcessorList([Parity(form)]))
        for form in ("float32", "in place")
    )
    ours = selfspec.wrap(model, drafter="ngram").generate(
        **prompt, **options, logits_processor=LogitsProcessorList([Parity("in place")])
    )
    assert written.logits[0].isinf().any()
    for a, b in zip(ours.logits, clean.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
