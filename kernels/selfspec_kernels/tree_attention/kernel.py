# mypy: allow-untyped-defs
"""Launches of tree attention: `kernel_attend`, and `kernel_combine` after it where it was split.

Bytes moved per sequence and key/value head: (prefix + N) * (D + Dv) items, read once per row block,
and queries and outputs; where split, 8 * (Dv + 1) bytes of partial results a row and split. The
count for a launch is `plan.LaunchPlan.bytes_moved`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._dispatch import device_guard, interpreting
from .._specimen import Specimen
from ..layout import TreeLayout
from ..tuning import part_of
from .blocks import Blocks, padded, tiles
from .kernel_attend import attend_kernel
from .kernel_combine import combine_kernel
from .plan import LaunchPlan, Shape, multiprocessors, plan

MAX_HEAD_SIZE = 256
LOG2E = math.log2(math.e)
# Items of a tile of the combining kernel, its warps, and the partial results it has in flight.
COMBINE_ITEMS = 1024
COMBINE_WARPS = 4
COMBINE_UNROLL = 8


def tree_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    softcap: float,
    window: int,
    sinks: Tensor | None,
    *,
    num_splits: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernels; see `selfspec_kernels.tree_attention`.

    The results are views of [B, M, H, Dv], the order that an output projection wants, and of
    [B, M, H].

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
    launch = plan(
        Shape(
            batch,
            kv_heads,
            heads // kv_heads,
            num_queries,
            layout.num_nodes,
            head_size,
            value_size,
            query.element_size(),
            layout.max_prefix_len,
            window,
        ),
        part_of(query.device),
        multiprocessors(query.device),
        num_splits,
        deterministic,
    )
    out = torch.empty(
        (batch, num_queries, heads, value_size), dtype=query.dtype, device=query.device
    )
    lse = None
    if return_lse:
        lse = torch.empty((batch, num_queries, heads), dtype=torch.float32, device=query.device)
    with device_guard(query):
        if launch.combines:
            scratch = (launch.splits, batch * num_queries * heads)
            partial = torch.empty((*scratch, value_size), dtype=torch.float32, device=query.device)
            weight = torch.empty(scratch, dtype=torch.float32, device=query.device)
            _attend(launch, partial, weight, query, key, value, layout, scale, softcap, sinks)
            _combine(launch, out, lse, partial, weight)
        else:
            _attend(launch, out, lse, query, key, value, layout, scale, softcap, sinks)
    return out.transpose(1, 2), None if lse is None else lse.transpose(1, 2)


def _attend(
    launch: LaunchPlan,
    out: Tensor,
    lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    shape, blocks = launch.shape, launch.blocks
    # Scores are kept as exponents of 2. Under a soft cap the kernel computes tanh from
    # exp(2 x) = exp2(2 log2(e) x), so that its factor is folded in here as well.
    score_scale, score_bound = scale * LOG2E, 0.0
    if softcap > 0:
        score_scale, score_bound = 2.0 * score_scale / softcap, softcap * LOG2E
    start, table = layout.start, layout.block_table
    attend_kernel[launch.row_blocks, shape.batch * shape.kv_heads, launch.splits](
        out,
        out if lse is None else lse,
        query,
        key,
        value,
        layout.ancestors,
        layout.depth,
        layout.prefix_len,
        layout.prefix_len if start is None else start,
        layout.prefix_len if table is None else table,
        query if sinks is None else sinks.contiguous(),
        score_scale,
        score_bound,
        shape.kv_heads,
        shape.queries,
        shape.nodes,
        shape.window,
        launch.splits,
        launch.chunk,
        0 if table is None else table.shape[1],
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        PAGE_SIZE=0 if table is None else key.shape[2],
        HAS_START=start is not None,
        HAS_WINDOW=shape.window > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None,
        IS_SPLIT=launch.combines,
        # The interpreter holds bfloat16 as integers and would multiply those.
        UPCAST=interpreting() and query.dtype is torch.bfloat16,
        **_sizes(blocks, shape.groups, shape.head_size, shape.value_size),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def _sizes(blocks: Blocks, groups: int, head_size: int, value_size: int) -> dict[str, Any]:
    return {
        "GROUPS": groups,
        "HEAD_SIZE": head_size,
        "VALUE_SIZE": value_size,
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_D": padded(head_size),
        "BLOCK_DV": padded(value_size),
        "PRECISION": blocks.precision,
    }


def _combine(
    launch: LaunchPlan, out: Tensor, lse: Tensor | None, partial: Tensor, weight: Tensor
) -> None:
    num_rows, constants = partial.shape[1], _combine_sizes(launch.shape.value_size)
    combine_kernel[-(-num_rows // constants["BLOCK_R"]),](
        out,
        weight if lse is None else lse,
        partial,
        weight,
        num_rows,
        launch.splits,
        HAS_LSE=lse is not None,
        **constants,
        num_warps=COMBINE_WARPS,
    )


def _combine_sizes(value_size: int) -> dict[str, int]:
    block_dv = padded(value_size)
    return {
        "VALUE_SIZE": value_size,
        "BLOCK_R": COMBINE_ITEMS // block_dv,
        "BLOCK_DV": block_dv,
        "UNROLL": COMBINE_UNROLL,
    }


def specimens(part: str) -> Iterator[Specimen]:
    """Every tile of a part, unsplit with all options and split with none; and the second launch."""
    for (item_size, width), candidates in tiles(part).items():
        item = {2: "bf16", 4: "fp32"}[item_size]
        types = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "sinks_ptr"), f"*{item}")
        types |= dict.fromkeys(("depth_ptr", "prefix_len_ptr", "start_ptr", "table_ptr"), "*i32")
        types |= {"ancestors_ptr": "*i64", "lse_ptr": "*fp32"}
        types |= {"score_scale": "fp32", "score_bound": "fp32"}
        for blocks in candidates:
            for split in (False, True):
                options = ("HAS_START", "HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS", "HAS_LSE")
                constants = _sizes(blocks, 3, width, width) | dict.fromkeys(options, not split)
                constants |= {"PAGE_SIZE": 0 if split else 16, "IS_SPLIT": split, "UPCAST": False}
                yield Specimen(
                    f"{8 * item_size}bit-{width}-{blocks.m}-{'split' if split else 'options'}",
                    attend_kernel,
                    types | {"out_ptr": "*fp32" if split else f"*{item}"},
                    constants,
                    blocks.warps,
                    blocks.stages,
                    tensor_cores=item_size == 2,
                )
        pointers = ("lse_ptr", "partial_ptr", "partial_lse_ptr")
        yield Specimen(
            f"{8 * item_size}bit-{width}-combine",
            combine_kernel,
            dict.fromkeys(pointers, "*fp32") | {"out_ptr": f"*{item}"},
            _combine_sizes(width) | {"HAS_LSE": True},
            COMBINE_WARPS,
        )
