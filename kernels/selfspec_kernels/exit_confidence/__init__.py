"""How sure the LM head is of its likeliest token, for leaving a model early."""

import torch
from torch import Tensor

from .._dispatch import Backend, use_triton
from ..draft_topk.head import Head
from .reference import ExitConfidence, exit_confidence_reference

__all__ = ["ExitConfidence", "exit_confidence"]


def exit_confidence(
    hidden: Tensor,
    head_weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    head_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    token_ids: Tensor | None = None,
    backend: Backend = "auto",
) -> ExitConfidence:
    """Apply final norm and LM head, and say how the probabilities are spread.

    Arguments, ties, NaN and what the fusion saves are those of `selfspec_kernels.draft_topk`.

    Args:
        hidden: [..., C], the last dimension contiguous.
        head_weight: [V, C] in the dtype of `hidden`.
        norm_weight: [C] weight of an RMS norm in front of the head, or None.
        norm_eps: Added to the mean square.
        norm_offset: Added to `norm_weight`.
        head_bias: [V], or None.
        logit_scale: Factor of the logits, bias included.
        softcap: Bound of the logits; 0 is none.
        token_ids: int64 [Vr], a reduced vocabulary, or None.
        backend: "auto" takes the Triton kernel for CUDA tensors, except float64, which it does not
            have; "triton" and "reference" insist.

    Returns:
        Token, its probability, that of the second most likely token, and the entropy in nats. A
        row with no logit above -inf gives the first token, and 0 for the three numbers.

    Raises:
        TypeError: If a dtype is not supported.
        ValueError: If shapes, strides or devices do not fit, or a number is out of range.

    Example:
        >>> hidden, head = torch.ones(1, 1), torch.tensor([[1.0], [1.0], [1.0], [1.0]])
        >>> exit_confidence(hidden, head)  # doctest: +NORMALIZE_WHITESPACE
        ExitConfidence(token=tensor([0]), top1=tensor([0.2500]), top2=tensor([0.2500]),
                       entropy=tensor([1.3863]))
    """
    head = Head(
        head_weight, norm_weight, norm_eps, norm_offset, head_bias, logit_scale, softcap, token_ids
    )
    head.check("exit_confidence", hidden)
    if backend == "auto" and hidden.dtype is torch.float64:
        backend = "reference"
    if use_triton("exit_confidence", backend, hidden):
        from .kernel import exit_confidence_triton

        return exit_confidence_triton(hidden, head)
    return exit_confidence_reference(hidden, head)
