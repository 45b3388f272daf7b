"""What becomes of every option of `generate`: the fields of a `GenerationConfig`, the arguments.

`table()` is the README's. The tests hold it to the installed transformers and show every entry; an
option that a newer transformers adds is left to its loop until it stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import GenerationConfig

# Option -> when, if not always. An option may stand in several groups.
EXACT: dict[str, str] = {
    # length
    "max_length": "",
    "max_new_tokens": "",
    "min_length": "",
    "min_new_tokens": "",
    "max_time": "",
    "stop_strings": "",
    "eos_token_id": "",
    # choosing
    "do_sample": "",
    "temperature": "",
    "top_k": "",
    "top_p": "",
    "top_h": "",
    "min_p": "",
    "typical_p": "",
    "epsilon_cutoff": "",
    "eta_cutoff": "",
    # processors
    "repetition_penalty": "",
    "encoder_repetition_penalty": "",
    "no_repeat_ngram_size": "",
    "encoder_no_repeat_ngram_size": "",
    "bad_words_ids": "",
    "sequence_bias": "",
    "suppress_tokens": "",
    "begin_suppress_tokens": "",
    "forced_bos_token_id": "",
    "forced_eos_token_id": "",
    "exponential_decay_length_penalty": "",
    "remove_invalid_values": "",
    "renormalize_logits": "",
    "watermarking_config": "SynthID: one sequence",
    "guidance_scale": "one sequence",
    "negative_prompt_ids": "one sequence",
    "negative_prompt_attention_mask": "one sequence",
    "prefix_allowed_tokens_fn": "one sequence, or marked stateless",
    "logits_processor": "one sequence, transformers' own, or marked stateless",
    "stopping_criteria": "one sequence, or transformers' own",
    # inputs and what is returned
    "inputs": "",
    "generation_config": "",
    "tokenizer": "",
    "streamer": "",
    "bos_token_id": "",
    "pad_token_id": "",
    "token_healing": "",
    "num_return_sequences": "",
    "return_dict_in_generate": "",
    "output_scores": "",
    "output_logits": "",
    # the cache
    "use_cache": "True",
    "cache_implementation": '"dynamic", "hybrid"',
    "prefill_chunk_size": "",
}

# Read by loops, caches or models that are not those of this request.
IDLE: dict[str, str] = {
    # beams
    "early_stopping": "",
    "length_penalty": "",
    "diversity_penalty": "",
    "num_beam_groups": "one beam",
    "low_memory": "",
    "penalty_alpha": "top_k up to 1, or sampling",
    # assistants
    "num_assistant_tokens": "",
    "num_assistant_tokens_schedule": "",
    "assistant_confidence_threshold": "",
    "assistant_ensemble_weight": "",
    "assistant_lookbehind": "",
    "target_lookbehind": "",
    "max_matching_ngram_size": "",
    "speculation_type": "",
    # encoders
    "decoder_start_token_id": "",
    # caches of fixed size
    "cache_config": "",
    "max_cache_len": "",
    "compile_config": "",
    "disable_compile": "",
    # files and services
    "continuous_batching_config": "",
    "transformers_version": "",
    "trust_remote_code": "",
}

STOCK: dict[str, str] = {
    "num_beams": "above 1",
    "assistant_model": "",
    "assistant_tokenizer": "",
    "prompt_lookup_num_tokens": "",
    "assistant_early_exit": "",
    "use_mtp": "",
    "is_assistant": "",
    "custom_generate": "",
    "use_cache": "False",
    "cache_implementation": "any other",
    "output_attentions": "",
    "output_hidden_states": "",
    "synced_gpus": "",
    "watermarking_config": "SynthID: several sequences",
    "guidance_scale": "several sequences",
    "prefix_allowed_tokens_fn": "several sequences, unmarked",
    "logits_processor": "several sequences, one of your own, unmarked",
    "stopping_criteria": "several sequences, one of your own; with output_scores "
    "or a cache of yours any of your own",
}

# From transformers, before anything is generated. So are wrong values and misspelt names.
ERROR: dict[str, str] = {
    "num_return_sequences": "above 1, without sampling or beams",
    "stop_strings": "no tokenizer",
    "token_healing": "no tokenizer",
    "penalty_alpha": "greedy, top_k above 1, without trust_remote_code",
    "num_beam_groups": "several beams",
    "dola_layers": "without trust_remote_code",
    "constraints": "without trust_remote_code",
    "force_words_ids": "without trust_remote_code",
    "use_model_defaults": "",
}

GROUPS: dict[str, dict[str, str]] = {
    "as plain `generate`, with drafts": EXACT,
    "no effect, as in plain `generate`": IDLE,
    "transformers' own loop, with a log line": STOCK,
    "`ValueError`, as from plain `generate`": ERROR,
}
KNOWN: frozenset[str] = frozenset().union(*GROUPS.values())

# What makes `generate` decode by other means than greedy search and sampling, in this order.
_OTHER_LOOPS = (
    "custom_generate",
    "assistant_model",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "num_beams",
    "penalty_alpha",
    "cache_implementation",
)


@cache
def _defaults() -> dict[str, Any]:
    values = {k: v for k, v in vars(GenerationConfig()).items() if not k.startswith("_")}
    of_generate = getattr(GenerationConfig, "_get_default_generation_params", dict)
    later: dict[str, Any] = of_generate()
    return {**values, **{k: v for k, v in later.items() if k in values}}


def unknown_option(config: GenerationConfig) -> str | None:
    """Name of a field of transformers' that is set and not in the table, or None.

    What is not a field of the installed transformers, such as a published config may carry, does
    nothing in its loop either.
    """
    for name, default in _defaults().items():
        value = getattr(config, name, None)
        if name not in KNOWN and value is not None and value != default:
            return name
    return None


def other_loop(option: Callable[[str], Any]) -> str:
    """Why a request never reached greedy search or sampling.

    Args:
        option: Value of an option by name, None if it is not set.
    """
    for name in _OTHER_LOOPS:
        value = option(name)
        if value is not None and value is not False and not (name == "num_beams" and value == 1):
            shown = f" is {value!r}" if isinstance(value, (int, str)) else " is set"
            return name + shown
    return "transformers decodes it by a method of its own"


def table() -> str:
    """The groups as a Markdown table."""
    lines = ["| what happens | options |", "|---|---|"]
    for group, options in GROUPS.items():
        entries = [f"`{name}`" + f" ({when})" * bool(when) for name, when in options.items()]
        lines.append(f"| {group} | {', '.join(entries)} |")
    return "\n".join(lines)
