"""The shape of trees: ancestors as packed bits, chains, trees from lists of parents."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

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


def topology_of(rows: list[list[int]], nodes: int, device: torch.device) -> dict[str, Any]:
    """The fields of a `TokenTree` that say which node hangs where.

    Args:
        rows: Parents of every row's nodes, -1 for the root; rows shorter than `nodes` are padded.
        nodes: N.
        device: Where the tensors go.

    Raises:
        ValueError: If a parent does not come before its child, or a row has no root.
    """
    words = -(-nodes // WORD_BITS)
    all_parents, all_depth, all_bits, children = [], [], [], []
    for b, row in enumerate(rows):
        if not 1 <= len(row) <= nodes or row[0] != -1:
            raise ValueError(
                f"parents of row {b} must start with -1 and have 1..{nodes} entries, got {row}."
            )
        depth, bits = [0], [1]
        for n in range(1, len(row)):
            if not 0 <= row[n] < n:
                raise ValueError(
                    f"node {n} of row {b} has parent {row[n]}; parents come before children."
                )
            depth.append(depth[row[n]] + 1)
            bits.append(bits[row[n]] | 1 << n)
        padding = range(len(row), nodes)  # sees itself only
        bits += [1 << n for n in padding]
        all_parents.append([*row, *(-1 for _ in padding)])
        all_depth.append([*depth, *(0 for _ in padding)])
        all_bits.append([words_of(value, words) for value in bits])
        children.append(max(Counter(row[1:]).values(), default=0))
    counts = [len(row) for row in rows]
    return {
        "parents": torch.tensor(all_parents, dtype=torch.int32, device=device),
        "depth": torch.tensor(all_depth, dtype=torch.int32, device=device),
        "ancestors": torch.tensor(all_bits, dtype=torch.int64, device=device),
        "num_nodes": torch.tensor(counts, dtype=torch.int32, device=device),
        "max_depth": max(map(max, all_depth)),
        "max_nodes": max(counts),
        "max_children": max(children),
    }


def ancestor_mask(ancestors: Tensor, nodes: int) -> Tensor:
    """Packed bits [..., W] as bool [..., N]."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int64, device=ancestors.device)
    return ((ancestors[..., None] >> shifts) & 1).bool().flatten(-2)[..., :nodes]


def packed_bits(visible: Tensor) -> Tensor:
    """The inverse of `ancestor_mask`: bool [..., N] as bits, int64 [..., ceil(N/64)]."""
    nodes = visible.shape[-1]
    words = -(-nodes // WORD_BITS)
    padded = torch.nn.functional.pad(visible, (0, words * WORD_BITS - nodes))
    shifts = torch.arange(WORD_BITS, dtype=torch.int64, device=visible.device)
    return (padded.unflatten(-1, (words, WORD_BITS)).long() << shifts).sum(-1)


def ancestors_of(parents: Tensor, max_depth: int) -> Tensor:
    """Packed ancestor bits, see `TokenTree`.

    Args:
        parents: int64 [B, N]; -1 at the root and at padding, which sees itself alone.
        max_depth: Of any node.

    Returns:
        int64 [B, N, ceil(N/64)]
    """
    batch, nodes = parents.shape
    words = -(-nodes // WORD_BITS)
    ones = torch.ones((), dtype=torch.int64, device=parents.device)
    current = torch.arange(nodes, device=parents.device).expand(batch, -1)
    out = [torch.zeros_like(parents) for _ in range(words)]
    for _ in range(max_depth + 1):
        bit = (ones << (current % WORD_BITS)).where(current >= 0, 0)
        for w in range(words):
            out[w] |= bit if words == 1 else bit.where(current // WORD_BITS == w, 0)
        current = parents.gather(1, current.clamp(min=0)).where(current >= 0, -1)
    return torch.stack(out, dim=-1)
