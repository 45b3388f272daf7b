"""Lengths of any size, the last position of a model, and caches that are not what they seem."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, raised
from tests.oracle import OracleDrafter

# ------------------------------------------------------------------------- lengths


@pytest.mark.parametrize(("batch", "graphs"), [(1, False), (2, False), (2, True)])
def test_a_maximum_length_may_be_huge_or_no_integer(model: Any, batch: int, graphs: bool) -> None:
    prompt = tiny.prompts(batch)
    ends = {**prompt, "do_sample": False, "eos_token_id": list(range(1, 20))}
    plain = model.generate(**ends)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain), cuda_graphs=graphs)
    for length in (int(1e30), 2**40, 2**31, 2**31 - 1, float("inf")):
        assert spec.generate(**ends, max_length=length).equal(plain)
        assert spec.generate(**ends, stopping_criteria=[MaxLengthCriteria(length)]).equal(plain)
    assert spec.generate(**ends, max_new_tokens=2**62).equal(plain)
    for part in (25.0, 24.5):
        cut = model.generate(**prompt, max_length=part)
        assert cut.shape[1] == 25
        assert spec.generate(**prompt, max_length=part).equal(cut)
    assert spec.stats.fallbacks == 0
    assert spec.stats.accepted > 0


# ------------------------------------------------------------------------- positions


@pytest.fixture(scope="module")
def learned() -> Any:
    """A model with a table of 32 positions."""
    sizes: dict[str, int] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    config = GPT2Config(n_positions=32, initializer_range=0.3, **sizes, **ids)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_stay_on_a_table_of_positions(learned: Any, batch: int, graphs: bool) -> None:
    prompt = tiny.prompts(batch)
    whole = learned.generate(**prompt, max_length=33)
    ends = sorted(set(whole[:, 30].tolist()))  # the first row to reach its end is two short of it
    plain = learned.generate(**prompt, max_length=33, eos_token_id=ends)
    # More right drafts than there are positions.
    answers = torch.cat([plain, plain], 1)
    for drafter in (OracleDrafter(answers, 8), selfspec.EarlyExitDrafter(2, 8, 0.0)):
        spec = selfspec.wrap(learned, drafter=drafter, cuda_graphs=graphs)
        assert spec.generate(**prompt, max_new_tokens=100, eos_token_id=ends).equal(plain)
        assert spec.stats.accepted > 0
        # ... and a text that does not end there fails as it does in plain.
        told = {
            raised(lambda g=g: g(**prompt, max_length=90))
            for g in (learned.generate, spec.generate)
        }
        assert told == {"IndexError: index out of range in self"}


@pytest.mark.parametrize("graphs", [False, True])
def test_computed_positions_go_on(model: Any, graphs: bool) -> None:
    """What a rotary model was made for is no end; drafts there are as good as anywhere."""
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = 20
    short = LlamaForCausalLM(config).eval()
    short.load_state_dict(model.state_dict())
    prompt = tiny.prompts(3)
    plain = short.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(short, drafter=OracleDrafter(plain, 7), cuda_graphs=graphs)
    steps = list(spec.stream(**prompt, max_new_tokens=NEW + 1))
    assert [len(step.tokens[0]) for step in steps[:4]] == [1, 8, 8, 8]
    assert spec.generate(**prompt, max_new_tokens=NEW).equal(plain)


# ------------------------------------------------------------------------- caches


class Halving(DynamicCache):
    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys * 0.5, values * 0.5, *args, **kwargs)


def replaced(of: str) -> DynamicCache:
    """A cache with an `update` of its own, or whose first layer has one."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 0, 16), torch.zeros(1, 2, 0, 16), 0)
    thing: Any = cache if of == "cache" else cache.layers[0]
    own = thing.update
    thing.update = lambda keys, *args, **kwargs: own(keys * 0.5, *args, **kwargs)
    return cache


@pytest.mark.parametrize("kind", ["subclass", "cache", "layer"])
def test_a_cache_that_computes_is_left_alone(model: Any, kind: str) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter="ngram")
    plain, ours = (
        g(
            **prompt,
            past_key_values=Halving() if kind == "subclass" else replaced(kind),
            max_new_tokens=NEW,
        )
        for g in (model.generate, spec.generate)
    )
    assert not plain.equal(model.generate(**prompt, max_new_tokens=NEW))
    assert ours.equal(plain)
    assert spec.stats.fallbacks == 1


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_of_another_dtype_is_promoted(model: Any, batch: int, graphs: bool) -> None:
    prompt = tiny.prompts(batch)
    whole = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(whole), cuda_graphs=graphs)
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, 6), value=1)

    def resume(generate: Any, cast: torch.dtype) -> tuple[torch.Tensor, DynamicCache]:
        half = model.generate(**prompt, max_new_tokens=6, return_dict_in_generate=True)
        cache = half.past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.to(cast), layer.values.to(cast)
        kwargs = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": NEW - 6}
        return generate(half.sequences, **kwargs), cache

    for cast in (torch.float16, torch.bfloat16):
        (plain, theirs), (ours, mine) = (resume(g, cast) for g in (model.generate, spec.generate))
        assert ours.equal(plain)
        assert mine.layers[0].keys.dtype == theirs.layers[0].keys.dtype == torch.float32
        assert mine.get_seq_length() == theirs.get_seq_length()
    # A wider one does not fit the model, in plain either, and does not stay in the way.
    for generate in (model.generate, spec.generate):
        assert "dtype" in raised(lambda g=generate: resume(g, torch.float64))
    assert spec.generate(**prompt, max_new_tokens=NEW).equal(whole)
    assert spec.stats.fallbacks == 0
    assert spec.stats.accepted > 0


def test_a_cache_of_another_dtype_after_the_model_was_cast(model: Any) -> None:
    prompt, mine = tiny.prompts(1), copy.deepcopy(model)
    whole = mine.generate(**prompt, max_new_tokens=NEW)
    half = mine.generate(**prompt, max_new_tokens=6, return_dict_in_generate=True)
    spec = selfspec.wrap(mine, drafter=OracleDrafter(whole))
    mine.double()
    plain, ours = (
        g(half.sequences, past_key_values=copy.deepcopy(half.past_key_values), max_new_tokens=NEW)
        for g in (mine.generate, spec.generate)
    )
    assert ours.equal(plain)
    assert spec.stats.fallbacks == 0


def test_a_cache_of_another_batch(model: Any) -> None:
    three, one = tiny.prompts(3)["input_ids"], tiny.prompts(1)
    half = model.generate(three, max_new_tokens=2, return_dict_in_generate=True)
    spec = selfspec.wrap(model)
    told = {
        raised(lambda g=g: g(**one, past_key_values=copy.deepcopy(half.past_key_values)))
        for g in (model.generate, spec.generate)
    }
    assert len(told) == 1


def test_a_criterion_that_reads_the_users_cache(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, outs = tiny.prompts(1), []
    spec = selfspec.wrap(model, drafter=OracleDrafter(model.generate(**prompt)))
    for generate in (model.generate, spec.generate):
        with torch.no_grad():
            cache = model(prompt["input_ids"][:, :4], use_cache=True).past_key_values

        def full(ids: Any, scores: Any, cache: Any = cache) -> torch.Tensor:
            return torch.tensor([cache.get_seq_length() >= 22])

        outs.append(generate(**prompt, past_key_values=cache, stopping_criteria=[full]))
    assert outs[1].equal(outs[0])
    assert "(stopping_criteria) may look at the cache" in caplog.text


# ------------------------------------------------------------------------- padding


@pytest.mark.parametrize("pad", [-1, 64])
def test_padding_that_cannot_be_embedded(model: Any, pad: int) -> None:
    spec = selfspec.wrap(model, drafter="ngram")
    for batch in (1, 2):  # alone nothing is padded
        kwargs = {**tiny.prompts(batch), "eos_token_id": 25, "pad_token_id": pad}
        if batch == 1:
            assert spec.generate(**kwargs).equal(model.generate(**kwargs))
            assert spec.stats.fallbacks == 0
        else:
            told = {raised(lambda g=g, k=kwargs: g(**k)) for g in (model.generate, spec.generate)}
            assert told == {"IndexError: index out of range in self"}


def test_an_end_without_padding(model: Any) -> None:
    mine = copy.deepcopy(model)
    mine.generation_config.pad_token_id = None
    kwargs = {**tiny.prompts(1), "stopping_criteria": [EosTokenCriteria(torch.tensor([25]))]}
    generates = (mine.generate, selfspec.wrap(mine, drafter="ngram").generate)
    assert len({raised(lambda g=g: g(**kwargs)) for g in generates}) == 1
