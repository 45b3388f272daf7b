"""Train a model of your own so that its early layers can draft (LayerSkip), and show what it gives.

    python examples/small_code_model.py --out work/small        # or take a model that you own
    python examples/train_early_exits.py --model work/small --out work/layerskip

Without `--answers` (a JSONL of `train_drafts.py answers`) the texts are Python's standard library,
for the small model of the first line. The run goes on where one before was stopped. At the end:
how often every layer says what the whole model says on held-out text, before and after.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmark_spine import machine
from selfspec.training import (
    Answer,
    EarlyExitConfig,
    exit_agreement,
    read_answers,
    train_early_exits,
)
from small_code_model import sources, windows
from train_drafts import named_value

_PROMPT = 16  # tokens of a piece of code that nothing is taught about


def code_texts(tokenizer: Any, held_out: bool, most: int | None = None) -> list[Answer]:
    """Pieces of the standard library, as prompts and what follows them."""
    pieces = windows(tokenizer, sources(held_out))
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    chosen = pieces[order[:most]].tolist()
    return [Answer(str(i), ids[:_PROMPT], ids[_PROMPT:]) for i, ids in enumerate(chosen)]


def default_exits(layers: int) -> tuple[int, ...]:
    """Every sixth of the model, up to two thirds of it."""
    return tuple(sorted({max(1, layers * i // 6) for i in (1, 2, 3, 4)}))


@torch.no_grad()
def loss_of(model: Any, answers: list[Answer]) -> float:
    """Mean loss of answer tokens by the whole model, in nats."""
    total, count = 0.0, 0
    for answer in answers:
        ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
        first = len(answer.prompt_ids)
        logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[0, first:], reduction="sum")
        total, count = total + float(loss), count + len(answer.response_ids)
    return total / max(count, 1)


def looks(model: Any, held: list[Answer]) -> dict[str, Any]:
    """What is shown before and after."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    agreement = exit_agreement(model.eval(), held, range(1, count + 1))
    return {
        "agreement by exit layer": {str(e): round(a, 4) for e, a in agreement.items()},
        "loss": round(loss_of(model, held), 4),
    }


def main(arguments: list[str] | None = None) -> None:
    """Train, compare, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or hub id; it is not changed")
    parser.add_argument("--out", type=Path, required=True, help="the run; `model` in it is trained")
    parser.add_argument("--answers", type=Path, help="JSONL, may be gzipped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--held-out", type=int, default=60, help="texts to compare on")
    parser.add_argument("--output", type=Path, help="JSON of what is shown at the end")
    parser.add_argument(
        "--set",
        type=named_value,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="options of EarlyExitConfig, like total_tokens=2000000 exits=[2,4]",
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    changes = {"exits": default_exits(layers)} | {k: json.loads(v) for k, v in args.set}
    config = EarlyExitConfig.from_dict(changes)
    texts = read_answers(args.answers) if args.answers else code_texts(tokenizer, held_out=False)
    trained = copy.deepcopy(model)
    held = train_early_exits(trained, texts, args.out, config, print)
    if not args.answers:  # files that no part of the training has seen
        held = code_texts(tokenizer, held_out=True, most=args.held_out)
    held = held[: args.held_out]
    trained.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    result = {
        "machine": machine(),
        "model": Path(args.model).name,
        "config": config.to_dict(),
        "held-out texts": len(held),
        "before": looks(model, held),
        "after": looks(trained, held),
    }
    print("layer  before  after")
    before, after = (result[k]["agreement by exit layer"] for k in ("before", "after"))
    for layer in before:
        print(f"{layer:>5}  {before[layer]:6.2f}  {after[layer]:5.2f}")
    print(f"loss   {result['before']['loss']:6.3f}  {result['after']['loss']:.3f}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
