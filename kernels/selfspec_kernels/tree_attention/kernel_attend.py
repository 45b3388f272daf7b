# mypy: allow-untyped-defs
"""The kernel that attends: one program owns BLOCK_M rows of one key/value head of one sequence.

Rows are pairs of node and query head, head innermost, so that a key/value tile is read once for all
G heads of its group. The program walks the prefix in tiles of BLOCK_N slots, where nothing but the
length, the padding and the window can hide a slot, then the N nodes, where one 64-bit ancestor word
per row and 64 columns decides. Scores, softmax (online, base 2) and the sum of values are float32.

If there are too few such programs to keep the memory busy, each prefix is split among several; the
nodes belong to the split in which the prefix ends. Every split leaves its normalised float32 result
and the base 2 logarithm of its weight to `kernel_combine`.

Design after vLLM's and SGLang's Triton verification kernels (Apache-2.0), splits after
Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

import math

import triton
import triton.language as tl

_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _attend_tile(
    row_max,
    row_sum,
    acc,
    q,
    key_ptr,
    value_ptr,
    table_ptr,
    slot,
    read,
    visible,
    key_stride_b,
    key_stride_s,
    value_stride_b,
    value_stride_s,
    score_scale,
    score_bound,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Fold the keys and values from `slot` on, as many as `read` is wide, into the softmax."""
    offs_n = tl.arange(0, read.shape[0])
    offs_d = tl.arange(0, q.shape[1])
    offs_dv = tl.arange(0, acc.shape[1])
    if PAGE_SIZE == 0:
        first = tl.cast(slot, tl.int64)
        key_ptr += first * key_stride_s
        value_ptr += first * value_stride_s
        key_offs = offs_n * key_stride_s
        value_offs = offs_n * value_stride_s
    else:
        slots = slot + offs_n
        page = tl.load(table_ptr + slots // PAGE_SIZE, mask=read, other=0).to(tl.int64)
        place = (slots % PAGE_SIZE).to(tl.int64)
        key_offs = page * key_stride_b + place * key_stride_s
        value_offs = page * value_stride_b + place * value_stride_s
    k = tl.load(
        key_ptr + (offs_d[:, None] + key_offs[None, :]),
        mask=(offs_d < HEAD_SIZE)[:, None] & read[None, :],
        other=0.0,
    )
    v = tl.load(
        value_ptr + (value_offs[:, None] + offs_dv[None, :]),
        mask=read[:, None] & (offs_dv < VALUE_SIZE)[None, :],
        other=0.0,
    )
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)

    scores = tl.dot(q, k, input_precision=PRECISION) * score_scale
    if HAS_SOFTCAP:
        # tanh by one exponential; its overflow to inf is the right limit.
        capped = 1.0 - 2.0 / (tl.exp2(scores) + 1.0)
        if q.dtype == tl.float32:
            # Small differences of large numbers; a continued fraction is exact to float32 there.
            x = scores * (0.5 * _LN2)
            square = x * x
            fraction = x * (945.0 + square * (105.0 + square))
            fraction /= 945.0 + square * (420.0 + 15.0 * square)
            capped = tl.where(square < 1.0, fraction, capped)
        scores = score_bound * capped
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
@triton.jit(
    do_not_specialize=["num_queries", "num_nodes", "window", "splits", "chunk", "table_width"]
)
def attend_kernel(
    out_ptr,
    lse_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    ancestors_ptr,
    depth_ptr,
    prefix_len_ptr,
    start_ptr,
    table_ptr,
    sinks_ptr,
    score_scale,
    score_bound,
    kv_heads,
    num_queries,
    num_nodes,
    window,
    splits,
    chunk,
    table_width,
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
    PAGE_SIZE: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: row blocks, B * K, splits. `out_ptr` and `lse_ptr` are scratch where split."""
    tl.static_assert(64 % BLOCK_N == 0, "a tile of nodes must not straddle an ancestor word")
    pid_bh = tl.program_id(1)
    b = (pid_bh // kv_heads).to(tl.int64)
    kv_head = (pid_bh % kv_heads).to(tl.int64)
    prefix_len = tl.load(prefix_len_ptr + b)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    num_rows = num_queries * GROUPS
    in_row = row < num_rows
    m = row // GROUPS
    head = kv_head * GROUPS + row % GROUPS

    # Output and scratch are [B, M, H, ...], one after the other for every split.
    place = (b * num_queries + m) * (kv_heads * GROUPS) + head
    if IS_SPLIT:
        place += tl.program_id(2).to(tl.int64) * tl.num_programs(1) * num_rows

    depth_ptr += b * num_nodes
    first_slot = 0
    if HAS_START:
        first_slot = tl.maximum(tl.load(start_ptr + b), 0)
    if HAS_WINDOW:
        q_depth = tl.load(depth_ptr + (num_nodes - num_queries) + m, mask=in_row, other=2147483647)
        # The first slot that the shallowest row sees; earlier ones are not even loaded.
        first_slot = tl.maximum(prefix_len + tl.min(q_depth, 0) - window + 1, first_slot)
    stop_slot = prefix_len
    stop_node = num_nodes
    loaded = in_row
    if IS_SPLIT:
        split = tl.program_id(2)
        span = tl.maximum(prefix_len - first_slot, 0)
        even = tl.cdiv(tl.cdiv(span, splits), BLOCK_N) * BLOCK_N
        size = tl.where(chunk > 0, chunk, tl.maximum(even, BLOCK_N))
        last = tl.maximum(span - 1, 0) // size
        first_slot += split * size
        stop_slot = tl.minimum(first_slot + size, prefix_len)
        stop_node = tl.where(split == last, num_nodes, 0)
        loaded = row < tl.where(split <= last, num_rows, 0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # A sink is a key of weight exp(logit) whose value is 0; it goes where the nodes go.
        sink = tl.load(sinks_ptr + head, mask=in_row, other=0.0).to(tl.float32) * _LOG2E
        row_max = tl.where(stop_node > 0, sink, float("-inf"))
        row_sum += tl.where(stop_node > 0, 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    q_ptrs = (
        query_ptr + b * query_stride_b + head * query_stride_h + m.to(tl.int64) * query_stride_m
    )
    q = tl.load(
        q_ptrs[:, None] + offs_d[None, :],
        mask=loaded[:, None] & (offs_d < HEAD_SIZE)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    key_ptr += kv_head * key_stride_h
    value_ptr += kv_head * value_stride_h
    if PAGE_SIZE == 0:
        key_ptr += b * key_stride_b
        value_ptr += b * value_stride_b
    else:
        table_ptr += b * table_width

    for slot in tl.range(first_slot, stop_slot, BLOCK_N):
        in_n = slot + offs_n < stop_slot
        visible = in_n[None, :]
        if HAS_WINDOW:
            distance = (prefix_len - slot) + q_depth[:, None] - offs_n[None, :]
            visible = visible & (distance < window)
        row_max, row_sum, acc = _attend_tile(
            row_max,
            row_sum,
            acc,
            q,
            key_ptr,
            value_ptr,
            table_ptr,
            slot,
            in_n,
            visible,
            key_stride_b,
            key_stride_s,
            value_stride_b,
            value_stride_s,
            score_scale,
            score_bound,
            HEAD_SIZE,
            VALUE_SIZE,
            PAGE_SIZE,
            HAS_SOFTCAP,
            PRECISION,
            UPCAST,
        )

    word_ptrs = ancestors_ptr + (b * num_queries + m) * ((num_nodes + 63) // 64)
    # One or two tiles, but staged like those of the prefix: other loads pass through registers.
    for start in tl.range(0, stop_node, BLOCK_N):
        node = start + offs_n
        in_n = node < num_nodes
        bit = (node % 64).to(tl.int64)
        word = tl.load(word_ptrs + start // 64, mask=in_row, other=0)
        visible = ((word[:, None] >> bit[None, :]) & 1) != 0
        visible = visible & in_n[None, :]
        if HAS_WINDOW:
            depth = tl.load(depth_ptr + node, mask=in_n, other=0)
            visible = visible & (q_depth[:, None] - depth[None, :] < window)
        # Whatever is in slots that are no row's ancestor, 0 times it must be 0.
        seen = in_n & (((tl.reduce(word, 0, _either) >> bit) & 1) != 0)
        row_max, row_sum, acc = _attend_tile(
            row_max,
            row_sum,
            acc,
            q,
            key_ptr,
            value_ptr,
            table_ptr,
            prefix_len + start,
            seen,
            visible,
            key_stride_b,
            key_stride_s,
            value_stride_b,
            value_stride_s,
            score_scale,
            score_bound,
            HEAD_SIZE,
            VALUE_SIZE,
            PAGE_SIZE,
            HAS_SOFTCAP,
            PRECISION,
            UPCAST,
        )

    # A sum of 0 belongs to a row that has seen nothing, whose maximum is -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    out = acc / row_sum[:, None]
    out_ptrs = out_ptr + place * VALUE_SIZE
    tl.store(
        out_ptrs[:, None] + offs_dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=loaded[:, None] & (offs_dv < VALUE_SIZE)[None, :],
    )
    if IS_SPLIT:
        tl.store(lse_ptr + place, row_max + tl.log2(row_sum), mask=in_row)
    elif HAS_LSE:
        tl.store(lse_ptr + place, (row_max + tl.log2(row_sum)) * _LN2, mask=in_row)
