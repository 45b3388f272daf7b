"""LM head and choice of the k most likely tokens in torch: the definition, and the CPU path."""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from .head import Head

_GROUP = 64


def head_logits(hidden: Tensor, head: Head) -> Tensor:
    """[R, Vr] logits of [R, C] hidden states, in at least float32, never NaN or +inf.

    The product is one in the dtype of the head, so that 16-bit logits are those of the model.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weight, bias = head.weight, head.bias
    if head.norm_weight is not None:
        x = hidden.to(wide)
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + head.norm_eps)
        hidden = (x * (head.norm_weight.to(wide) + head.norm_offset)).to(hidden.dtype)
    if head.token_ids is not None:
        weight = weight.index_select(0, head.token_ids)
        bias = None if bias is None else bias.index_select(0, head.token_ids)
    logits = linear(hidden, weight).to(wide)
    if bias is not None:
        logits = logits + bias
    if head.logit_scale != 1.0:
        logits = logits * head.logit_scale
    if head.softcap > 0:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return logits.nan_to_num_(nan=float("-inf"), neginf=float("-inf"))


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of every row and their positions, both [R, k]; the first wins a tie.

    The k largest are found in the k groups of columns whose maxima are largest, so that all but
    one pass over the logits work on few of them.
    """
    rows, size = logits.shape
    groups = -(-size // _GROUP)
    if size % _GROUP:
        logits = pad(logits, (0, groups * _GROUP - size), value=float("-inf"))
    grouped = logits.view(rows, groups, _GROUP)
    chosen = _first_largest(grouped.amax(dim=-1), min(k, groups))
    # Candidates in the order of their positions keep the rule for ties.
    chosen = chosen.sort(dim=-1).values
    candidates = grouped.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    index = _first_largest(candidates, k)
    positions = chosen.gather(1, index // _GROUP) * _GROUP + index % _GROUP
    return candidates.gather(1, index), positions


def _first_largest(values: Tensor, k: int) -> Tensor:
    """Columns of the k largest of every row, in order; `torch.topk` takes any of equal ones."""
    if values.dtype is not torch.float32:
        return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    # One integer that orders as value and column do; + 0.0 rids -0.0 of its sign.
    bits = (values + 0.0).view(torch.int32)
    last = values.shape[-1] - 1
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().bitwise_left_shift_(32)
    keys |= last - torch.arange(last + 1, device=values.device)
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def original_ids(positions: Tensor, head: Head) -> Tensor:
    """Token ids of positions among the tokens that take part."""
    return positions if head.token_ids is None else head.token_ids[positions]


def draft_topk_reference(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """See `selfspec_kernels.draft_topk`."""
    logits = head_logits(hidden.reshape(-1, hidden.shape[-1]), head)
    values, positions = largest(logits, k)
    # A row of -inf alone has no softmax.
    log_probs = logits.log_softmax(dim=-1).gather(1, positions)
    log_probs = log_probs.masked_fill_(values == float("-inf"), float("-inf"))
    shape = (*hidden.shape[:-1], k)
    return original_ids(positions, head).view(shape), log_probs.float().view(shape)
