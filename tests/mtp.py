"""Tiny models with MTP modules of their own, for tests."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, modeling_layers

from tests.families import tiny
from tests.families.shrink import tiny_config

HAS_MTP = hasattr(modeling_layers, "MtpModel")  # transformers 5.24 has it
NEW = 24
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
TRAINED = 40  # steps


def chained(module: Any, layers: int, ids: Tensor, hidden: Tensor, cache: Any) -> list[Tensor]:
    """What every layer makes of a text by transformers' own call: states at the text's tokens.

    Args:
        module: An `MtpModel`.
        layers: How many run.
        ids: int64 [1, T].
        hidden: [1, T, C] of the target, after its final norm.
        cache: Empty.
    """
    found, source = [], hidden[:, :-1]
    for k in range(layers):
        positions = torch.arange(k + 1, ids.shape[1])[None]
        source = module.forward_layer(k, source, positions, cache, input_ids=ids[:, k + 1 :])
        found.append(source)
        source = source[:, :-1]
    return found


def texts(model: Any) -> list[Tensor]:
    """What the model makes of the rows of a ragged prompt, each [1, T]."""
    out = model.generate(**tiny.prompts(3), **GREEDY)
    return [row[None, row.ne(tiny.PAD).int().argmax() :] for row in out]


CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_nextn_predict_layers": 1},
    # Layers without experts are faster; those of the module have them.
    "glm4_moe": {"num_nextn_predict_layers": 2, "num_hidden_layers": 2, "first_k_dense_replace": 2},
    "mellum": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse"] * 2,
        "num_nextn_predict_layers": 1,
        "mtp_layer_types": ["sliding_attention"],
        "mtp_mlp_layer_types": ["sparse"],
    },
}


@cache
def made(name: str) -> Any:
    """A tiny model with an MTP module in its config; not to be changed."""
    config = tiny_config(name)
    torch.manual_seed(0)
    changed = type(config)(**{**config.to_dict(), **CHANGES[name]})
    model = AutoModelForCausalLM.from_config(changed)
    tiny.redraw(model, 0)
    return model.eval()


@cache
def trained(name: str, num_layers: int) -> tuple[Any, Any]:
    """A model, and a module that knows the first half of its texts by heart."""
    model = made(name)
    depth = model.config.num_mtp_layers
    if num_layers < depth:
        module = copy.deepcopy(trained(name, depth)[1], {id(model): model})
        module.tie_with_main_model(model)
        module.layers = module.layers[:num_layers]
        module.config.num_hidden_layers = module.num_mtp_layers = num_layers
        return model, module
    torch.manual_seed(0)
    module = modeling_layers.MtpModel(model, num_layers)
    weights = list(module.layers.parameters())
    for weight in weights:
        nn.init.normal_(weight, std=0.1) if weight.ndim > 1 else nn.init.ones_(weight)
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    known = [ids[0, : -NEW // 2] for ids in texts(model)]
    ids = nn.utils.rnn.pad_sequence(known, batch_first=True, padding_value=-1)
    wanted = ids.masked_fill(ids < 0, -100)
    ids = ids.clamp(min=0)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]
    for _ in range(TRAINED):
        loss = torch.zeros(())
        for k, out in enumerate(chained(module, num_layers, ids, hidden, None)):
            logits = module._project_to_logits(out[:, :-1])
            loss = loss + nn.functional.cross_entropy(logits.transpose(1, 2), wanted[:, k + 2 :])
        grads = torch.autograd.grad(loss, weights, allow_unused=True)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        optimizer.step()
    return model, module.eval()
