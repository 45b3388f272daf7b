"""Area I: what a long prompt costs in memory."""

from __future__ import annotations

import gc
from functools import wraps
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

import selfspec
from benchmark_memory import BAR, FullTrees, LiveStorages, live_bytes
from tests.families import tiny
from tests.oracle import OracleDrafter

FLOAT = 4


def build(vocab: int, layers: int, **sizes: int) -> Any:
    torch.manual_seed(0)
    sizes |= {"hidden_size": 32, "num_hidden_layers": layers, "vocab_size": vocab}
    config = LlamaConfig(**{**tiny._GQA, **sizes, "max_position_embeddings": 8192})
    return LlamaForCausalLM(config).eval()


def prompt_of(model: Any, length: int, batch: int = 1) -> dict[str, Any]:
    ids = torch.randint(1, model.config.vocab_size, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}


def test_live_storages_count_what_is_alive() -> None:
    with LiveStorages() as storages:
        kept = torch.zeros(1000)
        view = kept[10:]
        torch.ones(3000).add_(1)
        assert storages.live == 1000 * FLOAT
        del kept
        assert storages.live == 1000 * FLOAT  # the view holds it
        del view
    assert (storages.live, storages.peak, storages.largest) == (0, 4000 * FLOAT, 3000 * FLOAT)


class Tapping(OracleDrafter):
    """Wants to see hidden states, which the loop must not keep for it."""

    hidden_taps = (0, 1)


@pytest.mark.parametrize("batch", [1, 3])
def test_i3_no_logits_of_the_whole_prompt(batch: int) -> None:
    """50,000 words, a prompt of 2,000, k = 4 drafts."""
    vocab, k = 50_000, 4
    model = build(vocab, 1)
    prompt = prompt_of(model, 2000, batch)
    answers = torch.randint(1, vocab, (batch, 2020))
    for drafter in (Tapping(answers, k), selfspec.EarlyExitDrafter(1, k, 0.0), "auto"):
        spec = selfspec.wrap(model, drafter=drafter, max_draft_tokens=k)
        storages = live_bytes(model, spec.generate, **prompt, max_new_tokens=6)
        assert spec.stats.fallbacks == 0
        assert storages.largest < batch * (k + 2) * vocab * FLOAT


def test_i3_a_model_that_gives_all_logits_anyway() -> None:
    """They go as soon as the last row has been taken, as in plain `generate`."""

    class Wordy(GemmaForCausalLM):
        @wraps(GemmaForCausalLM.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("logits_to_keep", None)
            return super().forward(*args, **kwargs)

    torch.manual_seed(0)
    sizes = {"vocab_size": 4000, "num_hidden_layers": 1}
    model = Wordy(GemmaConfig(**{**tiny._GQA, **sizes}, head_dim=16)).eval()
    prompt = prompt_of(model, 300)
    seen: list[int] = []

    class Watching(FullTrees):
        def observe(self, state: Any, output: Any, acceptance: Any) -> None:
            seen.append(storages.live)

    spec = selfspec.wrap(model, drafter=Watching(2), max_draft_tokens=2)
    with LiveStorages([*model.parameters(), *model.buffers()]) as storages:
        spec.generate(**prompt, max_new_tokens=6)
    assert storages.largest >= 300 * 4000 * FLOAT
    assert max(seen) < 50 * 4000 * FLOAT


# ------------------------------------------------------------------------- beside plain


LONG = 4096


@pytest.fixture(scope="module")
def long_model() -> Any:
    return build(512, 6, num_key_value_heads=4, intermediate_size=32)


@pytest.fixture(scope="module")
def plain_peak(long_model: Any) -> int:
    prompt = prompt_of(long_model, LONG)
    return live_bytes(long_model, long_model.generate, **prompt, max_new_tokens=34).peak


@pytest.mark.parametrize(("returned", "graphs"), [(True, False), (False, True)])
def test_i3_a_long_prompt_with_trees_of_32_nodes(
    long_model: Any, plain_peak: int, returned: bool, graphs: bool
) -> None:
    """All but the weights, which would only hide a difference."""
    prompt = prompt_of(long_model, LONG)
    spec = selfspec.wrap(long_model, drafter=FullTrees(), cuda_graphs=graphs)
    storages = live_bytes(
        long_model, spec.generate, **prompt, max_new_tokens=34, return_dict_in_generate=returned
    )
    assert spec.stats.drafted > 500
    assert storages.peak <= BAR * plain_peak


def test_i3_a_long_cache_of_the_users_is_held_once(long_model: Any) -> None:
    prompt = prompt_of(long_model, LONG)
    peaks = []
    spec = selfspec.wrap(long_model, drafter=FullTrees())
    for generate in (long_model.generate, spec.generate):
        gc.collect()
        with LiveStorages([*long_model.parameters(), *long_model.buffers()]) as storages:
            cache = DynamicCache(config=long_model.config)
            with torch.no_grad():
                long_model(prompt["input_ids"][:, :-9], past_key_values=cache, logits_to_keep=1)
            storages.peak = storages.live
            generate(**prompt, past_key_values=cache, max_new_tokens=12)
        assert cache.get_seq_length() == LONG + 11
        peaks.append(storages.peak)
    plain, ours = peaks
    assert ours <= BAR * plain
