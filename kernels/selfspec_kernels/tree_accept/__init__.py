"""Acceptance: which path of a token tree the target keeps, and the token that follows it."""

from typing import Literal, get_args

import torch
from torch import Tensor

from .._dispatch import Backend, use_triton
from .reference import tree_accept_reference, tree_accept_sampled_reference

__all__ = ["Rule", "tree_accept", "tree_accept_sampled"]

Rule = Literal["traversal", "multiround"]


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
    nodes = _nodes("tree_accept", tokens, max_depth)
    _check(
        "tree_accept",
        tokens.device,
        ("tokens", tokens, torch.int64, nodes),
        ("parents", parents, torch.int32, nodes),
        ("num_nodes", num_nodes, torch.int32, nodes[:1]),
        ("target_tokens", target_tokens, torch.int64, nodes),
    )
    if use_triton("tree_accept", backend, tokens):
        from .kernel import tree_accept_triton

        return tree_accept_triton(tokens, parents, num_nodes, target_tokens, max_depth)
    return tree_accept_reference(tokens, parents, num_nodes, target_tokens, max_depth)


def tree_accept_sampled(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    depth: Tensor,
    num_nodes: Tensor,
    scores: Tensor,
    logsumexp: Tensor,
    log_q: Tensor,
    *,
    seed: Tensor,
    position: Tensor,
    max_depth: int,
    max_children: int,
    rule: Rule = "traversal",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept a path of a tree whose tokens were drawn, so that the text follows the target's law.

    p, the target's distribution after node n, is exp(scores[n] - logsumexp[n]); q is what the
    children of node n were drawn from, without replacement, in the order of their numbers. Both
    rules are lossless: path and next token are distributed as if the target had drawn them alone.

    "traversal" is traversal verification (https://arxiv.org/abs/2505.12398): a node that fails may
    still be passed through by the nodes below it. On a chain it is block verification
    (https://arxiv.org/abs/2403.10444), and it accepts at least as much as "multiround", which
    rejects or keeps one sibling after the other, from the root on, and on a chain is rejection
    sampling token by token (https://arxiv.org/abs/2211.17192).

    Randomness is a function of seed, position, node and token alone: a row does not depend on the
    batch around it nor on padding. Nodes deeper than `max_depth`, children beyond the first
    `max_children` of a node, siblings that repeat a token and tokens that `log_q` gives no
    probability are not accepted; the result is then as if they had not been drafted, which keeps it
    lossless.

    Args:
        tokens: int64 [B, N]; node 0 is the root.
        parents: int32 [B, N]; -1 at the root, parents before children.
        ancestors: int64 [B, N, ceil(N / 64)]; bit m of word m // 64 is set iff node m is the node
            itself or an ancestor of it.
        depth: int32 [B, N]; 0 at the root.
        num_nodes: int32 [B]; nodes from there on are padding and are ignored.
        scores: [B, N, V], any float dtype: the target's scores after every node, as the softmax
            takes them (divided by the temperature); -inf for tokens that may not be emitted. NaN
            counts as -inf.
        logsumexp: float32 [B, N] of `scores`.
        log_q: float32 [B, N, V], normalised; not read at nodes without children.
        seed: int64 [B], the random key of every row.
        position: int32 [B]: how many tokens the row has emitted, which is the position of the token
            after its root. The same seed and position give the same numbers, so it has to grow from
            call to call.
        max_depth: Most draft tokens to accept; a bound of the depth of the trees.
        max_children: A bound of the children of a node, 1 for chains. The kernel is launched
            max_depth * (max_children - 1) + 1 times ("multiround": max_children), at most N - 1.
        rule: "traversal" or "multiround".
        backend: "auto" takes the Triton kernel for CUDA tensors; "triton" and "reference" insist.

    Returns:
        `path` int32 [B, max_depth + 1], the accepted nodes with the root first, -1 behind them;
        `num_accepted` int32 [B], without the root; `next_token` int64 [B], drawn from what is left
        of p after the last accepted node, always in 0..V - 1.

    Raises:
        TypeError: If a tensor has another dtype.
        ValueError: If shapes or devices disagree, `max_depth` is negative, `max_children` is less
            than 1, or `rule` is unknown.
    """
    op = "tree_accept_sampled"
    nodes = _nodes(op, tokens, max_depth)
    if max_children < 1:
        raise ValueError(f"{op}: max_children={max_children} is less than 1")
    if rule not in get_args(Rule):
        raise ValueError(f'{op}: rule={rule!r}; use "traversal" or "multiround"')
    if not scores.is_floating_point():
        raise TypeError(f"{op}: scores must be floating point, got {scores.dtype}")
    if scores.dim() != 3 or scores.shape[2] == 0:
        raise ValueError(f"{op}: scores has shape {tuple(scores.shape)}, expected [B, N, V]")
    batch, size = nodes
    _check(
        op,
        tokens.device,
        ("tokens", tokens, torch.int64, nodes),
        ("parents", parents, torch.int32, nodes),
        ("ancestors", ancestors, torch.int64, (batch, size, -(-size // 64))),
        ("depth", depth, torch.int32, nodes),
        ("num_nodes", num_nodes, torch.int32, (batch,)),
        ("scores", scores, scores.dtype, (batch, size, scores.shape[2])),
        ("logsumexp", logsumexp, torch.float32, nodes),
        ("log_q", log_q, torch.float32, (batch, size, scores.shape[2])),
        ("seed", seed, torch.int64, (batch,)),
        ("position", position, torch.int32, (batch,)),
    )
    arguments = (tokens, parents, ancestors, depth, num_nodes, scores, logsumexp, log_q, seed)
    bounds = (position, max_depth, max_children, rule)
    if use_triton(op, backend, tokens):
        from .kernel_sampled import tree_accept_sampled_triton

        return tree_accept_sampled_triton(*arguments, *bounds)
    return tree_accept_sampled_reference(*arguments, *bounds)


def _nodes(op: str, tokens: Tensor, max_depth: int) -> tuple[int, int]:
    """B and N."""
    if tokens.dim() != 2:
        raise ValueError(f"{op}: tokens has shape {tuple(tokens.shape)}, expected [B, N]")
    if tokens.shape[1] == 0:
        raise ValueError(f"{op}: tokens has no nodes; a tree has at least its root")
    if max_depth < 0:
        raise ValueError(f"{op}: max_depth={max_depth} is negative")
    return tokens.shape[0], tokens.shape[1]


def _check(
    op: str,
    device: torch.device,
    *expected: tuple[str, Tensor, torch.dtype, tuple[int, ...]],
) -> None:
    for name, tensor, dtype, shape in expected:
        if tensor.dtype is not dtype:
            raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, tokens on {device}")
