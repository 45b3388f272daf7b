"""What a kernel is compiled with, said by the kernel's own module for the compile gate."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Specimen:
    """One shipped configuration of a kernel, with its costliest options on.

    Attributes:
        label: Distinguishes it among those of its op and part, such as "16bit-128-64".
        kernel: The `@triton.jit` function.
        types: Triton type of every argument that is neither constexpr nor int32, such as "*bf16".
        constants: Values of the constexpr arguments.
        warps: Warps a program.
        stages: Stages of loads in flight.
        tensor_cores: Whether its products have to be matrix instructions.
    """

    label: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 1
    tensor_cores: bool = False
