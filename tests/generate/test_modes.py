"""Other decoding modes, bad input, the switch."""

from __future__ import annotations

from typing import Any

import torch

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, raised
from tests.oracle import RandomTreeDrafter


def test_other_modes_are_transformers_own(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model)
    for kwargs in ({"num_beams": 3}, {"num_beams": 2, "do_sample": False, "length_penalty": 0.5}):
        plain = model.generate(**prompt, max_new_tokens=NEW, **kwargs)
        assert spec.generate(**prompt, max_new_tokens=NEW, **kwargs).tolist() == plain.tolist()
    lookup = {"prompt_lookup_num_tokens": 3, "eos_token_id": 63}
    plain = model.generate(**prompt, max_new_tokens=NEW, **lookup)
    assert spec.generate(**prompt, max_new_tokens=NEW, **lookup).tolist() == plain.tolist()


def test_errors_are_transformers_own(model: Any) -> None:
    spec = selfspec.wrap(model)
    prompt = tiny.prompts(1)
    for kwargs in (
        {**prompt, "not_an_option": 1},
        {**prompt, "max_length": 3},
        {**prompt, "max_new_tokens": 0},
        {**prompt, "temperature": -1.0, "do_sample": True},
        {**prompt, "stop_strings": ["x"]},
        {"input_ids": torch.empty(1, 0, dtype=torch.int64), "max_new_tokens": 4},
    ):
        assert raised(lambda kw=kwargs: spec.generate(**kw)) == raised(
            lambda kw=kwargs: model.generate(**kw)
        )


def test_switched_off(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    spec.enabled = False
    plain = model.generate(**prompt, max_new_tokens=NEW)
    assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain.tolist()
    assert (spec.stats.requests, spec.stats.fallbacks) == (0, 1)
    spec.enabled = True
    spec.generate(**prompt, max_new_tokens=NEW)
    assert spec.stats.requests == 1
