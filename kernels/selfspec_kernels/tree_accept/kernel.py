# mypy: allow-untyped-defs
"""Triton kernel of greedy tree acceptance.

One program walks one row. It holds the whole tree, so that a step of the walk compares all nodes
at once: a child of the current node whose token is the one wanted, the lowest such. Bytes moved:
12 a node, once, plus 8 a step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import device_guard


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

    current = tl.zeros([], tl.int32)
    num_accepted = tl.zeros([], tl.int32)
    wanted = tl.load(target_tokens_ptr)
    tl.store(path_ptr, current)
    for level in range(max_depth):
        chosen = in_tree & (parents == current) & (tokens == wanted)
        child = tl.min(tl.where(chosen, node, BLOCK), 0)
        # Once the walk has ended it finds no child again, since it stays where it is.
        found = child < BLOCK
        current = tl.where(found, child, current)
        num_accepted += found.to(tl.int32)
        tl.store(path_ptr + level + 1, tl.where(found, child, -1))
        wanted = tl.load(target_tokens_ptr + current)
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
