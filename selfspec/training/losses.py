"""Losses between a draft's distribution q and the target's p, through a large head.

The target's distribution comes as its most probable tokens. Everything that has a value for every
token of the vocabulary exists for some positions at a time and is never kept: logits and
probabilities for as few as fit into a processor's cache, the gradient of the logits for a chunk,
from which those of the states and of the head are made at once, on the way forward.

Soft cross entropy and Kullback-Leibler divergence have the same gradient. `"lk"` is the hybrid of
divergence and acceptance of https://arxiv.org/abs/2602.23881: with alpha = sum(min(p, q)), the
probability that a token drawn from q is accepted, e^(-3 alpha) KL + (1 - e^(-3 alpha)) (1 - alpha),
so that a draft that is good already is trained for what it is used for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Loss = Literal["cross-entropy", "kl", "lk"]

# Positions at a time: with 8,192 draft tokens a gradient in bf16 is 32 MB, logits in float32 are 4.
_CHUNK, _ROWS = 2048, 128
_BLOCK = 64  # of draft tokens, of which the best are compared
_SHARPNESS = 3.0  # of the weight that "lk" gives to the divergence


@dataclass(frozen=True, eq=False)
class Distilled:
    """The loss of some positions and what they tell of the draft.

    Attributes:
        loss: Mean over the positions that count, by their weights; 0 without any.
        weight: Sum of the weights.
        hits: Weighted share of positions where q's likeliest token is p's; where that cannot be
            drafted, it is a miss.
        alpha: Weighted mean of sum(min(p, q)) over the tokens of p that are given.
        ranks: [R] weighted share of positions where p's likeliest token is q's first, second, ...
    """

    loss: Tensor
    weight: float
    hits: float
    alpha: float
    ranks: Tensor


def distill(
    states: Tensor,
    matrix: Tensor,
    tokens: Tensor,
    probs: Tensor,
    weights: Tensor,
    kind: Loss = "kl",
    ranks: int = 0,
) -> Distilled:
    """Compare the draft with the target at M positions.

    Args:
        states: [M, C] what the head reads.
        matrix: [Vd, C], the head.
        tokens: int64 [M, K] indices into the draft vocabulary of the target's most probable tokens,
            the best first; -1 for one that cannot be drafted.
        probs: float32 [M, K] their probabilities. The loss is that of p restricted to those of the
            tokens that can be drafted; a position that has none counts as a miss, without a loss.
        weights: float32 [M]; 0 for positions that do not count.
        kind: Which loss.
        ranks: R, how many ranks to count; 0: none, which saves time.

    Returns:
        The loss, through which gradients flow to `states` and `matrix`, and counts.
    """
    loss, counts = _Distill.apply(states, matrix, tokens, probs, weights, kind, ranks)
    total, hits, alpha, *by_rank = counts.tolist()
    return Distilled(loss, total, hits, alpha, torch.tensor(by_rank))


def _likeliest(q: Tensor) -> Tensor:
    """`q.argmax(-1)` of [M, V]: the first of equals. On a CPU argmax takes as long as a product."""
    if q.shape[1] % _BLOCK:
        return q.argmax(-1)
    inner = q.unflatten(1, (-1, _BLOCK))
    block = inner.amax(-1).argmax(-1)
    rows = torch.arange(len(q), device=q.device)
    return block * _BLOCK + inner[rows, block].argmax(-1)


class _Compared(NamedTuple):
    """q and p at some positions."""

    own: Tensor  # [M, K] q of the tokens of p
    likeliest: Tensor  # int64 [M], of q
    loss: Tensor  # [M]
    slopes: Tensor  # [M, Vd] d loss / d logits


def _compare(logits: Tensor, index: Tensor, given: Tensor, p: Tensor, kind: Loss) -> _Compared:
    tiny = torch.finfo(logits.dtype).tiny
    q = torch.softmax(logits, -1)
    own, likeliest = q.gather(1, index), _likeliest(q)
    entropy = torch.special.entr(p).sum(-1)
    divergence = -(p * own.clamp_min(tiny).log()).sum(-1) - entropy
    # d KL / d logits = q - p.
    loss, correction = divergence if kind == "kl" else divergence + entropy, -p
    if kind == "lk":
        alpha = (torch.minimum(p, own) * given).sum(-1)
        slope = torch.exp(-_SHARPNESS * alpha)
        loss = slope * divergence + (1 - slope) * (1 - alpha)
        # The weight itself is not differentiated: it says how far training has come.
        pull = (1 - slope)[:, None]
        # d alpha / d logits = q (1[q < p] - sum of q where q < p).
        below = torch.where(given & (own < p), own, 0.0)
        correction = slope[:, None] * correction - pull * below
        q *= slope[:, None] + pull * below.sum(-1, keepdim=True)
    q.scatter_add_(1, index, torch.where(given, correction, 0.0))
    return _Compared(own, likeliest, loss, q)


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        matrix: Tensor,
        tokens: Tensor,
        probs: Tensor,
        weights: Tensor,
        kind: Loss,
        ranks: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(states.dtype, torch.float32)
        tiny = torch.finfo(wide).tiny
        inside = tokens >= 0
        weights = weights.to(wide)
        true = torch.where(inside, probs.to(wide), 0.0)
        # Of the draft vocabulary alone: q has no share in anything else.
        mass = true.sum(-1, keepdim=True)
        p = true / mass.clamp_min(tiny)
        trained = torch.where(mass[:, 0] > 0, weights, 0.0)
        total = weights.sum()
        unit = trained / trained.sum().clamp_min(tiny)
        counted = weights / total.clamp_min(tiny)
        grad_states = torch.zeros_like(states)
        grad_matrix: Tensor | None = None
        loss = torch.zeros((), dtype=wide, device=states.device)
        counts = torch.zeros(2 + ranks, dtype=wide, device=states.device)
        # Elsewhere there are enough processors for a chunk, and launches cost more than a cache.
        rows = _ROWS if states.device.type == "cpu" else _CHUNK
        for start in range(0, states.shape[0], _CHUNK):
            chunk = slice(start, start + _CHUNK)
            # Of the logits, but for the share of the position, which both products below have.
            gradient = states.new_empty(states[chunk].shape[0], matrix.shape[0])
            for at in range(start, start + gradient.shape[0], rows):
                part = slice(at, min(at + rows, start + _CHUNK))
                index, given, seen = tokens[part].clamp(min=0), inside[part], counted[part]
                logits = states[part] @ matrix.t()
                found = _compare(logits.to(wide), index, given, p[part], kind)
                gradient[at - start : part.stop - start] = found.slopes
                loss += (unit[part] * found.loss).sum()
                right = (found.likeliest == index[:, 0]) & given[:, 0]
                counts[0] += (seen * right).sum()
                counts[1] += (seen * torch.minimum(true[part], found.own).sum(-1)).sum()
                if ranks:
                    above = (logits > logits.gather(1, index[:, :1])).sum(-1)
                    for r in range(ranks):
                        counts[2 + r] += (seen * ((above == r) & given[:, 0])).sum()
            share = unit[chunk, None]
            grad_states[chunk] = share * (gradient @ matrix)
            if ctx.needs_input_grad[1]:
                product = gradient.t() @ (share * states[chunk]).to(states.dtype)
                grad_matrix = product if grad_matrix is None else grad_matrix.to(wide) + product
        if grad_matrix is not None:
            grad_matrix = grad_matrix.to(matrix.dtype)
        elif ctx.needs_input_grad[1]:
            grad_matrix = torch.zeros_like(matrix)
        ctx.save_for_backward(grad_states, grad_matrix)
        counts = torch.cat([total[None], counts])
        ctx.mark_non_differentiable(counts)
        return loss, counts

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        grad_states, grad_matrix = ctx.saved_tensors
        return (
            grad_states * grad_loss,
            None if grad_matrix is None else grad_matrix * grad_loss,
            None,
            None,
            None,
            None,
            None,
        )
