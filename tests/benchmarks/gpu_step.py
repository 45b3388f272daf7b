"""Time of a whole verify step: a model of the shape of Llama 3.1 8B with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.fixed_cache import FixedCache
from selfspec.fixed_step import FixedStep
from selfspec.target import Target
from selfspec.tree import TokenTree
from tests.ops.trees import random_forest

from .gpu_clock import Clock, Launch

# The most telling first, since time may run out; a step of one token is what plain decoding takes.
CONTEXTS = (8192, 1024, 32768)
NODES = (1, 32, 64, 16, 8)


def model(device: torch.device, tiny: bool) -> LlamaForCausalLM:
    """Random weights, made on the device."""
    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    }
    if tiny:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
    config = LlamaConfig(**sizes)
    dtype = torch.float32 if tiny else torch.bfloat16
    # Initialisation by transformers takes longer than all that is measured.
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    made = made.to(dtype).to_empty(device=device).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    rotary = made.model.rotary_emb
    made.model.rotary_emb = type(rotary)(config).to(device)  # its buffers are no parameters
    return made


def filled_cache(target: Target, prefix: int, extra: int) -> FixedCache:
    """A cache of random keys and values, as a prefill of `prefix` tokens would leave it."""
    config, device = target.model.config, target.device
    cache = FixedCache(
        target.architecture.num_layers, 1, capacity=prefix + extra, extra=extra, device=device
    )
    shape = (1, config.num_key_value_heads, 1, config.hidden_size // config.num_attention_heads)
    state = torch.zeros(shape, device=device, dtype=target.model.dtype)
    for layer in cache.layers:
        layer.lazy_initialization(state, state)
        layer.keys.normal_()
        layer.values.normal_()
        layer.filled = prefix
    cache.settle([0])
    return cache


def tree(nodes: int, vocab: int, device: torch.device) -> TokenTree:
    """A random tree of random tokens."""
    forest = random_forest(nodes, [0])
    layout = forest.layout()
    parents = torch.tensor(forest.parents, dtype=torch.int32)
    count = torch.tensor([nodes], dtype=torch.int32)
    tokens = torch.randint(vocab, (1, nodes))
    tensors: list[Tensor] = [tokens, parents, layout.depth, layout.ancestors, count]
    return TokenTree(*(tensor.to(device) for tensor in tensors), max_depth=nodes, max_nodes=nodes)


def measurements(clock: Clock, tiny: bool) -> Iterator[dict[str, Any]]:
    """One entry a number of nodes and context: a step with and without CUDA graphs."""
    made = model(clock.device, tiny)
    target = Target(made)
    with target.ready():
        for prefix in (24,) if tiny else CONTEXTS:
            cache, one = filled_cache(target, prefix, 64), None
            for nodes in (1, 4) if tiny else NODES:
                times = {
                    name: clock.measure(lambda n=nodes, c=cache: [_step(target, c, n)], graph=graph)
                    for name, graph in (("graph", True), ("launches", False))
                }
                if nodes == 1:
                    one = times["graph"].get("us")
                taken = times["graph"].get("us")
                yield {
                    "op": "step",
                    "case": f"N{nodes} L{prefix}",
                    "nodes": nodes,
                    "prefix": prefix,
                    "bytes": _bytes(made, prefix + nodes),
                    "times": times,
                    "over_one_token": taken / one if taken and one else None,
                }
            del cache


def _step(target: Target, cache: FixedCache, nodes: int) -> Launch:
    """Verify, accept and commit, from buffers to buffers, as a captured step replays it."""
    step = FixedStep(target, cache, nodes, frozenset(), 0, True)
    step.load(tree(nodes, target.vocab_size, target.device))
    step.run(step.tree)
    return step.body


def _bytes(made: nn.Module, slots: int) -> int:
    """Weights, and keys and values; the embedding is read in a few rows only."""
    embedding = made.get_input_embeddings().weight
    weights = sum(p.numel() * p.itemsize for p in made.parameters() if p is not embedding)
    config = made.config
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    return weights + 2 * config.num_hidden_layers * slots * heads * embedding.itemsize
