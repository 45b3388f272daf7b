"""The demo model itself, in float32: real text, token-identical, with accepted drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import pipeline

import benchmark_prompts
import demo_model
import selfspec


@pytest.fixture(scope="module")
def loaded() -> Any:
    return demo_model.load(dtype=torch.float32)


@pytest.mark.parametrize("drafter", ["ngram", selfspec.EarlyExitDrafter(27, 2), "auto"])
def test_identical_on_real_text(loaded: Any, drafter: Any) -> None:
    model, tokenizer = loaded
    _, message, start = benchmark_prompts.COPY[1]
    prompts = [(message, start), (benchmark_prompts.CHAT[0][1], "")]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
        + start
        for message, start in prompts
    ]
    tokenizer.padding_side = "left"
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    spec = selfspec.wrap(model, drafter=drafter)
    assert spec.generate(**inputs, max_new_tokens=24, do_sample=False).equal(plain)
    if drafter != "auto":  # it measures, and may decide otherwise on a busy machine
        assert spec.stats.accepted > 0


def test_text_generation_pipeline(loaded: Any) -> None:
    model, tokenizer = loaded
    spec = selfspec.wrap(model, drafter="ngram")
    chat = [{"role": "user", "content": "Say the word yes eight times."}]
    texts = [
        pipeline("text-generation", model=m, tokenizer=tokenizer)(
            chat, max_new_tokens=16, do_sample=False
        )
        for m in (model, spec)
    ]
    assert texts[0] == texts[1]
    assert spec.stats.emitted == 16


@pytest.mark.parametrize("stop", ["four", " seven, e", "ine"])
def test_stop_strings_inside_a_block(loaded: Any, stop: str) -> None:
    model, tokenizer = loaded
    line = "one, two, three, four, five, six, seven, eight, nine, ten.\n"
    inputs = tokenizer(3 * line + "one, two,", return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(**inputs, **options, stop_strings=[stop], tokenizer=tokenizer)
    spec = selfspec.wrap(model, drafter="ngram")
    ours = spec.generate(**inputs, **options, stop_strings=[stop], tokenizer=tokenizer)
    assert ours.equal(plain)
    assert stop in tokenizer.decode(ours[0][inputs["input_ids"].shape[1] :])
    assert ours.shape[1] < inputs["input_ids"].shape[1] + 24
    assert spec.stats.accepted > 0
