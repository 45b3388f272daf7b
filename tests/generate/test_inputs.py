"""Caches, masks and other inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    StaticCache,
)

import selfspec
from tests.families import tiny
from tests.generate.common import NEW
from tests.oracle import OracleDrafter, RandomTreeDrafter


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mistral"])
def test_continuing_from_a_returned_cache(name: str) -> None:
    model = tiny.build(name)
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    whole = model.generate(**prompt, max_new_tokens=NEW)
    first = spec.generate(**prompt, max_new_tokens=9, return_dict_in_generate=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    again = spec.generate(input_ids=first.sequences, past_key_values=cache, max_new_tokens=NEW - 9)
    assert again.tolist() == whole.tolist()
    # ... and by the model itself
    first = spec.generate(**prompt, max_new_tokens=9, return_dict_in_generate=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    again = model.generate(input_ids=first.sequences, past_key_values=cache, max_new_tokens=NEW - 9)
    assert again.tolist() == whole.tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_the_users_cache_is_continued_in_place(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    ids = prompt["input_ids"]
    caches = []
    for generate in (model.generate, selfspec.wrap(model, drafter=RandomTreeDrafter()).generate):
        cache = DynamicCache()
        model(
            input_ids=ids[:, :-5],
            attention_mask=prompt["attention_mask"][:, :-5] if batch > 1 else None,
            past_key_values=cache,
        )
        out = generate(**prompt, past_key_values=cache, max_new_tokens=NEW)
        caches.append((cache, out))
    (theirs, plain), (mine, ours) = caches
    assert ours.tolist() == plain.tolist()
    assert mine.get_seq_length() == theirs.get_seq_length() == plain.shape[1] - 1


def test_other_caches_go_to_the_stock_loop(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model)
    for kwargs in (
        {"cache_implementation": "static"},
        {"past_key_values": StaticCache(model.config, max_cache_len=64)},
        {"use_cache": False},
    ):
        text = spec.generate(**prompt, max_new_tokens=NEW, **kwargs)
        assert text.tolist() == plain.tolist()
    assert spec.stats.fallbacks == 3
    assert "StaticCache" in caplog.text
    assert "use_cache is False" in caplog.text


@pytest.mark.parametrize("batch", [1, 3])
def test_passing_only_the_tokens_that_a_cache_lacks(model: Any, batch: int) -> None:
    prompt = tiny.prompts(batch)
    outs = []
    for generate in (model.generate, selfspec.wrap(model, drafter="ngram").generate):
        cache = DynamicCache()
        mask = prompt.get("attention_mask", torch.ones_like(prompt["input_ids"]))
        model(
            input_ids=prompt["input_ids"][:, :-5],
            attention_mask=mask[:, :-5],
            past_key_values=cache,
        )
        outs.append(
            generate(
                input_ids=prompt["input_ids"][:, -5:],
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=NEW,
            )
        )
    assert outs[0].equal(outs[1])
    assert outs[0].shape[1] == 5 + NEW


def test_chunked_prefill(model: Any) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW, prefill_chunk_size=5)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 4))
    assert spec.generate(**prompt, max_new_tokens=NEW, prefill_chunk_size=5).equal(plain)
    assert spec.stats.fallbacks == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_inputs_embeds(name: str) -> None:
    model = tiny.build(name)
    ids = tiny.prompts(1)["input_ids"]
    embeds = model.get_input_embeddings()(ids).detach()
    plain = model.generate(inputs_embeds=embeds, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=selfspec.NGramDrafter(min_match=1))
    ours = spec.generate(inputs_embeds=embeds, max_new_tokens=NEW)
    assert ours.tolist() == plain.tolist()
    assert spec.stats.fallbacks == 0


def test_masks_that_are_not_left_padding_go_to_the_stock_loop(model: Any) -> None:
    prompt = dict(tiny.prompts(1))
    mask = torch.ones_like(prompt["input_ids"])
    mask[0, 4:6] = 0
    prompt["attention_mask"] = mask
    spec = selfspec.wrap(model)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain.tolist()
    assert spec.stats.fallbacks == 1


def test_one_token_prompt_and_repetition(model: Any) -> None:
    for ids in ([[5]], [[7] * 48], [[3, 9]]):
        prompt = {"input_ids": torch.tensor(ids)}
        plain = model.generate(**prompt, max_new_tokens=NEW)
        for drafter in (selfspec.NGramDrafter(1), selfspec.EarlyExitDrafter(1)):
            spec = selfspec.wrap(model, drafter=drafter)
            assert spec.generate(**prompt, max_new_tokens=NEW).tolist() == plain.tolist()


def test_up_to_the_last_learned_position() -> None:
    model = tiny.build("gpt2")
    prompt = tiny.prompts(1)
    limit = model.config.n_positions
    plain = model.generate(**prompt, max_length=limit)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 8))
    assert spec.generate(**prompt, max_length=limit).tolist() == plain.tolist()
    assert plain.shape[1] == limit


@pytest.mark.parametrize(("length", "new"), [(200, 60), (500, 30)])
def test_longer_than_a_window_and_growing(length: int, new: int) -> None:
    model = tiny.build("gemma3")
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(0))
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(**prompt, max_new_tokens=new)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 6, wrong_at=(0, 4)))
    assert spec.generate(**prompt, max_new_tokens=new).tolist() == plain.tolist()
