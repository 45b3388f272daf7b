"""Ahead-of-time compilation for parts that need not be there.

Nothing is launched. The compiler's own numbers are held to what makes a kernel slow or impossible:
registers spilled to memory, more shared memory than the part has, products that miss the tensor
cores. Every tile of the tables is compiled with all options on, the costliest case.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from selfspec_kernels.tree_attention.blocks import AMD, NVIDIA, Blocks

pytestmark = pytest.mark.aot

# Bytes of shared memory that one program may use.
SHARED_MEMORY = {80: 166_912, 90: 232_448, "gfx942": 65_536}
TYPES = {1: "i8", 2: "bf16", 4: "fp32", 8: "i64"}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], part: Any, **options):
    """Compile for a part, with pointers and strides aligned as PyTorch's tensors are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        pointer, stride = name.endswith("_ptr"), "stride" in name
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if (pointer or stride) and name not in constants:
            attributes[(index,)] = [["tt.divisibility", 16]]
    target = GPUTarget("hip", part, 64) if isinstance(part, str) else GPUTarget("cuda", part, 32)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})


def assert_fits(binary: Any, part: Any, folder: Path) -> None:
    assert binary.metadata.shared <= SHARED_MEMORY[part]
    if isinstance(part, str):
        text = binary.asm["amdgcn"]
        # Scalar registers that do not fit go to lanes of vector registers, not to memory.
        for count in ("vgpr_spill_count", "private_segment_fixed_size"):
            assert int(re.search(rf"\.{count}:\s+(\d+)", text)[1]) == 0, count
        return
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run(
        [tool, "-res-usage", path], check=True, capture_output=True, text=True
    ).stdout
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report).groups()
    )
    assert (stack, local) == (0, 0), f"spills, with {registers} registers"


def attention(item_size: int, sizes: tuple[int, int], blocks: Blocks, part: Any, options: bool):
    from selfspec_kernels.tree_attention import kernel

    item = f"*{TYPES[item_size]}"
    types = dict.fromkeys(("out_ptr", "query_ptr", "key_ptr", "value_ptr", "sinks_ptr"), item)
    types |= {"ancestors_ptr": "*i64", "depth_ptr": "*i32", "prefix_len_ptr": "*i32"}
    types |= {"score_scale": "fp32", "score_bound": "fp32"}
    constants = {
        "GROUPS": 3,
        "HEAD_SIZE": sizes[0],
        "VALUE_SIZE": sizes[1],
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_D": _padded(sizes[0]),
        "BLOCK_DV": _padded(sizes[1]),
        "HAS_WINDOW": options,
        "HAS_SOFTCAP": options,
        "HAS_SINKS": options,
        "PRECISION": blocks.precision,
        "UPCAST": False,
    }
    return compiled(
        kernel._tree_attention_kernel,
        types,
        constants,
        part,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _tiles(parts: list[Any]) -> list[Any]:
    return [
        pytest.param(
            part, item_size, width, blocks, id=f"{part}-{8 * item_size}bit-{width}-{blocks.m}"
        )
        for part in parts
        for (item_size, width), rows in (AMD if part == "gfx942" else NVIDIA).items()
        for blocks in rows
    ]


@pytest.mark.parametrize(("part", "item_size", "width", "blocks"), _tiles(list(SHARED_MEMORY)))
def test_tree_attention(part, item_size, width, blocks, tmp_path):
    binary = attention(item_size, (width, width), blocks, part, options=True)
    assert_fits(binary, part, tmp_path)
    if item_size == 2:
        code = binary.asm["amdgcn" if isinstance(part, str) else "ptx"]
        assert re.search(r"v_mfma|mma\.sync|wgmma\.mma_async", code)


# Fewer options are not always fewer registers to the compiler; the tightest part shows it.
@pytest.mark.parametrize(("part", "item_size", "width", "blocks"), _tiles([80]))
def test_tree_attention_without_options(part, item_size, width, blocks, tmp_path):
    assert_fits(attention(item_size, (width, width), blocks, part, False), part, tmp_path)


@pytest.mark.parametrize(("sizes", "row"), [((80, 80), 3), ((96, 128), 2), ((192, 128), 1)])
def test_tree_attention_of_padded_heads(sizes, row, tmp_path):
    blocks = NVIDIA[2, _padded(max(sizes))][row]
    assert_fits(attention(2, sizes, blocks, 90, options=True), 90, tmp_path)


@pytest.mark.parametrize("part", list(SHARED_MEMORY))
def test_tree_accept(part, tmp_path):
    from selfspec_kernels.tree_accept import kernel

    types = dict.fromkeys(("path_ptr", "num_accepted_ptr", "parents_ptr", "num_nodes_ptr"), "*i32")
    types |= dict.fromkeys(("next_token_ptr", "tokens_ptr", "target_tokens_ptr"), "*i64")
    binary = compiled(kernel._tree_accept_kernel, types, {"BLOCK": 128}, part, num_warps=1)
    assert_fits(binary, part, tmp_path)


@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("part", list(SHARED_MEMORY))
def test_kv_commit(part, item_size, tmp_path):
    from selfspec_kernels.kv_commit import kernel

    types = dict.fromkeys(("path_ptr", "num_accepted_ptr", "prefix_len_ptr"), "*i32")
    types["table_ptr"] = "*i64"
    constants = {"ITEM": kernel._INTEGERS[item_size], "BLOCK": 1024}
    assert_fits(compiled(kernel._kv_commit_kernel, types, constants, part), part, tmp_path)


def test_the_gate_sees_a_spill(tmp_path):
    # The two halves that TF32 products make of 16 queries of 256 do not fit beside the rest.
    binary = attention(4, (256, 256), Blocks(16, 16, 4, 2, "tf32x3"), 90, options=False)
    with pytest.raises(AssertionError, match="spills"):
        assert_fits(binary, 90, tmp_path)
