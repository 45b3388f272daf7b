"""Stream one answer through selfspec, then measure it beside plain `generate` in this process."""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import TextStreamer

import selfspec
from demo_model import drafts, load

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

    spec = selfspec.wrap(model, drafts=drafts(args.model))
    print(spec)
    print(f"{args.prompt}\n\n--- answer, streamed ---")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    spec.generate(**options, streamer=streamer)
    print(f"--- stats ---\n{spec.stats}")

    # Both warmed up, then in turns; a ratio per round, so that a busy machine shows.
    print(f"--- measuring, {ROUNDS} rounds of both ---", flush=True)
    model.generate(**options)
    speed: dict[str, list[float]] = {"plain": [], "selfspec": []}
    for i in range(ROUNDS):
        spec.costs.forget_texts()  # the answer of the round before would be copied whole
        for name, generate in (("plain", model.generate), ("selfspec", spec.generate)):
            seconds, ids = timed(generate, options)
            answer = ids[0, prompt_tokens:]
            speed[name].append(len(answer) / seconds)
            if name == "plain":
                plain_ids = answer
            else:
                our_ids = answer
        print(
            f"round {i + 1}: plain {speed['plain'][-1]:.1f} tok/s, "
            f"selfspec {speed['selfspec'][-1]:.1f} tok/s",
            flush=True,
        )
    ratios = [ours / plain for plain, ours in zip(*speed.values(), strict=True)]
    print(
        f"{statistics.median(ratios):.2f}x (rounds {min(ratios):.2f} to {max(ratios):.2f}); "
        f"greedy, batch 1, {prompt_tokens} prompt and {len(plain_ids)} new tokens, with prefill, "
        f"{args.dtype}, {model.device.type}, {torch.get_num_threads()} threads"
    )
    if max(ratios) > 1.5 * min(ratios):
        print("the rounds disagree: the machine is busy, do not trust this figure")
    if len(plain_ids) == args.max_new_tokens:
        print(f"the answer was cut at --max-new-tokens {args.max_new_tokens}")
    report_identity(plain_ids, our_ids, tokenizer.decode, args.dtype)


def parse_args() -> argparse.Namespace:
    """Read the options; each has a default that needs nothing from the user."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompt", default=PROMPT, help="user message (default: a code edit)")
    parser.add_argument("--max-new-tokens", type=int, default=200)
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
