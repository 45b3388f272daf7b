"""Measure trained drafts against plain `generate`, on prompts of several tasks.

    python examples/benchmark_drafts.py --prompts prompts.jsonl --drafts drafts --output out.json

The prompts are a JSONL with `task` and `prompt`; a fixed choice of `--per-task` of each task is
measured. Plain `generate` and one wrapper a draft run in one process, prompt by prompt, after a
warm-up; end of sequence is disabled, so that all make the same number of tokens. A task's speed-up
is plain's time over the draft's, summed over its prompts; tau is the mean number of tokens a target
forward. Texts in bfloat16 may part at near ties only (see `benchmark_spine.first_difference`), in
float32 they must be identical (`--parts identity`).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

import demo_model
import selfspec
from benchmark_spine import first_difference, machine, no_end_of_sequence
from selfspec.drafters.feature_steps import FeatureSteps

DRAFTERS = {"feature": "feature", "heads": "heads", "exit": "early-exit"}


def chosen(path: Path, per_task: int, seed: int = 0) -> list[dict[str, Any]]:
    """`per_task` prompts of every task, always the same ones of a file."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    # By line ends alone: prompts may hold other separators that splitlines knows.
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line.strip():
            continue
        row = json.loads(line)
        if not {"task", "prompt"} <= row.keys():
            raise SystemExit(f"{path}: every line has a task and a prompt, not so {line[:80]}")
        by_task.setdefault(row["task"], []).append(row)
    order = random.Random(seed)
    parts = (order.sample(rows, min(per_task, len(rows))) for rows in by_task.values())
    return [row for rows in parts for row in rows]


def encoded(tokenizer: Any, rows: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(task, model inputs) of every prompt, as one turn of a chat."""
    return [
        (
            row["task"],
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            ),
        )
        for row in rows
    ]


def wrappers(model: Any, drafts: Any, names: list[str]) -> dict[str, Any]:
    """One for every trained draft; each runs it at every step."""
    return {name: selfspec.wrap(model, DRAFTERS[name], drafts=drafts) for name in names}


class Counted:
    """Seconds and calls of the feature network's forwards."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> Counted:
        self._run, self._best = FeatureSteps.run, FeatureSteps.best
        steps = self

        def run(this: Any, *args: Any) -> Any:
            start = time.perf_counter()
            out = steps._run(this, *args)
            if args[0].shape[1] <= 16:  # no prompt
                steps.seconds.append(time.perf_counter() - start)
            else:
                steps.seconds.append(0.0)
            return out

        def best(this: Any, *args: Any) -> Any:
            start = time.perf_counter()
            out = steps._best(this, *args)
            if steps.seconds:
                steps.seconds[-1] += time.perf_counter() - start
            return out

        FeatureSteps.run, FeatureSteps.best = run, best  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        FeatureSteps.run, FeatureSteps.best = self._run, self._best  # type: ignore[method-assign]


def measure(
    model: Any, prompts: list[tuple[str, Any]], specs: dict[str, Any], args: Any, sampled: bool
) -> list[dict[str, Any]]:
    """Seconds and forwards of every method on every prompt."""
    options: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": sampled}
    if sampled:
        options |= {"temperature": args.temperature, "top_k": 0}
    runs = {"plain": model, **specs}
    for run in runs.values():
        for _, inputs in prompts[:: max(1, len(prompts) // 3)]:
            run.generate(**inputs, max_new_tokens=16, do_sample=False)
    rows = []
    for at, (task, inputs) in enumerate(prompts):
        row: dict[str, Any] = {"task": task, "prompt_tokens": inputs["input_ids"].shape[1]}
        texts = {}
        row["seconds"], row["tau"], row["drafted"] = {}, {}, {}
        for name, run in runs.items():
            if name != "plain":
                run.stats = selfspec.SpecStats()
            torch.manual_seed(at)
            start = time.perf_counter()
            texts[name] = run.generate(**inputs, **options)[0].tolist()
            row["seconds"][name] = time.perf_counter() - start
            if name != "plain":
                row["tau"][name] = run.stats.mean_accepted_length
                row["drafted"][name] = run.stats.drafted / max(1, run.stats.forwards)
        if not sampled and not args.skip_ties:
            row["first_difference"] = {
                name: first_difference(model, inputs, texts[name], texts["plain"]) for name in specs
            }
        rows.append(row)
        speedup = {name: row["seconds"]["plain"] / row["seconds"][name] for name in specs}
        line = "  ".join(
            f"{name} {speedup[name]:.2f}x tau {row['tau'][name]:.2f}" for name in specs
        )
        print(f"{at + 1:3} {task:14} {line}", flush=True)
    return rows


def summarize(rows: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, Any]]:
    """Speed-up and tau of every draft, by task and over all."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        by_task = {}
        for task in [*tasks, "all"]:
            own = [row for row in rows if task in ("all", row["task"])]
            plain = sum(row["seconds"]["plain"] for row in own)
            by_task[task] = {
                "speedup": plain / sum(row["seconds"][name] for row in own),
                "tau": sum(row["tau"][name] for row in own) / len(own),
            }
        found[name] = by_task
    return found


def table(result: dict[str, Any]) -> str:
    """The README's table, in Markdown."""
    machine, summary = result["machine"], result["greedy"]["summary"]
    names = list(summary)
    bf16 = f" ({machine['bf16']})" if "bf16" in machine else ""
    lines = [
        f"SmolLM2-135M-Instruct, {result['dtype']}, greedy, {result['tokens']} tokens, batch 1, "
        f"{machine['threads']} threads of one {machine['cpu']}{bf16}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, commit {machine['commit'][:7]}; "
        f"{result['prompts']['per task']} prompts a task, plain "
        "`generate` in the same process, prompt by prompt. Time of plain over time of the draft, "
        "and tau.",
        "",
        "| task | " + " | ".join(f"`{DRAFTERS[name]}`" for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for task in summary[names[0]]:
        cells = (
            f"{summary[n][task]['speedup']:.2f}x · {summary[n][task]['tau']:.2f}" for n in names
        )
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def identity(prompts: list[tuple[str, Any]], args: Any, names: list[str]) -> dict[str, int]:
    """How many float32 texts are those of plain `generate`, by draft."""
    model, _ = demo_model.load(args.model, dtype=torch.float32)
    no_end_of_sequence(model)
    specs = wrappers(model, args.drafts, names)
    options = {"max_new_tokens": args.tokens, "do_sample": False}
    same = dict.fromkeys(names, 0)
    for _, inputs in prompts:
        plain = model.generate(**inputs, **options).tolist()
        for name, spec in specs.items():
            same[name] += spec.generate(**inputs, **options).tolist() == plain
        print(f"identical so far: {same}", flush=True)
    return same


def earlier(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What another run with the same settings has written, to be completed."""
    if path is None or not path.is_file():
        return settings
    found: dict[str, Any] = json.loads(path.read_text())
    return found if settings.items() <= found.items() else settings


def greedy(model: Any, prompts: list[tuple[str, Any]], args: Any) -> dict[str, Any]:
    """Speed and tau, texts that part, and what a draft step of the feature drafter costs."""
    specs = wrappers(model, args.drafts, args.names)
    with Counted() as counted:
        rows = measure(model, prompts, specs, args, sampled=False)
    differences = [
        d for row in rows for d in row.get("first_difference", {}).values() if d is not None
    ]
    found: dict[str, Any] = {
        "greedy": {
            "summary": summarize(rows, args.names),
            "rows": rows,
            "texts that part from plain": len(differences),
            "of them not at near ties": sum(not d["near_tie"] for d in differences),
        }
    }
    plain_step = sum(row["seconds"]["plain"] for row in rows) / len(rows) / args.tokens
    steps = sorted(seconds for seconds in counted.seconds if seconds > 0)
    if steps:
        median = steps[len(steps) // 2]
        found["draft step of the feature drafter over a plain step"] = median / plain_step
    return found


def main() -> None:
    """Run, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="JSONL with task and prompt")
    parser.add_argument("--model", help="folder or hub id; default: the demo model")
    parser.add_argument(
        "--drafts", type=Path, help="folder; default: the shipped ones, or those beside --model"
    )
    parser.add_argument("--names", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--per-task", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["greedy"],
        choices=["greedy", "sampled", "identity"],
        help="what to measure; what another run has written to --output is kept",
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="of the part sampled")
    parser.add_argument("--skip-ties", action="store_true", help="do not look at differences")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="only print the README's table of this JSON")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    if args.prompts is None:
        parser.error("--prompts is missing: a JSONL with task and prompt")
    args.drafts = args.drafts or demo_model.drafts(args.model)
    torch.set_num_threads(args.threads)
    model, tokenizer = demo_model.load(args.model, dtype=getattr(torch, args.dtype))
    no_end_of_sequence(model)
    prompts = encoded(tokenizer, chosen(args.prompts, args.per_task))
    settings = {
        "machine": machine(),
        "prompts": {"file": args.prompts.name, "per task": args.per_task},
        "dtype": args.dtype,
        "tokens": args.tokens,
    }
    result = earlier(args.output, settings)
    for part in args.parts:
        if part == "greedy":
            result |= greedy(model, prompts, args)
        elif part == "sampled":
            specs = wrappers(model, args.drafts, args.names)
            rows = measure(model, prompts, specs, args, sampled=True)
            found = {"summary": summarize(rows, args.names), "rows": rows}
            result[f"temperature {args.temperature}"] = found
        else:
            same = identity(prompts, args, args.names)
            result["identical in float32"] = {**same, "of": len(prompts)}
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    for mode, found in result.items():
        if not isinstance(found, dict) or "summary" not in found:
            continue
        for name, tasks in found["summary"].items():
            line = "  ".join(f"{t} {v['speedup']:.2f}x/{v['tau']:.2f}" for t, v in tasks.items())
            print(f"{mode} {name}: {line}")
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name}: {value:.3f}")
    if same := result.get("identical in float32"):
        texts = ", ".join(f"{name} {same[name]}" for name in same if name != "of")
        print(f"texts identical in float32, of {same['of']}: {texts}")


if __name__ == "__main__":
    main()
