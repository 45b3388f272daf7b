"""Rotary self-attention of the draft networks; what is attended to is the caller's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
    """

    def __init__(
        self, num_heads: int, head_dim: int, max_positions: int, parameters: dict[str, Any]
    ) -> None:
        super().__init__()
        # Here, since it takes a second that wrapping a model without trained drafts does not need.
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig(
            hidden_size=num_heads * head_dim,
            num_attention_heads=num_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=dict(parameters),
        )
        self.embedding = LlamaRotaryEmbedding(config)

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


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """[B, H, T, D] turned by its positions."""
    one, two = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat([-two, one], dim=-1) * angles[1]


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, H D] as [B, H, T, D]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def joined_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] as [B, T, H D]."""
    return x.transpose(1, 2).flatten(2)
