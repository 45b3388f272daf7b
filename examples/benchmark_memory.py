"""Measure what a long prompt costs in memory, beside plain `generate`.

    python examples/benchmark_memory.py --output results/memory.json

A model of SmolLM2-135M's shape with random weights reads 4096 tokens and makes 64, plain, with
trees of 32 nodes, with early exits and with `wrap(model)` as it is. Every method runs in a process
of its own and is measured twice there: by the storages of tensors that are alive (all but the
weights), and by resident memory. The bar is 1.15 times plain's memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import selfspec
from benchmark_spine import machine

METHODS = ("plain", "trees", "early-exit", "auto")
BAR = 1.15


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of what operations have made and nobody has dropped yet.

    What an operation needs for itself while it runs is not seen here; resident memory has that.

    Attributes:
        live: Bytes alive now.
        peak: Most bytes that were alive at once.
        largest: Bytes of the largest single storage.

    Args:
        known: Tensors that were there before, which do not count: the weights.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._references: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and count its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._references or storage.data_ptr() in self._known:
            return

        def dropped(_: Any) -> None:
            self.live -= size
            del self._references[key]

        self._references[key] = weakref.ref(storage, dropped)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)


class FullTrees:
    """Drafts a tree of the whole budget at every step: a chain with siblings, its tokens random."""

    hidden_taps = ()

    def __init__(self, depth: int = 7) -> None:
        self.depth = depth
        self.reset()

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        """The same topology always."""
        parents = [-1, *range(min(self.depth, budget))]
        parents += [node % (self.depth + 1) for node in range(budget + 1 - len(parents))]
        vocab = state.target.vocab_size
        shape = (state.batch, len(parents) - 1)
        tokens = torch.randint(vocab, shape, generator=self.generator).to(state.root.device)
        # Siblings have to differ.
        offset = torch.arange(shape[1], device=tokens.device)
        tokens = (tokens // len(parents) * len(parents) + offset) % vocab
        tokens = torch.cat([state.root[:, None], tokens], dim=1)
        return selfspec.TokenTree.from_topology(tokens, parents)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Start over."""
        self.generator = torch.Generator().manual_seed(0)


def generator_of(method: str, model: Any, nodes: int) -> Callable[..., Any]:
    """`generate` of one method."""
    drafters: dict[str, Any] = {
        "trees": FullTrees(),
        "early-exit": selfspec.EarlyExitDrafter(max_draft_tokens=8, confidence=0.0, branches=4),
        "auto": "auto",
    }
    if method == "plain":
        generate: Callable[..., Any] = model.generate
        return generate
    return selfspec.wrap(model, drafters[method], max_draft_tokens=nodes - 1).generate


def live_bytes(model: Any, generate: Callable[..., Any], **inputs: Any) -> LiveStorages:
    """Run one request and count; garbage that waits for a collection counts as alive."""
    gc.collect()
    gc.disable()
    try:
        with LiveStorages([*model.parameters(), *model.buffers()]) as storages:
            generate(**inputs)
    finally:
        gc.enable()
    return storages


def resident(kind: str) -> int:
    """Bytes: "VmRSS" now, "VmHWM" at most since `forget_peak`."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(kind))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if platform.system() == "Darwin" else 1024
    )


def forget_peak() -> None:
    """Let the peak of resident memory start from here (Linux)."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


def build(args: Any) -> Any:
    """The model, its weights random, without an end of sequence."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 192),
        max_position_embeddings=2 * (args.prompt + args.tokens),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.set_default_dtype(getattr(torch, args.dtype))
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def measure(method: str, args: Any) -> dict[str, Any]:
    """One method in this process."""
    torch.set_num_threads(args.threads)
    model = build(args)
    generate = generator_of(method, model, args.nodes)
    ids = torch.randint(1, args.vocab, (args.batch, args.prompt))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": args.tokens,
        "do_sample": False,
    }
    generate(
        **{**inputs, "input_ids": ids[:, :8], "attention_mask": inputs["attention_mask"][:, :8]}
    )
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    generate(**inputs)
    peak = resident("VmHWM")
    storages = live_bytes(model, generate, **inputs)
    config = model.config
    slot = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return {
        "method": method,
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "keys and values": args.batch
        * (args.prompt + args.tokens - 1)
        * slot
        * config.num_hidden_layers,
        "peak of tensors": storages.peak,
        "largest tensor": storages.largest,
        "resident before": before,
        "resident at most": peak,
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Every method's memory over plain's."""
    plain = rows[0]

    def of(row: dict[str, Any]) -> dict[str, float]:
        tensors, weights = row["peak of tensors"], row["weights"]
        return {
            "tensors": tensors / plain["peak of tensors"],
            "tensors and weights": (tensors + weights) / (plain["peak of tensors"] + weights),
            "resident": row["resident at most"] / plain["resident at most"],
        }

    return {row["method"]: of(row) for row in rows[1:]}


def main() -> None:
    """Run every method in a process of its own, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=576, help="a multiple of 192")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=METHODS, help="measure one in this process, print JSON")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args)))
        return
    rows = []
    for method in METHODS:
        command = [sys.executable, *sys.argv, "--only", method]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(run.stdout.strip().splitlines()[-1]))
        sizes = "  ".join(f"{k} {v / 1e6:.1f} MB" for k, v in rows[-1].items() if k != "method")
        print(f"{method:10}  {sizes}", flush=True)
    result = {
        "machine": machine(),
        "settings": {k: v for k, v in vars(args).items() if k not in ("output", "only")},
        "bar": BAR,
        "over plain": ratios(rows),
        "methods": rows,
    }
    for method, ratio in result["over plain"].items():
        print(f"{method:10}  " + "  ".join(f"{k} {v:.3f}x" for k, v in ratio.items()))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
