"""Greedy acceptance: the path of a token tree that the target would have produced itself."""

import torch
from torch import Tensor

from .._dispatch import Backend, use_triton
from .reference import tree_accept_reference

__all__ = ["tree_accept"]


def tree_accept(
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    target_tokens: Tensor,
    *,
    max_depth: int,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the tree from the root, each time to the child that holds the target's choice.

    From node i the walk goes to the lowest-numbered child whose token is `target_tokens[i]`, and
    ends where there is none. The path then spells what the target alone would have emitted.

    Args:
        tokens: int64 [B, N]; node 0 is the root.
        parents: int32 [B, N]; -1 at the root, parents before children.
        num_nodes: int32 [B]; nodes from there on are padding and are ignored.
        target_tokens: int64 [B, N]; the target's choice of token after every node.
        max_depth: Most draft tokens to accept.
        backend: "auto" takes the Triton kernel for CUDA tensors; "triton" and "reference" insist.

    Returns:
        `path` int32 [B, max_depth + 1], the accepted nodes with the root first, -1 behind them;
        `num_accepted` int32 [B], without the root; `next_token` int64 [B], the target's choice
        after the last accepted node.

    Raises:
        TypeError: If a tensor has another dtype.
        ValueError: If shapes or devices disagree, or `max_depth` is negative.

    Example:
        >>> tokens = torch.tensor([[5, 7, 8, 9]])  # 5 -> 7, 5 -> 8 -> 9
        >>> parents = torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32)
        >>> choices = torch.tensor([[8, 1, 9, 4]])
        >>> tree_accept(tokens, parents, torch.tensor([4], dtype=torch.int32), choices, max_depth=3)
        (tensor([[ 0,  2,  3, -1]], dtype=torch.int32), tensor([2], dtype=torch.int32), tensor([4]))
    """
    for name, tensor, dtype, ndim in (
        ("tokens", tokens, torch.int64, 2),
        ("parents", parents, torch.int32, 2),
        ("num_nodes", num_nodes, torch.int32, 1),
        ("target_tokens", target_tokens, torch.int64, 2),
    ):
        if tensor.dtype is not dtype:
            raise TypeError(f"tree_accept: {name} must be {dtype}, got {tensor.dtype}")
        expected = tokens.shape[:ndim]
        if tokens.dim() != 2 or tensor.shape != expected:
            raise ValueError(
                f"tree_accept: {name} has shape {tuple(tensor.shape)}, expected "
                f"{'[B, N]' if tokens.dim() != 2 else tuple(expected)}"
            )
        if tensor.device != tokens.device:
            raise ValueError(
                f"tree_accept: {name} is on {tensor.device}, tokens on {tokens.device}"
            )
    if tokens.shape[1] == 0:
        raise ValueError("tree_accept: tokens has no nodes; a tree has at least its root")
    if max_depth < 0:
        raise ValueError(f"tree_accept: max_depth={max_depth} is negative")
    if use_triton("tree_accept", backend, tokens):
        from .kernel import tree_accept_triton

        return tree_accept_triton(tokens, parents, num_nodes, target_tokens, max_depth)
    return tree_accept_reference(tokens, parents, num_nodes, target_tokens, max_depth)
