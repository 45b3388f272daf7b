"""Ancestors as packed bits, and the topology of chains."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

WORD_BITS = 64


def words_of(bits: int, words: int) -> list[int]:
    """Split a bit set into signed 64-bit words, lowest first."""
    out = []
    for w in range(words):
        word = bits >> (WORD_BITS * w) & (1 << WORD_BITS) - 1
        out.append(word - (1 << WORD_BITS) if word >> (WORD_BITS - 1) else word)
    return out


@lru_cache(maxsize=512)
def chain_topology(nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depth and ancestors of one chain, [1, N] and [1, N, W]; made once a length.

    Built with inference mode off: tensors made inside a user's `torch.inference_mode()` would be
    unusable in a later call outside it.
    """
    words = -(-nodes // WORD_BITS)
    bits = [words_of((1 << n + 1) - 1, words) for n in range(nodes)]
    with torch.inference_mode(False):
        depth = torch.arange(nodes, dtype=torch.int32, device=device)[None]
        return depth - 1, depth, torch.tensor([bits], dtype=torch.int64, device=device)


def ancestor_mask(ancestors: Tensor, nodes: int) -> Tensor:
    """Packed bits [..., W] as bool [..., N]."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int64, device=ancestors.device)
    return ((ancestors[..., None] >> shifts) & 1).bool().flatten(-2)[..., :nodes]
