"""Compile kernels for parts that need not be there, and read what the compiler made of them.

Nothing is launched. The numbers are those of the binary itself: what `cuobjdump` finds in the cubin
(the assembler's log can differ from what ships), and the metadata of AMD's assembly. Triton
chooses between compiler and interpreter when a kernel is decorated, so `TRITON_INTERPRET` must be
unset in the process.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .._specimen import Specimen
from .parts import PARTS

PACKAGE = Path(__file__).parents[1]
# NVIDIA's three generations of matrix instructions, and AMD's.
_MATRIX = re.compile(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma")


@dataclass(frozen=True)
class Report:
    """What one compiled configuration uses.

    Attributes:
        op: Folder of the op.
        part: Key of `PARTS`.
        label: The specimen's.
        registers: Vector registers a lane.
        spilled: Bytes a lane keeps in memory for want of registers.
        shared_memory: Bytes a program.
        shared_memory_limit: Bytes that a program may use on the part.
        matrix_instructions: Whether there are any.
        tensor_cores: Whether there have to be.
    """

    op: str
    part: str
    label: str
    registers: int
    spilled: int
    shared_memory: int
    shared_memory_limit: int
    matrix_instructions: bool
    tensor_cores: bool

    @property
    def faults(self) -> list[str]:
        """Why this configuration must not ship; empty if it may."""
        found = []
        if self.spilled:
            found.append(f"spills {self.spilled} bytes with {self.registers} registers")
        if self.shared_memory > self.shared_memory_limit:
            found.append(
                f"takes {self.shared_memory} of {self.shared_memory_limit} bytes of shared memory"
            )
        if self.tensor_cores and not self.matrix_instructions:
            found.append("has no matrix instruction")
        return found


def ops() -> list[str]:
    """Names of the ops that have a kernel."""
    return sorted(path.parent.name for path in PACKAGE.glob("*/kernel.py"))


def specimens(op: str, part: str) -> list[Specimen]:
    """Every configuration of `op` that ships for `part`."""
    module = importlib.import_module(f"selfspec_kernels.{op}.kernel")
    found: Iterator[Specimen] = module.specimens(part)
    return list(found)


def misnamed(specimen: Specimen, siblings: Iterable[Specimen] = ()) -> list[str]:
    """Where a specimen does not describe the arguments of its kernel; empty if it does.

    Args:
        specimen: What to look at.
        siblings: Others whose kernels it may share a table of types with.
    """
    kernel, found = specimen.kernel, []
    known = {name for one in (specimen, *siblings) for name in one.kernel.arg_names}
    twice = specimen.types.keys() & specimen.constants.keys()
    found += [f"{name} is a type and a constant" for name in sorted(twice)]
    unknown = (specimen.types.keys() - known) | (specimen.constants.keys() - {*kernel.arg_names})
    found += [f"{name} is no argument" for name in sorted(unknown)]
    for parameter in kernel.params:
        name = parameter.name
        if name in specimen.constants:
            continue
        if parameter.is_constexpr:
            found.append(f"{name} has no value")
        elif name.endswith("_ptr") != specimen.types.get(name, "i32").startswith("*"):
            found.append(f"{name} is {specimen.types.get(name, 'i32')}")
    return found


def compile_for(specimen: Specimen, part: str) -> Any:
    """Compile `specimen` for `part`, with pointers and strides aligned as PyTorch's tensors are.

    Returns:
        Triton's `CompiledKernel`; it touches no driver before a launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = specimen.kernel, specimen.constants
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else specimen.types.get(name, "i32")
        if name not in constants and (name.endswith("_ptr") or "stride" in name):
            attributes[(index,)] = [["tt.divisibility", 16]]
    target = GPUTarget(PARTS[part].backend, PARTS[part].arch, PARTS[part].warp_size)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    # Without it, a later Triton would compile something else than what was looked at here.
    options = {
        "enable_fp_fusion": True,
        "num_warps": specimen.warps,
        "num_stages": specimen.stages,
    }
    return triton.compile(source, target=target, options=options)


def report(specimen: Specimen, part: str, op: str = "") -> Report:
    """Compile `specimen` for `part` and say what it uses."""
    binary = compile_for(specimen, part)
    if PARTS[part].backend == "hip":
        code = binary.asm["amdgcn"]
        # Scalar registers that do not fit go to lanes of vector registers, not to memory.
        registers, vectors, memory = (
            int(re.search(rf"\.{count}:\s+(\d+)", code)[1])  # type: ignore[index]
            for count in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        )
        spilled = max(memory, 4 * vectors)
    else:
        code = binary.asm["ptx"]
        registers, spilled = _usage(binary.asm["cubin"])
    return Report(
        op=op,
        part=part,
        label=specimen.label,
        registers=registers,
        spilled=spilled,
        shared_memory=binary.metadata.shared,
        shared_memory_limit=PARTS[part].shared_memory,
        matrix_instructions=bool(_MATRIX.search(code)),
        tensor_cores=specimen.tensor_cores,
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command: list[str | Path] = [_cuobjdump(), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


@lru_cache(maxsize=1)
def _cuobjdump() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def reports(ops: list[str], parts: list[str], jobs: int = 1) -> Iterator[Report]:
    """Reports of all configurations, in a fixed order.

    Args:
        ops: Folders of ops.
        parts: Keys of `PARTS`.
        jobs: Processes side by side.
    """
    work = [
        (op, part, index)
        for op in ops
        for part in parts
        for index in range(len(specimens(op, part)))
    ]
    if jobs == 1:
        yield from map(_report, work)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_report, work)


def _report(work: tuple[str, str, int]) -> Report:
    op, part, index = work
    return report(specimens(op, part)[index], part, op)
