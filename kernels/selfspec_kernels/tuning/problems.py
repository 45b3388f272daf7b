"""Representative launches for what a row of the table is for, as the tuner times them."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..layout import TreeLayout

Launch = Callable[[], object]


def launches(op: str, row: dict[str, Any], device: torch.device, divisor: int = 1) -> list[Launch]:
    """Calls of `op` that use `row`; sizes of model and context are divided by `divisor`."""
    return _MAKERS[op](row, device, divisor)


def _op(name: str) -> Callable[..., Any]:
    module = name.removesuffix("_sampled")
    function: Callable[..., Any] = getattr(import_module(f"selfspec_kernels.{module}"), name)
    return function


def _dtype(row: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if row.get("item_size", 2) == 2 else torch.float32


def _randn(*shape: int, row: dict[str, Any], device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=_dtype(row))


def chain_layout(nodes: int, prefix: int, device: torch.device, batch: int = 1) -> TreeLayout:
    """A chain behind a prefix; a kernel's work does not depend on the shape of the tree."""
    node = torch.arange(nodes, device=device)
    word = torch.arange(-(-nodes // 64), device=device)
    # Bits 0..n of 64 * word + bit; a shift by 64 is none at all, hence two.
    count = (node[:, None] + 1 - 64 * word).clamp(0, 64)
    bits = torch.where(count == 64, -1, (1 << count.clamp(max=63)) - 1)
    return TreeLayout(
        bits.expand(batch, -1, -1),
        node.int().expand(batch, -1),
        torch.full((batch,), prefix, dtype=torch.int32, device=device),
        prefix,
    )


def _tree_attention(row: dict[str, Any], device: torch.device, divisor: int) -> list[Launch]:
    """One pass over the prefix by all rows of the tile: 4 query heads a group, 8 groups."""
    attend = _op("tree_attention")
    found: list[Launch] = []
    nodes, size = row["m"] // 4, row["width"]
    for prefix in (8192 // divisor, 32768 // divisor):
        query = _randn(1, 32, nodes, size, row=row, device=device)
        key, value = (_randn(1, 8, prefix + nodes, size, row=row, device=device) for _ in range(2))
        layout = chain_layout(nodes, prefix, device)
        found.append(partial(attend, query, key, value, layout))
    return found


def _draft_topk(row: dict[str, Any], device: torch.device, divisor: int) -> list[Launch]:
    """As many states as the tile holds, before a whole and a reduced vocabulary."""
    drafts, confidence = _op("draft_topk"), _op("exit_confidence")
    found: list[Launch] = []
    hidden = _randn(row["m"], 4096 // divisor, row=row, device=device)
    for vocab in (128256 // divisor, 32768 // divisor):
        weight = _randn(vocab, 4096 // divisor, row=row, device=device)
        found += [partial(drafts, hidden, weight, 8), partial(confidence, hidden, weight)]
    return found


def _row_stats(row: dict[str, Any], device: torch.device, divisor: int) -> list[Launch]:
    stats = _op("row_stats")
    logits = _randn(32, 128256 // divisor, row=row, device=device)
    filters = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
    return [
        partial(stats, logits[:1]),
        partial(stats, logits),
        partial(stats, logits, **filters),
    ]


def _tree_accept(row: dict[str, Any], device: torch.device, divisor: int) -> list[Launch]:
    """A chain of 7 drafts whose distributions resemble the target's."""
    accept = _op("tree_accept_sampled")
    nodes, vocab = 8, 128256 // divisor
    layout = chain_layout(nodes, 0, device)
    scores = torch.randn(1, nodes, vocab, device=device)
    tokens = torch.randint(vocab, (1, nodes), device=device)
    count = torch.full((1,), nodes, dtype=torch.int32, device=device)
    return [
        partial(
            accept,
            tokens,
            layout.depth - 1,
            layout.ancestors,
            layout.depth,
            count,
            scores,
            scores.logsumexp(-1),
            (scores + torch.randn_like(scores)).log_softmax(-1),
            seed=torch.ones(1, dtype=torch.int64, device=device),
            position=count,
            max_depth=nodes - 1,
            max_children=1,
        )
    ]


_MAKERS: dict[str, Callable[[dict[str, Any], torch.device, int], list[Launch]]] = {
    "tree_attention": _tree_attention,
    "draft_topk": _draft_topk,
    "row_stats": _row_stats,
    "tree_accept": _tree_accept,
}
