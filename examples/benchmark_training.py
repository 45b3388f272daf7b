"""Measure how fast drafts train: tokens a second of every kind, prompts included, padding not.

    python examples/benchmark_training.py --answers answers.jsonl --output out.json

The answers are those of `train_drafts.py answers`. Their hidden states are written once to a
temporary folder, then every kind is trained in turn for `--tokens` tokens; the first quarter is a
warm-up that does not count. What is trained is thrown away.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import demo_model
from benchmark_spine import machine
from selfspec.training import TrainConfig, read_answers, train, write_states
from train_drafts import default_taps, named_value

KINDS = ("feature", "heads", "exit")
_NEVER = 10**9


def throughput(config: TrainConfig, model: Any, states: Path) -> float:
    """Tokens a second after the first quarter of a run."""
    with tempfile.TemporaryDirectory() as out:
        train(config, model, states, out)
        lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    # (tokens, seconds) since the start.
    marks = [
        (line["tokens"], line["tokens"] / line["tokens_per_second"])
        for line in lines
        if "tokens_per_second" in line
    ]
    tokens, seconds = next(mark for mark in marks if mark[0] >= config.total_tokens / 4)
    return (marks[-1][0] - tokens) / (marks[-1][1] - seconds)


def main() -> None:
    """Run, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=Path, required=True, help="JSONL, may be gzipped")
    parser.add_argument("--count", type=int, default=500, help="answers to train on")
    parser.add_argument("--model", help="folder or hub id; default: the demo model")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", type=int, default=80_000, help="of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--set",
        type=named_value,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="options of TrainConfig; the shipped drafts: own_head=false tokens_per_batch=1536",
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, _ = demo_model.load(args.model, dtype=torch.bfloat16)
    answers = read_answers(args.answers)[: args.count]
    shape = [(len(a.prompt_ids), len(a.response_ids)) for a in answers]
    result: dict[str, Any] = {
        "machine": machine(),
        "answers": {
            "file": args.answers.name,
            "count": len(shape),
            "prompt tokens": sum(prompt for prompt, _ in shape),
            "answer tokens": sum(answer for _, answer in shape),
        },
        "tokens per second": {},
    }
    changes = {name: json.loads(value) for name, value in args.set}
    fixed = {"total_tokens": args.tokens, "log_every": 1, "evaluate_every": _NEVER}
    configs = {
        kind: TrainConfig.from_dict({**changes, **fixed, "kind": kind}) for kind in args.kinds
    }
    with tempfile.TemporaryDirectory() as folder:
        write_states(model, answers, folder, default_taps(model))
        for kind, config in configs.items():
            rate = throughput(config, model, Path(folder))
            result["tokens per second"][kind] = round(rate, 1)
            result.setdefault("configs", {})[kind] = config.to_dict()
            print(f"{kind}: {rate:,.0f} tokens a second", flush=True)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
