"""Several draft steps from many positions at once, as a draft will make them.

Training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840): after the first step the network is
fed its own outputs, and sees, of the steps it has made itself, only those of its own position.

Positions that are not drafted from, those of prompts as a rule, are only ever attended to: of them
keys and values are made, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from selfspec.networks.exit import ExitNetwork
from selfspec.networks.feature import FeatureNetwork


class _Kept:
    """The N positions that are drafted from: as a list, and row by row for attention.

    Args:
        keep: bool [B, T].
    """

    def __init__(self, keep: Tensor) -> None:
        rows, self.positions = keep.nonzero(as_tuple=True)
        columns = (keep.cumsum(1) - 1)[keep]
        self.shape = keep.shape[0], int(keep.sum(1).max())  # B, M
        self._back = rows * self.shape[1] + columns
        # A row that has fewer than M of them asks for the first one of all once more.
        self._there = self._back.new_zeros(self.shape[0] * self.shape[1])
        self._there[self._back] = torch.arange(len(rows), device=keep.device)
        slots = torch.arange(keep.shape[1], device=keep.device)
        asked = self.positions[self._there].view(*self.shape, 1)
        self.visible = slots <= asked  # [B, M, T]

    def by_row(self, listed: Tensor) -> Tensor:
        """[B, M, ...] of [N, ...]."""
        return listed.index_select(0, self._there).unflatten(0, self.shape)

    def listed(self, rows: Tensor) -> Tensor:
        """[N, ...] of [B, M, ...]."""
        return rows.flatten(0, 1).index_select(0, self._back)


def unroll(
    network: FeatureNetwork, embedded: Tensor, taps: Tensor, steps: int, keep: Tensor
) -> Iterator[Tensor]:
    """Draft `steps` tokens from every position to keep.

    Args:
        network: In training.
        embedded: [B, T + steps - 1, C]: at t the embedding of token t + 1.
        taps: [B, T, n C] hidden states of the target, rows padded at the end.
        steps: S.
        keep: bool [B, T].

    Yields:
        S times [N, C], row by row of `keep`: the output of step s = 0, 1, ... at position t, which
        predicts token t + 2 + s after the true tokens up to t + 1 + s.
    """
    c = network.config
    length = taps.shape[1]
    kept = _Kept(keep)
    positions = torch.arange(length + steps - 1, device=taps.device)[None]
    cos, sin = network.rotary(positions, taps.dtype)
    x, residual = network.inputs(embedded[:, :length], network.fuse(taps))
    keys, values = network.keys_and_values(x, (cos[:, :, :length], sin[:, :, :length]))
    keys = (keys * c.head_dim**-0.5).transpose(-1, -2)
    bias = torch.zeros(kept.visible.shape, dtype=taps.dtype, device=taps.device)
    bias = bias.masked_fill_(~kept.visible, float("-inf"))[:, None]
    groups = c.num_heads // c.num_key_value_heads
    later: list[tuple[Tensor, Tensor]] = []  # keys and values [N, H, D] of steps after the first

    def attend(queries: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
        asked, own_key, own_value = (x[0].transpose(0, 1) for x in (queries, own_keys, own_values))
        if step:  # those of the first step are among all
            scaled = own_key * c.head_dim**-0.5
            later.append(
                (scaled.repeat_interleave(groups, 1), own_value.repeat_interleave(groups, 1))
            )
        packed = rearrange(
            kept.by_row(asked), "b m (k g) d -> b k (g m) d", k=c.num_key_value_heads
        )
        scores = rearrange(packed @ keys, "b k (g m) t -> b (k g) m t", g=groups) + bias
        if later:
            own = torch.stack([(asked * key).sum(-1) for key, _ in later], -1)
            scores = torch.cat([scores, kept.by_row(own).transpose(1, 2)], -1)
        weights = scores.softmax(-1)
        shares = rearrange(weights[..., :length], "b (k g) m t -> b k (g m) t", g=groups)
        out = kept.listed(rearrange(shares @ values, "b k (g m) d -> b m (k g) d", g=groups))
        if later:
            shares = kept.listed(weights[..., length:].transpose(1, 2))
            for j, (_, value) in enumerate(later):
                out = out + shares[..., j, None] * value
        return out.transpose(0, 1)[None]

    for step in range(steps):
        at = kept.positions + step
        angles = cos[:, :, at], sin[:, :, at]
        if step == 0:
            drafted = network.layer(x[keep][None], residual[keep][None], angles, attend)
        else:
            tokens = embedded[:, step : step + length][keep][None]
            drafted = network(tokens, drafted, angles, attend)
        yield drafted[0]


def exit_states(network: ExitNetwork, taps: Tensor, keep: Tensor) -> Tensor:
    """What the head of an exit reads at every position to keep.

    The states of drafted tokens are the target's own, so that one step says all.

    Args:
        network: In training.
        taps: [B, T, C] states after the exit's layers, rows padded at the end.
        keep: bool [B, T].

    Returns:
        [N, C], row by row of `keep`.
    """
    states = taps[keep]
    if not network.config.num_heads:
        out: Tensor = network(states)
        return out
    kept = _Kept(keep)
    positions = torch.arange(taps.shape[1], device=taps.device)[None]
    cos, sin = network.rotary(positions, taps.dtype)
    keys, values = network.entries(taps, (cos, sin))

    def attend(queries: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
        asked = kept.by_row(queries[0].transpose(0, 1)).transpose(1, 2)
        found = scaled_dot_product_attention(
            asked, keys, values, attn_mask=kept.visible[:, None], enable_gqa=True
        )
        return kept.listed(found.transpose(1, 2)).transpose(0, 1)[None]

    angles = cos[:, :, kept.positions], sin[:, :, kept.positions]
    attended: Tensor = network(states[None], angles, attend)[0]
    return attended
