"""Measure `drafter="auto"` against every drafter alone, and transformers' own assisted generation.

    python examples/benchmark_auto.py --prompts prompts.jsonl --output auto.json

Four parts. `tasks`: every method on every prompt in one process, prompt by prompt, in turns, plain
`generate` before and after (their mean counts); speed-ups by task, and the slowest prompt. `wrong`:
a drafter that is never right. `batches`: batches of prompts. `oracle`: the same drafts as whoever
knew which are right would have used them, and what the simulator says of the controller. Texts are
checked as in `benchmark_drafts.py`. The wrappers of `"auto"` and `"suffix"` remember earlier
prompts of the same run, as they do in use; `--fresh` drops what they remember before every prompt.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import demo_model
import selfspec
from benchmark_drafts import DRAFTERS, chosen, earlier, encoded
from benchmark_spine import first_difference, machine, no_end_of_sequence
from selfspec import simulate

ALONE = ("suffix", "ngram", *DRAFTERS)
# Options of transformers' generate, as its documentation has them.
THEIRS: dict[str, dict[str, Any]] = {
    "transformers: prompt lookup": {"prompt_lookup_num_tokens": 10},
    "transformers: early exit": {"assistant_early_exit": 10},
}
_SETTLED = 20  # steps after which a drafter that is never right must not cost anything


class NeverRight:
    """Drafts what the text will not say: the rarest way to be wrong is to be so always."""

    hidden_taps = ()
    makes_valid_trees = True

    def __init__(self, vocab_size: int, length: int = 7) -> None:
        self.vocab_size, self.length = vocab_size, length
        self.steps = 0

    def draft(self, state: Any, budget: int) -> selfspec.TokenTree:
        """A chain of one token that is hardly ever said."""
        length = max(0, min(self.length, budget, *(state.room(b) - 1 for b in range(state.batch))))
        token = state.root.new_full((state.batch, length), self.vocab_size - 1)
        return selfspec.TokenTree.chain(state.root, token)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""


def timed(run: Any, inputs: Any, **options: Any) -> tuple[float, list[int]]:
    """Seconds, and the text of the first row."""
    start = time.perf_counter()
    out = run(**inputs, do_sample=False, **options)
    return time.perf_counter() - start, out[0].tolist()


def tasks(model: Any, prompts: list[tuple[str, Any]], args: Any) -> dict[str, Any]:
    """Speed-ups by task."""
    specs = {
        name: selfspec.wrap(model, DRAFTERS.get(name, name), drafts=args.drafts)
        if name in ("auto", *DRAFTERS)
        else selfspec.wrap(model, name)
        for name in ("auto", *args.names)
    }
    runs: dict[str, Any] = {name: (spec.generate, {}) for name, spec in specs.items()}
    runs |= {name: (model.generate, options) for name, options in THEIRS.items()}
    for run, options in [(model.generate, {}), *runs.values()]:
        for _, inputs in prompts[:: max(1, len(prompts) // 3)]:
            timed(run, inputs, max_new_tokens=16, **options)
    for spec in specs.values():
        spec.costs.forget_texts()  # beginnings of answers that are still to be measured
    rows = []
    for at, (task, inputs) in enumerate(prompts):
        for name in ("auto", "suffix"):
            if args.fresh and name in specs:
                specs[name].costs.forget_texts()
        order = list(runs)
        order = order[at % len(order) :] + order[: at % len(order)]
        first, plain = timed(model.generate, inputs, max_new_tokens=args.tokens)
        row: dict[str, Any] = {"task": task, "seconds": {}, "tau": {}, "parts": []}
        for name in order:
            run, options = runs[name]
            if name in specs:
                specs[name].stats = selfspec.SpecStats()
            seconds, text = timed(run, inputs, max_new_tokens=args.tokens, **options)
            row["seconds"][name] = seconds
            if name in specs:
                row["tau"][name] = specs[name].stats.mean_accepted_length
                found = first_difference(model, inputs, text, plain)
                if found is not None:
                    row["parts"].append({"method": name, **found})
        last, _ = timed(model.generate, inputs, max_new_tokens=args.tokens)
        row["seconds"]["plain"] = (first + last) / 2
        rows.append(row)
        line = "  ".join(f"{n} {row['seconds']['plain'] / row['seconds'][n]:.2f}x" for n in runs)
        print(f"{at + 1:3} {task:14} {line}", flush=True)
    names = list(runs)
    summary: dict[str, dict[str, float]] = {}
    for task in [*dict.fromkeys(row["task"] for row in rows), "all"]:
        own = [row["seconds"] for row in rows if task in ("all", row["task"])]
        plain_seconds = sum(seconds["plain"] for seconds in own)
        summary[task] = {n: plain_seconds / sum(s[n] for s in own) for n in names}
    ratios = [row["seconds"]["plain"] / row["seconds"]["auto"] for row in rows]
    parted = [found for row in rows for found in row["parts"]]
    return {
        "summary": summary,
        "auto over the best drafter alone": {
            task: found["auto"] / max(found[n] for n in args.names)
            for task, found in summary.items()
        },
        "slowest prompt of auto": min(ratios),
        "texts that part from plain": len(parted),
        "of them not at near ties": sum(not found["near_tie"] for found in parted),
        "rows": rows,
    }


def wrong(model: Any, prompts: list[tuple[str, Any]], args: Any) -> dict[str, Any]:
    """Time of steps after the first 20 over plain's, with a drafter that is never right."""
    size = model.get_input_embeddings().weight.shape[0]
    spec = selfspec.wrap(model, NeverRight(size), off_switch=True)
    ratios = []
    for _, inputs in prompts[: args.wrong]:
        spec.costs = type(spec.costs)(spec.options.adaptive)  # as if it had never met the drafter

        def plain_step(inputs: Any = inputs) -> float:
            few, _ = timed(model.generate, inputs, max_new_tokens=_SETTLED + 1)
            whole, _ = timed(model.generate, inputs, max_new_tokens=args.tokens)
            return (whole - few) / (args.tokens - _SETTLED - 1)

        before = plain_step()
        seconds = [
            sum(step.seconds.values())
            for step in spec.stream(**inputs, max_new_tokens=args.tokens, do_sample=False)
        ]
        after = plain_step()
        mine = sum(seconds[_SETTLED + 1 :]) / len(seconds[_SETTLED + 1 :])
        ratios.append((before + after) / 2 / mine)
        print(f"never right: {ratios[-1]:.3f}x", flush=True)
    return {"speed after the first 20 steps": sorted(ratios)[len(ratios) // 2], "each": ratios}


def batches(model: Any, prompts: list[tuple[str, Any]], args: Any) -> dict[str, Any]:
    """Speed-up by batch size, and from which size on drafting loses time if nothing stops it."""
    specs = {
        "auto": selfspec.wrap(model, drafts=args.drafts),
        "auto without off switch": selfspec.wrap(model, drafts=args.drafts, off_switch=False),
    }
    found: dict[str, Any] = {}
    every = [inputs["input_ids"][0] for _, inputs in prompts]
    for size in args.batches:
        ratios: dict[str, list[float]] = {name: [] for name in specs}
        for at in range(args.rounds + 1):  # the first warms up
            picked = [every[(at * size + i) % len(every)] for i in range(size)]
            longest = max(map(len, picked))
            ids = torch.zeros(size, longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for b, row in enumerate(picked):
                ids[b, longest - len(row) :] = row
                mask[b, longest - len(row) :] = 1
            inputs = {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}
            first, _ = timed(model.generate, inputs, max_new_tokens=args.tokens)
            for name, spec in specs.items():
                spec.costs.forget_texts()  # other batches have the same prompts
                mine, _ = timed(spec.generate, inputs, max_new_tokens=args.tokens)
                last, _ = timed(model.generate, inputs, max_new_tokens=args.tokens)
                if at:
                    ratios[name].append((first + last) / 2 / mine)
                first = last
        found[str(size)] = {name: sorted(of)[len(of) // 2] for name, of in ratios.items()}
        print(f"batch {size}: {found[str(size)]}", flush=True)
    losing = [size for size in args.batches if found[str(size)]["auto without off switch"] < 1]
    found["break-even batch"] = min(losing, default=None)
    return found


def oracle(model: Any, prompts: list[tuple[str, Any]], args: Any) -> dict[str, Any]:
    """What an oracle makes of the same drafts, and what the simulator says of `"auto"`."""
    live, looking = (selfspec.wrap(model, drafts=args.drafts) for _ in range(2))
    warm = selfspec.wrap(model, drafts=args.drafts)
    for run in (model.generate, warm.generate):
        timed(run, prompts[0][1], max_new_tokens=16)
    rows, paths = [], []
    with tempfile.TemporaryDirectory() as folder:
        for at, (task, inputs) in enumerate(prompts):
            paths += [Path(folder, f"{at} {kind}.jsonl") for kind in ("steps", "everywhere")]
            first, _ = timed(model.generate, inputs, max_new_tokens=args.tokens)
            with live.trace(paths[-2]):
                mine, _ = timed(live.generate, inputs, max_new_tokens=args.tokens)
            last, _ = timed(model.generate, inputs, max_new_tokens=args.tokens)
            with looking.trace(paths[-1], every_position=True):
                timed(looking.generate, inputs, max_new_tokens=args.tokens)
            rows.append({"task": task, "plain": (first + last) / 2, "auto": mine})
            print(f"{at + 1:3} {task:14} {rows[-1]['plain'] / mine:.2f}x", flush=True)
        trace = simulate.read(*paths)
    steps = [request for request in trace.requests if not request.about["every_position"]]
    bounds = simulate.oracle(trace)
    knowing = simulate.oracle(trace, branches=True)["together"]
    replayed = simulate.replay(trace)
    for at, row in enumerate(rows):
        row["auto, the loop alone"] = steps[at].prefill + steps[at].seconds
        row["oracle"] = {name: seconds[at] for name, seconds in bounds.items()}
        row["oracle of branches"] = knowing[at]
        row["simulated"] = replayed[at].seconds
    summary = {}
    for task in [*dict.fromkeys(row["task"] for row in rows), "all"]:
        own: list[dict[str, Any]] = [row for row in rows if task in ("all", row["task"])]
        plain, mine = sum(row["plain"] for row in own), sum(row["auto"] for row in own)
        loop = sum(row["auto, the loop alone"] for row in own)
        best = {name: sum(row["oracle"][name] for row in own) for name in bounds}
        simulated = sum(row["simulated"] for row in own)
        summary[task] = {
            "auto": plain / mine,
            "simulated": best["plain"] / simulated,
            "simulated over measured": best["plain"] / simulated / (plain / mine),
            "share of the oracle": best["together"] / loop,
            "share of the oracle of branches": sum(r["oracle of branches"] for r in own) / loop,
            **{f"oracle: {name}": best["plain"] / best[name] for name in best if name != "plain"},
        }
        print(task, {name: round(value, 3) for name, value in summary[task].items()}, flush=True)
    return {"summary": summary, "rows": rows}


PARTS = {"tasks": tasks, "wrong": wrong, "batches": batches, "oracle": oracle}


def table(result: dict[str, Any]) -> str:
    """The README's table, in Markdown."""
    summary, about = result["tasks"]["summary"], result["machine"]
    names = list(next(iter(summary.values())))
    lines = [
        f"SmolLM2-135M-Instruct, {result['dtype']}, greedy, {result['tokens']} tokens, batch 1, "
        f"{about['threads']} threads of one {about['cpu']} ({about.get('bf16', '')}), torch "
        f"{about['torch']}, transformers {about['transformers']}, commit {about['commit'][:7]}; "
        f"{result['prompts']['per task']} prompts a task. Time of plain over time.",
        "",
        "| task | " + " | ".join(DRAFTERS.get(name, name) for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for task, found in summary.items():
        lines.append(f"| {task} | " + " | ".join(f"{found[n]:.2f}x" for n in names) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, help="JSONL with task and prompt")
    parser.add_argument("--model", help="folder or hub id; default: the demo model")
    parser.add_argument("--drafts", type=Path, help="folder; default: the shipped ones")
    parser.add_argument("--names", nargs="+", default=["suffix", "feature"], choices=ALONE)
    parser.add_argument("--per-task", type=int, default=10)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3, help="batches of every size")
    parser.add_argument("--wrong", type=int, default=5, help="prompts of that part")
    parser.add_argument("--fresh", action="store_true", help="remember no earlier prompts")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="what another run has written is kept")
    parser.add_argument("--table", type=Path, help="only print the README's table of this JSON")
    args = parser.parse_args(arguments)
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
        "remembers earlier prompts": not args.fresh,
    }
    result = earlier(args.output, settings)
    for part in args.parts:
        result[part] = PARTS[part](model, prompts, args)
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    if "tasks" in result:
        print(table(result))
        for name, found in result["tasks"].items():
            if name not in ("rows", "summary"):
                print(f"{name}: {found}")


if __name__ == "__main__":
    main()
