"""A tiny configuration of any model type, made from its default one by the names of its fields."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

VOCAB = 64
SPECIAL = 60
"""Ids from here on may mean an image or the like; prompts keep below."""
LAYERS = 4

_SIZES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size "
    "hidden_size d_model n_embd emb_dim embedding_dim embed_dim moe_intermediate_size "
    "shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size "
    "expert_ffn_hidden_size moe_shared_expert_intermediate_size input_embedding_size "
    "output_embedding_size attention_hidden_size lru_width out_hidden_size backbone_hidden_size "
    "hidden_size_global chunk_size chunk_size_feed_forward mamba_d_ssm time_step_rank o_lora_rank "
    "ple_embed_dim pronunciation_vocab_size shape_vocab_size audio_vocab_size output_channels "
    "vision_output_dim projector_input_dim projector_output_dim input_size adapter_in_dim",
    128: "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff "
    "d_inner dim_ff intermediate_size_mlp dense_intermediate_size feed_forward_size mlp_dim "
    "ngram_vocab_size_base encoder_hash_byte_group_vocab",
    LAYERS: "num_blocks depth num_attention_heads n_head n_heads num_heads attention_heads "
    "decoder_attention_heads encoder_attention_heads num_encoder_attention_heads "
    "num_decoder_attention_heads "
    "swa_num_attention_heads index_n_heads linear_num_value_heads linear_num_heads "
    "conf_num_hidden_layers num_global_layers num_query_groups loop_layer_index_end "
    "layer_group_size n_layers_per_attn_res_block interleave_moe_layer_step",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts "
    "linear_num_key_heads n_group num_expert_group o_groups n_recurrent_layers "
    "num_layers_per_stack loop_layer_index_start max_window_layers attn_layer_period "
    "sliding_window_pattern no_rope_layer_interval global_attn_every_n_layers num_kv_shared_layers",
    1: "n_input_layers n_output_layers attn_layer_offset topk_group first_k_dense_replace "
    "num_dense_layers num_nextn_predict_layers",
    8: "num_experts n_routed_experts num_local_experts moe_num_experts rotary_dim qk_rope_head_dim "
    "sliding_window sliding_window_size window_size attention_window_size index_topk "
    "attention_chunk_size local_attention local_attention_window_len laurel_rank mamba_n_heads "
    "mamba_num_heads n_mamba_heads router_hidden_size keep_window_size loop_gate_rank "
    "gated_norm_rank zero_expert_num hc_lowrank prompt_length num_filters",
    16: "head_dim kv_channels d_head dim_head v_head_dim qk_nope_head_dim kv_lora_rank "
    "index_head_dim swa_head_dim swa_v_head_dim global_head_dim linear_head_dim "
    "linear_key_head_dim linear_value_head_dim query_pre_attn_scalar hidden_size_per_layer_input "
    "mamba_d_head mamba_head_dim mamba_headdim mamba_d_state ssm_state_size state_size "
    "mamba_chunk_size mamba_dt_rank adapter_rank pronunciation_embed_dim shape_embed_dim "
    "dim_model_base split_ngram_parts block_size",
    24: "qk_head_dim",
    32: "q_lora_rank attention_head_dim word_embed_proj_dim base_channels upsample_groups",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions "
    "max_source_positions context_length model_max_length max_context_length "
    "original_max_position_embeddings",
}
_LIMITS = {name: size for size, names in _SIZES.items() for name in names.split()}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")
_HEADS = ("num_attention_heads", "n_heads", "n_head", "swa_num_attention_heads")
# Set even where the default is None or smaller.
_ALWAYS = {
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_encoder_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
}

# What no rule on names gives.
_ATTENTION_EVERY_SECOND = ["mamba", "attention"] * 2
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "dots1": {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "granitemoehybrid": {"layer_types": _ATTENTION_EVERY_SECOND},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
}


_EXCEPTIONS |= {
    name: {"rope_parameters": {"rope_type": "default", "mrope_section": section}}
    for section, names in (
        (
            [2, 3, 3],
            "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen3_vl_text paddleocr_vl_text",
        ),
        ([2, 2, 4], "glm4v_text glm46v_text glm_ocr_text glmga_text"),
    )
    for name in names.split()
}


def tiny_config(model_type: str) -> PretrainedConfig:
    """The default configuration of `model_type` with every size made small, and no end token.

    Raises:
        Exception: Whatever the configuration's own class raises.
    """
    cls = CONFIG_MAPPING[model_type]
    config = cls(**_small(cls()))
    for one in (config, config.get_text_config(decoder=True)):
        for name in ("bos_token_id", "eos_token_id"):
            with suppress(Exception):  # some classes insist on a number
                setattr(one, name, None)
    return config


def _small(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of `config` that have to change, as arguments of its class."""
    fields = config.to_dict()
    depth = getattr(config, "num_hidden_layers", None)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "per_layer_config":  # its class makes it anew
            continue
        if name in config.sub_configs:
            inner = getattr(config, name, None)
            if inner is not None:
                small[name] = {**_small(inner), "model_type": inner.model_type}
        elif isinstance(value, list) and value and len(value) == depth:
            small[name] = [_number(name, kind) for kind in _kinds(value)]
        elif name.endswith(("_token_id", "_token_index")):
            small[name] = _special(name, value)
        elif name in _KV_HEADS:
            small[name] = _kv_heads(value, fields)
        elif name == "tie_word_embeddings":  # tied, a random model repeats the last token
            small[name] = False
        elif name == "is_decoder" and not config.is_encoder_decoder:
            small[name] = True
        elif isinstance(value, dict):
            small[name] = _rope(value)
        elif name in _ALWAYS:
            small[name] = (
                8 if name == "head_dim" and "qk_rope_head_dim" in fields else _ALWAYS[name]
            )
        else:
            small[name] = _number(name, value)
    small |= _EXCEPTIONS.get(config.model_type, {})
    return {name: value for name, value in small.items() if value != fields.get(name, small)}


def _number(name: str, value: Any) -> Any:
    limit = _LIMITS.get(name)
    return limit if isinstance(value, int) and limit is not None and value > limit else value


def _kinds(values: list[Any]) -> list[Any]:
    """Four of a list that has an item for every layer, with each kind of item among them."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    # The last layer is special in some families (always full attention).
    kinds = sorted(kinds[:LAYERS], key=lambda kind: kind == values[-1])
    return [kinds[i % len(kinds)] for i in range(LAYERS)]


def _special(name: str, value: Any) -> Any:
    if name == "pad_token_id":
        return 0
    if isinstance(value, list):
        return [min(v, VOCAB - 1) for v in value]
    return SPECIAL + value % (VOCAB - SPECIAL) if isinstance(value, int) and value > 9 else value


def _kv_heads(value: Any, fields: dict[str, Any]) -> Any:
    heads = next((fields[name] for name in _HEADS if fields.get(name)), None)
    if value == 1:
        return value
    return LAYERS if value in (None, heads) else 2


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings whose lists fit a head of 16; by layer type, perhaps."""
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            small[name] = _rope(value)
        elif name == "mrope_section":
            small[name] = [2, 3, 3]
        elif name in ("short_factor", "long_factor"):
            small[name] = value[:8]
        else:
            small[name] = value
    return small
