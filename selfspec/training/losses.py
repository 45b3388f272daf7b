"""Losses between a draft's distribution q and the target's p, through a large head.

The target's distribution comes as its most probable tokens. Everything that has a value for every
token of the vocabulary (logits, probabilities, their gradient) exists for some positions at a time
and is never kept: the gradients of the states and of the head are made on the way forward.

Soft cross entropy and Kullback-Leibler divergence have the same gradient. `"lk"` is the hybrid of
divergence and acceptance of https://arxiv.org/abs/2602.23881: with alpha = sum(min(p, q)), the
probability that a token drawn from q is accepted, e^(-3 alpha) KL + (1 - e^(-3 alpha)) (1 - alpha),
so that a draft that is good already is trained for what it is used for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Loss = Literal["cross-entropy", "kl", "lk"]

# Positions at a time: logits of 8,192 draft tokens in bf16 are 16 MB then.
_CHUNK = 1024
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
        wants_matrix = ctx.needs_input_grad[1]
        grad_matrix = torch.zeros_like(matrix, dtype=wide) if wants_matrix else None
        loss = torch.zeros((), dtype=wide, device=states.device)
        counts = torch.zeros(2 + ranks, dtype=wide, device=states.device)
        for at in range(0, states.shape[0], _CHUNK):
            part = slice(at, at + _CHUNK)
            x, share = states[part], unit[part]
            index, given, target = tokens[part].clamp(min=0), inside[part], p[part]
            logits = x @ matrix.t()
            q = torch.softmax(logits.to(wide), -1)
            own = q.gather(1, index)
            log_own = own.clamp_min(tiny).log()
            entropy = torch.special.entr(target).sum(-1)
            divergence = -(target * log_own).sum(-1) - entropy
            alpha = (torch.minimum(target, own) * given).sum(-1)
            slope = torch.ones_like(alpha)
            pull = torch.zeros_like(alpha)
            if kind == "lk":
                slope = torch.exp(-_SHARPNESS * alpha)
                value = slope * divergence + (1 - slope) * (1 - alpha)
                # The weight itself is not differentiated: it says how far training has come.
                pull = 1 - slope
            else:
                value = divergence if kind == "kl" else divergence + entropy
            loss += (share * value).sum()
            seen = counted[part]
            right = (_likeliest(q) == index[:, 0]) & given[:, 0]
            counts[0] += (seen * right).sum()
            counts[1] += (seen * torch.minimum(true[part], own).sum(-1)).sum()
            if ranks:
                first = logits.gather(1, index[:, :1])
                above = (logits > first).sum(-1)
                for r in range(ranks):
                    counts[2 + r] += (seen * ((above == r) & given[:, 0])).sum()
            # d KL / d logits = q - p;  d alpha / d logits = q (1[q < p] - sum of q where q < p).
            below = torch.where(given & (own < target), own, 0.0)
            scale = share * (slope + pull * below.sum(-1))
            correction = -(share * slope)[:, None] * target - (share * pull)[:, None] * below
            q *= scale[:, None]
            q.scatter_add_(1, index, torch.where(given, correction, 0.0))
            gradient = q.to(x.dtype)
            grad_states[part] = gradient @ matrix
            if grad_matrix is not None:
                grad_matrix += gradient.t() @ x
        ctx.save_for_backward(
            grad_states, None if grad_matrix is None else grad_matrix.to(matrix.dtype)
        )
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
