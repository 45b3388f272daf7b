"""`tree_attention` beside what else attends a tree: times on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from selfspec_kernels import TreeLayout, tree_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.ops.trees import random_forest

from .gpu_clock import Clock, Launch, copies


@dataclass(frozen=True)
class Case:
    """One shape; sizes as in the package: N nodes behind `prefix` slots."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    nodes: int
    prefix: int
    dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False
    peers: bool = True

    @property
    def groups(self) -> int:
        """G."""
        return self.heads // self.kv_heads

    @property
    def name(self) -> str:
        """What the tables call it."""
        text = f"B{self.batch} H{self.heads}/{self.kv_heads} D{self.size} N{self.nodes} "
        text += f"L{self.prefix} {str(self.dtype).removeprefix('torch.')}"
        return text + (" deterministic" if self.deterministic else "")

    @property
    def bytes(self) -> int:
        """What has to be read and written: keys, values, queries, output."""
        cache = 2 * self.kv_heads * (self.prefix + self.nodes)
        return self.batch * (cache + 2 * self.heads * self.nodes) * self.size * self.dtype.itemsize

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""

        def make(heads: int, length: int) -> Tensor:
            return torch.randn(
                self.batch, heads, length, self.size, device=device, dtype=self.dtype
            )

        slots = self.prefix + self.nodes
        return make(self.heads, self.nodes), make(self.kv_heads, slots), make(self.kv_heads, slots)

    def layout(self, device: torch.device) -> TreeLayout:
        """A random tree behind rows of the same length."""
        layout = random_forest(self.nodes, [self.prefix] * self.batch).layout()
        tensors = (layout.ancestors, layout.depth, layout.prefix_len)
        return TreeLayout(*(tensor.to(device) for tensor in tensors), layout.max_prefix_len)


LLAMA, SMOL, QWEN, GEMMA = (32, 8, 128), (9, 3, 64), (28, 4, 128), (16, 8, 256)
# The most telling first, since time may run out.
CASES = [
    Case(1, *LLAMA, 32, 8192),
    Case(1, *SMOL, 32, 8192),
    Case(1, *QWEN, 16, 8192),
    *(Case(1, *LLAMA, nodes, 32768) for nodes in (16, 32)),
    Case(8, *LLAMA, 32, 8192),
    Case(1, *GEMMA, 32, 8192),
    *(Case(1, *LLAMA, nodes, 8192, peers=False) for nodes in (1, 16, 64)),
    Case(1, *LLAMA, 32, 1024),
    Case(1, *QWEN, 16, 32768),
    Case(8, *SMOL, 32, 8192),
    Case(1, *LLAMA, 32, 8192, deterministic=True, peers=False),
    Case(1, *LLAMA, 64, 32768, peers=False),
    Case(1, *SMOL, 16, 4096, torch.float32, peers=False),
]
TINY = [Case(1, 6, 2, 16, 5, 33), Case(2, 2, 2, 16, 3, 20, torch.float32, deterministic=True)]


def measurements(clock: Clock, tiny: bool) -> Iterator[dict[str, Any]]:
    """One entry a case: times by method, and how far the result is from float32's."""
    for case in TINY if tiny else CASES:
        times = {"selfspec": clock.measure(partial(_rotated, case, clock.device, _ours))}
        for name, method in PEERS.items():
            if case.peers or name == "copy":
                times[name] = clock.measure(partial(_rotated, case, clock.device, method))
        yield {
            "op": "tree_attention",
            "case": case.name,
            "bytes": case.bytes,
            "times": times,
            "check": _checked(case, clock.device),
        }


def _checked(case: Case, device: torch.device) -> dict[str, float]:
    """Largest errors of the op, and of torch in the same dtype, against float32."""
    query, key, value = case.inputs(device)
    layout = case.layout(device)
    key, value = (_expanded(x, case) for x in (key, value))
    mask = layout.mask(key.shape[2])[:, None]
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        exact = scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=mask
        )
        torch_error = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    ours = tree_attention(query, key, value, layout, deterministic=case.deterministic)
    found = {
        "error": (ours.float() - exact).abs().max().item(),
        "torch_error": (torch_error.float() - exact).abs().max().item(),
    }
    # Torch's float32 products here may be exact where three TF32 products are nearly so.
    assert found["error"] <= 2 * found["torch_error"] + 2e-6, (case.name, found)
    return found


Method = Callable[[Case, TreeLayout, Tensor, Tensor, Tensor], Launch]


def _rotated(case: Case, device: torch.device, method: Method) -> list[Launch]:
    layout = case.layout(device)
    count = copies(case.bytes) if device.type == "cuda" else 1
    return [method(case, layout, *case.inputs(device)) for _ in range(count)]


def _ours(case: Case, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor) -> Launch:
    return lambda: tree_attention(query, key, value, layout, deterministic=case.deterministic)


def _transformers(
    case: Case, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor
) -> Launch:
    """As transformers calls it: with a mask, keys and values are repeated in every call."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = SimpleNamespace(num_key_value_groups=case.groups, is_causal=True)
    mask = layout.mask(key.shape[2])[:, None]
    return lambda: sdpa_attention_forward(module, query, key, value, mask)


def _expanded(tensor: Tensor, case: Case) -> Tensor:
    return tensor.repeat_interleave(case.groups, dim=1)


def _sdpa(backend: SDPBackend) -> Method:
    def method(case: Case, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor) -> Launch:
        key, value = (_expanded(x, case) for x in (key, value))
        # Rows of a mask have to be aligned for the memory-efficient kernel.
        mask = layout.mask(key.shape[2])[:, None]
        padded = torch.zeros(
            *mask.shape[:3], 16 * math.ceil(mask.shape[3] / 16), dtype=query.dtype
        ).to(query.device)
        bias = padded[..., : mask.shape[3]].masked_fill_(~mask, float("-inf"))
        bias = bias.expand(-1, case.heads, -1, -1)

        def launch() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, key, value, attn_mask=bias)

        return launch

    return method


def _without_tree(
    case: Case, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor
) -> Launch:
    """Torch's fastest kernel without a mask: not the same result, a bound."""

    def launch() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return launch


def _flex(case: Case, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor) -> Launch:
    """Compiled FlexAttention; its mask of blocks is made outside of the time."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dense = layout.mask(key.shape[2])

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return dense[b, q, k]

    shape = (case.batch, None, case.nodes, key.shape[2])
    mask = create_block_mask(visible, *shape, device=str(query.device))
    attend = flex_attention
    if query.is_cuda:
        attend = _compiled_flex(case)
    return lambda: attend(query, key, value, block_mask=mask, enable_gqa=case.groups > 1)


_flexes: dict[str, Any] = {}


def _compiled_flex(case: Case) -> Any:
    """One compilation a case, static in all shapes, which its decoding kernel asks for."""
    from torch.nn.attention.flex_attention import flex_attention

    if case.name not in _flexes:
        torch.compiler.reset()
        _flexes.clear()
        _flexes[case.name] = torch.compile(flex_attention, dynamic=False)
    return _flexes[case.name]


def _xformers(case: Case, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor) -> Launch:
    """Prefix and tree apart, then merged; in the memory layout of its own cache."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention as attend

    def grouped(tensor: Tensor) -> Tensor:
        """[B, S, K, G, D], the heads of a group sharing memory."""
        shared = tensor.transpose(1, 2).contiguous()[:, :, :, None]
        return shared.expand(-1, -1, -1, case.groups, -1)

    q = query.view(case.batch, case.kv_heads, case.groups, case.nodes, case.size)
    q = q.permute(0, 3, 1, 2, 4).contiguous()
    cache = [grouped(x[:, :, : case.prefix]) for x in (key, value)]
    spec = [grouped(x[:, :, case.prefix :]) for x in (key, value)]
    tree = layout.mask(key.shape[2])[0, :, case.prefix :]
    bias = torch.zeros(tree.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~tree, float("-inf"))
    prefix = BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[case.nodes] * case.batch,
        kv_seqlen=[case.prefix] * case.batch,
        kv_padding=case.prefix,
    ).to(query.device)
    return lambda: attend(q, *spec, *cache, bias, prefix)


def _copy(case: Case, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor) -> Launch:
    """A device copy that reads and writes as many bytes as the op has to."""
    source = torch.empty(case.bytes // 2, dtype=torch.int8, device=query.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


PEERS: dict[str, Method] = {
    "transformers": _transformers,
    "efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "math": _sdpa(SDPBackend.MATH),
    "flex": _flex,
    "xformers": _xformers,
    "no mask": _without_tree,
    "copy": _copy,
}
