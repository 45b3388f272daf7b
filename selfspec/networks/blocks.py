"""Parts that the draft networks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight.

    Args:
        size: C.
        eps: Added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Of [..., C]."""
        if torch.is_grad_enabled():
            out: Tensor = _TrainedRMSNorm.apply(x, self.weight, self.eps)
            return out
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _TrainedRMSNorm(torch.autograd.Function):
    """The same, at half the time of a backward that autograd makes of its steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale, weight)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        to_normed = gradient.to(scale.dtype)
        shares = to_normed * normed
        to_weight = shares.flatten(0, -2).sum(0)
        along = (shares @ weight.to(scale.dtype))[..., None] / x.shape[-1]
        to_x = (to_normed * weight).addcmul_(normed, along, value=-1).mul_(scale)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None


class Packed:
    """Linear layers of one input as one product: a draft step is short, and every call counts.

    Their weights become views of one matrix. For inference: layers that are moved to another device
    or dtype later are not followed.

    Args:
        layers: With as many inputs each.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        with torch.no_grad():
            self.weight = torch.cat(tuple(layer.weight for layer in layers))
            biases = tuple(layer.bias for layer in layers if layer.bias is not None)
            self.bias = torch.cat(biases) if biases else None
            for layer, rows in zip(layers, self.weight.split(self.sizes), strict=True):
                layer.weight = nn.Parameter(rows, requires_grad=False)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """One output [..., out] a layer of x [..., in]."""
        return functional.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)


class GatedMLP(nn.Module):
    """SwiGLU, as in Llama.

    Args:
        size: C.
        intermediate_size: Inner size.
    """

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)
        self.gate_up: Packed | None = None

    def pack(self) -> None:
        """See `Packed`."""
        self.gate_up = Packed([self.gate_proj, self.up_proj])

    def forward(self, x: Tensor) -> Tensor:
        """Of [..., C]."""
        if self.gate_up is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up(x)
        out: Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), the block of a Medusa head; the identity at first.

    Args:
        size: C.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Of [..., C]."""
        return x + functional.silu(self.linear(x))
