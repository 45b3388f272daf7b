"""Stream one answer through selfspec, then measure it beside plain `generate` in this process."""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import TextStreamer

import selfspec
from demo_model import load

ROUNDS = 3
CODE = """\
def summarize(orders):
    total = 0
    largest = None
    for order in orders:
        if order.cancelled:
            continue
        price = order.quantity * order.unit_price
        total = total + price
        if largest is None or price > largest:
            largest = price
    average = total / len(orders)
    print("orders:", len(orders))
    print("total:", total)
    print("average:", average)
    print("largest:", largest)
    return total, average, largest
"""
PROMPT = f"```python\n{CODE}```\n\nRepeat this code with the function renamed to summarize_orders."


def main() -> None:
    """Parse the command line, stream the answer, print the comparison."""
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model, getattr(torch, args.dtype))
    chat = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {**inputs, "max_new_tokens": args.max_new_tokens, "do_sample": False}
    prompt_tokens = inputs["input_ids"].shape[1]

    spec = selfspec.wrap(model)
    print(f"{args.prompt}\n\n--- answer, streamed ---")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    spec.generate(**options, streamer=streamer)
    print(f"--- stats ---\n{spec.stats}")

    # Both warmed up, then in turns, so that a busy machine slows both alike.
    model.generate(**options)
    runs = [(timed(model.generate, options), timed(spec.generate, options)) for _ in range(ROUNDS)]
    plain = statistics.median(seconds for (seconds, _), _ in runs)
    ours = statistics.median(seconds for _, (seconds, _) in runs)
    plain_ids, our_ids = (ids[0, prompt_tokens:] for _, ids in runs[-1])
    print(
        f"plain {len(plain_ids) / plain:.1f} tok/s ({len(plain_ids)} tokens), "
        f"selfspec {len(our_ids) / ours:.1f} tok/s ({len(our_ids)} tokens): "
        f"{len(our_ids) / ours * plain / len(plain_ids):.2f}x\n"
        f"greedy, batch 1, {prompt_tokens} prompt tokens, {args.dtype}, {model.device.type}, "
        f"{torch.get_num_threads()} threads, median of {ROUNDS} interleaved runs, prefill included"
    )
    report_identity(plain_ids, our_ids, tokenizer.decode, args.dtype)


def parse_args() -> argparse.Namespace:
    """Read the options; each has a default that needs nothing from the user."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompt", default=PROMPT, help="user message (default: a code edit)")
    parser.add_argument("--max-new-tokens", type=int, default=110)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    return parser.parse_args()


def timed(generate: Callable[..., torch.Tensor], options: dict) -> tuple[float, torch.Tensor]:
    """Seconds that one call takes, and the ids it returns, [1, prompt + new]."""
    start = time.perf_counter()
    ids = generate(**options)
    return time.perf_counter() - start, ids


def report_identity(
    plain: torch.Tensor, ours: torch.Tensor, decode: Callable[..., str], dtype: str
) -> None:
    """Say whether two answers, 1-D ids, are the same; fail where no rounding can excuse them."""
    if torch.equal(plain, ours):
        print("text: identical to plain generate")
        return
    shared = min(len(plain), len(ours))
    differs = (plain[:shared] != ours[:shared]).nonzero()
    first = int(differs[0]) if len(differs) else shared
    where = f"{decode(plain[first:][:1])!r} (plain) / {decode(ours[first:][:1])!r} (selfspec)"
    print(f"text: differs from plain generate at new token {first}: {where}")
    if dtype == "float32":
        raise SystemExit("float32 output must be identical: please report this as a bug")
    print(
        f"In {dtype}, logits of one token and of a block of tokens round differently, and two "
        "candidates that are nearly tied can swap. With --dtype float32 the texts are identical."
    )


if __name__ == "__main__":
    main()
