"""Small random networks, what they compute, and published layouts written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from selfspec.networks.exit import ExitConfig, ExitNetwork
from selfspec.networks.feature import FeatureConfig, FeatureNetwork
from selfspec.networks.heads import HeadsConfig, HeadsNetwork
from selfspec.networks.vocabulary import DraftHead

SIZE, VOCAB, LAYERS = 64, 64, 4  # of the tiny models
IDS = torch.tensor([0, 3, 4, 9, 17, 18, 40, 63])

FEATURE = FeatureConfig(
    target_hidden_size=SIZE,
    vocab_size=VOCAB,
    taps=(1, 3, 2),  # in no order, so that one that sorts them is seen
    hidden_size=SIZE,
    intermediate_size=96,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    draft_vocab_size=len(IDS),
    rope={"rope_type": "default", "rope_theta": 500.0},
    rms_norm_eps=1e-3,
)
HEADS = HeadsConfig(SIZE, VOCAB, num_heads=3, num_layers=2, draft_vocab_size=len(IDS))
EXIT = ExitConfig(SIZE, VOCAB, exit_layer=2, intermediate_size=96, draft_vocab_size=len(IDS))


def feature(**changes: Any) -> FeatureNetwork:
    return randomised(FeatureNetwork(replace(FEATURE, **changes)))


def heads(**changes: Any) -> HeadsNetwork:
    return randomised(HeadsNetwork(replace(HEADS, **changes)))


def exit_(**changes: Any) -> ExitNetwork:
    return randomised(ExitNetwork(replace(EXIT, **changes)))


MAKE: dict[str, Any] = {"feature": feature, "heads": heads, "exit": exit_}


@torch.no_grad()
def randomised(network: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        noise = 0.3 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise + (parameter.ndim == 1))
    for head in network.modules():
        if isinstance(head, DraftHead) and head.ids is not None:
            head.choose(IDS)
    return network


def attach(network: nn.Module, model: Any) -> None:
    for head in network.modules():
        if isinstance(head, DraftHead):
            head.attach(model.get_output_embeddings().weight)


def inputs(width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 7, width, generator=generator)


@torch.no_grad()
def logits(network: Any) -> Tensor:
    """What the network makes of fixed inputs, in float32, of all its heads."""
    dtype = next(network.parameters()).dtype
    states = inputs(SIZE).to(dtype)
    if isinstance(network, FeatureNetwork):
        taps = inputs(SIZE * len(network.config.taps), 1).to(dtype)
        angles = network.rotary(torch.arange(7)[None], dtype)
        out = network(states, network.fuse(taps), angles, attend)
        return network.head(network.readout(out)).float()
    if isinstance(network, HeadsNetwork):
        path = inputs(SIZE * 3, 2).view(1, 7, 3, SIZE).to(dtype)
        rows = [network.head(k)(network(k, states, path)) for k in range(network.config.num_heads)]
        return torch.stack(rows).float()
    return network.head(network(states)).float()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def random(*shape: int, seed: int) -> Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def eagle_layer(prefix: str, width: int, biases: bool = False) -> dict[str, Tensor]:
    """Weights of a decoder layer whose queries read `width` numbers; heads 4 and 2."""
    shapes = {
        "self_attn.q_proj": (96, width),
        "self_attn.k_proj": (48, width),
        "self_attn.v_proj": (48, width),
        "self_attn.o_proj": (SIZE, 96),
        "mlp.gate_proj": (96, SIZE),
        "mlp.up_proj": (96, SIZE),
        "mlp.down_proj": (SIZE, 96),
    }
    made = {
        f"{prefix}.{name}.weight": random(*shape, seed=i)
        for i, (name, shape) in enumerate(shapes.items())
    }
    made[f"{prefix}.post_attention_layernorm.weight"] = 1 + random(SIZE, seed=20)
    if biases:
        made |= {
            f"{prefix}.self_attn.{p}_proj.bias": random(n, seed=30 + n)
            for p, n in (("q", 96), ("k", 48), ("v", 48))
        }
    return made


def layer_by_hand(
    t: dict[str, Tensor], prefix: str, x: Tensor, residual: Tensor, theta: float, eps: float
) -> Tensor:
    """One llama layer behind its first norm, over `x` [T, width], from weights by name."""
    length = len(x)
    frequencies = theta ** (-torch.arange(0, 24, 2) / 24)
    angle = torch.arange(length)[:, None] * frequencies
    rotation = torch.polar(torch.ones_like(angle), angle)[:, None]

    def project(part: str, heads: int) -> Tensor:
        name = f"{prefix}.self_attn.{part}_proj"
        return linear(x, t[f"{name}.weight"], t.get(f"{name}.bias")).view(length, heads, 24)

    def rotated(y: Tensor) -> Tensor:  # halves are real and imaginary part
        z = torch.complex(y[..., :12], y[..., 12:]) * rotation
        return torch.cat([z.real, z.imag], -1)

    q, k, v = rotated(project("q", 4)), rotated(project("k", 2)), project("v", 2)
    mixed = torch.zeros(length, 4, 24)
    for head in range(4):
        for i in range(length):
            weights = (k[: i + 1, head // 2] @ q[i, head] / 24**0.5).softmax(0)
            mixed[i, head] = weights @ v[: i + 1, head // 2]
    residual = residual + mixed.reshape(length, 96) @ t[f"{prefix}.self_attn.o_proj.weight"].T
    y = rms(residual, t[f"{prefix}.post_attention_layernorm.weight"], eps)
    gate, up = (y @ t[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return residual + (silu(gate) * up) @ t[f"{prefix}.mlp.down_proj.weight"].T


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    name: str = "model.safetensors",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Set fields, given as `outer__inner`; `...` removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split("__")
        place = values
        for key in outer:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    path.write_text(json.dumps(values))


def edit_tensors(folder: Path, change: Any, name: str = "model.safetensors") -> None:
    """Apply `change` to the dict of tensors; the header is lost, as with other tools."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
