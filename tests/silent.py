"""Models some of whose layers say nothing, so that it is known what can be left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import LlamaForCausalLM

from tests.families import tiny


def silent(
    attention: Iterable[int] = (), mlp: Iterable[int] = (), layers: int = 6
) -> LlamaForCausalLM:
    """A random llama in which some attentions and MLPs add nothing to the states."""
    model = tiny.llama(num_hidden_layers=layers)
    with torch.no_grad():
        for layer in attention:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in mlp:
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model
