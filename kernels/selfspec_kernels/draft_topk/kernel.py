# mypy: allow-untyped-defs
"""Triton kernels of the LM head: logits stay in registers, only their best and their sums leave.

One program takes BLOCK_M rows and BLOCK_V tokens: it walks the channels, adds up the squares that
the norm needs beside the product, and turns the logits into 64-bit keys that order as a logit and,
among equal ones, the lower position do. It leaves the k largest keys, the sum of exponentials and,
for the entropy, their moment. A second launch has one program a row, which merges the sorted lists
by k rounds over their first elements. All sums are in a fixed order, which depends on the tile and
so on the number of rows, but not on what is in them.

Bytes read: Vr * C items of the head once per block of rows; written and read again: per row and
block of tokens 8 * k + 4. The rounds cost time in k; they are meant for the few children of a node.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import device_guard, interpreting
from .._specimen import Specimen
from ..tuning import part_of
from .blocks import Blocks, choose_blocks, tiles
from .head import Head

# Below every key, that of -inf included.
_NO_KEY = tl.constexpr(-(2**63))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@triton.jit
def key_of(logits, position):
    """Integers that order as logit and position do, the lower position above the higher."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - position).to(tl.int64)


@triton.jit
def logit_of(key):
    """The logit of a key; -inf for none."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return tl.where(key == _NO_KEY, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def position_of(key):
    """The position of a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


# Rows and k change from step to step; a specialised kernel for some of them would be compiled then.
@triton.jit(do_not_specialize=["num_rows", "k"])
def head_tile_kernel(
    keys_ptr,
    sums_ptr,
    moments_ptr,
    hidden_ptr,
    weight_ptr,
    norm_weight_ptr,
    bias_ptr,
    token_ids_ptr,
    norm_eps,
    norm_offset,
    norm_scale,
    logit_scale,
    softcap,
    num_rows,
    num_tokens,
    vocab,
    k,
    hidden_stride_r,
    weight_stride_v,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TOKEN_IDS: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Keys, sums and moments of BLOCK_M rows and BLOCK_V tokens."""
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    in_row = row < num_rows
    position = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_block = position < num_tokens
    token = position.to(tl.int64)
    in_head = in_block
    if HAS_TOKEN_IDS:
        token = tl.load(token_ids_ptr + position, mask=in_block, other=0)
        # An id from outside of the vocabulary is no address.
        in_head = in_block & (token >= 0) & (token < vocab)

    offs_c = tl.arange(0, BLOCK_C)
    h_ptrs = hidden_ptr + row[:, None] * hidden_stride_r + offs_c[None, :]
    w_ptrs = weight_ptr + token[None, :] * weight_stride_v + offs_c[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, HIDDEN_SIZE, BLOCK_C):
        in_c = start + offs_c < HIDDEN_SIZE
        h = tl.load(h_ptrs + start, mask=in_row[:, None] & in_c[None, :], other=0.0)
        w = tl.load(w_ptrs + start, mask=in_c[:, None] & in_head[None, :], other=0.0)
        if UPCAST:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        if HAS_NORM:
            wide = h.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            gain = tl.load(norm_weight_ptr + start + offs_c, mask=in_c, other=0.0).to(tl.float32)
            h = (wide * ((gain + norm_offset) * norm_scale)[None, :]).to(h.dtype)
        acc = tl.dot(h, w, acc, input_precision=PRECISION)

    logits = acc
    if HAS_NORM:
        logits *= (tl.rsqrt(squares / HIDDEN_SIZE + norm_eps) / norm_scale)[:, None]
    if HAS_BIAS:
        logits += tl.load(bias_ptr + token, mask=in_head, other=0.0).to(tl.float32)[None, :]
    logits *= logit_scale
    if HAS_SOFTCAP:
        # tanh by one exponential; its overflow to inf is the right limit.
        logits = softcap * (1.0 - 2.0 / (tl.exp(logits * (2.0 / softcap)) + 1.0))
    logits = tl.where((logits == logits) & in_head[None, :], logits, float("-inf"))
    logits = tl.where(logits > _LARGEST, _LARGEST, logits)

    top = tl.max(logits, 1)
    # In a row of -inf alone, -inf - -inf would be NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    # Where exp gives 0 already, and 0 times a finite number is 0.
    shifted = tl.maximum(logits - shift[:, None], -1e3)
    weights = tl.exp(shifted)
    partial = row * num_blocks + block
    tl.store(sums_ptr + partial, tl.sum(weights, 1), mask=in_row)
    if HAS_MOMENTS:
        tl.store(moments_ptr + partial, tl.sum(weights * shifted, 1), mask=in_row)

    keys = tl.where(in_block[None, :], key_of(logits, position[None, :]), _NO_KEY)
    keys_ptrs = keys_ptr + row * k * num_blocks + block
    for _ in range(k):
        best = tl.max(keys, 1)
        tl.store(keys_ptrs, best, mask=in_row)
        keys = tl.where(keys == best[:, None], _NO_KEY, keys)
        keys_ptrs += num_blocks


@triton.jit(do_not_specialize=["k", "num_blocks"])
def _topk_combine_kernel(
    ids_ptr,
    log_probs_ptr,
    keys_ptr,
    sums_ptr,
    token_ids_ptr,
    k,
    num_blocks,
    HAS_TOKEN_IDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_B)
    in_range = block < num_blocks
    keys_ptrs = keys_ptr + row * k * num_blocks + block
    firsts = tl.load(keys_ptrs, mask=in_range, other=_NO_KEY)
    sums = tl.load(sums_ptr + row * num_blocks + block, mask=in_range, other=0.0)

    top = logit_of(tl.max(firsts, 0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    log_sum = tl.log(tl.sum(sums * tl.exp(logit_of(firsts) - shift), 0))
    taken = tl.zeros([BLOCK_B], tl.int32)
    for i in range(k):
        best = tl.max(firsts, 0)
        logit = logit_of(best)
        log_prob = tl.where(logit == float("-inf"), logit, logit - shift - log_sum)
        token = position_of(best).to(tl.int64)
        if HAS_TOKEN_IDS:
            token = tl.load(token_ids_ptr + token)
        tl.store(ids_ptr + row * k + i, token)
        tl.store(log_probs_ptr + row * k + i, log_prob)
        # Keys differ, so one list alone moves on.
        won = firsts == best
        taken += won.to(tl.int32)
        firsts = tl.load(
            keys_ptrs + taken * num_blocks,
            mask=won & (taken < k),
            other=tl.where(won, _NO_KEY, firsts),
        )


def launch_head_tiles(
    op: str, hidden: Tensor, head: Head, k: int, with_moments: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Partial results by row and block of the vocabulary.

    Args:
        op: Name of the op, for the error message.
        hidden: [R, C].
        head: The head.
        k: How many keys a block.
        with_moments: Whether to fill the third result.

    Returns:
        Keys int64 [R, k, blocks], in falling order along k; sums of exponentials of the logits
        over the block's largest, float32 [R, blocks]; the same sums weighted with that difference.

    Raises:
        TypeError: If the dtype is not float32, float16 or bfloat16.
    """
    if hidden.dtype not in _DTYPES:
        raise TypeError(
            f"{op}: hidden is {hidden.dtype}, which the Triton kernel does not have; use float32, "
            'float16 or bfloat16, or backend="reference"'
        )
    rows, size = hidden.shape
    weight, device = head.weight, hidden.device
    blocks = choose_blocks(part_of(device), rows, head.num_tokens, hidden.element_size())
    num_blocks = triton.cdiv(head.num_tokens, blocks.v)
    keys = torch.empty((rows, k, num_blocks), dtype=torch.int64, device=device)
    sums = torch.empty((rows, num_blocks), dtype=torch.float32, device=device)
    moments = torch.empty_like(sums) if with_moments else sums
    # The norm's own factor comes after the product. Before it, channels that float16 holds barely
    # would overflow by their weight; a power of two is exact.
    norm_scale = 2.0**-7 if hidden.dtype is torch.float16 else 1.0
    norm_weight, bias, token_ids = head.norm_weight, head.bias, head.token_ids
    with device_guard(hidden):
        head_tile_kernel[(triton.cdiv(rows, blocks.m), num_blocks)](
            keys,
            sums,
            moments,
            hidden,
            weight,
            weight if norm_weight is None else norm_weight.contiguous(),
            weight if bias is None else bias.contiguous(),
            keys if token_ids is None else token_ids.contiguous(),
            float(head.norm_eps),
            float(head.norm_offset),
            norm_scale,
            float(head.logit_scale),
            float(head.softcap),
            rows,
            head.num_tokens,
            weight.shape[0],
            k,
            hidden.stride(0),
            weight.stride(0),
            HIDDEN_SIZE=size,
            BLOCK_M=blocks.m,
            BLOCK_V=blocks.v,
            BLOCK_C=blocks.c,
            HAS_NORM=norm_weight is not None,
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=head.softcap > 0,
            HAS_TOKEN_IDS=token_ids is not None,
            HAS_MOMENTS=with_moments,
            PRECISION=blocks.precision,
            # The interpreter holds bfloat16 as integers and would multiply those.
            UPCAST=interpreting() and hidden.dtype is torch.bfloat16,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return keys, sums, moments


def combine_shape(num_blocks: int) -> tuple[int, int]:
    """Lanes of a program that combines, and its warps: at most 16 lists a thread up to 8192."""
    lanes = max(32, triton.next_power_of_2(num_blocks))
    return lanes, min(16, max(1, lanes // 256))


def draft_topk_triton(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """Launch the kernels; see `selfspec_kernels.draft_topk`.

    Raises:
        TypeError: If the dtype is not float32, float16 or bfloat16.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows, shape = flat.shape[0], (*hidden.shape[:-1], k)
    ids = torch.empty((rows, k), dtype=torch.int64, device=hidden.device)
    log_probs = torch.empty((rows, k), dtype=torch.float32, device=hidden.device)
    if rows == 0:
        return ids.view(shape), log_probs.view(shape)
    keys, sums, _ = launch_head_tiles("draft_topk", flat, head, k, with_moments=False)
    lanes, warps = combine_shape(sums.shape[1])
    with device_guard(hidden):
        _topk_combine_kernel[(rows,)](
            ids,
            log_probs,
            keys,
            sums,
            keys if head.token_ids is None else head.token_ids.contiguous(),
            k,
            sums.shape[1],
            HAS_TOKEN_IDS=head.token_ids is not None,
            BLOCK_B=lanes,
            num_warps=warps,
        )
    return ids.view(shape), log_probs.view(shape)


def tile_specimens(part: str, with_moments: bool) -> Iterator[Specimen]:
    """Every tile of the table, with all options on."""
    for item_size, item in ((2, "*bf16"), (4, "*fp32")):
        for blocks in tiles(part, item_size):
            yield tile_specimen(blocks, item, with_moments)


def tile_specimen(blocks: Blocks, item: str, with_moments: bool) -> Specimen:
    """The tile kernel with all options on."""
    types = dict.fromkeys(("hidden_ptr", "weight_ptr", "norm_weight_ptr", "bias_ptr"), item)
    types |= {"keys_ptr": "*i64", "token_ids_ptr": "*i64"}
    types |= dict.fromkeys(("sums_ptr", "moments_ptr"), "*fp32")
    types |= dict.fromkeys(
        ("norm_eps", "norm_offset", "norm_scale", "logit_scale", "softcap"), "fp32"
    )
    return Specimen(
        label=f"{item[1:]}-{blocks.m}-{blocks.v}",
        kernel=head_tile_kernel,
        types=types,
        constants={
            "HIDDEN_SIZE": 576,
            "BLOCK_M": blocks.m,
            "BLOCK_V": blocks.v,
            "BLOCK_C": blocks.c,
            "HAS_NORM": True,
            "HAS_BIAS": True,
            "HAS_SOFTCAP": True,
            "HAS_TOKEN_IDS": True,
            "HAS_MOMENTS": with_moments,
            "PRECISION": blocks.precision,
            "UPCAST": False,
        },
        warps=blocks.warps,
        stages=blocks.stages,
        tensor_cores=item != "*fp32",
    )


def specimens(part: str) -> Iterator[Specimen]:
    """What ships for `part`, with all options on."""
    yield from tile_specimens(part, with_moments=False)
    types = {"ids_ptr": "*i64", "log_probs_ptr": "*fp32", "keys_ptr": "*i64", "sums_ptr": "*fp32"}
    for num_blocks in (1, 8192):
        lanes, warps = combine_shape(num_blocks)
        yield Specimen(
            label=f"combine-{lanes}",
            kernel=_topk_combine_kernel,
            types=types | {"token_ids_ptr": "*i64"},
            constants={"HAS_TOKEN_IDS": True, "BLOCK_B": lanes},
            warps=warps,
        )
