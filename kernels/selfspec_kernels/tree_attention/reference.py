"""Tree attention in torch: the definition, and the path that CPU tensors take."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..layout import TreeLayout


def tree_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    softcap: float,
    window: int,
    sinks: Tensor | None,
    *,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `selfspec_kernels.tree_attention`.

    The G query heads of a key/value head are packed with the M nodes into one dimension of G * M
    queries, so that keys and values are read once a group and never repeated.
    """
    batch, heads, num_queries, _ = query.shape
    kv_heads, value_size = key.shape[1], value.shape[3]
    groups = heads // kv_heads
    # Nothing is visible beyond, so a view of a whole preallocated cache costs no more than a slice.
    key_len = layout.max_prefix_len + layout.num_nodes
    if layout.block_table is None:
        key, value = key[:, :, :key_len], value[:, :, :key_len]
    else:
        hidden = layout.mask(key_len, window).any(dim=1).logical_not()[:, None, :, None]
        key, value = (_gather(pages, layout.block_table, hidden) for pages in (key, value))
    packed = query.reshape(batch, kv_heads, groups * num_queries, -1)
    if softcap > 0 or sinks is not None or return_lse:
        out, lse = _explicit(packed, key, value, layout, scale, softcap, window, sinks, return_lse)
        out = out.reshape(batch, heads, num_queries, value_size)
        return out, None if lse is None else lse.reshape(batch, heads, num_queries)
    bias = None
    if not layout.sees_all(key_len, window):
        bias = layout.bias(key_len, window, query.dtype, groups)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=bias, scale=scale)
    if not query.is_cpu:
        # Torch's CPU kernels give 0 for a query that sees nothing; other devices may not.
        blind = layout.mask(key_len, window).any(dim=-1).logical_not()
        out = out.masked_fill(blind.repeat(1, groups)[:, None, :, None], 0)
    return out.reshape(batch, heads, num_queries, value_size), None


def _gather(pages: Tensor, block_table: Tensor, hidden: Tensor) -> Tensor:
    """The first slots of every row, copied out of their pages, with 0 in hidden ones.

    Args:
        pages: [pages, K, page_size, D].
        block_table: int32 [B, P]; entries of pages that hold hidden slots only may be anything.
        hidden: bool [B, 1, S, 1].
    """
    key_len, page_size = hidden.shape[2], pages.shape[2]
    table = block_table[:, : (key_len + page_size - 1) // page_size].clamp(0, pages.shape[0] - 1)
    rows = rearrange(pages[table], "b p k s d -> b k (p s) d")
    return rows[:, :, :key_len].masked_fill(hidden, 0)


def _explicit(
    packed: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    softcap: float,
    window: int,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention with what `scaled_dot_product_attention` lacks: soft cap, sinks, logsumexp.

    16-bit inputs are widened throughout, which on a CPU is no slower than 16-bit products.
    """
    batch, kv_heads, rows, _ = packed.shape
    num_queries, key_len = layout.num_queries, key.shape[2]
    grouped = (batch, kv_heads, rows // num_queries, num_queries, key_len)
    mask = layout.mask(key_len, window)
    hidden = mask.logical_not()[:, None, None]
    dtype = torch.promote_types(packed.dtype, torch.float32)

    scores = torch.matmul(packed.to(dtype) * scale, key.to(dtype).transpose(2, 3)).view(grouped)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.to(dtype).view(1, kv_heads, -1, 1, 1).expand(*grouped[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    lse = scores.logsumexp(dim=-1) if return_lse else None
    weights = scores.softmax(dim=-1)[..., :key_len]
    # A softmax over nothing is NaN; filling the hidden entries once more leaves it 0.
    weights = weights.masked_fill(hidden, 0).view(batch, kv_heads, rows, key_len)
    unseen = mask.any(dim=1).logical_not()[:, None, :, None]
    return torch.matmul(weights, value.to(dtype).masked_fill(unseen, 0)).to(packed.dtype), lse
