"""Measure what n-gram drafts with the off switch gain, and what they cost where they cannot.

    python examples/benchmark_spine.py --output results/spine.json

Plain `generate`, `selfspec`, `selfspec` without drafts and transformers' prompt lookup run in one
process on the same prompts, interleaved, after a warm-up; every figure is a median of ratios
against the plain run of the same round. Greedy, end of sequence disabled, so that all methods make
the same number of tokens. In float32 the texts must be identical.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

import benchmark_prompts
import demo_model
import selfspec

METHODS = ("plain", "selfspec", "no-drafts", "prompt-lookup")


def encode(tokenizer: Any) -> list[tuple[str, str, Any]]:
    """(kind, name, model inputs) of every prompt."""

    def chat(message: str, start: str = "") -> Any:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
        return tokenizer(text + start, return_tensors="pt", add_special_tokens=False)

    copies = [("copy", name, chat(m, start)) for name, m, start in benchmark_prompts.COPY]
    chats = [("chat", name, chat(m)) for name, m in benchmark_prompts.CHAT]
    return copies + chats


def methods(model: Any) -> dict[str, Callable[..., torch.Tensor]]:
    """Fresh wrappers; "selfspec" is `wrap(model)` as a user would call it."""
    spec, bare = selfspec.wrap(model), selfspec.wrap(model, drafter="none")

    def speculate(**kwargs: Any) -> torch.Tensor:
        spec.costs.forget_texts()  # the answer of the round before would be copied whole
        out: torch.Tensor = spec.generate(**kwargs)
        return out

    return {
        "plain": model.generate,
        "selfspec": speculate,
        "no-drafts": bare.generate,
        "prompt-lookup": lambda **kw: model.generate(**kw, prompt_lookup_num_tokens=8),
    }


def measure(model: Any, prompts: list[tuple[str, str, Any]], args: Any) -> list[dict[str, Any]]:
    """Seconds of every method and round, and whether the texts agree."""
    options = {"max_new_tokens": args.tokens, "do_sample": False}
    runs = methods(model)
    for run in runs.values():  # warm up on a prompt of each kind
        for index in (0, -1):
            run(**prompts[index][2], max_new_tokens=16, do_sample=False)
    rows = []
    for kind, name, inputs in prompts:
        rounds = args.rounds if kind == "copy" else args.chat_rounds
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        texts = {}
        for _ in range(rounds):
            for method in METHODS:
                start = time.perf_counter()
                out = runs[method](**inputs, **options)
                seconds[method].append(time.perf_counter() - start)
                texts[method] = out[0].tolist()
        spec = selfspec.wrap(model)
        spec.generate(**inputs, **options)
        row = {
            "kind": kind,
            "name": name,
            "prompt_tokens": inputs["input_ids"].shape[1],
            "seconds": seconds,
            "speedup": {
                m: median(p / s for p, s in zip(seconds["plain"], seconds[m], strict=True))
                for m in METHODS[1:]
            },
            "identical": {m: texts[m] == texts["plain"] for m in METHODS[1:]},
            "first_difference": first_difference(model, inputs, texts["selfspec"], texts["plain"]),
            "mean_accepted_length": spec.stats.mean_accepted_length,
            "forwards": spec.stats.forwards,
        }
        rows.append(row)
        speedups = "  ".join(f"{m} {row['speedup'][m]:.2f}x" for m in METHODS[1:])
        print(
            f"{kind:5} {name:15} plain {args.tokens / median(seconds['plain']):5.1f} tok/s  "
            f"{speedups}  " + describe_text(row),
            flush=True,
        )
    return rows


@torch.no_grad()
def first_difference(model: Any, inputs: Any, ours: list[int], plain: list[int]) -> Any:
    """Where two bf16 texts part, and whether rounding alone explains it.

    The noise is measured in place: the largest difference of a logit between the last token run
    alone and run as the end of a block of eight. The texts may part only where the two candidates
    are closer than that.
    """
    if ours == plain:
        return None
    at = next(i for i, (a, b) in enumerate(zip(ours, plain, strict=True)) if a != b)
    ids = torch.tensor([plain[:at]])
    ends = []
    for width in (1, 8):
        cache = model(input_ids=ids[:, :-width], use_cache=True)
        name = "cache" if "cache" in cache else "past_key_values"
        logits = model(input_ids=ids[:, -width:], **{name: cache[name]}).logits
        ends.append(logits[0, -1].float())
    gap = float((ends[0][plain[at]] - ends[0][ours[at]]).abs())
    noise = float((ends[0] - ends[1]).abs().max())
    start = inputs["input_ids"].shape[1]
    return {"token": at - start, "gap": gap, "noise": noise, "near_tie": gap <= noise}


def identity(prompts: list[tuple[str, str, Any]], args: Any) -> dict[str, bool]:
    """Whether float32 texts of `selfspec` are those of plain `generate`."""
    model, _ = demo_model.load(args.model, dtype=torch.float32)
    no_end_of_sequence(model)
    spec = selfspec.wrap(model)
    options = {"max_new_tokens": args.tokens, "do_sample": False}
    return {
        name: spec.generate(**inputs, **options).tolist()
        == model.generate(**inputs, **options).tolist()
        for _, name, inputs in prompts
    }


def describe_text(row: dict[str, Any]) -> str:
    """Whether the text is that of plain `generate`."""
    difference = row["first_difference"]
    if difference is None:
        return "identical"
    kind = "near tie" if difference["near_tie"] else "DIFFERENT"
    return f"{kind} at token {difference['token']}"


def batched(model: Any, tokenizer: Any, args: Any) -> dict[str, Any]:
    """Seconds of plain `generate` and of the loop without drafts on a batch, even and padded."""
    tokenizer.padding_side = "left"
    messages = [message for _, message in benchmark_prompts.CHAT][: args.batch]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
        for message in messages
    ]
    padded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    shortest = int(padded["attention_mask"].sum(-1).min())
    even = {name: tensor[:, -shortest:] for name, tensor in padded.items()}
    runs = {"plain": model.generate, "no-drafts": selfspec.wrap(model, drafter="none").generate}
    options = {"max_new_tokens": args.tokens, "do_sample": False}
    found = {}
    for kind, inputs in (("even rows", even), ("padded rows", padded)):
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run(**inputs, max_new_tokens=8, do_sample=False)
        for _ in range(args.rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run(**inputs, **options)
                seconds[name].append(time.perf_counter() - start)
        ratios = [
            ours / plain for ours, plain in zip(seconds["no-drafts"], seconds["plain"], strict=True)
        ]
        found[kind] = {"seconds": seconds, "ratio": median(ratios)}
    return {"batch": args.batch, **found}


def import_seconds(repeats: int = 7) -> float:
    """Median seconds that importing selfspec takes beyond torch and transformers."""
    code = (
        "import time, torch, transformers\n"
        "from transformers import PreTrainedModel, GenerationMixin\n"
        "start = time.perf_counter()\nimport selfspec\nprint(time.perf_counter() - start)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(repeats)
    ]
    return median(float(run.stdout) for run in runs)


def no_end_of_sequence(model: Any) -> None:
    """Let every run make the same number of tokens."""
    model.generation_config.eos_token_id = None


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    flags = fields.get("flags", "").split()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return {
        "cpu": fields.get("model name", platform.processor()).strip(),
        # What multiplies bfloat16 matrices: a block of tokens costs far more without tiles.
        "bf16": next((name for name in ("amx_bf16", "avx512_bf16") if name in flags), "emulated"),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit,
        "selfspec": selfspec.__version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures that the project's bars are about."""
    copy = [row for row in rows if row["kind"] == "copy"]
    chat = [row for row in rows if row["kind"] == "chat"]
    summary = {}
    if copy:
        summary["copy: least speedup over plain"] = min(r["speedup"]["selfspec"] for r in copy)
        summary["copy: least speedup over prompt lookup"] = min(
            r["speedup"]["selfspec"] / r["speedup"]["prompt-lookup"] for r in copy
        )
    if chat:
        summary["chat: median speedup over plain"] = median(r["speedup"]["selfspec"] for r in chat)
        summary["chat: least speedup over plain"] = min(r["speedup"]["selfspec"] for r in chat)
    if rows:
        summary["time of the loop without drafts over plain"] = median(
            1 / r["speedup"]["no-drafts"] for r in rows
        )
    return summary


def table(result: dict[str, Any]) -> str:
    """The README's table, in Markdown."""
    machine, kinds = result["machine"], result["rounds"]
    lines = [
        f"SmolLM2-135M-Instruct, {result['dtype']}, greedy, {result['tokens']} tokens, batch 1, "
        f"{machine['threads']} threads of one {machine['cpu']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, commit {machine['commit'][:7]}; plain `generate` "
        "in the same process, interleaved, medians of ratios "
        f"({kinds['copy']} rounds for copies, {kinds['chat']} for chat).",
        "",
        "| prompt | tokens/s plain | `wrap(model)` | prompt lookup of transformers | tau |",
        "|---|---|---|---|---|",
    ]
    for row in result["prompts"]:
        plain = result["tokens"] / median(row["seconds"]["plain"])
        speedup = row["speedup"]
        lines.append(
            f"| {row['kind']}: {row['name']} | {plain:.1f} | {speedup['selfspec']:.2f}x | "
            f"{speedup['prompt-lookup']:.2f}x | {row['mean_accepted_length']:.2f} |"
        )
    same = result["identical in float32"]
    lines += [
        "",
        f"In float32 {sum(same.values())} of {len(same)} texts are identical to plain `generate`. "
        "The loop without drafts takes "
        f"{result['summary']['time of the loop without drafts over plain']:.2f} of plain's time.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; default: the demo model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chat-rounds", type=int, default=3, help="there are ten such prompts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="rows of the batch without drafts")
    parser.add_argument("--only", choices=["copy", "chat", "batch"])
    parser.add_argument("--skip-identity", action="store_true", help="leave the float32 run out")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="only print the README's table of this JSON")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    torch.set_num_threads(args.threads)
    model, tokenizer = demo_model.load(args.model, dtype=getattr(torch, args.dtype))
    no_end_of_sequence(model)
    prompts = [p for p in encode(tokenizer) if args.only in (None, p[0])]
    rows = measure(model, prompts, args) if prompts else []
    result: dict[str, Any] = {
        "machine": machine(),
        "dtype": args.dtype,
        "tokens": args.tokens,
        "rounds": {"copy": args.rounds, "chat": args.chat_rounds},
        "summary": summarize(rows),
        "prompts": rows,
    }
    if args.only in (None, "batch"):
        result["batch without drafts"] = batch = batched(model, tokenizer, args)
        for kind in ("even rows", "padded rows"):
            name = f"time of the loop without drafts over plain, batch {args.batch}, {kind}"
            result["summary"][name] = batch[kind]["ratio"]
    del model
    if not args.skip_identity:
        result["identical in float32"] = identity(prompts, args)
    result["summary"]["import seconds beyond torch and transformers"] = import_seconds()
    for name, value in result["summary"].items():
        print(f"{name}: {value:.3f}")
    if "identical in float32" in result:
        agree = result["identical in float32"]
        print(f"identical in float32: {sum(agree.values())} of {len(agree)} prompts")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
