"""What both ops of the LM head take beside hidden states: the head, and what stands before it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Head:
    """Final norm, LM head and what is done to logits; `selfspec_kernels.draft_topk` has the terms.

    Attributes:
        weight: [V, C].
        norm_weight: [C], or None for hidden states that are normed already.
        norm_eps: Added to the mean square.
        norm_offset: Added to `norm_weight`.
        bias: [V], or None.
        logit_scale: Factor of the logits, bias included.
        softcap: Bound of the scaled logits; 0 is none.
        token_ids: int64 [Vr], the rows of `weight` that take part; None for all.
    """

    weight: Tensor
    norm_weight: Tensor | None
    norm_eps: float
    norm_offset: float
    bias: Tensor | None
    logit_scale: float
    softcap: float
    token_ids: Tensor | None

    @property
    def num_tokens(self) -> int:
        """How many tokens take part."""
        return (self.weight if self.token_ids is None else self.token_ids).shape[0]

    def check(self, op: str, hidden: Tensor) -> None:
        """Refuse what does not fit, naming `op` and the argument.

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If shapes, strides or devices do not fit, or a number is out of range.
        """
        weight, norm_weight, bias, token_ids = (
            self.weight,
            self.norm_weight,
            self.bias,
            self.token_ids,
        )
        if not hidden.dtype.is_floating_point:
            raise TypeError(f"{op}: hidden is {hidden.dtype}; use a floating dtype")
        if weight.dtype is not hidden.dtype:
            raise TypeError(
                f"{op}: head_weight is {weight.dtype}, hidden is {hidden.dtype}; use one dtype"
            )
        if weight.dim() != 2 or 0 in weight.shape:
            raise ValueError(
                f"{op}: head_weight has shape {tuple(weight.shape)}, expected [V, C], not empty"
            )
        vocab, size = weight.shape
        if hidden.dim() == 0 or hidden.shape[-1] != size:
            raise ValueError(
                f"{op}: hidden has shape {tuple(hidden.shape)}, expected [..., {size}] to fit "
                f"head_weight {tuple(weight.shape)}"
            )
        for name, tensor in (("hidden", hidden), ("head_weight", weight)):
            if size > 1 and tensor.stride(-1) != 1:
                raise ValueError(
                    f"{op}: {name} has stride {tensor.stride(-1)} in its last dimension; make it "
                    "contiguous there"
                )
        for name, vector, length in (
            ("norm_weight", norm_weight, size),
            ("head_bias", bias, vocab),
        ):
            if vector is None:
                continue
            if not vector.dtype.is_floating_point:
                raise TypeError(f"{op}: {name} is {vector.dtype}; use a floating dtype")
            if vector.shape != (length,):
                raise ValueError(
                    f"{op}: {name} has shape {tuple(vector.shape)}, expected ({length},)"
                )
        if token_ids is not None:
            if token_ids.dtype is not torch.int64:
                raise TypeError(f"{op}: token_ids must be torch.int64, got {token_ids.dtype}")
            if token_ids.dim() != 1 or token_ids.shape[0] == 0:
                raise ValueError(
                    f"{op}: token_ids has shape {tuple(token_ids.shape)}, expected [Vr], not empty"
                )
        for name, other in (
            ("head_weight", weight),
            ("norm_weight", norm_weight),
            ("head_bias", bias),
            ("token_ids", token_ids),
        ):
            if other is not None and other.device != hidden.device:
                raise ValueError(f"{op}: {name} is on {other.device}, hidden on {hidden.device}")
        # Written so that NaN is refused too.
        for name, number, fits, rule in (
            ("norm_eps", self.norm_eps, 0 <= self.norm_eps < math.inf, "negative or not finite"),
            ("norm_offset", self.norm_offset, math.isfinite(self.norm_offset), "not finite"),
            ("logit_scale", self.logit_scale, math.isfinite(self.logit_scale), "not finite"),
            ("softcap", self.softcap, 0 <= self.softcap < math.inf, "negative or not finite"),
        ):
            if not fits:
                raise ValueError(f"{op}: {name}={number} is {rule}")
