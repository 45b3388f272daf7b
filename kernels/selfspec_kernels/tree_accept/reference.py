"""Greedy tree acceptance in torch: the definition, and the path that CPU tensors take."""

import torch
from torch import Tensor


def tree_accept_reference(
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    target_tokens: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `selfspec_kernels.tree_accept`.

    The successor of every node is found at once, so the walk itself is one gather a level and
    reads nothing back to the host.
    """
    batch, size = tokens.shape
    node = torch.arange(size, device=tokens.device)
    parent = parents.long().clamp(min=0)
    wanted = target_tokens.gather(1, parent)
    chosen = (tokens == wanted) & (parents >= 0) & (node < num_nodes[:, None])
    # successor[i] is the first chosen child of node i; `size`, its own successor, stands for none.
    successor = tokens.new_full((batch, size + 1), size)
    successor.scatter_reduce_(1, parent, torch.where(chosen, node, size), "amin")

    path = tokens.new_zeros((batch, max_depth + 1))
    for level in range(max_depth):
        torch.gather(successor, 1, path[:, level : level + 1], out=path[:, level + 1 : level + 2])
    ended = path == size
    num_accepted = max_depth - ended.sum(dim=1)
    last = path.gather(1, num_accepted[:, None])
    next_token = target_tokens.gather(1, last)[:, 0]
    return path.masked_fill_(ended, -1).int(), num_accepted.int(), next_token
