"""The k most likely next tokens of hidden states, by final norm and LM head."""

import torch
from torch import Tensor

from .._dispatch import Backend, use_triton
from .head import Head
from .reference import draft_topk_reference

__all__ = ["MAX_K", "draft_topk"]

MAX_K = 64


def draft_topk(
    hidden: Tensor,
    head_weight: Tensor,
    k: int,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    head_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    token_ids: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Apply final norm and LM head, and keep the k most likely tokens.

    With :math:`\hat h = h / \sqrt{\mathrm{mean}(h^2) + \epsilon} \cdot (\mathrm{offset} + w)`, or
    :math:`\hat h = h` without `norm_weight`, and :math:`x = \mathrm{scale} \cdot (W \hat h + b)`,
    the logits are x, soft-capped to :math:`c \tanh(x / c)` if `softcap` c is positive.

    What the fusion saves is launches, and the [N, V] logits in memory; the head itself is read
    once either way, and its bytes are the time of a draft step. Only a reduced vocabulary makes
    them fewer.

    Args:
        hidden: [..., C], the last dimension contiguous.
        head_weight: [V, C] in the dtype of `hidden`; the model's own tensor, rows contiguous.
        k: How many tokens, 1..64 and no more than take part.
        norm_weight: [C] weight of an RMS norm in front of the head; None if `hidden` is normed
            already.
        norm_eps: Added to the mean square.
        norm_offset: Added to `norm_weight`; 1 for models that store their weight minus one.
        head_bias: [V], or None.
        logit_scale: Factor of the logits, bias included.
        softcap: Bound of the logits; 0 is none.
        token_ids: int64 [Vr], a reduced vocabulary: only these rows of the head take part, and
            probabilities are over them. They must be different and in [0, V), which is not
            checked: it would read them back to the host. The kernel reads the rows where they
            are; the reference copies them at every call.
        backend: "auto" takes the Triton kernel for CUDA tensors, except float64, which it does not
            have; "triton" and "reference" insist.

    Returns:
        Token ids int64 [..., k], original ones also for a reduced vocabulary, and their natural-log
        probabilities float32 [..., k], both most likely first. Of equal tokens the one first in
        the vocabulary, or in `token_ids`, comes first. A NaN logit counts as -inf, and +inf as the
        largest finite number. A row with no logit above -inf gives the first k tokens, and -inf.

    Raises:
        TypeError: If a dtype is not supported, or `k` is no int.
        ValueError: If shapes, strides or devices do not fit, or a number is out of range.

    Example:
        >>> hidden, head = torch.eye(3)[1], torch.tensor([[0, 1, 0], [0, 3, 0], [0, 1, 0.0]])
        >>> draft_topk(hidden, head, 2)
        (tensor([1, 0]), tensor([-0.2395, -2.2395]))
        >>> draft_topk(hidden, head, 2, token_ids=torch.tensor([2, 0]))
        (tensor([2, 0]), tensor([-0.6931, -0.6931]))
    """
    head = Head(
        head_weight, norm_weight, norm_eps, norm_offset, head_bias, logit_scale, softcap, token_ids
    )
    head.check("draft_topk", hidden)
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"draft_topk: k must be an int, got {k!r}")
    if not 1 <= k <= min(MAX_K, head.num_tokens):
        raise ValueError(
            f"draft_topk: k={k} is outside of 1..{min(MAX_K, head.num_tokens)}; at most {MAX_K}, "
            f"and {head.num_tokens} tokens take part"
        )
    if backend == "auto" and hidden.dtype is torch.float64:
        backend = "reference"
    if use_triton("draft_topk", backend, hidden):
        from .kernel import draft_topk_triton

        return draft_topk_triton(hidden, head, k)
    return draft_topk_reference(hidden, head, k)
