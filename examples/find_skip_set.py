"""Look for the sublayers that a model's drafts can do without, and say what that is worth.

    python examples/find_skip_set.py --answers work/answers.jsonl --out work/drafts

The answers are those of `train_drafts.py answers`: the model's own words, like those to come. The
result, `skip_set.json`, is read by `wrap(model, "layer-skip", drafts="work/drafts")`, also if it
says that no set pays. Started again it goes on from `--log`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import demo_model
from selfspec.training import find_skip_set, read_answers

METHODS = ("similarity", "greedy", "bayesian")


def main(arguments: list[str] | None = None) -> None:
    """Search, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=Path, required=True, help="JSONL, may be gzipped")
    parser.add_argument("--out", type=Path, required=True, help="folder for skip_set.json")
    parser.add_argument("--model", help="folder or hub id; default: the demo model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--evaluations", type=int, default=200, help="sets to try")
    parser.add_argument("--texts", type=int, default=24, help="to judge by; as many to check")
    parser.add_argument("--log", type=Path, help="JSONL of what was tried; default: in --out")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model, _ = demo_model.load(args.model, dtype=getattr(torch, args.dtype))
    try:
        found = find_skip_set(
            model,
            read_answers(args.answers),
            methods=args.methods,
            evaluations=args.evaluations,
            texts=args.texts,
            log=args.log or args.out / "skip_sets.jsonl",
            seed=args.seed,
            say=print,
        )
    except (ValueError, OSError) as error:
        raise SystemExit(f"find_skip_set: {error}") from error
    print(found.table())
    print(f"saved as {found.save(args.out)}")


if __name__ == "__main__":
    main()
