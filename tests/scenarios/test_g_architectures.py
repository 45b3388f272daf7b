"""G: what an architecture does differently, and what may be done about it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import selfspec
from selfspec.drafters import EarlyExitDrafter, LayerSkipDrafter
from tests.families import sweep, tiny
from tests.families.shrink import tiny_config
from tests.generate.common import same
from tests.oracle import OracleDrafter, RandomTreeDrafter

NEW = 32
# Float32 sums in another order, of keys and values around 10.
KV_ATOL = 1e-4
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}

# Type and what the refusal has to say.
REFUSED = {
    "mamba": "state",
    "mamba2": "state",
    "falcon_mamba": "state",
    "jamba": "state",
    "bamba": "state",
    "zamba": "state",
    "falcon_h1": "state",
    "recurrent_gemma": "state",
    "rwkv": "state",
    "lfm2": "state",
    "qwen3_next": "state",
    "llama4_text": "chunked",
    "doge": "(rule of its own|behind a token)",  # which keys it selects depends on the block
}


@pytest.mark.parametrize("kind", REFUSED)
def test_g1_what_cannot_be_rewound_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    with pytest.raises(ValueError, match=rf"cannot be wrapped: .*{REFUSED[kind]}.*as it is"):
        selfspec.wrap(model)


def test_g1_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be wrapped: it is an encoder-decoder"):
        selfspec.wrap(tiny.build("t5"))


class Recording(EarlyExitDrafter):
    """Early exit whose first draft can be looked at."""

    first: torch.Tensor | None = None

    def draft(self, state: Any, budget: int) -> Any:
        tree = super().draft(state, budget)
        if self.first is None:
            self.first = tree.tokens
        return tree


# Final norms: RMS, LayerNorm with a bias, RMS with 1 added to its weight and a soft cap behind.
@pytest.mark.parametrize("name", ["llama", "phi", "gpt_neox", "gemma2"])
def test_g3_early_logits_are_those_of_a_model_cut_short(name: str) -> None:
    model = tiny.build(name)
    prompt = tiny.prompts(1)
    short = copy.deepcopy(model)
    layers = selfspec.wrap(short)._target.architecture.layers
    inner = next(m for m in short.modules() if layers[0] in list(m.children()))
    for module in short.modules():
        for child, value in list(module.named_children()):
            if value is inner:
                setattr(module, child, inner[:2])
    with torch.no_grad():
        truth = short(**prompt, use_cache=False).logits.log_softmax(-1)
        # A copy: transformers leaves hooks on a model that is asked for its states.
        states = copy.deepcopy(model)(**prompt, use_cache=False, output_hidden_states=True)
    hidden = states.hidden_states[2]
    ids, log_probs = selfspec.wrap(model)._target.architecture.readout.top(hidden, tiny.VOCAB)
    torch.testing.assert_close(log_probs, truth.gather(-1, ids), atol=1e-4, rtol=0)
    # And so are the drafts: the first one continues the prompt and the target's first token.
    drafter = Recording(2, max_draft_tokens=4, confidence=0.0)
    selfspec.wrap(model, drafter=drafter).generate(**prompt, **GREEDY)
    assert drafter.first is not None
    root = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    expected = root
    for _ in range(4):
        with torch.no_grad():
            best = short(expected, use_cache=False).logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, best], dim=1)
    assert drafter.first.tolist() == expected[:, root.shape[1] - 1 :].tolist()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", [*tiny.CHAIN_ONLY])
def test_g4_positions_by_slot_make_chains_of_trees(name: str, batch: int) -> None:
    model, prompt = tiny.build(name), tiny.prompts(batch)
    plain = model.generate(**prompt, **GREEDY)
    oracle = OracleDrafter(plain, 5, wrong_at=(0, 3))
    for drafter in (RandomTreeDrafter(), oracle):
        spec = selfspec.wrap(model, drafter=drafter)
        assert "verifies chains only (" in repr(spec)
        assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
        assert spec.stats.fallbacks == 0
    assert spec.stats.accepted > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["gpt_bigcode", "gptj", "codegen"])
def test_g6_rolled_back_keys_are_those_of_plain(name: str, batch: int) -> None:
    model, prompt = tiny.build(name), tiny.prompts(batch)
    arguments = {**GREEDY, "return_dict_in_generate": True}
    plain = model.generate(**prompt, **arguments)
    oracle = OracleDrafter(plain.sequences, 4, wrong_at=(2, 3, 0), branches=2)
    spec = selfspec.wrap(model, drafter=oracle)
    ours = spec.generate(**prompt, **arguments)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert 0 < spec.stats.accepted < spec.stats.drafted
    field = "cache" if "cache" in plain else "past_key_values"
    rows = prompt["attention_mask"].sum(-1) - prompt["input_ids"].shape[1]
    for mine, theirs in zip(ours[field].layers, plain[field].layers, strict=True):
        assert mine.keys.shape == theirs.keys.shape
        for b, start in enumerate((-rows).tolist()):  # padding holds anything
            for one, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                torch.testing.assert_close(
                    one[b, :, start:], other[b, :, start:], atol=KV_ATOL, rtol=0
                )


def test_g6_keys_that_only_the_cache_drops_stay_dropped() -> None:
    """The masks of moshi know no window; transformers' cache, made from its config, does."""
    model, prompt = tiny.build("moshi"), tiny.prompts(1)
    plain = model.generate(**prompt, **GREEDY)
    for drafter in (
        "none",
        OracleDrafter(plain, 4, wrong_at=(2, 0)),
        selfspec.NGramDrafter(1, min_prob=0.0),
    ):
        spec = selfspec.wrap(model, drafter=drafter)
        assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
        assert spec.stats.fallbacks == 0


@pytest.fixture
def flash() -> Iterator[str]:
    """An implementation with the interface of flash attention: 2-D masks, causal at the end."""
    name = "imitated_flash_attention"

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any
    ) -> Any:
        if mask is not None and mask.ndim != 2:
            raise ValueError("flash attention takes no 4-D masks")
        rows, width = query.shape[2], key.shape[2]
        seen = torch.ones(rows, width, dtype=torch.bool).tril(width - rows)[None, None]
        if mask is not None:
            seen = seen & mask[:, None, None, -width:].bool()
        key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
        out = scaled_dot_product_attention(query, key, value, seen, scale=scaling)
        return out.nan_to_num().transpose(1, 2), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *, attention_mask=None, **kwargs: attention_mask)
    try:
        yield name
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name)


@pytest.mark.parametrize("batch", [1, 3])
def test_g7_attention_without_4d_masks_gets_chains(flash: str, batch: int) -> None:
    model, prompt = copy.deepcopy(tiny.build("llama")), tiny.prompts(batch)
    model.config._attn_implementation_internal = flash
    plain = model.generate(**prompt, **GREEDY)
    assert plain.tolist() == tiny.build("llama").generate(**prompt, **GREEDY).tolist()
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 4, wrong_at=(0, 2)))
    assert "verifies chains only" in repr(spec)
    assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
    assert spec.stats.accepted > 0 == spec.stats.fallbacks
    assert model.config._attn_implementation_internal == flash


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "drafter",
    [
        LayerSkipDrafter([3], confidence=0.0),
        LayerSkipDrafter([2, 3], confidence=0.0, branches=2),
        EarlyExitDrafter(1, confidence=0.0),
        EarlyExitDrafter(3, confidence=0.0, branches=2),
    ],
    ids=["skip", "skip all borrowers", "exit before", "exit behind"],
)
def test_g9_shared_keys_stay_where_they_are_read(drafter: Any, batch: int) -> None:
    """Layers 2 and 3 of this gemma3n read the keys and values of 0 and 1."""
    model, prompt = tiny.build("gemma3n_text"), tiny.prompts(batch)
    plain = model.generate(**prompt, **GREEDY)
    spec = selfspec.wrap(model, drafter=drafter)
    assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
    assert spec.stats.drafted > 0 == spec.stats.fallbacks


@pytest.mark.parametrize("layer", [0, 1])
def test_g9_a_lender_is_not_skipped(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"skip_set.attention has layers \[{layer}\].*\[2, 3\]"):
        selfspec.wrap(tiny.build("gemma3n_text"), drafter=LayerSkipDrafter([layer, 2]))
    alone = selfspec.SkipSet(mlp=frozenset({layer}))  # its keys are still there
    selfspec.wrap(tiny.build("gemma3n_text"), drafter=LayerSkipDrafter(alone))


LOOPED = [kind for kind in ("dory",) if kind in CONFIG_MAPPING]  # newer than our floor


@pytest.mark.parametrize("kind", LOOPED)
def test_g9_layers_in_loops_are_verified_from_the_beginning(kind: str) -> None:
    model, prompt = sweep.build(kind), tiny.prompts(3)
    plain = model.generate(**prompt, **GREEDY)
    for drafter in (EarlyExitDrafter(2, confidence=0.0), LayerSkipDrafter([1], confidence=0.0)):
        spec = selfspec.wrap(model, drafter=drafter)
        assert not spec._target.architecture.resumable
        assert spec.generate(**prompt, **GREEDY).tolist() == plain.tolist()
        assert spec.stats.drafted > 0 == spec.stats.fallbacks


class Counting(LlamaForCausalLM):
    """Lets the model count positions by itself, as some models for images do."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "position_ids": None}


def test_g10_padding_that_counts_as_text(caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    model.__class__ = Counting
    assert same(model, tiny.prompts(1), **GREEDY).accepted > 0
    with caplog.at_level(logging.WARNING, "selfspec"):
        same(model, tiny.prompts(3), falls_back=True, **GREEDY)
    assert "drops position_ids, so that padding counts as text" in caplog.text


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl"])
def test_g10_a_model_for_images_given_text_alone(kind: str, batch: int) -> None:
    model = sweep.build(kind)
    assert type(model).__name__.endswith("ForConditionalGeneration")
    assert same(model, tiny.prompts(batch), **GREEDY).accepted > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_g10_a_prompt_of_embeddings(name: str, batch: int) -> None:
    model, prompt = tiny.build(name), tiny.prompts(batch)
    embeds = model.get_input_embeddings()(prompt["input_ids"]).detach()
    arguments = {"attention_mask": prompt["attention_mask"], **GREEDY}
    plain = model.generate(inputs_embeds=embeds, **arguments)
    assert plain.shape == (batch, NEW)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 5, wrong_at=(0, 2)))
    ours = spec.generate(inputs_embeds=embeds, **arguments)
    assert ours.tolist() == plain.tolist()
    assert spec.stats.accepted > 0 == spec.stats.fallbacks


def test_g10_positions_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = tiny.build("llama"), tiny.prompts(1)
    usual = torch.arange(17)[None]
    assert same(model, {**prompt, "position_ids": usual}, **GREEDY).accepted > 0
    for odd in (usual + 5, 3 * usual):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "selfspec"):
            same(model, {**prompt, "position_ids": odd}, falls_back=True, **GREEDY)
        assert "position_ids are not the usual ones" in caplog.text
        shifted = model.generate(**prompt, position_ids=odd, **GREEDY)
        assert (3 * usual != odd).any() or shifted.tolist() != model.generate(
            **prompt, **GREEDY
        ).tolist()


def test_g10_inputs_per_token_are_left_to_plain(caplog: pytest.LogCaptureFixture) -> None:
    """`token_type_ids` grow with the text: who forgets that gives another text or an error."""
    model, prompt = tiny.build("gpt2"), tiny.prompts(2, ragged=False)
    kinds = torch.arange(17).remainder(2).expand(2, -1)
    with caplog.at_level(logging.WARNING, "selfspec"):
        same(model, {**prompt, "token_type_ids": kinds}, falls_back=True, **GREEDY)
    assert "the model is given token_type_ids" in caplog.text


class Cost:
    """A clock that a forward moves on by what its experts cost."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch, per_token: float) -> None:
        self.now, self.per_token = 0.0, per_token
        monkeypatch.setattr("selfspec.clock.perf_counter", lambda: self.now)
        self.hook = model.model.embed_tokens.register_forward_hook(self.spend)

    def spend(self, module: Any, args: Any, output: torch.Tensor) -> None:
        self.now += 1.0 - self.per_token + self.per_token * output.shape[1]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize(("per_token", "pays"), [(0.95, False), (0.02, True)])
def test_g12_experts_whose_cost_is_linear_switch_drafting_off(
    name: str, per_token: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are good (two in three hold); it is the verify that does or does not pay."""
    model, prompt = copy.deepcopy(tiny.build(name)), tiny.prompts(1)
    arguments = {"max_new_tokens": 160, "do_sample": False}
    plain = model.generate(**prompt, **arguments)
    Cost(model, monkeypatch, per_token)
    drafter = OracleDrafter(plain, 3, wrong_at=(3,))
    spec = selfspec.wrap(model, drafter=drafter, off_switch=True)
    assert spec.generate(**prompt, **arguments).tolist() == plain.tolist()
    stats = spec.stats
    assert stats.verifies > 0
    assert stats.plain_forwards > 0
    assert stats.break_even is not None
    assert stats.break_even == pytest.approx(1 + 3 * per_token, rel=0.05)
    assert (stats.mean_accepted_length > stats.break_even) == pays
    if pays:
        assert stats.plain_forwards < 5
    else:
        assert stats.verifies < 0.15 * stats.plain_forwards
    assert stats.tokens_per_second > (1.5 if pays else 0.95)
