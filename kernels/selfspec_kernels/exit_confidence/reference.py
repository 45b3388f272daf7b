"""Confidence of an early exit in torch: the definition, and the path that CPU tensors take."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..draft_topk.head import Head
from ..draft_topk.reference import head_logits, largest, original_ids


@dataclass(frozen=True, eq=False)
class ExitConfidence:
    """The likeliest token and how sure the head is of it.

    Attributes:
        token: int64 [...], the most likely token.
        top1: float32 [...], its probability.
        top2: float32 [...], probability of the second most likely token; 0 if there is one only.
        entropy: float32 [...], of the distribution, in nats.
    """

    token: Tensor
    top1: Tensor
    top2: Tensor
    entropy: Tensor


def exit_confidence_reference(hidden: Tensor, head: Head) -> ExitConfidence:
    """See `selfspec_kernels.exit_confidence`."""
    logits = head_logits(hidden.reshape(-1, hidden.shape[-1]), head)
    values, positions = largest(logits, min(2, head.num_tokens))
    dead = values[:, 0] == float("-inf")
    best = values[:, :1].clamp(min=torch.finfo(values.dtype).min)
    # exp(-80) is nothing beside 1, but not yet a denormal number, which CPUs are slow with; and
    # 0 * -inf stays out of the sum.
    shifted = (logits - best).clamp_(min=-80.0)
    weights = shifted.exp()
    total = weights.sum(dim=-1)
    entropy = total.log() - (weights * shifted).sum(dim=-1) / total
    probs = (values - best).exp() / total[:, None]
    top2 = probs[:, 1] if probs.shape[1] > 1 else torch.zeros_like(entropy)
    shape = hidden.shape[:-1]
    return ExitConfidence(
        original_ids(positions[:, 0], head).view(shape),
        *(x.masked_fill(dead, 0.0).float().view(shape) for x in (probs[:, 0], top2, entropy)),
    )
