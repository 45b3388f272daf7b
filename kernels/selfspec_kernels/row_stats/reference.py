"""Row statistics in torch: the definition, and the path that CPU tensors take."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowStats:
    """What acceptance needs to know of each row of logits; R rows of V.

    Attributes:
        maximum: float32 [R]; the largest scaled logit.
        argmax: int64 [R]; the first index that has it, inside [0, V) whatever the row holds.
        logsumexp: float32 [R]; of the kept scaled logits.
        threshold: float32 [R]; scaled logits below it are dropped. -inf keeps all.
        ties: int32 [R]; how many of those equal to the threshold are kept, the last ones by index;
            V where all are.
    """

    maximum: Tensor
    argmax: Tensor
    logsumexp: Tensor
    threshold: Tensor
    ties: Tensor


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """float32 logits over the temperature, -inf where they are NaN."""
    scaled = logits.float()
    if temperature != 1.0:
        # A tensor on the device: for a number, torch on CUDA multiplies by a rounded reciprocal.
        scaled = scaled / torch.full((), temperature, dtype=torch.float32, device=logits.device)
    clean = torch.nan_to_num if scaled is logits else torch.nan_to_num_  # a copy may change
    return clean(scaled, nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def kept(scaled: Tensor, threshold: Tensor, ties: Tensor) -> Tensor:
    """Which scaled logits [..., V] pass a threshold [...] with a number of ties [...]."""
    threshold = threshold[..., None]
    equal = scaled == threshold
    before = equal.cumsum(-1, dtype=torch.int32)  # itself included
    last = before > before[..., -1:] - ties[..., None]
    return (scaled > threshold) | (equal & last)


def row_stats_reference(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> RowStats:
    """See `selfspec_kernels.row_stats`."""
    vocab = logits.shape[-1]
    scaled = scaled_logits(logits, temperature)
    maximum, argmax = scaled.max(-1)
    threshold = torch.full_like(maximum, -math.inf)
    ties = torch.full_like(argmax, vocab, dtype=torch.int32)
    if 0 < top_k < vocab or top_p < 1:
        threshold, ties = _selected(scaled, maximum, top_k, top_p)
    if min_p > 0:
        floor = maximum + math.log(min_p)
        higher = floor > threshold
        threshold = torch.where(higher, floor, threshold)
        ties = ties.masked_fill(higher, vocab)
    if 0 < top_k < vocab or top_p < 1 or min_p > 0:
        scaled = scaled.masked_fill(~kept(scaled, threshold, ties), -math.inf)
    # Subtracted only where it is finite, so that infinite rows give no NaN.
    shift = maximum.masked_fill(maximum.isinf(), 0.0)
    logsumexp = (scaled - shift[..., None]).exp_().sum(-1).log_() + shift
    return RowStats(maximum, argmax, logsumexp, threshold, ties)


def _selected(scaled: Tensor, maximum: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Threshold and ties of top-k, then top-p, from a sort."""
    vocab = scaled.shape[-1]
    top = maximum[..., None]
    ordered = scaled.sort(-1).values
    threshold = torch.full_like(maximum, -math.inf)
    ties = torch.full_like(maximum, vocab, dtype=torch.int32)
    if 0 < top_k < vocab:
        threshold = ordered[..., vocab - top_k]
    if top_p < 1:
        # Equal to the maximum is 1 by definition, so that infinite rows have no NaN.
        weight = torch.where(ordered == top, 1.0, (ordered.double() - top.double()).exp())
        weight = weight.masked_fill(ordered < threshold[..., None], 0.0)
        from_here = weight.flip(-1).cumsum(-1).flip(-1)
        # A token stays while those above it, later ties included, have less than the share.
        stays = from_here - weight < top_p * from_here[..., :1]
        stays[..., -1] = True
        threshold = ordered.gather(-1, vocab - stays.sum(-1, keepdim=True))[..., 0]
        equal = ordered == threshold[..., None]
        held, total = (equal & stays).sum(-1), equal.sum(-1)
        ties = torch.where(held < total, held, vocab).int()
    dead = maximum == -math.inf
    return threshold.masked_fill(dead, -math.inf), ties.masked_fill(dead, vocab)
