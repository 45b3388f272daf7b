"""A tiny target whose texts can be learnt, and answers of it.

Attention and MLPs whisper, so that the next token is nearly a function of the last one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import LlamaForCausalLM

from selfspec.training import Answer, TrainConfig
from tests.families import tiny

LAYERS = 4
TAPS = (1, 2, LAYERS)
EXIT = 2


@cache
def target() -> LlamaForCausalLM:
    model = tiny.llama(eos_token_id=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.003)
            layer.mlp.down_proj.weight.mul_(0.003)
    return model


@cache
def answers(count: int = 40) -> list[Answer]:
    """Random prompts of 2 to 9 tokens and 8 to 23 tokens of what the target says to them."""
    g = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        prompt = torch.randint(2, tiny.VOCAB, (1, 2 + i % 8), generator=g)
        new = 8 + (5 * i) % 16
        mask = torch.ones_like(prompt)
        out = target().generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False)
        found.append(Answer(str(i), prompt[0].tolist(), out[0, prompt.shape[1] :].tolist()))
    return found


def config(**changes: Any) -> TrainConfig:
    small = {
        "draft_vocab_size": 48,
        "dtype": "float32",
        "tokens_per_batch": 256,
        "total_tokens": 12_000,
        "warmup_steps": 5,
        "held_out": 0.2,
        "exit_layer": EXIT,
        "evaluate_every": 1000,
        "log_every": 1,
        "num_draft_heads": 3,
        "ranks": 4,
    }
    return TrainConfig(**{**small, **changes})
