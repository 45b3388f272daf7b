"""A value of every option of `generate`, by the group of the table it stands in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.configuration_utils import CompileConfig

from tests.families import tiny
from tests.generate.common import Columns
from tests.oracle import OracleDrafter
from tests.scenarios import text

NEW = 8
END = [*range(20, 28)]


@cache
def small(seed: int = 0) -> Any:
    """Two layers, because these tests are many; shared: never change it."""
    config = LlamaConfig(**{**tiny._GQA, "num_hidden_layers": 2})
    model = LlamaForCausalLM(config).eval()
    tiny.redraw(model, seed)
    return model


def answered(plain: Any) -> OracleDrafter:
    """Drafts what plain `generate` gave, ids or an output, wrong now and then."""
    return OracleDrafter(getattr(plain, "sequences", plain), 4, wrong_at=(0, 3))


@cache
def tokenizer() -> Any:
    """One that token healing takes."""
    tokenizer = copy.deepcopy(text.tokenizer())
    tokenizer.bos_token = text.USER
    return tokenizer


def unhealed(batch: int) -> torch.Tensor:
    """A prompt whose last token has longer ones beside it: "s", "st", "stop"."""
    return torch.tensor([tokenizer().encode(t) for t in ("the in s", "er in s", "in e s")[:batch]])


class Fresh:
    """An option made anew for every request.

    Args:
        make: Takes the number of sequences.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make


class Counting(LogitsProcessor):
    """Bans the last token at every third call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        if len(self.calls) % 3 == 0:
            scores[:, scores.argmax(-1)] = -float("inf")
        return scores


class AtSeven(StoppingCriteria):
    """Ends a row at a token divisible by 7, after a few."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 7 == 0) & (input_ids.shape[1] > 18)


def allowed(b: int, ids: torch.Tensor) -> list[int]:
    """For `prefix_allowed_tokens_fn`."""
    return list(range(int(ids[-1]) % 3, 64, 3))


def marked(b: int, ids: torch.Tensor) -> list[int]:
    """The same, promising to keep no state."""
    return allowed(b, ids)


marked.stateless = True  # type: ignore[attr-defined]


def _processors(batch: int) -> LogitsProcessorList:
    return LogitsProcessorList([Counting()])


def _criteria(batch: int) -> StoppingCriteriaList:
    return StoppingCriteriaList([AtSeven()])


def _negative(batch: int) -> torch.Tensor:
    return tiny.prompts(batch, seed=3, ragged=False)["input_ids"][:, :6]


def _others_logits(batch: int) -> dict[str, Any]:
    return {"negative_prompt_ids": Fresh(_negative), "guidance_scale": 2.0}


NO_IDS = {"input_ids": None, "attention_mask": None}
SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
RETURNED = {"return_dict_in_generate": True}
HEALED = {"inputs": Fresh(unhealed), **NO_IDS, "token_healing": True, "tokenizer": tokenizer()}

Cases = dict[str, list[dict[str, Any]]]

EXACT: Cases = {
    "max_length": [{"max_length": 22, "max_new_tokens": None}],
    "max_new_tokens": [{"max_new_tokens": n} for n in (1, 3)],
    "min_length": [{"min_length": 23, "eos_token_id": list(range(2, 60))}],
    "min_new_tokens": [{"min_new_tokens": 7, "eos_token_id": list(range(2, 60))}],
    "max_time": [{"max_time": 0.0}],
    "stop_strings": [{"stop_strings": [*"aeiot", "\n"], "tokenizer": tokenizer()}],
    "eos_token_id": [{"eos_token_id": END}],
    "do_sample": [{"do_sample": True}],
    "temperature": [{"temperature": 0.3}],
    "top_k": [{"top_k": 3}],
    "top_p": [{"top_p": 0.4}],
    "top_h": [{"top_h": 0.3}],
    "min_p": [{"min_p": 0.3}],
    "typical_p": [{"typical_p": 0.3}],
    "epsilon_cutoff": [{"epsilon_cutoff": 0.1}],
    "eta_cutoff": [{"eta_cutoff": 0.5}],
    "repetition_penalty": [{"repetition_penalty": 3.0}],
    "encoder_repetition_penalty": [{"encoder_repetition_penalty": 4.0}],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": 1}],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": 1}],
    "bad_words_ids": [{"bad_words_ids": [[i] for i in range(1, 30)]}],
    "sequence_bias": [{"sequence_bias": {(11,): 8.0, (11, 4): 9.0}}],
    "suppress_tokens": [{"suppress_tokens": list(range(1, 30))}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": list(range(1, 40))}],
    "forced_bos_token_id": [
        {"forced_bos_token_id": 9, **NO_IDS, "inputs": Fresh(lambda b: torch.full((b, 1), 5))}
    ],
    "forced_eos_token_id": [{"forced_eos_token_id": 2}],
    "exponential_decay_length_penalty": [
        {"exponential_decay_length_penalty": (2, 9.0), "eos_token_id": 9}
    ],
    "remove_invalid_values": [{"remove_invalid_values": True}],
    "renormalize_logits": [{"renormalize_logits": True, **RETURNED, "output_scores": True}],
    "watermarking_config": [
        {"watermarking_config": WatermarkingConfig(bias=9.0, seeding_scheme="selfhash")},
        {"watermarking_config": SYNTH_ID},
    ],
    "guidance_scale": [{"guidance_scale": 2.0}],
    "negative_prompt_ids": [{"guidance_scale": 2.0, "negative_prompt_ids": Fresh(_negative)}],
    "negative_prompt_attention_mask": [
        {
            "guidance_scale": 2.0,
            "negative_prompt_ids": Fresh(_negative),
            "negative_prompt_attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]),
        }
    ],
    "prefix_allowed_tokens_fn": [
        {"prefix_allowed_tokens_fn": allowed},
        {"prefix_allowed_tokens_fn": marked},
    ],
    "logits_processor": [{"logits_processor": Fresh(_processors)}],
    "stopping_criteria": [{"stopping_criteria": Fresh(_criteria), "eos_token_id": 63}],
    "inputs": [{**NO_IDS, "inputs": torch.tensor([[7, 9, 7, 9]] * 3)}],
    "generation_config": [
        {"generation_config": GenerationConfig(repetition_penalty=3.0, eos_token_id=END)}
    ],
    "tokenizer": [{"tokenizer": tokenizer()}],
    "streamer": [{"streamer": Fresh(lambda batch: Columns()), "eos_token_id": END}],
    "bos_token_id": [{**NO_IDS, "bos_token_id": 5}],
    "pad_token_id": [{"pad_token_id": 3, "eos_token_id": END}],
    "token_healing": [HEALED],
    "num_return_sequences": [{"num_return_sequences": 2, "do_sample": True}],
    "return_dict_in_generate": [RETURNED],
    "output_scores": [{"output_scores": True, **RETURNED}],
    "output_logits": [{"output_logits": True, **RETURNED}],
    "use_cache": [{"use_cache": True}],
    "cache_implementation": [{"cache_implementation": name} for name in ("dynamic", "hybrid")],
    "prefill_chunk_size": [{"prefill_chunk_size": 5}],
}
"""What our loop does."""

DRAWN = {"temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff"}
DRAWN |= {"eta_cutoff", "do_sample", "num_return_sequences"}
"""Exact options that mean nothing to greedy search."""

NO_CHANGE = {
    "do_sample",  # what each of the others is compared with
    "use_cache",
    "cache_implementation",
    "prefill_chunk_size",
    "remove_invalid_values",
    "tokenizer",
}
"""Exact options that leave the result as it is; of all others the value must change it."""

IDLE: Cases = {
    "early_stopping": [{"early_stopping": True}],
    "length_penalty": [{"length_penalty": 2.0}],
    "diversity_penalty": [{"diversity_penalty": 0.5}],
    "num_beam_groups": [{"num_beam_groups": 2}],
    "low_memory": [{"low_memory": True}],
    "penalty_alpha": [{"penalty_alpha": 0.6, "top_k": 1}, {"penalty_alpha": 0.6, "top_k": 0}],
    "num_assistant_tokens": [{"num_assistant_tokens": 3}],
    "num_assistant_tokens_schedule": [{"num_assistant_tokens_schedule": "heuristic"}],
    "assistant_confidence_threshold": [{"assistant_confidence_threshold": 0.9}],
    "assistant_ensemble_weight": [{"assistant_ensemble_weight": 0.5}],
    "assistant_lookbehind": [{"assistant_lookbehind": 3}],
    "target_lookbehind": [{"target_lookbehind": 3}],
    "max_matching_ngram_size": [{"max_matching_ngram_size": 3}],
    "speculation_type": [{"speculation_type": "dflash"}],
    "decoder_start_token_id": [{"decoder_start_token_id": 3}],
    "cache_config": [{"cache_config": {"nbits": 4}}],
    "max_cache_len": [{"max_cache_len": 64}],
    "compile_config": [{"compile_config": CompileConfig()}],
    "disable_compile": [{"disable_compile": True}],
    "continuous_batching_config": [{"continuous_batching_config": "any"}],
    "transformers_version": [{"transformers_version": "5.0.0"}],
    "trust_remote_code": [{"trust_remote_code": True}],
}

STOCK: Cases = {
    "num_beams": [{"num_beams": 2}, {"num_beams": 2, "do_sample": True}],
    "assistant_model": [{"assistant_model": Fresh(lambda batch: small(1))}],
    "assistant_tokenizer": [{"assistant_tokenizer": "any"}],
    "prompt_lookup_num_tokens": [{"prompt_lookup_num_tokens": 3}],
    "assistant_early_exit": [{"assistant_early_exit": 1}],
    "use_mtp": [{"use_mtp": True}],
    "is_assistant": [{"is_assistant": True, **RETURNED, "output_scores": True}],
    "custom_generate": [{"custom_generate": lambda model, input_ids, **kwargs: input_ids[:, :3]}],
    "use_cache": [{"use_cache": False}],
    "cache_implementation": [{"cache_implementation": "static"}],
    "output_attentions": [{"output_attentions": True, **RETURNED}],
    "output_hidden_states": [
        {"output_hidden_states": True, **RETURNED},
        {"output_hidden_states": True},
    ],
    "synced_gpus": [{"synced_gpus": True}],
    "watermarking_config": [{"watermarking_config": SYNTH_ID}],
    "guidance_scale": [{"guidance_scale": 2.0}],
    "prefix_allowed_tokens_fn": [{"prefix_allowed_tokens_fn": allowed}],
    "logits_processor": [{"logits_processor": Fresh(_processors)}],
    "stopping_criteria": [
        {"stopping_criteria": Fresh(_criteria)},
        {"stopping_criteria": Fresh(_criteria), **RETURNED, "output_scores": True},
    ],
}

ERROR: Cases = {
    "num_return_sequences": [{"num_return_sequences": 2}],
    "stop_strings": [{"stop_strings": "a"}],
    "token_healing": [{"token_healing": True}],
    "penalty_alpha": [{"penalty_alpha": 0.6}],
    "num_beam_groups": [{"num_beam_groups": 2, "num_beams": 4}],
    "dola_layers": [{"dola_layers": "high"}],
    "constraints": [{"constraints": ["any"]}],
    "force_words_ids": [{"force_words_ids": [[3]]}],
    "use_model_defaults": [{"use_model_defaults": True}],
}

WRONG: list[dict[str, Any]] = [
    {"temperature": -1.0, "do_sample": True},
    {"top_p": -1.0, "do_sample": True},
    {"top_k": -1, "do_sample": True},
    {"min_p": 3.0, "do_sample": True},
    {"repetition_penalty": -1.0},
    {"max_new_tokens": 0},
    {"max_length": 5, "max_new_tokens": None},
    {"early_stopping": "sometimes"},
    {"cache_implementation": "none such"},
    {"compile_config": {}},
    {"sequence_bias": {}},
    {"stop_strings": "a", "tokenizer": None},
    {"input_ids": torch.empty(1, 0, dtype=torch.int64), "attention_mask": None},
    {"max_new_token": 8},
    {"temprature": 0.5},
    {"logit_processor": []},
]
"""Values and names that transformers refuses."""
