"""Train a draft for a model on what the model itself says.

Three steps, each of which goes on where a run before it was stopped:

    python examples/train_drafts.py answers --prompts prompts.jsonl --work work
    python examples/train_drafts.py states --work work
    python examples/train_drafts.py train --work work --kind feature --set total_tokens=20000000

`all` runs them one after the other. A line of the prompts has `prompt` (a user's message) or
`prompt_ids`, and perhaps an `id`. Without `--model` the model is the demo model.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import demo_model
from selfspec.checkpoints import load
from selfspec.training import (
    Answer,
    StreamedStates,
    TrainConfig,
    answer_prompts,
    read_answers,
    read_prompts,
    train,
    write_states,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: list[str] | None = None) -> None:
    """Run one step, or all of them."""
    options = _parser().parse_args(arguments)
    if options.threads is not None:
        if options.threads < 1:
            raise SystemExit(f"--threads {options.threads} must be at least 1.")
        torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = demo_model.load(options.model, DTYPES[options.model_dtype])
    model.to(options.device)
    if options.step in ("answers", "all"):
        answers(options, model, tokenizer)
    if options.step in ("states", "all") and not options.streamed:
        states(options, model)
    if options.step in ("train", "all"):
        try:
            fit(options, model)
        except ValueError as error:  # of an option, or of what lies in a folder
            raise SystemExit(f"train: {error}") from error


def answers(options: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """Let the model answer the prompts."""
    if options.prompts is None or not options.prompts.is_file():
        missing = "is missing" if options.prompts is None else f"{options.prompts} does not exist"
        raise SystemExit(f"--prompts {missing}: a JSONL file of prompts to answer.")
    added = answer_prompts(
        model,
        read_prompts(options.prompts, tokenizer),
        _answers_file(options),
        max_new_tokens=options.max_new_tokens,
        temperatures=options.temperatures,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    print(f"{added} answers added to {_answers_file(options)}")


def states(options: argparse.Namespace, model: Any) -> None:
    """Write the model's hidden states on these texts."""
    found = write_states(
        model,
        _answered(options),
        options.work / "states",
        options.taps or default_taps(model),
        max_length=options.max_length,
    )
    print(f"{len(found.lengths)} texts, {sum(found.lengths):,} tokens in {found.folder}")


def fit(options: argparse.Namespace, model: Any) -> None:
    """Train on them."""
    changes = {name: json.loads(value) for name, value in options.set}
    config = TrainConfig.from_dict({"kind": options.kind, "seed": options.seed, **changes})
    data: Any = options.work / "states"
    if options.streamed:
        found = _answered(options)
        data = StreamedStates(model, found, max_length=options.max_length)
    out = options.out or options.work / options.kind
    initial: Any = None
    if options.initial is not None:
        initial = load(options.initial, model=model, kind=options.kind)
    train(config, model, data, out, initial=initial, license=options.license, say=print)
    print(f"the best draft is in {out / 'best'}")


def _answered(options: argparse.Namespace) -> list[Answer]:
    path = _answers_file(options)
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: let the model answer prompts first (answers).")
    return read_answers(path)


def _answers_file(options: argparse.Namespace) -> Path:
    return options.answers or options.work / "answers.jsonl"


def default_taps(model: Any) -> tuple[int, ...]:
    """What the default configs of all kinds read."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    wanted = {2, layers // 2, layers - 3, max(1, layers // 3), layers}
    return tuple(sorted(tap for tap in wanted if 0 <= tap <= layers))


def named_value(text: str) -> tuple[str, str]:
    """NAME=VALUE; what is no JSON is a word."""
    name, _, value = text.partition("=")
    try:
        json.loads(value)
    except json.JSONDecodeError:
        value = json.dumps(value)  # a word
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("answers", "states", "train", "all"))
    parser.add_argument("--work", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--model", help="folder or hub id; default: the demo model")
    parser.add_argument("--model-dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, help="JSONL; default: answers.jsonl in --work")
    asked = parser.add_argument_group("answers")
    asked.add_argument("--prompts", type=Path, help="JSONL of prompts")
    asked.add_argument("--max-new-tokens", type=int, default=256)
    asked.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.0, 0.7])
    asked.add_argument("--batch-size", type=int, default=32)
    kept = parser.add_argument_group("states")
    kept.add_argument("--taps", type=int, nargs="+", help="default: what all kinds read")
    kept.add_argument("--max-length", type=int, default=1024, help="longer texts are cut")
    kept.add_argument("--streamed", action="store_true", help="nothing on disk, slower")
    fitted = parser.add_argument_group("train")
    fitted.add_argument("--kind", choices=("feature", "heads", "exit"), default="feature")
    fitted.add_argument("--out", type=Path, help="default: a folder named after the kind in --work")
    fitted.add_argument("--initial", type=Path, help="a draft to go on from, with --out another")
    fitted.add_argument("--license", help="of the draft, an SPDX name")
    fitted.add_argument(
        "--set",
        type=named_value,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="options of TrainConfig",
    )
    return parser


if __name__ == "__main__":
    main()
