"""Rotary self-attention of the draft networks; what is attended to is the caller's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.networks.blocks import Packed

# attend(queries [B, H, T, D], keys [B, K, T, D], values [B, K, T, D]) -> [B, H, T, D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Angles = tuple[Tensor, Tensor]  # cosines and sines, each [B, 1, T, D]


class Rotary(nn.Module):
    """Angles by position, of any kind that transformers knows for Llama.

    Args:
        num_heads: H.
        head_dim: D.
        max_positions: Positions that the network was made for.
        parameters: As in a transformers config (`rope_type`, `rope_theta`, ...).

    Raises:
        ValueError: If transformers knows no such parameters.
    """

    def __init__(
        self, num_heads: int, head_dim: int, max_positions: int, parameters: dict[str, Any]
    ) -> None:
        super().__init__()
        # Here, since it takes a second that wrapping a model without trained drafts does not need.
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        try:
            config = LlamaConfig(
                hidden_size=num_heads * head_dim,
                num_attention_heads=num_heads,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters=dict(parameters),
            )
            self.embedding = LlamaRotaryEmbedding(config)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"rope={parameters} is not what transformers makes angles of "
                f"({type(error).__name__}: {error}): give a rope_type that it knows, and what that "
                "needs."
            ) from error

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        # In two bytes the frequencies would turn far positions by whole radians.
        exact = dict(self.embedding.named_buffers())
        super()._apply(fn, recurse)
        for name, moved in self.embedding.named_buffers():
            if not moved.is_meta and not exact[name].is_meta:
                setattr(self.embedding, name, exact[name].to(moved.device))
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """For int64 positions [B, T]."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self.embedding(like, positions)
        return cos[:, None], sin[:, None]


class AttentionLayer(nn.Module):
    """Projections of self-attention, for networks of one layer.

    A base class and no part of them: published drafts have these names beside those of the rest.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    rotary: Rotary

    def __init__(self) -> None:
        super().__init__()
        self._packed: Packed | None = None
        self._head_dim = 0

    def make_attention(self, inputs: int, outputs: int, config: Any, bias: bool = False) -> None:
        """Make the projections.

        Args:
            inputs: Size of what is projected.
            outputs: Size of the result.
            config: Has `num_heads`, `num_key_value_heads`, `head_dim`, `max_positions`, `rope`.
            bias: Whether queries, keys and values have biases.
        """
        self._head_dim = size = config.head_dim
        self.q_proj = nn.Linear(inputs, config.num_heads * size, bias=bias)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * size, outputs, bias=False)
        self.rotary = Rotary(config.num_heads, size, config.max_positions, config.rope)

    def pack_attention(self) -> None:
        """See `Packed`."""
        self._packed = Packed([self.q_proj, self.k_proj, self.v_proj])

    def attended(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Self-attention of x [B, T, inputs]; [B, T, outputs]."""
        projections = self.q_proj, self.k_proj, self.v_proj
        found = self._packed(x) if self._packed else (p(x) for p in projections)
        q, k, v = (self._by_head(y) for y in found)
        out = attend(_rotated(q, angles), _rotated(k, angles), v)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def keys_and_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """What `attended` would pass to `attend` of x [B, T, inputs], each [B, K, T, D]."""
        k, v = self._by_head(self.k_proj(x)), self._by_head(self.v_proj(x))
        return _rotated(k, angles), v

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)


def _rotated(x: Tensor, angles: Angles) -> Tensor:
    """[B, H, T, D] turned by its positions."""
    one, two = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat([-two, one], dim=-1) * angles[1]
