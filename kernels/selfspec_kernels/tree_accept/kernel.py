# mypy: allow-untyped-defs
"""Triton kernel of greedy tree acceptance.

One program walks one row. It holds the whole tree, so that a step of the walk compares all nodes
at once: a child of the current node whose token is the one wanted, the lowest such. Bytes moved:
12 a node, once, plus 8 a step.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import device_guard
from .._specimen import Specimen


@triton.jit
def first_child(chosen, parents, node, BLOCK: tl.constexpr):
    """The lowest chosen child of a node; BLOCK if there is none."""
    return tl.min(tl.where(chosen & (parents == node), tl.arange(0, BLOCK), BLOCK), 0)


@triton.jit
def pad_path(path_ptr, num_accepted, max_depth, BLOCK: tl.constexpr):
    """Write -1 behind the last accepted node."""
    for start in range(num_accepted + 1, max_depth + 1, BLOCK):
        level = start + tl.arange(0, BLOCK)
        tl.store(path_ptr + level, -1, mask=level <= max_depth)


@triton.jit(do_not_specialize=["size", "max_depth"])
def _tree_accept_kernel(
    path_ptr,
    num_accepted_ptr,
    next_token_ptr,
    tokens_ptr,
    parents_ptr,
    num_nodes_ptr,
    target_tokens_ptr,
    size,
    max_depth,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    path_ptr += b * (max_depth + 1)
    target_tokens_ptr += b * size
    node = tl.arange(0, BLOCK)
    in_tree = node < tl.minimum(tl.load(num_nodes_ptr + b), size)
    tokens = tl.load(tokens_ptr + b * size + node, mask=in_tree, other=-1)
    parents = tl.load(parents_ptr + b * size + node, mask=in_tree, other=-1)

    num_accepted = tl.zeros([], tl.int32)
    wanted = tl.load(target_tokens_ptr)
    child = first_child(in_tree & (tokens == wanted), parents, 0, BLOCK)
    tl.store(path_ptr, 0)
    while (child < BLOCK) & (num_accepted < max_depth):
        num_accepted += 1
        tl.store(path_ptr + num_accepted, child)
        wanted = tl.load(target_tokens_ptr + child)
        child = first_child(in_tree & (tokens == wanted), parents, child, BLOCK)
    pad_path(path_ptr, num_accepted, max_depth, BLOCK)
    tl.store(num_accepted_ptr + b, num_accepted)
    tl.store(next_token_ptr + b, wanted)


def tree_accept_triton(
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    target_tokens: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; see `selfspec_kernels.tree_accept`."""
    batch, size = tokens.shape
    path = torch.empty((batch, max_depth + 1), dtype=torch.int32, device=tokens.device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=tokens.device)
    next_token = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    with device_guard(tokens):
        _tree_accept_kernel[(batch,)](
            path,
            num_accepted,
            next_token,
            tokens.contiguous(),
            parents.contiguous(),
            num_nodes.contiguous(),
            target_tokens.contiguous(),
            size,
            max_depth,
            BLOCK=max(16, triton.next_power_of_2(size)),
            num_warps=1,
        )
    return path, num_accepted, next_token


def specimens(part: str) -> Iterator[Specimen]:
    """What the compile gate compiles for `part`: the greedy walk, and sampled acceptance."""
    from . import kernel_sampled

    types = dict.fromkeys(("path_ptr", "num_accepted_ptr", "parents_ptr", "num_nodes_ptr"), "*i32")
    types |= dict.fromkeys(("next_token_ptr", "tokens_ptr", "target_tokens_ptr"), "*i64")
    yield Specimen("greedy-128", _tree_accept_kernel, types, {"BLOCK": 128}, warps=1)
    yield from kernel_sampled.specimens(part)
