"""The drafts for the demo model: they load, fit it, and are accepted on real text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import benchmark_prompts
import demo_model
import selfspec
from selfspec.checkpoints import card_of, load_all

# Least mean accepted length on three prompts, in float32, where counts do not depend on rounding:
# far below what was measured, far above what a draft for another model has.
LEAST = {"feature": 1.8, "heads": 1.6, "early-exit": 1.4}


@pytest.fixture(scope="module")
def loaded() -> Any:
    return demo_model.load(dtype=torch.float32)


def test_they_were_trained_for_this_model(loaded: Any) -> None:
    found = load_all(demo_model.DRAFTS, model=loaded[0])
    assert set(found) == {"feature", "heads", "exit"}
    for network in found.values():
        card = card_of(network)
        assert card is not None
        assert card.license == "apache-2.0"
        assert card.training["total_tokens"] >= 1_000_000
        assert card.evaluation["held_out"]["tau"] > 1.3
    size = sum(file.stat().st_size for file in demo_model.DRAFTS.rglob("*") if file.is_file())
    assert size <= 24_000_000


@pytest.mark.parametrize("drafter", LEAST)
def test_they_draft_what_the_model_says(loaded: Any, drafter: str) -> None:
    model, tokenizer = loaded
    spec = selfspec.wrap(model, drafter, drafts=demo_model.drafts(), adaptive=False)
    for _, message in benchmark_prompts.CHAT[:3]:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        options = {"max_new_tokens": 32, "do_sample": False}
        assert spec.generate(**inputs, **options).equal(model.generate(**inputs, **options))
    assert spec.stats.mean_accepted_length > LEAST[drafter]
