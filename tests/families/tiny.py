"""Tiny random HuggingFace decoders and prompts for the token-identity tests.

Every model has vocabulary 64, four layers and weights wide enough (std 0.3, not the usual 0.02)
that greedy decoding neither cycles nor forgives: one wrong position, mask bit or stale key changes
the text. No special token ends a generation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    T5Config,
)

import selfspec
from tests.families.shrink import tiny_config

VOCAB = 64
WINDOW = 8
WEIGHT_STD = 0.3
PAD = 0

# Some families run into short cycles more often than the rest. Added to the caller's seed, so that
# seed 0 is one where the first few prompts do not.
_SEED_OFFSET = {
    "bloom": 1,
    "cohere2": 15,
    "falcon_alibi": 8,
    "mpt": 7,
    "olmo2": 3,
    "opt": 22,
    "starcoder2": 15,
    "t5": 21,
}

_IDS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
_SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
_MHA: dict[str, Any] = {**_IDS, **_SIZES, "intermediate_size": 128, "max_position_embeddings": 512}
_GQA: dict[str, Any] = {**_MHA, "num_key_value_heads": 2}
_FALCON: dict[str, Any] = {
    **_IDS,
    **_SIZES,
    "ffn_hidden_size": 128,
    "max_position_embeddings": 512,
}
# Explicit, because gemma3's default pattern would make all four layers slide.
_HYBRID = ["sliding_attention", "full_attention"] * 2


def _llama_gqa3() -> PretrainedConfig:
    # Three query heads share a key/value head: a group size that is no power of two.
    return LlamaConfig(**{**_GQA, "hidden_size": 96, "num_attention_heads": 6}, head_dim=16)


def _qwen2_sliding() -> PretrainedConfig:
    # Layers from max_window_layers on slide: two full ones, then two sliding ones.
    return Qwen2Config(**_GQA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)


def _gemma2() -> PretrainedConfig:
    # Eager by default from transformers 5.13; before, sdpa, which ignores the attention softcap.
    # Caps low enough to bend typical scores; at the published 50 and 30 they would be idle.
    # Untied: normalised sublayers next to embeddings scaled by 8 would echo the last token.
    return Gemma2Config(
        **_GQA,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_HYBRID,
        attn_logit_softcapping=10.0,
        final_logit_softcapping=10.0,
        tie_word_embeddings=False,
    )


def _gemma3() -> PretrainedConfig:
    return Gemma3TextConfig(
        **_GQA,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_HYBRID,
        tie_word_embeddings=False,  # as gemma2
    )


def _gpt2() -> PretrainedConfig:
    return GPT2Config(**_IDS, n_embd=64, n_layer=4, n_head=4, n_inner=128, n_positions=256)


def _opt() -> PretrainedConfig:
    # Embeddings narrower than the hidden size bring in project_in and project_out, as in OPT-350m.
    return OPTConfig(
        **_IDS, **_SIZES, ffn_dim=128, max_position_embeddings=256, word_embed_proj_dim=32
    )


def _granite() -> PretrainedConfig:
    # All four multipliers away from their neutral values, so that none can be forgotten.
    return GraniteConfig(
        **_GQA,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    )


def _cohere2() -> PretrainedConfig:
    # Full layers have no rotary embedding. The published logit_scale of 1/16 would shrink the gap
    # between the best two logits towards float32 noise.
    return Cohere2Config(**_GQA, sliding_window=WINDOW, layer_types=_HYBRID, logit_scale=0.5)


def _gpt_oss() -> PretrainedConfig:
    # Eager only (attention sinks). The default YaRN settings belong to 131072 positions.
    return GptOssConfig(
        **_GQA,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=_HYBRID,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    )


def _qwen3_moe() -> PretrainedConfig:
    return Qwen3MoeConfig(**_GQA, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)


def _deepseek_v3() -> PretrainedConfig:
    # MLA: keys are 16 + 8 wide, values 16; only the last 8 key channels rotate, interleaved.
    return DeepseekV3Config(
        **_MHA,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=64,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )


# ALiBi with few heads is nearly blind to order (slopes from 1/4 down), and an order-blind model
# with tied embeddings repeats itself: hence more heads, and untied.
def _bloom() -> PretrainedConfig:
    return BloomConfig(**_IDS, hidden_size=64, n_layer=4, n_head=16, tie_word_embeddings=False)


def _mpt() -> PretrainedConfig:
    return MptConfig(
        **_IDS,
        d_model=64,
        n_layers=4,
        n_heads=8,
        expansion_ratio=2,
        max_seq_len=512,
        use_cache=True,  # the class default is False, and generate would obey it
        tie_word_embeddings=False,
    )


def _falcon_alibi() -> PretrainedConfig:
    # The layout of falcon-rw-1b, the published ALiBi model.
    return FalconConfig(
        **{**_FALCON, "num_attention_heads": 8},
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        tie_word_embeddings=False,
    )


def _t5() -> PretrainedConfig:
    # Scores are not scaled by the head size; narrow heads keep them soft.
    return T5Config(
        **{**_IDS, "decoder_start_token_id": PAD},
        d_model=64,
        d_kv=4,
        d_ff=128,
        num_layers=4,
        num_heads=16,
        feed_forward_proj="gated-gelu",
    )


_TREE: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GQA),
    "llama_gqa3": _llama_gqa3,
    "qwen2": lambda: Qwen2Config(**_GQA),
    "qwen2_sliding": _qwen2_sliding,
    # Heads that are wider together than the hidden size, as in Qwen3-0.6B.
    "qwen3": lambda: Qwen3Config(**_GQA, head_dim=32),
    "mistral": lambda: MistralConfig(**_GQA, sliding_window=WINDOW),
    "gemma": lambda: GemmaConfig(**_GQA, head_dim=16),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi": lambda: PhiConfig(**_GQA),
    "phi3": lambda: Phi3Config(**_GQA),
    "gpt2": _gpt2,
    "gpt_neox": lambda: GPTNeoXConfig(**_MHA),
    "opt": _opt,
    "falcon": lambda: FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_mqa": lambda: FalconConfig(**_FALCON),
    "stablelm": lambda: StableLmConfig(**_GQA),
    "olmo2": lambda: Olmo2Config(**_GQA),
    "granite": _granite,
    "cohere2": _cohere2,
    "starcoder2": lambda: Starcoder2Config(**_GQA),
    "mixtral": lambda: MixtralConfig(**_GQA, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _qwen3_moe,
    "smollm3": lambda: SmolLM3Config(**_GQA),  # the last layer has no rotary embedding
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
}
_CHAIN_ONLY: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt_neo": partial(tiny_config, "gpt_neo"),
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon_alibi": _falcon_alibi,
}
_UNSUPPORTED: dict[str, Callable[[], PretrainedConfig]] = {"t5": _t5}
MORE: tuple[str, ...] = (
    *("apertus", "arcee", "biogpt", "codegen", "cohere", "ernie4_5", "exaone4", "glm4", "glm4_moe"),
    *("gptj", "granitemoe", "helium", "nemotron", "olmo", "olmo3", "persimmon", "phimoe"),
    *("qwen2_moe", "seed_oss"),
    "gemma3n_text",  # its last two layers read the keys of the first two
    "gpt_bigcode",  # one key head for all
    "moshi",  # its window is nowhere but in transformers' cache
)
"""Trees, too, from default configurations that were made small; tested with fewer drafters."""
_CONFIGS = {
    **_TREE,
    **_CHAIN_ONLY,
    **_UNSUPPORTED,
    **{kind: partial(tiny_config, kind) for kind in MORE},
}

TREE: tuple[str, ...] = tuple(_TREE)
"""Rotary or learned positions: the stock forward takes a token tree."""
CHAIN_ONLY: tuple[str, ...] = tuple(_CHAIN_ONLY)
"""ALiBi, or a window (gpt_neo): they follow cache slots, so only chains can be verified."""
UNSUPPORTED: tuple[str, ...] = tuple(_UNSUPPORTED)
"""An encoder-decoder. (Recurrent state: see `shrink.tiny_config`.)"""
UNPADDED_FLOAT64: tuple[str, ...] = ("gemma2", "bloom", "mpt")
"""Families whose stock float64 logits are NaN in left-padded rows: use `prompts(ragged=False)`.

Their eager attention adds float64's lowest number to the scores, then takes the softmax in float32,
where a fully masked (padding) row is all -inf; the NaN spreads through the values. (gemma2 is
affected only where its default is eager.)
"""


@torch.no_grad()
def redraw(model: PreTrainedModel, seed: int) -> None:
    """Draw every weight anew; `initializer_range` misses experts, projections and embeddings."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            # Zero row and column sums: the positive mean of GELU and ReLU would otherwise push
            # every token the same way and drown the context.
            noise -= noise.mean(0)
            noise -= noise.mean(1, keepdim=True)
        if parameter.ndim > 1:
            parameter.copy_(WEIGHT_STD * noise)
        else:  # Norm scales stay near neutral; biases and sinks leave zero.
            parameter.add_(0.1 * noise)
        if name.endswith("q_norm.weight"):
            # Normalised queries and keys give scores of std 1, nearly an average; make it 3.
            parameter.add_(2.0)


def llama(**changes: Any) -> LlamaForCausalLM:
    """A llama as the others here but for `changes` of its config; every call makes a new one."""
    config = LlamaConfig(**{**_GQA, "initializer_range": WEIGHT_STD, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


# What a wrapper measures is shared with all others of its model, while one of them lives.
_WRAPPERS: list[selfspec.SpeculativeModel] = []


@cache
def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A tiny random model in eval mode on the CPU, with its default attention implementation.

    The instance is shared between calls with the same arguments: never change it.

    Args:
        name: A member of `TREE`, `MORE`, `CHAIN_ONLY` or `UNSUPPORTED`.
        dtype: Of the parameters; whatever it is, they hold the float32 weights (exactly in
            float64).
        seed: Of the weights.

    Raises:
        ValueError: If `name` is unknown.
    """
    if name not in _CONFIGS:
        raise ValueError(f"name={name!r} is no tiny family; choose one of {', '.join(_CONFIGS)}")
    config = _CONFIGS[name]()
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    # The MoE families default to torch's grouped matmul, which has no float64.
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    weight_seed = seed + _SEED_OFFSET.get(name, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(weight_seed)  # redraw keeps what transformers drew for vectors
        model = auto.from_config(config, dtype=dtype, **experts)
    if dtype == torch.float32:
        redraw(model, weight_seed)
    else:
        model.load_state_dict(build(name, torch.float32, seed).state_dict())
    model.eval()
    with suppress(ValueError):
        _WRAPPERS.append(selfspec.wrap(model, "none"))
    return model


def prompts(
    batch: int, seed: int = 0, vocab: int = VOCAB, ragged: bool = True
) -> dict[str, torch.Tensor]:
    """Random left-padded prompts that end by repeating their own beginning.

    The repetition gives an n-gram drafter a match on its first call. Row b does not depend on
    `batch`.

    Args:
        batch: Number of rows B.
        seed: Of the token ids.
        vocab: Ids lie in [1, vocab); 0 is padding.
        ragged: Row b has 17, 9 or 4 tokens (b modulo 3); False: every row has 17.

    Returns:
        `input_ids` and `attention_mask`, int64 [B, 17].
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((batch, 17), PAD)
    mask = torch.zeros_like(ids)
    for row in range(batch):
        length = (17, 9, 4)[row % 3] if ragged else 17
        repeated = max(2, length // 3)
        head = torch.randint(1, vocab, (length - repeated,), generator=generator)
        ids[row, -length:] = torch.cat([head, head[:repeated]])
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}
