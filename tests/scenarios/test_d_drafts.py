"""D: what a trained draft keeps of a text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from selfspec.drafters.own_cache import OwnCache
from tests.families import tiny
from tests.networks import random_feature


@pytest.mark.parametrize("batch", [1, 3])
def test_d7_prompts_beyond_what_a_draft_was_trained_for(batch: int) -> None:
    """Drafts get worse there, if anything; nothing fails."""
    model = tiny.build("llama")
    network = random_feature(64, 64, max_positions=16)
    prompt = tiny.prompts(batch)
    assert prompt["input_ids"].shape[1] + 40 > 3 * network.config.max_positions
    plain = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    spec = selfspec.wrap(model, selfspec.FeatureDrafter(network, min_gain=0.0, min_prob=0.0))
    assert spec.generate(**prompt, max_new_tokens=40, do_sample=False).equal(plain)
    assert spec.stats.drafted > 100


class Kept(selfspec.FeatureDrafter):
    """Lets go of nothing when a request ends."""

    cache: OwnCache

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        tree = super().draft(state, budget)
        assert self._steps is not None
        self.cache = self._steps.cache
        self.text = [state.tokens(b).tolist() for b in range(state.batch)]
        return tree


@pytest.mark.parametrize("batch", [1, 3])
def test_d10_the_cache_of_a_draft_is_made_of_true_features(batch: int) -> None:
    """After many steps, some with accepted drafts: what one pass over the text would give."""
    model = tiny.build("llama", dtype=torch.float64)
    network = random_feature(64, 64, taps=(0, 2)).double()
    drafter = Kept(network, min_gain=0.0, min_prob=0.0)
    prompt = tiny.prompts(batch)
    spec = selfspec.wrap(model, [selfspec.NGramDrafter(1, min_prob=0.0), drafter])
    spec.generate(**prompt, max_new_tokens=40, do_sample=False)
    assert spec.stats.accepted > 0
    cache = drafter.cache
    for b, text in enumerate(drafter.text):
        length = len(text) - 1
        assert cache.lengths[b] == length
        ids = torch.tensor([text])
        with torch.no_grad():
            hidden = model(ids[:, :-1], output_hidden_states=True).hidden_states
            feature = network.fuse(torch.cat([hidden[0], hidden[2]], dim=-1))
            embedded = model.get_input_embeddings()(ids[:, 1:])
        kept: list[torch.Tensor] = []

        def attend(q: Any, k: Any, v: Any) -> Any:
            kept[:] = [k, v]  # noqa: B023
            return torch.zeros_like(q)

        network(
            embedded, feature, network.rotary(torch.arange(length)[None], torch.float64), attend
        )
        for mine, true in zip(cache.row(cache.layers[0], b), kept, strict=True):
            assert torch.allclose(mine, true[0], rtol=1e-9, atol=1e-9)
