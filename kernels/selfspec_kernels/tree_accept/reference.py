"""Tree acceptance in torch: the definition, and the path that CPU tensors take."""

import torch
from torch import Tensor

from ..philox import ACCEPT, RESIDUAL, exponential, uniform


def tree_accept_reference(
    tokens: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    target_tokens: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `selfspec_kernels.tree_accept`."""
    node = torch.arange(tokens.shape[1], device=tokens.device)
    wanted = target_tokens.gather(1, parents.long().clamp(min=0))
    chosen = (tokens == wanted) & (parents >= 0) & (node < num_nodes[:, None])
    path, num_accepted, last = _follow(chosen, parents, max_depth)
    return path, num_accepted, target_tokens.gather(1, last)[:, 0]


def _follow(chosen: Tensor, parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root, each time to the first chosen child; also the last node, int64 [B, 1].

    The successor of every node is found at once, so the walk itself is one gather a level and
    reads nothing back to the host.
    """
    batch, size = chosen.shape
    node = torch.arange(size, device=chosen.device)
    # successor[i] is the first chosen child of node i; `size`, its own successor, stands for none.
    successor = node.new_full((batch, size + 1), size)
    first = torch.where(chosen, node, size)
    successor.scatter_reduce_(1, parents.long().clamp(0, size), first, "amin")

    path = node.new_zeros((batch, max_depth + 1))
    for level in range(max_depth):
        torch.gather(successor, 1, path[:, level : level + 1], out=path[:, level + 1 : level + 2])
    ended = path == size
    num_accepted = max_depth - ended.sum(dim=1)
    last = path.gather(1, num_accepted[:, None])
    return path.masked_fill_(ended, -1).int(), num_accepted.int(), last


def tree_accept_sampled_reference(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    depth: Tensor,
    num_nodes: Tensor,
    scores: Tensor,
    logsumexp: Tensor,
    log_q: Tensor,
    seed: Tensor,
    position: Tensor,
    max_depth: int,
    max_children: int,
    rule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `selfspec_kernels.tree_accept_sampled`."""
    vocab = scores.shape[2]
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    node = torch.arange(tokens.shape[1], device=tokens.device)
    p, q = _probability(scores.float() - logsumexp[..., None]), _probability(log_q)
    drafted = (node < num_nodes[:, None]) & (parents >= 0) & (parents < node)
    drafted &= (depth <= max_depth) & (tokens >= 0) & (tokens < vocab)
    level, drafted = _chances(tokens, parents, drafted, p, q, max_children, rule)
    # By the root's position: the number of a node recurs in later steps, that position never does.
    coins = uniform(seed[:, None], node, position[:, None], ACCEPT)
    passed = coins < level
    if rule == "traversal":
        passed[:, 0] = True
        # A subtree emits if one of its nodes passes: bit m of the ancestors of some such node.
        bits = (ancestors[:, :, node // 64] >> (node % 64)) & 1
        passed = ((bits > 0) & passed[:, :, None]).any(1)
    path, num_accepted, last = _follow(passed & drafted, parents, max_depth)
    weight = p[rows, last[:, 0]]
    at = position + depth.gather(1, last)[:, 0]
    noise = exponential(seed, vocab, at, RESIDUAL)
    return path, num_accepted, (weight / noise).argmax(-1)


def _chances(
    tokens: Tensor,
    parents: Tensor,
    drafted: Tensor,
    p: Tensor,
    q: Tensor,
    max_children: int,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """The chance of every node, if tried, and whether it counts; p becomes what is left of it.

    Neither depends on a coin: all children are tried, in order, as if those before had failed.
    """
    batch, size, vocab = p.shape
    node = torch.arange(size, device=tokens.device)
    first = torch.arange(batch, device=tokens.device) * size
    at = first[:, None] + parents.long().clamp(0, size - 1)
    p, q = p.view(-1, vocab), q.view(-1, vocab)
    siblings = (parents[:, :, None] == parents[:, None, :]) & (node[:, None] > node)
    siblings &= drafted[:, None, :]
    drafted = drafted & (siblings.sum(-1) < max_children)
    # A token drawn twice counts once: drawing until tokens repeat is drawing without replacement.
    drafted &= ~(siblings & (tokens[:, :, None] == tokens[:, None, :])).any(-1)
    # What q cannot have drawn was not drawn, whatever the drafter says.
    drafted &= q[at, tokens.clamp(0, vocab - 1)] > 0

    # level[n] is the chance of node n, if tried: 1 at the root, 0 for nodes that do not count.
    level = p.new_zeros((batch, size))
    level[:, 0] = 1
    levels = level.view(-1)
    for n in range(1, size):
        live, parent = drafted[:, n], first + parents[:, n].long().clamp(0, n - 1)
        token = torch.where(live, tokens[:, n], 0)[:, None]
        p_here, q_here = p.index_select(0, parent), q.index_select(0, parent)
        r = levels[parent] if rule == "traversal" else torch.ones_like(level[:, 0])
        ratio = _ratio(r[:, None] * p_here.gather(1, token), q_here.gather(1, token))
        level[:, n] = torch.where(live, ratio[:, 0], 0)
        # What is left of the parent's p, its q and its level when this child fails.
        residual = (r[:, None] * p_here - q_here).clamp_(min=0)
        mass = residual.sum(-1)
        # Nothing is left where p was q: then the child cannot fail, and what p is matters no more.
        some = mass > 0
        residual /= torch.where(some, mass, 1)[:, None]
        p.index_copy_(0, parent, torch.where((live & some)[:, None], residual, p_here))
        if rule == "traversal":
            kept = torch.where(r < 1, mass / (mass + (1 - r)), 1)
            levels[parent] = torch.where(live, kept, r)
        q_left = q_here.scatter(1, token, 0)
        mass = q_left.sum(-1, keepdim=True)
        q_left /= torch.where(mass > 0, mass, 1)
        q.index_copy_(0, parent, torch.where(live[:, None], q_left, q_here))
    return level, drafted


def _probability(log: Tensor) -> Tensor:
    """exp, and 0 for what is no probability: NaN, and differences with an infinite sum."""
    return log.contiguous().exp().nan_to_num_(0, posinf=0)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """min(1, above / below), with 0 for 0 / 0."""
    return torch.where(above >= below, (above > 0).float(), above / below)
