"""Measure drafts by the model's own layers: exits, skip sets, calibration, and the lossy mode.

    python examples/benchmark_layers.py --parts pays --prompts prompts.jsonl --output out.json
    python examples/benchmark_layers.py --model work/layerskip/model --parts exits lossy

`pays`: what `"layer-skip"` and `"early-exit"` find out about a model and what that costs, beside
plain `generate`, prompt by prompt. `exits`: early exit as it chooses itself, beside every fixed
exit layer and length, in turns. `calibration`: what was said of draft tokens beside what became of
them. `lossy`: thresholds on prompts, and how often the guarantee of a random half fails on the
other half. Without `--prompts`, prompts are pieces of Python's standard library that the small
model of `small_code_model.py` was not trained on. Parts of one JSON are of one model.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import demo_model
import selfspec
from benchmark_drafts import chosen, encoded
from benchmark_spine import machine, no_end_of_sequence
from selfspec.exit_calibration import THRESHOLDS
from selfspec.risk_control import choose_threshold
from small_code_model import sources, windows

_CODE_PROMPT = 48  # tokens
_SPLITS = 200
_LOWEST = 0.5  # threshold that is looked at
_OVERHEAD = "share of step time while searching"


def prompts_of(args: Any, tokenizer: Any) -> list[torch.Tensor]:
    """Token ids [1, T] of every prompt."""
    if args.prompts is not None:
        rows = encoded(tokenizer, chosen(args.prompts, args.per_task))
        # Task by task in turns, so that what is learned from the first ones is of all of them.
        turns = [row for k in range(args.per_task) for row in rows[k :: args.per_task]]
        return [inputs["input_ids"] for _, inputs in turns]
    pieces = windows(tokenizer, sources(held_out=True))
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(1))
    return [pieces[i : i + 1, :_CODE_PROMPT] for i in order[: args.count].tolist()]


def timed(run: Any, ids: torch.Tensor, tokens: int) -> tuple[float, list[int]]:
    """Seconds, and the text."""
    start = time.perf_counter()
    out = run.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return time.perf_counter() - start, out[0].tolist()


def pays(model: Any, prompts: list[torch.Tensor], args: Any) -> dict[str, Any]:
    """Drafters that find out themselves: what they say, and plain's time over theirs."""
    specs = {name: selfspec.wrap(model, name) for name in ("layer-skip", "early-exit")}
    seconds: dict[str, list[float]] = {"plain": [], **{name: [] for name in specs}}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in specs}
    same = dict.fromkeys(specs, 0)
    timed(model, prompts[0], 16)
    for at, ids in enumerate(prompts):
        taken, plain = timed(model, ids, args.tokens)
        seconds["plain"].append(taken)
        for name, spec in specs.items():
            taken, text = timed(spec, ids, args.tokens)
            seconds[name].append(taken)
            same[name] += text == plain
            side = spec.costs.side
            spent[name].append((sum(side.spent.values()), side.decoding))
        ratios = {name: seconds["plain"][-1] / seconds[name][-1] for name in specs}
        print(at + 1, {name: round(ratio, 3) for name, ratio in ratios.items()}, flush=True)
    found: dict[str, Any] = {}
    for name, spec in specs.items():
        side, decoding = (np.diff([0.0, *values]) for values in zip(*spent[name], strict=True))
        busy, last = side > 0, slice(-max(1, len(side) // 4), None)
        found[name] = {
            "says": list(spec.costs.notes.values()),
            "speed over plain": sum(seconds["plain"]) / sum(seconds[name]),
            "identical texts": same[name],
            "stats": spec.stats.to_dict(),
            _OVERHEAD: float(side[busy].sum() / decoding[busy].sum()) if busy.any() else 0.0,
            "share of step time over all": float(side.sum() / decoding.sum()),
            "share of step time in the last quarter": float(
                side[last].sum() / decoding[last].sum()
            ),
        }
    return {"prompts": len(prompts), **found}


def exits(model: Any, prompts: list[torch.Tensor], args: Any) -> dict[str, Any]:
    """Tokens a second of early exit that chooses itself, and of every fixed exit and length."""
    network = (args.drafts or {}).get("exit")
    layers = [network.config.exit_layer] if network is not None else args.exits
    specs = {
        f"exit {e}, length {d}": selfspec.wrap(
            model,
            selfspec.EarlyExitDrafter(
                None if network is not None else e, d, confidence=0.0, branches=1, network=network
            ),
        )
        for e in layers
        for d in args.lengths
    }
    options = {"max_draft_tokens": max(args.lengths), "network": network}
    for name, branches in (("itself", 1), ("itself, with branches", 8)):
        drafter = selfspec.EarlyExitDrafter(branches=branches, **options)
        specs[name] = selfspec.wrap(model, drafter, off_switch=True)
    for spec in specs.values():  # what it learns, it learns beforehand
        selfspec.calibrate(spec, [ids[0] for ids in prompts[: args.learn]], max_new_tokens=64)
        spec.stats = selfspec.SpecStats()
    judged = prompts[args.learn :]
    seconds = dict.fromkeys(("plain", *specs), 0.0)
    same = 0
    for at, ids in enumerate(judged):
        taken, plain = timed(model, ids, args.tokens)
        seconds["plain"] += taken
        order = list(specs)
        for name in order[at % len(order) :] + order[: at % len(order)]:
            taken, text = timed(specs[name], ids, args.tokens)
            seconds[name] += taken
            same += text == plain
    rows = {
        name: {
            "speed over plain": seconds["plain"] / seconds[name],
            "tau": spec.stats.mean_accepted_length,
            "acceptance": spec.stats.acceptance_rate,
        }
        for name, spec in specs.items()
    }
    for name, row in sorted(rows.items(), key=lambda pair: -pair[1]["speed over plain"]):
        print(name, {key: round(value, 3) for key, value in row.items()})
    return {
        "prompts": len(judged),
        "learned on": args.learn,
        "identical texts": same,
        "of": len(judged) * len(specs),
        "rows": rows,
        "says": list(specs["itself"].costs.notes.values()),
    }


def calibration(model: Any, prompts: list[torch.Tensor], args: Any) -> dict[str, Any]:
    """Of the exit, trained or as it is."""
    network = (args.drafts or {}).get("exit")
    layer = None if network is not None else args.exits[0]
    drafter = selfspec.EarlyExitDrafter(layer, args.lengths[-1], network=network)
    spec = selfspec.wrap(model, drafter)
    ids = [row[0] for row in prompts]
    found = selfspec.calibrate(spec, ids, max_new_tokens=args.tokens)
    print(found)
    return {
        "expected calibration error": found.expected_calibration_error,
        "bins": {
            part: {
                "predicted": rel.predicted,
                "accepted": rel.observed,
                "tokens": rel.counts,
            }
            for part, rel in found.reliability.items()
        },
    }


def lossy(model: Any, prompts: list[torch.Tensor], args: Any) -> dict[str, Any]:
    """Thresholds, and the guarantee over random halves."""
    network = (args.drafts or {}).get("exit")
    found = selfspec.calibrate_exit(
        model,
        [ids[0] for ids in prompts],
        None if network is not None else args.lossy_exits,
        network=network,
        delta=args.delta,
        epsilon=args.epsilon,
        test=args.test,
        thresholds=[threshold for threshold in THRESHOLDS if threshold >= _LOWEST],
        max_new_tokens=args.tokens,
        run_all=True,
    )
    print(found)
    rng = np.random.default_rng(0)
    count = len(found.losses)
    violated, nothing, layers = 0, 0, []
    for _ in range(_SPLITS):
        order = rng.permutation(count)
        mine, theirs = order[: count // 2], order[count // 2 :]
        guarantee = choose_threshold(
            found.losses[mine], found.thresholds, args.delta, args.epsilon, args.test
        )
        if guarantee is None:
            nothing += 1
            continue
        k = found.thresholds.index(guarantee.threshold)
        violated += bool(found.losses[theirs, k].mean() > args.delta)
        layers.append(found.layers[theirs, k].mean())
    table = {
        str(threshold): {
            "loss": float(found.losses[:, k].mean()),
            "kept unseen": float(found.given[:, k].mean()),
            "layers a token": float(found.layers_per_token[k]),
            "share of the layers": float(found.layers_per_token[k] / found.num_layers),
        }
        for k, threshold in enumerate(found.thresholds)
    }
    result = {
        "prompts": count,
        "learned on": len(prompts) - count,
        "exit layers": found.exit_layers,
        "weights": found.weights,
        "test": args.test,
        "delta": args.delta,
        "epsilon": args.epsilon,
        "thresholds": table,
        "certified on all": None if found.guarantee is None else found.guarantee.threshold,
        "splits": _SPLITS,
        "splits in which the other half has more than delta": violated / _SPLITS,
        "splits without a threshold": nothing / _SPLITS,
        "layers a token at the thresholds of splits": float(np.mean(layers)) if layers else None,
        "of layers": found.num_layers,
    }
    print({key: value for key, value in result.items() if key != "thresholds"})
    return result


PARTS = {"pays": pays, "exits": exits, "calibration": calibration, "lossy": lossy}


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id; default: the demo model")
    parser.add_argument("--trained", action="store_true", help="use the demo model's trained exit")
    parser.add_argument("--prompts", type=Path, help="JSONL with task and prompt")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--count", type=int, default=60, help="pieces of code, without --prompts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--exits", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--learn", type=int, default=8, help="prompts of `exits` to learn on")
    parser.add_argument("--lossy-exits", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--delta", type=float, default=0.05)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--test", default="hoeffding-bentkus")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    model, tokenizer = demo_model.load(args.model, dtype=getattr(torch, args.dtype))
    no_end_of_sequence(model)
    prompts = prompts_of(args, tokenizer)
    if "exits" in args.parts and args.learn >= len(prompts):
        parser.error(f"--learn {args.learn} leaves no prompt to judge on")
    args.drafts = demo_model.drafts(args.model) if args.trained else None
    result: dict[str, Any] = {}
    if args.output is not None and args.output.is_file():
        result = json.loads(args.output.read_text())
    for part in args.parts:
        print(f"== {part}")
        found = PARTS[part](model, prompts, args)
        result[part] = {
            "machine": machine(),
            "model": Path(args.model).name if args.model else "SmolLM2-135M-Instruct",
            "trained exit": args.trained,
            "dtype": args.dtype,
            "tokens": args.tokens,
            **found,
        }
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
