"""Acceptance: which nodes of a draft the target keeps. The only place where p meets q.

p is the target's distribution after every processor that `generate` applies, q the draft's. All
rules but the last are lossless:

* greedy, and sampling with deterministic drafts: the target makes its own choice after every node,
  and the walk follows it as long as it is drafted;
* sampling with drafts that were drawn (`log_q`): traversal verification, Weng et al. 2025,
  https://arxiv.org/abs/2505.12398, which on a chain is block verification, or rejection sampling
  round by round; see `selfspec_kernels.tree_accept_sampled`;
* lossy, on request only: typical acceptance, Cai et al. 2024 (Medusa), section 2.3.1,
  https://arxiv.org/abs/2401.10774; and tokens of an early exit that are kept unseen, Schuster et
  al. 2022 (CALM), https://arxiv.org/abs/2207.07061.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from selfspec_kernels import row_stats, tree_accept, tree_accept_sampled
from torch import Tensor

from selfspec.sampling import first_choice
from selfspec.state import Acceptance
from selfspec.topology import ancestor_mask

# Thresholds of typical acceptance as published.
EPSILON, DELTA = 0.09, 0.3

if TYPE_CHECKING:
    from selfspec.sampling import Sampler
    from selfspec.state import DecodeState
    from selfspec.tree import TokenTree


def accept(tree: TokenTree, logits: Tensor, sampler: Sampler, state: DecodeState) -> Acceptance:
    """Keep the longest path from the root that the target agrees with.

    Args:
        tree: The draft; `log_q` is None unless its tokens were drawn.
        logits: [B, N, V] target logits after every node.
        sampler: Processors, whether to draw, and the rule for drawn drafts.
        state: For the prefixes of the nodes and the positions of their noise.

    Returns:
        Path, count and next token of every row.

    Raises:
        ValueError: If `logits` and `tree` disagree on B, N or V.
    """
    if logits.shape[:2] != tree.tokens.shape:
        raise ValueError(
            f"logits are {tuple(logits.shape)} for a tree of {tuple(tree.tokens.shape)} nodes."
        )
    if sampler.do_sample and sampler.rule == "lossy-typical" and not sampler.stateful:
        return _typical(tree, logits, sampler, state)
    # A processor that remembers its calls must not be shown paths that are not taken. Following
    # the target's own draws instead is as lossless for drafts that were drawn, it accepts less.
    if sampler.do_sample and not sampler.stateful and _weighs(tree, sampler):
        return _reject(tree, logits, sampler, state)
    if sampler.prefix_free:
        return _follow_choices(tree, logits, sampler, state)
    return _walk(tree, logits, sampler, state)


def _weighs(tree: TokenTree, sampler: Sampler) -> bool:
    """Whether p is weighed against q.

    Where it has been once, a step without drafts draws from the same stream: a row alone, which has
    no room to draft, has to get what it would get beside rows that do.
    """
    return tree.log_q is not None or (tree.width == 1 and sampler.has_seeds)


def _follow_choices(
    tree: TokenTree, logits: Tensor, sampler: Sampler, state: DecodeState
) -> Acceptance:
    """All choices at once, then one walk on the device."""
    if sampler.is_argmax:
        choices = first_choice(logits)
        return follow(tree, choices) if tree.given is None else _keep(tree, choices, tree.given)
    scores = sampler.scores(logits)
    positions = state.positions()
    at = torch.tensor(positions, device=logits.device)[:, None] + tree.depth.to(logits.device)
    choices = sampler.choose(scores, at, range(min(positions), max(positions) + tree.max_depth + 1))
    acceptance = follow(tree, choices, scores if sampler.keep_scores else None)
    sampler.check(scores, acceptance.path)
    return acceptance


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


def _keep(tree: TokenTree, choices: Tensor, given: Tensor) -> Acceptance:
    """Keep the first nodes of every row's chain as `given`, then follow the choices [B, N]."""
    device = choices.device
    node = torch.arange(1, tree.width, device=device)
    there = node < tree.num_nodes.to(device)[:, None]
    layers = given.to(device)[:, 1:] * there
    unseen, own = layers > 0, tree.tokens.to(device)[:, 1:]
    differs = unseen & (own != choices[:, :-1])
    kept = torch.cat([torch.where(unseen, own, choices[:, :-1]), choices[:, -1:]], dim=1)
    return replace(follow(tree, kept), differs=differs, given=layers)


def _reject(tree: TokenTree, logits: Tensor, sampler: Sampler, state: DecodeState) -> Acceptance:
    """The rules that weigh p against q, on the device."""
    if tree.log_q is not None and tree.log_q.shape[-1] != logits.shape[-1]:
        raise ValueError(
            f"log_q is over {tree.log_q.shape[-1]} tokens, the model's logits over "
            f"{logits.shape[-1]}."
        )
    assert sampler.rule != "lossy-typical"
    device = logits.device
    scores = _node_scores(tree, logits, sampler, state)
    log_q = scores if tree.log_q is None else tree.log_q  # no child of a root alone was drawn
    path, num_accepted, next_token = tree_accept_sampled(
        tree.tokens.to(device),
        tree.parents.to(device),
        tree.ancestors.to(device),
        tree.depth.to(device),
        tree.num_nodes.to(device),
        scores,
        row_stats(scores).logsumexp,
        log_q.to(device, torch.float32),
        seed=sampler.seeds(tree.batch).to(device),
        position=torch.tensor(state.positions(), dtype=torch.int32, device=device),
        max_depth=tree.max_depth,
        max_children=max(1, tree.max_children),
        rule=sampler.rule,
    )
    sampler.check(scores, path)
    return Acceptance(path, num_accepted, next_token, scores if sampler.keep_scores else None)


def _typical(tree: TokenTree, logits: Tensor, sampler: Sampler, state: DecodeState) -> Acceptance:
    """Keep the deepest path of tokens that are likely enough, whatever the target would have drawn.

    A token passes if its probability is above min(EPSILON, DELTA * exp(-H)), H being the entropy of
    the target's distribution there. Of several deepest paths the likeliest is kept; the token after
    it is drawn from p.
    """
    scores = _node_scores(tree, logits, sampler, state)
    device, rows = logits.device, torch.arange(tree.batch, device=logits.device)[:, None]
    tokens, depth = tree.tokens.to(device), tree.depth.to(device)
    parents = tree.parents.to(device).long().clamp(min=0)
    log_p = scores.float().log_softmax(-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    threshold = (DELTA * torch.exp(-entropy)).clamp(max=EPSILON)
    own = log_p[rows, parents, tokens]
    node = torch.arange(tree.width, device=device)
    passes = (own.exp() > threshold.gather(1, parents)) & (
        node < tree.num_nodes.to(device)[:, None]
    )
    passes[:, 0] = True
    own[:, 0] = 0
    above = ancestor_mask(tree.ancestors.to(device), tree.width)  # [B, N, N]
    reached = (passes[:, None] | ~above).all(-1) & passes
    likelihood = own[:, None].where(above, 0).sum(-1)
    num_accepted = depth.where(reached, -1).amax(1)
    deepest = reached & (depth == num_accepted[:, None])
    last = likelihood.where(deepest, float("-inf")).max(1).indices[:, None]

    # Nodes come after their ancestors, so those of the last one are its path in order.
    path = node.where(above[rows[:, 0], last[:, 0]], tree.width).sort(1).values
    path = path[:, : tree.max_depth + 1]
    path = path.where(path < tree.width, -1).int()
    positions = state.positions()
    at = torch.tensor(positions, device=device)[:, None] + num_accepted[:, None]
    span = range(min(positions), max(positions) + tree.max_depth + 1)
    next_token = sampler.choose(scores[rows, last], at, span)[:, 0]
    sampler.check(scores, path)
    kept = scores if sampler.keep_scores else None
    return Acceptance(path, num_accepted.int(), next_token, kept)


def _node_scores(tree: TokenTree, logits: Tensor, sampler: Sampler, state: DecodeState) -> Tensor:
    """Processed scores [B, N, V], every node after its own prefix."""
    if sampler.prefix_free:
        return sampler.scores(logits)
    counts = tree.num_nodes.tolist()
    live = [b for b in range(tree.batch) if not state.frozen[b]]
    bits = ancestor_mask(tree.ancestors, tree.width).cpu()
    tokens = tree.tokens.cpu()
    prefixes = [state.prefix(b) for b in range(tree.batch)]
    scores: Tensor | None = None
    for n in range(tree.width):
        active = [b for b in live if n < counts[b]]
        if not active:
            continue
        # Nodes come after their ancestors, so a mask picks the path in order; the root is known.
        paths = [tokens[b, 1:][bits[b, n, 1:]].to(prefixes[b].device) for b in range(tree.batch)]
        after = [torch.cat(pair) for pair in zip(prefixes, paths, strict=True)]
        processed = sampler.scores_after(logits[:, n], after, active)
        if scores is None:
            scores = processed.new_zeros(*logits.shape[:2], processed.shape[-1])
        scores[active, n] = processed[active]
    return logits.float() if scores is None else scores


def _walk(tree: TokenTree, logits: Tensor, sampler: Sampler, state: DecodeState) -> Acceptance:
    """Follow the target's own choices one depth at a time, for processors that need the prefix.

    Every emitted token costs one call of the processors, with the prefix that plain `generate`
    would pass; for one sequence even a processor that keeps a state sees the calls it expects.
    """
    batch = tree.batch
    tokens, parents, counts = tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist()
    prefixes = [state.prefix(b) for b in range(batch)]
    node, paths, next_token = [0] * batch, [[0] for _ in range(batch)], [0] * batch
    walked: list[list[int]] = [[] for _ in range(batch)]
    kept = None
    active = [b for b in range(batch) if not state.frozen[b]]
    rows = torch.arange(batch, device=logits.device)
    while active:
        at = torch.tensor(node, device=logits.device)
        scores = sampler.scores_after(logits[rows, at], prefixes, active)
        if sampler.keep_scores:
            if kept is None:
                kept = scores.new_zeros(*logits.shape[:2], scores.shape[-1])
            kept[rows[active], at[active]] = scores[active]
        position = [p + len(path) - 1 for p, path in zip(state.positions(), paths, strict=True)]
        where = torch.tensor(position, device=scores.device)[:, None]
        span = range(min(position), max(position) + 1)
        sampler.check(scores[active][:, None], where[active] * 0)
        chosen = sampler.choose(scores[:, None], where, span)[:, 0].tolist()
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
            walked[b].append(chosen[b])
            # A token that ends the text is the last one that processors may hear of.
            if child is None or sampler.ends(state, b, walked[b]):
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
