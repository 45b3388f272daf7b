"""The one place that decides between a Triton kernel and its torch reference."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "reference"]


def interpreting() -> bool:
    """Whether Triton was asked to run kernels in its interpreter, on CPU tensors.

    Triton reads the variable when a kernel is decorated, so it has to be set before the first
    kernel of the process is imported.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(op: str, backend: str, tensor: Tensor) -> bool:
    """Decide whether `op` runs its Triton kernel.

    Args:
        op: Name of the op, for the error message.
        backend: "auto" takes the kernel exactly for CUDA (or ROCm) tensors, "triton" insists on
            it, "reference" never takes it.
        tensor: The tensor whose device decides.

    Raises:
        ValueError: If `backend` is unknown, or is "triton" for a tensor that no kernel can reach.
    """
    if backend == "auto":
        return tensor.is_cuda
    if backend == "reference":
        return False
    if backend != "triton":
        raise ValueError(f'{op}: backend={backend!r}; use "auto", "triton" or "reference"')
    if not tensor.is_cuda and not interpreting():
        raise ValueError(
            f'{op}: backend="triton" needs CUDA tensors, got device {str(tensor.device)!r}; use '
            '"auto" or "reference", or start the process with TRITON_INTERPRET=1 to interpret'
        )
    return True


def device_guard(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the device of `tensor` current, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
