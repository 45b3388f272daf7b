"""Attention of tree nodes over a cached prefix and over their own ancestors."""

import torch
from torch import Tensor

from .._dispatch import Backend, use_triton
from ..layout import TreeLayout
from .reference import tree_attention_reference

__all__ = ["tree_attention"]


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""Attend from tree nodes to the prefix and to the nodes that `layout` lets them see.

    With :math:`s = \mathrm{scale} \cdot q k^T`, soft-capped to :math:`c \tanh(s / c)` if
    `softcap` c is positive, the result is :math:`\sum_j e^{s_j} v_j / (\sum_j e^{s_j} + e^{z})`
    over visible slots j, where the sink term :math:`e^z` is present only if `sinks` is given. A
    query that sees nothing gives 0.

    Args:
        query: [B, H, M, D]; the last M nodes of the tree. H is a multiple of K.
        key: [B, K, S, D] view of the cache, S >= `layout.max_prefix_len` + N, with the nodes
            already in place (`TreeLayout` says where). Last dimension contiguous, as for all three.
        value: [B, K, S, Dv].
        layout: Where the nodes are and who sees whom.
        scale: Factor of the scores; None is `D ** -0.5`.
        softcap: Bound of the scores; 0 is none.
        window: If positive, a query sees only positions less than `window` behind its own.
            Positions follow tree depth, not slots.
        sinks: [H] logit of an attention sink for every query head, or None.
        backend: "auto" takes the Triton kernel for CUDA tensors, except float64, which it does not
            have; "triton" and "reference" insist.

    Returns:
        [B, H, M, Dv] in the dtype of `query`.

    Raises:
        TypeError: If dtypes differ or are not supported.
        ValueError: If shapes, devices or strides do not fit, or a number is out of range.

    Note:
        Slots outside of prefix and tree may hold anything, NaN included, and so may nodes that are
        no query's ancestor: in the kernel, and wherever the reference takes its explicit path
        (`softcap` or `sinks`). Torch's own attention, which the reference uses otherwise,
        multiplies hidden values by 0, so there they must be finite.
    """
    _check(query, key, value, layout, softcap, window, sinks)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if backend == "auto" and query.dtype is torch.float64:
        backend = "reference"
    if use_triton("tree_attention", backend, query):
        from .kernel import tree_attention_triton

        return tree_attention_triton(query, key, value, layout, scale, softcap, window, sinks)
    return tree_attention_reference(query, key, value, layout, scale, softcap, window, sinks)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    softcap: float,
    window: int,
    sinks: Tensor | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"tree_attention: {name} must have 4 dimensions, got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype is not query.dtype:
            raise TypeError(
                f"tree_attention: {name} is {tensor.dtype}, query is {query.dtype}; use one dtype"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"tree_attention: {name} is on {tensor.device}, query on {query.device}"
            )
        if tensor.stride(3) != 1:
            raise ValueError(
                f"tree_attention: {name} has stride {tensor.stride(3)} in its last dimension; "
                "make it contiguous there"
            )
    if not query.dtype.is_floating_point:
        raise TypeError(f"tree_attention: query is {query.dtype}; use a floating dtype")
    batch, heads, num_queries, head_size = query.shape
    kv_heads, key_len = key.shape[1:3]
    if key.shape[0] != batch or key.shape[3] != head_size:
        raise ValueError(
            f"tree_attention: key {tuple(key.shape)} does not fit query {tuple(query.shape)}; "
            "expected [B, K, S, D]"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"tree_attention: value {tuple(value.shape)} does not fit key {tuple(key.shape)}; "
            "they must agree on [B, K, S]"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"tree_attention: query has {heads} heads, no multiple of the {kv_heads} of key"
        )
    if layout.batch != batch or layout.num_queries != num_queries:
        raise ValueError(
            f"tree_attention: layout is for {layout.batch} sequences of {layout.num_queries} "
            f"queries, query has shape {tuple(query.shape)}"
        )
    if layout.prefix_len.device != query.device:
        raise ValueError(
            f"tree_attention: layout is on {layout.prefix_len.device}, query on {query.device}"
        )
    if key_len < layout.max_prefix_len + layout.num_nodes:
        raise ValueError(
            f"tree_attention: key has {key_len} slots; layout needs max_prefix_len + N = "
            f"{layout.max_prefix_len} + {layout.num_nodes}"
        )
    if softcap < 0:
        raise ValueError(f"tree_attention: softcap={softcap} is negative; 0 switches it off")
    if window < 0:
        raise ValueError(f"tree_attention: window={window} is negative; 0 switches it off")
    if sinks is not None:
        if sinks.shape != (heads,):
            raise ValueError(
                f"tree_attention: sinks has shape {tuple(sinks.shape)}, expected ({heads},)"
            )
        if sinks.device != query.device:
            raise ValueError(f"tree_attention: sinks is on {sinks.device}, query on {query.device}")
