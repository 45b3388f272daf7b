# mypy: allow-untyped-defs
"""Triton kernel of tree attention.

One program owns BLOCK_M rows of one key/value head of one sequence. Rows are pairs of node and
query head, head innermost, so that a key/value tile is read once for all G heads of its group. The
program walks the prefix in tiles of BLOCK_N slots, where nothing but the length and the window can
hide a slot, then the N nodes, where one 64-bit ancestor word per row and 64 columns decides.
Scores, softmax (online, base 2) and the sum of values are float32.

Bytes moved per sequence and key/value head: (prefix + N) * (D + Dv) items, read once per row block,
plus queries and outputs. Design after vLLM's and SGLang's Triton verification kernels (Apache-2.0).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import device_guard, interpreting
from ..layout import TreeLayout
from .blocks import choose_blocks

MAX_HEAD_SIZE = 256
_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _attend_tile(
    q,
    k,
    v,
    visible,
    row_max,
    row_sum,
    acc,
    score_scale,
    score_bound,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold one tile of keys and values into the running softmax."""
    scores = tl.dot(q, k, input_precision=PRECISION) * score_scale
    if HAS_SOFTCAP:
        # tanh by one exponential; its overflow to inf is the right limit.
        scores = score_bound * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen nothing has maximum -inf, and -inf - -inf is NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_max, row_sum, acc


# Tree sizes change from step to step; a specialised kernel for some of them would be compiled then.
@triton.jit(do_not_specialize=["num_queries", "num_nodes", "window"])
def _tree_attention_kernel(
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    ancestors_ptr,
    depth_ptr,
    prefix_len_ptr,
    sinks_ptr,
    score_scale,
    score_bound,
    kv_heads,
    num_queries,
    num_nodes,
    window,
    out_stride_b,
    out_stride_h,
    out_stride_m,
    query_stride_b,
    query_stride_h,
    query_stride_m,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tl.static_assert(64 % BLOCK_N == 0, "a tile of nodes must not straddle an ancestor word")
    pid_bh = tl.program_id(1)
    b = (pid_bh // kv_heads).to(tl.int64)
    kv_head = (pid_bh % kv_heads).to(tl.int64)
    prefix_len = tl.load(prefix_len_ptr + b)

    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    in_d = offs_d < HEAD_SIZE
    in_dv = offs_dv < VALUE_SIZE

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = row < num_queries * GROUPS
    m = row // GROUPS
    head = kv_head * GROUPS + row % GROUPS
    q_ptrs = (
        query_ptr + b * query_stride_b + head * query_stride_h + m.to(tl.int64) * query_stride_m
    )
    q = tl.load(q_ptrs[:, None] + offs_d[None, :], mask=in_row[:, None] & in_d[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    depth_ptr += b * num_nodes
    first_slot = 0
    if HAS_WINDOW:
        q_depth = tl.load(depth_ptr + (num_nodes - num_queries) + m, mask=in_row, other=2147483647)
        # The first slot that the shallowest row sees; earlier ones are not even loaded.
        first_slot = tl.maximum(prefix_len + tl.min(q_depth, 0) - window + 1, 0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # A sink is a key of weight exp(logit) whose value is 0.
        row_max = tl.load(sinks_ptr + head, mask=in_row, other=0.0).to(tl.float32) * _LOG2E
        row_sum += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    k_ptrs = key_ptr + b * key_stride_b + kv_head * key_stride_h
    k_ptrs = k_ptrs + offs_d[:, None] + offs_n[None, :] * key_stride_s
    v_ptrs = value_ptr + b * value_stride_b + kv_head * value_stride_h
    v_ptrs = v_ptrs + offs_n[:, None] * value_stride_s + offs_dv[None, :]

    for start in tl.range(first_slot, prefix_len, BLOCK_N):
        base = tl.cast(start, tl.int64)
        in_n = start + offs_n < prefix_len
        k = tl.load(k_ptrs + base * key_stride_s, mask=in_d[:, None] & in_n[None, :], other=0.0)
        v = tl.load(v_ptrs + base * value_stride_s, mask=in_n[:, None] & in_dv[None, :], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        visible = in_n[None, :]
        if HAS_WINDOW:
            distance = (prefix_len - start) + q_depth[:, None] - offs_n[None, :]
            visible = visible & (distance < window)
        row_max, row_sum, acc = _attend_tile(
            q,
            k,
            v,
            visible,
            row_max,
            row_sum,
            acc,
            score_scale,
            score_bound,
            HAS_SOFTCAP,
            PRECISION,
        )

    word_ptrs = ancestors_ptr + (b * num_queries + m) * ((num_nodes + 63) // 64)
    for start in tl.range(0, num_nodes, BLOCK_N):
        base = prefix_len.to(tl.int64) + start
        node = start + offs_n
        in_n = node < num_nodes
        word = tl.load(word_ptrs + start // 64, mask=in_row, other=0)
        visible = ((word[:, None] >> (node % 64).to(tl.int64)[None, :]) & 1) != 0
        visible = visible & in_n[None, :]
        if HAS_WINDOW:
            depth = tl.load(depth_ptr + node, mask=in_n, other=0)
            visible = visible & (q_depth[:, None] - depth[None, :] < window)
        # Whatever is in slots that are no row's ancestor, 0 times it must be 0.
        seen = in_n & (((tl.reduce(word, 0, _either) >> (node % 64).to(tl.int64)) & 1) != 0)
        k = tl.load(k_ptrs + base * key_stride_s, mask=in_d[:, None] & seen[None, :], other=0.0)
        v = tl.load(v_ptrs + base * value_stride_s, mask=seen[:, None] & in_dv[None, :], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        row_max, row_sum, acc = _attend_tile(
            q,
            k,
            v,
            visible,
            row_max,
            row_sum,
            acc,
            score_scale,
            score_bound,
            HAS_SOFTCAP,
            PRECISION,
        )

    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_ptrs = out_ptr + b * out_stride_b + head * out_stride_h + m.to(tl.int64) * out_stride_m
    tl.store(
        out_ptrs[:, None] + offs_dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=in_row[:, None] & in_dv[None, :],
    )


def tree_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    softcap: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """Launch the kernel; see `selfspec_kernels.tree_attention`.

    The result is a view of [B, M, H, Dv], the order that an output projection wants.

    Raises:
        TypeError: If the dtype is not float32, float16 or bfloat16.
        ValueError: If a head is larger than 256.
    """
    batch, heads, num_queries, head_size = query.shape
    kv_heads, value_size = key.shape[1], value.shape[3]
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"tree_attention: query is {query.dtype}, which the Triton kernel does not have; use "
            'float32, float16 or bfloat16, or backend="reference"'
        )
    if max(head_size, value_size) > MAX_HEAD_SIZE:
        raise ValueError(
            f"tree_attention: query and value have heads of {head_size} and {value_size}; the "
            f'Triton kernel holds at most {MAX_HEAD_SIZE}, use backend="reference"'
        )
    groups = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(head_size))
    block_dv = max(16, triton.next_power_of_2(value_size))
    blocks = choose_blocks(
        groups * num_queries,
        max(block_d, block_dv),
        query.element_size(),
        amd=torch.version.hip is not None,
    )
    # Scores are kept as exponents of 2. Under a soft cap the kernel computes tanh from
    # exp(2 x) = exp2(2 log2(e) x), so that its factor is folded in here as well.
    score_scale, score_bound = scale * _LOG2E.value, 0.0
    if softcap > 0:
        score_scale, score_bound = 2.0 * score_scale / softcap, softcap * _LOG2E.value

    out = torch.empty(
        (batch, num_queries, heads, value_size), dtype=query.dtype, device=query.device
    ).transpose(1, 2)
    grid = (triton.cdiv(groups * num_queries, blocks.m), batch * kv_heads)
    with device_guard(query):
        _tree_attention_kernel[grid](
            out,
            query,
            key,
            value,
            layout.ancestors,
            layout.depth,
            layout.prefix_len,
            query if sinks is None else sinks.contiguous(),
            score_scale,
            score_bound,
            kv_heads,
            num_queries,
            layout.num_nodes,
            window,
            *out.stride()[:3],
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            GROUPS=groups,
            HEAD_SIZE=head_size,
            VALUE_SIZE=value_size,
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=softcap > 0,
            HAS_SINKS=sinks is not None,
            PRECISION=blocks.precision,
            # The interpreter holds bfloat16 as integers and would multiply those.
            UPCAST=interpreting() and query.dtype is torch.bfloat16,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return out
