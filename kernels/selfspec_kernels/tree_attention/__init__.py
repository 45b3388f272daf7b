"""Attention of tree nodes over a cached prefix and over their own ancestors."""

from typing import Literal, overload

import torch
from torch import Tensor

from .._dispatch import Backend, use_triton
from ..layout import TreeLayout
from .reference import tree_attention_reference

__all__ = ["tree_attention"]

# Programs along the dimension of a CUDA grid that the splits take.
MAX_GRID = 65_535


@overload
def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    *,
    scale: float | None = ...,
    softcap: float = ...,
    window: int = ...,
    sinks: Tensor | None = ...,
    num_splits: int | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    backend: Backend = ...,
) -> Tensor: ...


@overload
def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    *,
    scale: float | None = ...,
    softcap: float = ...,
    window: int = ...,
    sinks: Tensor | None = ...,
    num_splits: int | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    backend: Backend = ...,
) -> tuple[Tensor, Tensor]: ...


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
    num_splits: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attend from tree nodes to the prefix and to the nodes that `layout` lets them see.

    With :math:`s = \mathrm{scale} \cdot q k^T`, soft-capped to :math:`c \tanh(s / c)` if
    `softcap` c is positive, the result is :math:`\sum_j e^{s_j} v_j / (\sum_j e^{s_j} + e^{z})`
    over visible slots j, where the sink term :math:`e^z` is present only if `sinks` is given. A
    query that sees nothing gives 0.

    Args:
        query: [B, H, M, D]; the last M nodes of the tree. H is a multiple of K.
        key: [B, K, S, D] view of the cache, S >= `layout.max_prefix_len` + N, with the nodes
            already in place (`TreeLayout` says where); [pages, K, page_size, D] if the layout has a
            block table. Last dimension contiguous, as for all three.
        value: [B, K, S, Dv], or [pages, K, page_size, Dv].
        layout: Where the nodes are and who sees whom.
        scale: Factor of the scores; None is `D ** -0.5`.
        softcap: Bound of the scores; 0 is none.
        window: If positive, a query sees only positions less than `window` behind its own.
            Positions follow tree depth, not slots.
        sinks: [H] logit of an attention sink for every query head, or None.
        num_splits: Number of programs among which the kernel divides a prefix; None chooses by the
            sizes of the call and of the device. The reference does not split.
        deterministic: In the kernel, split into chunks of a fixed size instead: no bit of a
            sequence's rows then depends on the other sequences or on `layout.max_prefix_len`, only
            on its own content, M, N and the device. Costs a second launch at any length.
        return_lse: Whether to return the logarithm of the denominators, too.
        backend: "auto" takes the Triton kernel for CUDA tensors, except float64, which it does not
            have; "triton" and "reference" insist.

    Returns:
        [B, H, M, Dv] in the dtype of `query`. With `return_lse`, a pair of that and of
        :math:`\log(\sum_j e^{s_j} + e^z)`, [B, H, M] in float32 (float64 for float64), -inf for a
        query that sees nothing and has no sink.

    Raises:
        TypeError: If dtypes differ or are not supported.
        ValueError: If shapes, devices or strides do not fit, a number is out of range, or
            `num_splits` and `deterministic` are both given.

    Note:
        Slots outside of prefix and tree may hold anything, NaN included, and so may padding, nodes
        that are no query's ancestor, and pages that are not in use: in the kernel, and wherever the
        reference takes its explicit path (`softcap`, `sinks` or `return_lse`) or gathers pages.
        Torch's own attention, which the reference uses otherwise, multiplies hidden values by 0, so
        there they must be finite.
    """
    _check_tensors(query, key, value, layout)
    _check_options(query, softcap, window, sinks, num_splits, deterministic)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if backend == "auto" and query.dtype is torch.float64:
        backend = "reference"
    if use_triton("tree_attention", backend, query):
        from .kernel import tree_attention_triton

        out, lse = tree_attention_triton(
            query,
            key,
            value,
            layout,
            scale,
            softcap,
            window,
            sinks,
            num_splits=num_splits,
            deterministic=deterministic,
            return_lse=return_lse,
        )
    else:
        out, lse = tree_attention_reference(
            query, key, value, layout, scale, softcap, window, sinks, return_lse=return_lse
        )
    return out if lse is None else (out, lse)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout) -> None:
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
    table = layout.block_table
    if key.shape[3] != head_size or (table is None and key.shape[0] != batch):
        raise ValueError(
            f"tree_attention: key {tuple(key.shape)} does not fit query {tuple(query.shape)}; "
            f"expected {'[B, K, S, D]' if table is None else '[pages, K, page_size, D]'}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"tree_attention: value {tuple(value.shape)} does not fit key {tuple(key.shape)}; "
            "they must agree on all but the last dimension"
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
    needed = f"layout needs max_prefix_len + N = {layout.max_prefix_len} + {layout.num_nodes}"
    if table is None and key_len < layout.max_prefix_len + layout.num_nodes:
        raise ValueError(f"tree_attention: key has {key_len} slots; {needed}")
    if table is not None:
        if key.shape[0] == 0 or key_len == 0:
            raise ValueError(f"tree_attention: key {tuple(key.shape)} has no pages")
        if table.shape[1] * key_len < layout.max_prefix_len + layout.num_nodes:
            raise ValueError(
                f"tree_attention: layout has {table.shape[1]} pages a row of {key_len} slots in "
                f"block_table; {needed}"
            )


def _check_options(
    query: Tensor,
    softcap: float,
    window: int,
    sinks: Tensor | None,
    num_splits: int | None,
    deterministic: bool,
) -> None:
    heads = query.shape[1]
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
    if num_splits is not None:
        if deterministic:
            raise ValueError(
                f"tree_attention: num_splits={num_splits} with deterministic=True, which splits by "
                "itself; give one of them"
            )
        if not 1 <= num_splits <= MAX_GRID:
            raise ValueError(
                f"tree_attention: num_splits={num_splits}; use 1 to {MAX_GRID}, or None to choose"
            )
