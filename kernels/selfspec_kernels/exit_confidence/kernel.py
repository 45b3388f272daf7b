# mypy: allow-untyped-defs
"""Triton kernel that combines the LM head's partial results into token, probabilities and entropy.

The first launch is that of `draft_topk` with two keys a block. This one has one program a row: the
best key of all blocks, the second best, and sums of exponentials and of their moments rescaled to
the best. With z = logit - top, s = sum e^z and t = sum z e^z, the entropy is log s - t / s.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import device_guard
from .._specimen import Specimen
from ..draft_topk.head import Head
from ..draft_topk.kernel import (
    combine_shape,
    launch_head_tiles,
    logit_of,
    position_of,
    tile_specimens,
)
from .reference import ExitConfidence

# Below every key of a logit.
_NO_KEY = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["num_blocks"])
def _exit_combine_kernel(
    token_ptr,
    top1_ptr,
    top2_ptr,
    entropy_ptr,
    keys_ptr,
    sums_ptr,
    moments_ptr,
    token_ids_ptr,
    num_blocks,
    HAS_TOKEN_IDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_B)
    in_range = block < num_blocks
    partial = row * num_blocks + block
    first_ptrs = keys_ptr + 2 * row * num_blocks + block
    firsts = tl.load(first_ptrs, mask=in_range, other=_NO_KEY)
    seconds = tl.load(first_ptrs + num_blocks, mask=in_range, other=_NO_KEY)
    sums = tl.load(sums_ptr + partial, mask=in_range, other=0.0)
    moments = tl.load(moments_ptr + partial, mask=in_range, other=0.0)

    best = tl.max(firsts, 0)
    second = tl.max(tl.where(firsts == best, seconds, firsts), 0)
    top = logit_of(best)
    dead = top == float("-inf")
    shift = tl.where(dead, 0.0, top)
    # How far a block's own shift is below the row's, as far as exp tells a difference.
    offset = tl.maximum(logit_of(firsts) - shift, -1e3)
    scale = tl.exp(offset)
    total = tl.sum(scale * sums, 0)
    moment = tl.sum(scale * (moments + sums * offset), 0)
    total = tl.where(dead, 1.0, total)

    token = position_of(best).to(tl.int64)
    if HAS_TOKEN_IDS:
        token = tl.load(token_ids_ptr + token)
    tl.store(token_ptr + row, token)
    tl.store(top1_ptr + row, tl.where(dead, 0.0, 1.0 / total))
    tl.store(top2_ptr + row, tl.exp(logit_of(second) - shift) / total)
    tl.store(entropy_ptr + row, tl.where(dead, 0.0, tl.log(total) - moment / total))


def exit_confidence_triton(hidden: Tensor, head: Head) -> ExitConfidence:
    """Launch the kernels; see `selfspec_kernels.exit_confidence`.

    Raises:
        TypeError: If the dtype is not float32, float16 or bfloat16.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows, shape = flat.shape[0], hidden.shape[:-1]
    token = torch.empty(rows, dtype=torch.int64, device=hidden.device)
    top1, top2, entropy = (
        torch.empty(rows, dtype=torch.float32, device=hidden.device) for _ in range(3)
    )
    if rows > 0:
        keys, sums, moments = launch_head_tiles("exit_confidence", flat, head, 2, with_moments=True)
        lanes, warps = combine_shape(sums.shape[1])
        with device_guard(hidden):
            _exit_combine_kernel[(rows,)](
                token,
                top1,
                top2,
                entropy,
                keys,
                sums,
                moments,
                keys if head.token_ids is None else head.token_ids.contiguous(),
                sums.shape[1],
                HAS_TOKEN_IDS=head.token_ids is not None,
                BLOCK_B=lanes,
                num_warps=warps,
            )
    return ExitConfidence(*(x.view(shape) for x in (token, top1, top2, entropy)))


def specimens(part: str) -> Iterator[Specimen]:
    """What ships for `part`, with all options on."""
    yield from tile_specimens(part, with_moments=True)
    types = {"token_ptr": "*i64", "keys_ptr": "*i64", "token_ids_ptr": "*i64"}
    floats = ("top1_ptr", "top2_ptr", "entropy_ptr", "sums_ptr", "moments_ptr")
    for num_blocks in (1, 8192):
        lanes, warps = combine_shape(num_blocks)
        yield Specimen(
            label=f"combine-{lanes}",
            kernel=_exit_combine_kernel,
            types=types | dict.fromkeys(floats, "*fp32"),
            constants={"HAS_TOKEN_IDS": True, "BLOCK_B": lanes},
            warps=warps,
        )
