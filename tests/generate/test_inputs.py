"""Caches, masks and other inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import selfspec
from tests.families import tiny
from tests.generate.common import NEW
from tests.oracle import OracleDrafter


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
    spec = selfspec.wrap(model, drafter=selfspec.NGramDrafter(min_match=1, min_prob=0.0))
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


@pytest.mark.parametrize("more", [-2, 0, 1, 3])
@pytest.mark.parametrize("ids", [-3, 0, 1, 3])
@pytest.mark.parametrize(("batch", "ragged"), [(1, False), (3, False), (3, True)])
def test_masks_and_ids_that_say_different_things_of_a_cache(
    model: Any, batch: int, ragged: bool, ids: int, more: int
) -> None:
    """Fewer ids than are cached, or as many; a mask that is wider than the text, or narrower."""

    def run(generate: Any) -> Any:
        prompt, cache = tiny.prompts(batch, ragged=ragged), DynamicCache()
        positions = (prompt["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            model(**prompt, position_ids=positions, past_key_values=cache)
        length = prompt["input_ids"].shape[1] + ids
        text = torch.nn.functional.pad(prompt["input_ids"], (0, 3), value=5)[:, :length]
        mask = torch.nn.functional.pad(prompt["attention_mask"], (0, 9), value=1)[
            :, : length + more
        ]
        try:
            out = generate(text, attention_mask=mask, past_key_values=cache, max_new_tokens=6)
        except (RuntimeError, ValueError, IndexError) as error:
            return str(error)
        return out.tolist(), cache.get_seq_length()

    spec = selfspec.wrap(model, drafter=selfspec.NGramDrafter(min_match=1, min_prob=0.0))
    assert run(spec.generate) == run(model.generate)
    assert spec.stats.fallbacks == (ids <= 0 or more != 0)


@pytest.mark.parametrize("more", [1, 3])
def test_a_mask_that_is_wider_than_the_prompt(model: Any, more: int) -> None:
    prompt = dict(tiny.prompts(2))
    left = torch.nn.functional.pad(prompt["attention_mask"], (more, 0))
    prompt["attention_mask"] = left
    spec = selfspec.wrap(model)
    assert spec.generate(**prompt, max_new_tokens=NEW).equal(
        model.generate(**prompt, max_new_tokens=NEW)
    )
    assert spec.stats.fallbacks == 1


@pytest.mark.parametrize(("length", "new"), [(200, 60), (500, 30)])
def test_longer_than_a_window_and_growing(length: int, new: int) -> None:
    model = tiny.build("gemma3")
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(0))
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(**prompt, max_new_tokens=new)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 6, wrong_at=(0, 4)))
    assert spec.generate(**prompt, max_new_tokens=new).tolist() == plain.tolist()
