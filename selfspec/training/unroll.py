"""Several draft steps from every position at once, as a draft will make them.

Training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840): after the first step the network is
fed its own outputs, and sees, of the steps it has made itself, only those of its own position.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from selfspec.networks.attention import causal
from selfspec.networks.exit import ExitNetwork
from selfspec.networks.feature import FeatureNetwork


def unroll(network: FeatureNetwork, embedded: Tensor, taps: Tensor, steps: int) -> Iterator[Tensor]:
    """Draft `steps` tokens from every position.

    Args:
        network: In training.
        embedded: [B, T + steps - 1, C]: at t the embedding of token t + 1.
        taps: [B, T, n C] hidden states of the target, rows padded at the end.
        steps: S.

    Yields:
        S times [B, T, C], the output of step s = 0, 1, ... at position t, which predicts token
        t + 2 + s after the true tokens up to t + 1 + s.
    """
    c = network.config
    length = taps.shape[1]
    feature = network.fuse(taps)
    group = c.num_heads // c.num_key_value_heads
    positions = torch.arange(length + steps - 1, device=taps.device)[None]
    cos, sin = network.rotary(positions, taps.dtype)
    causal = torch.ones(length, length, dtype=torch.bool, device=taps.device).tril()
    bias = torch.zeros(length, length, dtype=taps.dtype, device=taps.device)
    bias.masked_fill_(~causal, float("-inf"))
    first: list[Tensor] = []  # keys (transposed, scaled) and values of step 0
    later: list[tuple[Tensor, Tensor]] = []  # of the others, for their own position alone

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys = (keys * c.head_dim**-0.5).repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        if not first:
            first.extend([keys.transpose(-1, -2), values])
        else:
            later.append((keys, values))
        scores = torch.matmul(queries, first[0]) + bias
        if not later:
            return torch.matmul(scores.softmax(-1), first[1])
        own = torch.stack([(queries * k).sum(-1) for k, _ in later], dim=-1)
        weights = torch.cat([scores, own], dim=-1).softmax(-1)
        out = torch.matmul(weights[..., :length], first[1])
        for j, (_, v) in enumerate(later):
            out = out + weights[..., length + j, None] * v
        return out

    for s in range(steps):
        window = slice(s, s + length)
        angles = cos[:, :, window], sin[:, :, window]
        feature = network(embedded[:, window], feature, angles, attend)
        yield feature


def exit_states(network: ExitNetwork, taps: Tensor) -> Tensor:
    """What the head of an exit reads at every position.

    The states of drafted tokens are the target's own, so that one step says all.

    Args:
        network: In training.
        taps: [B, T, C] states after the exit's layers, rows padded at the end.

    Returns:
        [B, T, C]
    """
    if not network.config.num_heads:
        out: Tensor = network(taps)
        return out
    positions = torch.arange(taps.shape[1], device=taps.device)[None]
    attended: Tensor = network(taps, network.rotary(positions, taps.dtype), causal)
    return attended
