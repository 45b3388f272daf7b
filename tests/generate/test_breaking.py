"""What sessions of breaking it have found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    RobertaConfig,
    RobertaForCausalLM,
)

import selfspec
from tests.families import tiny
from tests.generate.common import NEW, raised, same
from tests.oracle import OracleDrafter, RandomTreeDrafter
from tests.parts import by_name


def test_small_position_tables_are_no_reason_against_trees() -> None:
    config = GPT2Config(n_positions=24, n_embd=32, n_layer=2, n_head=2, vocab_size=64)
    assert "token trees" in repr(selfspec.wrap(GPT2LMHeadModel(config).eval()))


@pytest.mark.parametrize("pads", [0, 12])
def test_longrope_around_its_limit(pads: int) -> None:
    """Frequencies change for a whole call at position 24: by positions, not by slots."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 24,
    }
    model = tiny.llama(max_position_embeddings=96, rope_parameters=rope)
    ids = torch.cat([torch.zeros(1, pads, dtype=torch.int64), tiny.prompts(1)["input_ids"]], 1)
    kwargs = {"attention_mask": (ids > 0).long(), "max_new_tokens": 30, "do_sample": False}
    plain = model.generate(ids, **kwargs)
    for drafter in (
        selfspec.NGramDrafter(1, min_prob=0.0),
        selfspec.EarlyExitDrafter(2, confidence=0.0),
    ):
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.generate(ids, **kwargs).equal(plain)


def test_other_dtypes_of_inputs(model: Any) -> None:
    prompt = tiny.prompts(3)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    spec = selfspec.wrap(model, drafter="ngram")
    ours = spec.generate(
        prompt["input_ids"].int(),
        attention_mask=prompt["attention_mask"].float(),
        max_new_tokens=NEW,
    )
    assert ours.equal(plain)
    assert spec.stats.fallbacks == 0


class Doubling(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.double() * 0.7


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_that_changes_the_dtype(model: Any, do_sample: bool) -> None:
    processors = LogitsProcessorList([Doubling()])
    same(
        model,
        tiny.prompts(1),
        max_new_tokens=NEW,
        logits_processor=processors,
        do_sample=do_sample,
    )


def test_classifier_free_guidance() -> None:
    for dtype in (torch.float32, torch.float64):
        same(
            tiny.build("llama", dtype=dtype), tiny.prompts(1), max_new_tokens=9, guidance_scale=1.5
        )


class OwnLoop(LlamaForCausalLM):
    def _sample(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super()._sample(input_ids, **kwargs)


def test_a_class_with_a_loop_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="it overrides _sample"):
        selfspec.wrap(OwnLoop(LlamaConfig(**tiny._GQA)).eval())


def test_models_whose_positions_come_from_cache_slots_are_refused() -> None:
    """Aligning the rows of a batch would move them; ALiBi does not mind, a position table does."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        is_decoder=True,
        init_std=0.3,
    )
    with pytest.raises(ValueError, match="cannot be wrapped"):
        selfspec.wrap(BartForCausalLM(config).eval())


@pytest.mark.parametrize("batch", [1, 3])
def test_encoder_style_decoders_with_shifted_position_tables(batch: int) -> None:
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
        pad_token_id=1,
        bos_token_id=None,
        eos_token_id=None,
        is_decoder=True,
        initializer_range=0.3,
    )
    model = RobertaForCausalLM(config).eval()
    ids = torch.randint(2, 64, (batch, 12), generator=torch.Generator().manual_seed(0))
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    for drafter in (
        "none",
        selfspec.NGramDrafter(1, min_prob=0.0),
        OracleDrafter(plain, 4, (0, 3)),
    ):
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.generate(ids, max_new_tokens=NEW, do_sample=False).equal(plain)


def test_a_model_in_training_mode_is_left_to_transformers() -> None:
    model = copy.deepcopy(tiny.build("gpt2"))
    spec = selfspec.wrap(model, drafter="ngram")
    model.train()
    torch.manual_seed(0)
    plain = model.generate(**tiny.prompts(1), max_new_tokens=NEW)
    torch.manual_seed(0)
    assert spec.generate(**tiny.prompts(1), max_new_tokens=NEW).equal(plain)
    assert spec.stats.fallbacks == 1


def test_a_model_copied_while_a_request_runs_is_an_ordinary_one(model: Any) -> None:
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=NEW)
    steps = selfspec.wrap(model, drafter=by_name("early-exit")).stream(**prompt, max_new_tokens=NEW)
    next(steps)
    next(steps)
    twin = copy.deepcopy(model)
    again = selfspec.wrap(model, drafter="ngram")
    steps.close()
    assert not any("selfspec" in type(m.__dict__.get("forward")).__module__ for m in twin.modules())
    for generate in (twin.generate, again.generate, selfspec.wrap(twin).generate):
        assert generate(**prompt, max_new_tokens=NEW).equal(plain)


def test_nan_logits_raise_under_sampling_as_plain_does() -> None:
    model = copy.deepcopy(tiny.build("llama"))
    spec = selfspec.wrap(model, drafter=RandomTreeDrafter())
    model.lm_head.weight.data[3] = float("nan")
    prompt = tiny.prompts(1)
    assert raised(lambda: spec.generate(**prompt, max_new_tokens=4, do_sample=True)) == raised(
        lambda: model.generate(**prompt, max_new_tokens=4, do_sample=True)
    )
    plain = model.generate(**prompt, max_new_tokens=4)
    assert spec.generate(**prompt, max_new_tokens=4).equal(plain)


def test_autocast_reaches_the_thread_of_a_stream(model: Any) -> None:
    prompt = tiny.prompts(1)
    spec = selfspec.wrap(model, drafter="none")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = spec.generate(**prompt, max_new_tokens=NEW)[0, 17:].tolist()
        steps = list(spec.stream(**prompt, max_new_tokens=NEW))
    assert [t for step in steps for t in step.tokens[0]] == whole


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafter", ["none", "ngram", "early-exit"])
@pytest.mark.parametrize("batch", [1, 3])
def test_under_autocast_and_after_it(batch: int, drafter: str, graphs: bool) -> None:
    model, prompt = tiny.build("llama_gqa3"), tiny.prompts(batch)
    spec = selfspec.wrap(model, drafter=by_name(drafter), cuda_graphs=graphs)
    for dtype in (torch.bfloat16, None, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            plain = model.generate(**prompt, max_new_tokens=2)
            out = spec.generate(**prompt, max_new_tokens=12)
        assert out[:, :-10].equal(plain)  # later ones may be tied in bfloat16
        if dtype is None:
            assert out.equal(model.generate(**prompt, max_new_tokens=12))


def test_what_a_model_can_do_is_not_found_by_the_rounding_of_autocast() -> None:
    """What is found when a model is wrapped is kept for all its requests."""
    model = copy.deepcopy(tiny.build("llama_gqa3"))
    with torch.autocast("cpu", torch.bfloat16):
        spec = selfspec.wrap(model, by_name("early-exit"))
        spec.generate(**tiny.prompts(1), max_new_tokens=4)
    found = spec._target.architecture
    assert found.support == "tree"
    assert found.readout is not None
    model.lm_head.to(torch.bfloat16)  # runs under autocast only
    with torch.autocast("cpu", torch.bfloat16):
        plain = model.generate(**tiny.prompts(1), max_new_tokens=4)
        assert selfspec.wrap(model).generate(**tiny.prompts(1), max_new_tokens=4).equal(plain)


def test_a_cache_that_has_no_layers_yet() -> None:
    model, prompt = tiny.build("llama_gqa3"), tiny.prompts(2)
    plain = model.generate(**prompt, max_new_tokens=8)
    cache = DynamicCache()
    assert (
        selfspec.wrap(model)
        .generate(**prompt, past_key_values=cache, max_new_tokens=8)
        .equal(plain)
    )
    # Older transformers do not say whose an empty cache is; there it stays empty.
    filled = plain.shape[1] - 1 if hasattr(cache, "_is_user_defined") else 0
    assert cache.get_seq_length() == filled


@pytest.mark.parametrize(
    "drafter", [selfspec.EarlyExitDrafter(1, 3, 0.0), selfspec.LayerSkipDrafter([3], 3, 0.0)]
)
def test_layers_replaced_after_wrapping(drafter: Any) -> None:
    model: Any = copy.deepcopy(tiny.build("llama_gqa3"))
    prompt = tiny.prompts(2)
    spec = selfspec.wrap(model, drafter)
    before = spec.generate(**prompt, max_new_tokens=12)
    for part in ("layer", "attention", "order"):
        layers = model.model.layers
        if part == "layer":
            layers[1] = copy.deepcopy(layers[1])
            torch.nn.init.normal_(layers[1].mlp.up_proj.weight)
        elif part == "attention":
            layers[2].self_attn = copy.deepcopy(layers[2].self_attn)
            torch.nn.init.normal_(layers[2].self_attn.v_proj.weight)
        else:
            layers[1].mlp, layers[2].mlp = layers[2].mlp, layers[1].mlp
        plain = model.generate(**prompt, max_new_tokens=12)
        assert not plain.equal(before)
        assert spec.generate(**prompt, max_new_tokens=12).equal(plain)
        before = plain
