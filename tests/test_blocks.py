"""Parts of draft networks, in training and out of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

from selfspec.networks.blocks import RMSNorm


def norm(dtype: torch.dtype) -> RMSNorm:
    made = RMSNorm(6, 1e-5).to(dtype)
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(0))
    return made


def states(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 2, 4), (0,), (2, 0)])
def test_rms_norm_is_the_same_while_it_is_trained(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    made, x = norm(dtype), states(dtype, *shape)
    trained = made(x)
    assert trained.requires_grad
    assert trained.dtype == dtype
    with torch.no_grad():
        torch.testing.assert_close(trained.detach(), made(x))
        torch.testing.assert_close(trained.detach(), rms_norm(x, (6,), made.weight, 1e-5))


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_gradients_of_rms_norm(shape: tuple[int, ...]) -> None:
    made = norm(torch.float64)
    x = states(torch.float64, *shape).requires_grad_()
    assert torch.autograd.gradcheck(made, (x,))
    upstream = states(torch.float64, *shape)
    found = torch.autograd.grad(made(x), (x, made.weight), upstream)
    expected = torch.autograd.grad(rms_norm(x, (6,), made.weight, 1e-5), (x, made.weight), upstream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_rms_norm_in_two_bytes() -> None:
    """As exact as rounding once to the result allows."""
    made, x = norm(torch.bfloat16), states(torch.bfloat16, 40).requires_grad_()
    exact, y = norm(torch.float64), x.detach().double().requires_grad_()
    exact.weight.data.copy_(made.weight.data)
    upstream = states(torch.bfloat16, 40)
    found = torch.autograd.grad(made(x), (x, made.weight), upstream)
    expected = torch.autograd.grad(exact(y), (y, exact.weight), upstream.double())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-3)
