"""Caches, masks and other inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(("length", "new"), [(200, 60), (500, 30)])
def test_longer_than_a_window_and_growing(length: int, new: int) -> None:
    model = tiny.build("gemma3")
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(0))
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(**prompt, max_new_tokens=new)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 6, wrong_at=(0, 4)))
    assert spec.generate(**prompt, max_new_tokens=new).tolist() == plain.tolist()
