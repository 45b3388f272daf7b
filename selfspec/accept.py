"""Acceptance: which nodes of a draft the target keeps. The only place where p meets q.

p is the target's distribution after every processor that `generate` applies, q the draft's. All
rules here are lossless:

* greedy, and sampling with deterministic drafts: the target makes its own choice after every node,
  and the walk follows it as long as it is drafted;
* sampling with a sampled chain (`log_q`): rejection sampling, Leviathan et al. 2023, Algorithm 1,
  https://arxiv.org/abs/2211.17192.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from selfspec_kernels import tree_accept
from torch import Tensor

from selfspec.state import Acceptance

if TYPE_CHECKING:
    from selfspec.sampling import Sampler
    from selfspec.state import DecodeState
    from selfspec.tree import TokenTree


def accept(tree: TokenTree, logits: Tensor, sampler: Sampler, state: DecodeState) -> Acceptance:
    """Keep the longest path from the root that the target agrees with.

    Args:
        tree: The draft; `log_q` is None unless its tokens were drawn.
        logits: [B, N, V] target logits after every node.
        sampler: Processors, and whether to draw.
        state: For the prefixes of the nodes and the positions of their noise.

    Returns:
        Path, count and next token of every row.

    Raises:
        ValueError: If `logits` and `tree` disagree on B or N, or a sampled draft branches.
    """
    if logits.shape[:2] != tree.tokens.shape:
        raise ValueError(
            f"logits are {tuple(logits.shape)} for a tree of {tuple(tree.tokens.shape)} nodes."
        )
    if sampler.do_sample and tree.log_q is not None:
        if not tree.is_chain:
            raise ValueError(
                "log_q was given for a tree with branches; sampled drafts must be chains "
                "(leave log_q out for deterministic trees)."
            )
        if tree.log_q.shape[-1] != logits.shape[-1]:
            raise ValueError(
                f"log_q is over {tree.log_q.shape[-1]} tokens, the model's logits over "
                f"{logits.shape[-1]}."
            )
        return _walk(tree, logits, sampler, state, _Rejection(tree))
    if sampler.prefix_free:
        return _follow_choices(tree, logits, sampler, state)
    return _walk(tree, logits, sampler, state, _Match(tree))


def _follow_choices(
    tree: TokenTree, logits: Tensor, sampler: Sampler, state: DecodeState
) -> Acceptance:
    """All choices at once, then one walk on the device."""
    if sampler.do_sample or sampler.processors or sampler.keep_scores:
        scores = sampler.scores(logits)
        choices = sampler.choose(
            scores, torch.tensor(state.positions())[:, None] + tree.depth.cpu()
        )
    else:  # argmax of the raw logits; casting cannot change it
        scores, choices = None, sampler.choose(logits, [])
    return follow(tree, choices, scores if sampler.keep_scores else None)


def follow(tree: TokenTree, choices: Tensor, scores: Tensor | None = None) -> Acceptance:
    """Walk along the target's choices, on the device.

    Args:
        tree: The draft.
        choices: int64 [B, N], the target's choice after every node.
        scores: What to return as `Acceptance.scores`.
    """
    device = choices.device
    if tree.width == 1:  # nothing was drafted
        none = torch.zeros(tree.batch, dtype=torch.int32, device=device)
        return Acceptance(none[:, None], none, choices[:, 0], scores)
    path, num_accepted, next_token = tree_accept(
        tree.tokens.to(device),
        tree.parents.to(device),
        tree.num_nodes.to(device),
        choices,
        max_depth=tree.max_depth,
    )
    return Acceptance(path, num_accepted, next_token, scores)


def _walk(
    tree: TokenTree,
    logits: Tensor,
    sampler: Sampler,
    state: DecodeState,
    rule: _Match | _Rejection,
) -> Acceptance:
    """One depth at a time, for processors that need the prefix and rules that need q.

    Every emitted token costs one call of the processors, with the prefix that plain `generate`
    would pass; for one sequence even a processor that keeps a state sees the calls it expects.
    """
    batch = tree.batch
    tokens, parents, counts = tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist()
    prefixes = [state.prefix(b) for b in range(batch)]
    node, paths, next_token = [0] * batch, [[0] for _ in range(batch)], [0] * batch
    kept = None
    active = [b for b in range(batch) if not state.frozen[b]]
    rows = torch.arange(batch, device=logits.device)
    while active:
        at = torch.tensor(node, device=logits.device)
        scores = sampler.scores_after(logits[rows, at], prefixes, active)
        if sampler.keep_scores:
            if kept is None:
                kept = logits.new_zeros(logits.shape, dtype=scores.dtype)
            kept[rows[active], at[active]] = scores[active]
        position = [p + len(path) - 1 for p, path in zip(state.positions(), paths, strict=True)]
        chosen = rule.choose(scores, node, position, sampler)
        still = []
        for b in active:
            child = next(
                (
                    n
                    for n in range(node[b] + 1, counts[b])
                    if parents[b][n] == node[b] and tokens[b][n] == chosen[b]
                ),
                None,
            )
            if child is None or rule.rejected[b]:
                next_token[b] = chosen[b]
                continue
            node[b] = child
            paths[b].append(child)
            prefixes[b] = torch.cat([prefixes[b], prefixes[b].new_tensor([chosen[b]])])
            still.append(b)
        active = still
    depth = tree.max_depth + 1
    padded = [path + [-1] * (depth - len(path)) for path in paths]
    device = logits.device
    return Acceptance(
        torch.tensor(padded, dtype=torch.int32, device=device),
        torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32, device=device),
        torch.tensor(next_token, dtype=torch.int64, device=device),
        kept,
    )


class _Match:
    """Follow the target's own choice."""

    def __init__(self, tree: TokenTree) -> None:
        self.rejected = [False] * tree.batch

    def choose(
        self, scores: Tensor, node: list[int], position: list[int], sampler: Sampler
    ) -> list[int]:
        return sampler.choose(scores[:, None], position)[:, 0].tolist()


class _Rejection:
    """Accept a drawn token with probability min(1, p / q), else draw from norm(max(p - q, 0))."""

    def __init__(self, tree: TokenTree) -> None:
        assert tree.log_q is not None
        self.log_q = tree.log_q.float()
        self.tokens, self.counts = tree.tokens.tolist(), tree.num_nodes.tolist()
        self.rejected: list[bool] = [False] * tree.batch

    def choose(
        self, scores: Tensor, node: list[int], position: list[int], sampler: Sampler
    ) -> list[int]:
        sampler.draw_otherwise()
        batch = len(node)
        rows = torch.arange(batch, device=scores.device)
        p = scores.softmax(-1)
        q = self.log_q.to(scores.device)[rows, torch.tensor(node, device=scores.device)].exp()
        # On a chain the child of node n is node n + 1; a leaf has nothing to accept.
        has_child = torch.tensor([n + 1 < c for n, c in zip(node, self.counts, strict=True)])
        has_child = has_child.to(scores.device)
        child = torch.tensor(
            [row[min(n + 1, len(row) - 1)] for row, n in zip(self.tokens, node, strict=True)],
            device=scores.device,
        )
        p_child, q_child = p[rows, child], q[rows, child]
        coin = torch.rand(batch, device=scores.device)
        # Strict: with u = 0 a token of probability 0 must not pass.
        accepted = has_child & (coin * q_child < p_child)
        residual = (p - q).clamp_(min=0)
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
        drawn = torch.multinomial(torch.where(has_child[:, None], residual, p), 1)[:, 0]
        self.rejected = (~accepted).tolist()
        return torch.where(accepted, child, drawn).tolist()
