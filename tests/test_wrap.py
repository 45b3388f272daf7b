"""wrap(): what it takes, what it says, what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import selfspec
from selfspec import TokenTree
from selfspec.tree import Resume
from tests.families import tiny
from tests.oracle import OracleDrafter, RandomTreeDrafter

ONES, STATES = torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, 2, 64)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: selfspec.wrap(m, drafter="n-gram"), ValueError, "drafter='n-gram' is unknown"),
        (lambda m: selfspec.wrap(m, drafter=selfspec.NGramDrafter), TypeError, "pass an instance"),
        (lambda m: selfspec.wrap(m, drafter=object()), TypeError, "without hidden_taps, draft"),
        (lambda m: selfspec.wrap(m, drafter=[]), ValueError, "has no drafter"),
        (lambda m: selfspec.wrap(m, drafter=["ngram", "none"]), ValueError, "part of a list"),
        (
            lambda m: selfspec.wrap(m, drafter=None),
            TypeError,
            "drafter is an instance of NoneType without",
        ),
        (lambda m: selfspec.wrap(m, max_draft=3), ValueError, "unknown option max_draft"),
        (lambda m: selfspec.wrap(m, max_draft_tokens=0), ValueError, "max_draft_tokens=0"),
        (lambda m: selfspec.wrap(m, off_switch="yes"), ValueError, "off_switch='yes'"),
        (lambda m: selfspec.wrap(m, adaptive=1), ValueError, "adaptive=1 must be True or False"),
        (lambda m: selfspec.wrap(m.model), TypeError, "LlamaModel"),
        (lambda m: selfspec.wrap("llama"), TypeError, "model is a str"),
        (lambda m: selfspec.wrap(selfspec.wrap(m)), TypeError, "wrapped already"),
        (
            lambda m: selfspec.wrap(m, drafter=selfspec.EarlyExitDrafter(5)),
            ValueError,
            "exit_layer=5 is out of range: the model has 4 layers, choose 1..4",
        ),
        (
            lambda m: selfspec.wrap(m, drafter=[selfspec.LayerSkipDrafter([4])]),
            ValueError,
            r"skip_set.attention has layer 4: the model has layers 0..3",
        ),
        (lambda m: selfspec.EarlyExitDrafter(0), ValueError, "exit_layer=0 must be at least 1"),
        (lambda m: selfspec.EarlyExitDrafter(1, 0), ValueError, "max_draft_tokens=0"),
        (lambda m: selfspec.EarlyExitDrafter(1.5), TypeError, "exit_layer=1.5 must be an int"),
        (lambda m: selfspec.LayerSkipDrafter([1], 2, 1.5), ValueError, "confidence=1.5"),
        (lambda m: selfspec.LayerSkipDrafter([1], 2, "high"), TypeError, "confidence='high'"),
        (lambda m: selfspec.LayerSkipDrafter(3), TypeError, "skip_set=3 must be a SkipSet"),
        (lambda m: selfspec.SkipSet(mlp=["x"]), TypeError, "skip_set.mlp layer='x'"),
        (lambda m: selfspec.wrap(m, max_draft_tokens=True), ValueError, "max_draft_tokens=True"),
    ],
)
def test_refusals(
    model: Any, call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(model)


class Malformed:
    """Drafts a token that does not exist."""

    hidden_taps = ()

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        return selfspec.TokenTree.chain(state.root, torch.full((state.batch, 1), 64))

    def observe(self, *args: Any) -> None: ...

    def reset(self) -> None: ...


def test_a_malformed_draft_is_refused_by_name(model: Any) -> None:
    spec = selfspec.wrap(model, drafter=Malformed())
    with pytest.raises(ValueError, match="token 64 of node 1, row 0, is outside the vocabulary"):
        spec.generate(**tiny.prompts(1), max_new_tokens=8)
    plain = model.generate(**tiny.prompts(1), max_new_tokens=8)
    assert selfspec.wrap(model).generate(**tiny.prompts(1), max_new_tokens=8).equal(plain)


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (lambda s, b: None, TypeError, "draft returned a NoneType; it must return a TokenTree"),
        (lambda s, b: [1, 2], TypeError, "draft returned a list"),
        (
            lambda s, b: replace(TokenTree.chain(s.root, ONES), resume=Resume(9, STATES)),
            ValueError,
            "resume.layer is 9; it must be in 1..4",
        ),
        (
            lambda s, b: replace(TokenTree.chain(s.root, ONES), resume=Resume(2, STATES[:, :1])),
            ValueError,
            "resume.hidden is",
        ),
    ],
)
def test_other_malformed_drafts(model: Any, draft: Any, error: Any, message: str) -> None:
    drafter = Malformed()
    drafter.draft = draft  # type: ignore[method-assign]
    spec = selfspec.wrap(model, drafter=drafter)
    with pytest.raises(error, match=message):
        spec.generate(**tiny.prompts(1), max_new_tokens=8)


def test_taps_of_layers_that_do_not_exist(model: Any) -> None:
    drafter = Malformed()
    drafter.hidden_taps = (5,)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="hidden_taps of Malformed has 5"):
        selfspec.wrap(model, drafter=drafter).generate(**tiny.prompts(1), max_new_tokens=8)


def test_repr_and_log_line_say_what_runs(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="selfspec"):
        spec = selfspec.wrap(model)
        selfspec.wrap(tiny.build("bloom"), drafter=[selfspec.NGramDrafter()])
    assert caplog.messages[0] == repr(spec)
    assert "drafts: suffix" in repr(spec)
    assert "off switch on" in repr(spec)
    assert "token trees" in repr(spec)
    assert "chains only (its forward takes no position_ids" in caplog.messages[1]


def test_properties_are_the_models(model: Any) -> None:
    spec = selfspec.wrap(model)
    assert spec.config is model.config
    assert spec.generation_config is model.generation_config
    assert (spec.device, spec.dtype) == (model.device, model.dtype)
    assert not hasattr(spec, "no_such_thing")


# ------------------------------------------------------------------------ stats


def test_stats_add_up(model: Any) -> None:
    prompt = tiny.prompts(3)
    plain = model.generate(**prompt, max_new_tokens=30)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 5, wrong_at=(0, 3, 1)))
    assert "no speculative generate yet" in str(spec.stats)
    spec.generate(**prompt, max_new_tokens=30)
    stats = spec.stats
    assert stats.emitted == 90
    assert stats.emitted_by_verifies + stats.plain_tokens + 3 == 90  # the prefill gives one a row
    assert stats.emitted_by_verifies == stats.accepted + stats.verifies
    assert stats.accepted == sum(stats.accepted_by_depth.values())
    assert stats.accepted_by == {"OracleDrafter": stats.accepted}
    assert stats.mean_accepted_length == pytest.approx(1 + stats.accepted / stats.verifies)
    assert set(stats.seconds) == {"prefill", "draft", "verify", "accept", "commit"}
    both = stats + stats
    assert both.emitted == 180
    assert both.to_dict()["seconds"]["verify"] == pytest.approx(2 * stats.seconds["verify"])
    assert "tau" in str(stats)
    stats.reset()
    assert stats.to_dict() == selfspec.SpecStats().to_dict()


def test_accepts_after_the_first_reject_do_not_count(model: Any) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=20)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 3, wrong_at=(2,)))
    spec.generate(**prompt, max_new_tokens=20)
    assert spec.stats.acceptance_by_depth == {1: 1.0, 2: 0.0}
    assert 1.9 < spec.stats.mean_accepted_length <= 2.0


def test_the_same_call_twice_counts_the_same(model: Any) -> None:
    prompt = tiny.prompts(2)
    spec = selfspec.wrap(model, drafter="ngram", adaptive=False)
    counts = []
    for _ in range(2):
        spec.stats.reset()
        spec.generate(**prompt, max_new_tokens=30)
        counts.append((spec.stats.drafted, spec.stats.accepted, spec.stats.forwards))
    assert counts[0] == counts[1]


def test_a_bad_drafter_costs_no_forwards(model: Any) -> None:
    """Rule of the house: at most one target forward a token, however bad the drafts."""
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=30)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 4, wrong_at=(1,)))
    assert spec.generate(**prompt, max_new_tokens=30).equal(plain)
    assert spec.stats.acceptance_rate == 0
    assert spec.stats.forwards == 29


def test_a_list_of_drafters_is_merged(model: Any) -> None:
    prompt = tiny.prompts(2)
    plain = model.generate(**prompt, max_new_tokens=30)
    drafters = [
        OracleDrafter(plain, 3, wrong_at=(2,)),
        OracleDrafter(plain, 5),
        RandomTreeDrafter(),
    ]
    spec = selfspec.wrap(model, drafter=drafters)
    assert spec.generate(**prompt, max_new_tokens=30).equal(plain)
    assert spec.stats.mean_accepted_length > 3  # the second one's chain is in the tree


# ------------------------------------------------------------------------ changed models


def test_a_forward_that_passes_on_whatever_it_is_given() -> None:
    """Its signature says nothing; plain `generate` then leaves positions out."""
    model = copy.deepcopy(tiny.build("llama"))
    before = selfspec.wrap(model, drafter="ngram")
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    for spec in (before, selfspec.wrap(model, drafter=selfspec.EarlyExitDrafter(3, 3, 0.0))):
        for batch in (1, 3):
            prompt = tiny.prompts(batch)
            plain = model.generate(**prompt, max_new_tokens=12)
            assert spec.generate(**prompt, max_new_tokens=12).equal(plain)
        assert spec.stats.requests >= 1


def test_a_model_that_comes_to_be_unsupported_is_left_to_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    spec, prompt = selfspec.wrap(model, drafter="ngram"), tiny.prompts(1)
    forward = model.forward
    model.forward = lambda input_ids, **kwargs: forward(input_ids, **kwargs)
    model._is_stateful = True
    plain = model.generate(**prompt, max_new_tokens=6)
    assert spec.generate(**prompt, max_new_tokens=6).equal(plain)
    assert spec.stats.fallbacks == 1
    assert "its state is recurrent" in caplog.text
    assert "verifies nothing" in repr(spec)
    del model.forward, model._is_stateful
    spec.generate(**prompt, max_new_tokens=6)
    assert spec.stats.requests == 1


def test_a_generate_of_the_objects_own_is_called_and_counted() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    spec, prompt, generate = selfspec.wrap(model, drafter="ngram"), tiny.prompts(1), model.generate
    model.generate = lambda *args, **kwargs: generate(*args, **{**kwargs, "max_new_tokens": 5})
    assert spec.generate(**prompt, max_new_tokens=9).shape[1] == 17 + 5
    assert (spec.stats.requests, spec.stats.fallbacks) == (0, 1)
    with pytest.raises(ValueError, match="generator: transformers' own loop takes none"):
        spec.generate(**prompt, generator=torch.Generator())


def test_what_other_loops_cannot_do_is_said_before_they_run(model: Any) -> None:
    spec, prompt = selfspec.wrap(model), tiny.prompts(1)
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(ValueError, match="takes none: num_beams is 2"):
            spec.generate(**prompt, num_beams=2, max_new_tokens=9, generator=torch.Generator())
        with pytest.raises(ValueError, match="in steps: num_beams is 2"):
            next(spec.stream(**prompt, num_beams=2, max_new_tokens=9))
    finally:
        hook.remove()
    assert not calls


def test_what_a_wrapper_lacks_is_said_to_be_the_models(model: Any) -> None:
    with pytest.raises(AttributeError, match="no attribute 'train'; the model itself is its `mod"):
        selfspec.wrap(model).train()
