"""`generator=`: one for the batch, or one a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from tests.families import tiny
from tests.oracle import OracleDrafter

NEW = 16
SETTINGS = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "top_k": 30}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama_gqa3")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_one_generator_stands_for_torchs_own(model: Any) -> None:
    prompt = tiny.prompts(3)
    torch.manual_seed(5)
    plain = model.generate(**prompt, **SETTINGS)
    after_plain = torch.get_rng_state()
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 3, wrong_at=(0, 2)))
    before = torch.get_rng_state()
    mine = seeded(5)
    assert spec.generate(**prompt, **SETTINGS, generator=mine).equal(plain)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(mine.get_state(), after_plain)
    assert spec.stats.mean_accepted_length > 1.5


def test_a_row_with_its_own_generator_gets_the_text_it_gets_alone(model: Any) -> None:
    prompt = tiny.prompts(3)
    together = selfspec.wrap(model, drafter="ngram").generate(
        **prompt, **SETTINGS, generator=[seeded(b) for b in range(3)]
    )
    for b in range(3):
        kept = prompt["attention_mask"][b].bool()
        torch.manual_seed(b)
        alone = model.generate(prompt["input_ids"][b, kept][None], **SETTINGS)
        assert torch.equal(together[b, -NEW:], alone[0, -NEW:])


@pytest.mark.parametrize("rule", ["traversal", "multiround"])
def test_so_does_a_row_whose_drafts_are_drawn(model: Any, rule: str) -> None:
    """Also for its last token, where a row alone has no room to draft and one beside others has."""
    prompt = tiny.prompts(3)
    drafter = selfspec.EarlyExitDrafter(3, 3, 0.0, do_sample=True)
    spec = selfspec.wrap(model, drafter, acceptance=rule)
    settings = {**SETTINGS, "temperature": 2.0, "top_k": 0}
    differ = 0
    for seed in range(3):
        together = spec.generate(
            **prompt, **settings, generator=[seeded(9 * seed + b) for b in range(3)]
        )
        for b in range(3):
            kept = prompt["attention_mask"][b].bool()
            ids = prompt["input_ids"][b, kept][None]
            alone = spec.generate(ids, **settings, generator=[seeded(9 * seed + b)])
            differ += not torch.equal(together[b, -NEW:], alone[0, -NEW:])
    assert spec.stats.accepted > 0
    assert differ == 0


def test_streams_and_greedy_requests_take_one(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model)
    torch.manual_seed(7)
    plain = model.generate(**prompt, **SETTINGS)
    steps = list(spec.stream(**prompt, **SETTINGS, generator=seeded(7)))
    assert [t for step in steps for t in step.tokens[0]] == plain[0, -NEW:].tolist()
    greedy = model.generate(**prompt, max_new_tokens=NEW)
    assert spec.generate(**prompt, max_new_tokens=NEW, generator=seeded(0)).equal(greedy)


def test_refusals(model: Any) -> None:
    prompt = tiny.prompts(2)
    spec = selfspec.wrap(model)
    with pytest.raises(TypeError, match=r"generator=3 must be a torch\.Generator or a list"):
        spec.generate(**prompt, **SETTINGS, generator=3)
    with pytest.raises(ValueError, match="generator has 3 generators, one a sequence would be 2"):
        spec.generate(**prompt, **SETTINGS, generator=[seeded(b) for b in range(3)])
    with pytest.raises(ValueError, match="every sequence of a list needs a generator of its own"):
        spec.generate(**prompt, **SETTINGS, generator=[seeded(0)] * 2)
    with pytest.raises(ValueError, match=r"generator: transformers' own loop takes none: use_cac"):
        spec.generate(**prompt, **SETTINGS, use_cache=False, generator=seeded(0))
    with pytest.raises(
        ValueError, match="generator: transformers' own loop takes none: num_beams is 2"
    ):
        spec.generate(**prompt, num_beams=2, max_new_tokens=3, generator=seeded(0))
    assert spec.generate(**prompt, **SETTINGS).shape[0] == 2
