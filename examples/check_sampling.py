"""Check on a real model that drawn drafts leave the distribution of the text as it is.

    python examples/check_sampling.py --output results/sampling.json

The first three tokens of many sampled continuations of one prompt are compared as triples: two
independent runs of plain `generate` say how far apart two samples of one distribution are, and a
permutation of pooled samples says which distance that chance alone exceeds once in a thousand. The
first token is also held against its exact distribution, and the drafts that were accepted against
what p and q say, at every depth. float32, since a block of tokens rounds differently in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections import Counter
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import demo_model
import selfspec
import selfspec.loop
from selfspec.sampling import Sampler

PROMPT = "Once upon a time, in a small"
COMPARED = 3
NEW = 5  # room for a draft of three tokens behind the first
TEMPERATURES = (0.7, 1.0)
FILTERS = {"top_p": 0.9, "top_k": 50}
PERMUTATIONS = 2000


def drafters(num_layers: int) -> dict[str, tuple[Any, str]]:
    """(drafter, acceptance rule) by name."""
    late, some = num_layers - 2, list(range(num_layers // 3, num_layers // 3 + 3))
    return {
        "early exit, tree, traversal": (
            selfspec.EarlyExitDrafter(late, 2, 0.0, branches=2, do_sample=True),
            "traversal",
        ),
        "layer skip, chain, multiround": (
            selfspec.LayerSkipDrafter(some, 3, 0.0, do_sample=True),
            "multiround",
        ),
    }


class Overlap:
    """Accepted drafts beside the sum of min(p, q), token by token of the first children."""

    def __init__(self) -> None:
        self.depths: dict[int, list[float]] = {}
        self._accept = selfspec.loop.accept

    def __enter__(self) -> Overlap:
        selfspec.loop.accept = self  # the loop looks it up at every step
        return self

    def __exit__(self, *error: object) -> None:
        selfspec.loop.accept = self._accept

    def __call__(self, tree: Any, logits: Any, sampler: Sampler, state: Any) -> Any:
        """Accept as ever, and count."""
        acceptance = self._accept(tree, logits, sampler, state)
        if tree.log_q is not None and tree.max_children == 1:
            p, q = sampler.scores(logits).softmax(-1), tree.log_q.exp()
            for depth in range(tree.max_depth):
                tried = (tree.num_nodes > depth + 1) & (acceptance.num_accepted >= depth)
                overlap = torch.minimum(p[:, depth], q[:, depth]).sum(-1)[tried]
                accepted = acceptance.num_accepted[tried] > depth
                sums = self.depths.setdefault(depth + 1, [0, 0.0, 0.0, 0.0])
                for i, value in enumerate(
                    (tried.sum(), accepted.sum(), overlap.sum(), (overlap * (1 - overlap)).sum())
                ):
                    sums[i] += float(value)
        return acceptance

    def rows(self) -> list[dict[str, float]]:
        """Tried, accepted, expected, and the difference in standard deviations, by depth."""
        return [
            {
                "depth": depth,
                "tried": tried,
                "accepted": accepted,
                "expected": round(expected, 1),
                "sigmas": round((accepted - expected) / max(variance, 1e-9) ** 0.5, 2),
            }
            for depth, (tried, accepted, expected, variance) in sorted(self.depths.items())
        ]


def plain_tokens(model: Any, rows: torch.Tensor, **settings: Any) -> list[list[int]]:
    """The first tokens of every row, by transformers."""
    out = model.generate(rows, max_new_tokens=COMPARED, do_sample=True, **settings)
    tokens: list[list[int]] = out[:, rows.shape[1] :].tolist()
    return tokens


def drafted_tokens(spec: Any, rows: torch.Tensor, **settings: Any) -> list[list[int]]:
    """The same with drafts; the steps end as soon as every row has enough."""
    found: list[list[int]] = [[] for _ in rows]
    for step in spec.stream(rows, max_new_tokens=NEW, do_sample=True, **settings):
        for row, new in zip(found, step.tokens, strict=True):
            row += new
        if min(map(len, found)) >= COMPARED:
            break
    return found


def triples(draw: Any, ids: torch.Tensor, runs: int, batch: int, **settings: Any) -> list[Any]:
    """The first tokens of `runs` continuations."""
    found: list[Any] = []
    while len(found) < runs:
        rows = ids.expand(min(batch, runs - len(found)), -1)
        found += [tuple(row[:COMPARED]) for row in draw(rows, **settings)]
    return found


def distance(one: list[Any], other: list[Any]) -> float:
    """Total variation of two samples of one size."""
    a, b = Counter(one), Counter(other)
    return sum(abs(a[key] - b[key]) for key in a.keys() | b.keys()) / (2 * len(one))


def chance(one: list[Any], other: list[Any]) -> float:
    """The distance that samples of one distribution exceed once in a thousand."""
    keys = {key: i for i, key in enumerate(sorted(set(one) | set(other)))}
    pooled = torch.tensor([keys[key] for key in one + other])
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(PERMUTATIONS):
        mixed = pooled[torch.randperm(len(pooled), generator=generator)]
        a, b = (torch.bincount(half, minlength=len(keys)) for half in mixed.chunk(2))
        found.append(float((a - b).abs().sum()) / (2 * len(one)))
    return sorted(found)[int(0.999 * PERMUTATIONS)]


def chi_square(sample: list[Any], law: torch.Tensor) -> dict[str, float]:
    """Of the first token; tokens that are expected fewer than five times are taken together."""
    counts = torch.bincount(torch.tensor([t[0] for t in sample]), minlength=len(law)).double()
    expected = law.double() * len(sample)
    rare = expected < 5
    groups = [(counts[~rare], expected[~rare])]
    if float(expected[rare].sum()) > 0:
        groups.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    statistic = sum(float(((c - e) ** 2 / e).sum()) for c, e in groups)
    return {
        "statistic": round(statistic, 1),
        "degrees": int((~rare).sum()) + len(groups) - 2,
        "outside_the_nucleus": int(counts[law == 0].sum()),
    }


def check(model: Any, ids: torch.Tensor, args: Any) -> list[dict[str, Any]]:
    """One entry a temperature."""
    entries = []
    for temperature in TEMPERATURES:
        settings = {"temperature": temperature, **FILTERS, "eos_token_id": None, "pad_token_id": 0}
        torch.manual_seed(1)
        plain = [
            triples(partial(plain_tokens, model), ids, args.runs, args.batch, **settings)
            for _ in "ab"
        ]
        with torch.no_grad():
            logits = model(ids).logits[:, -1].float()
        law = reference_law(model, ids, logits, settings)
        entry: dict[str, Any] = {
            "temperature": temperature,
            "plain_apart": round(distance(*plain), 4),
            "chance": round(chance(*plain), 4),
            "plain_first_token": chi_square(plain[0], law),
            "drafts": {},
        }
        for name, (drafter, rule) in drafters(model.config.num_hidden_layers).items():
            spec = selfspec.wrap(model, drafter, acceptance=rule)
            torch.manual_seed(2)
            with Overlap() as overlap:
                draw = partial(drafted_tokens, spec)
                sample = triples(draw, ids, args.runs, args.batch, **settings)
            entry["drafts"][name] = {
                "apart": [round(distance(sample, other), 4) for other in plain],
                "chance": round(chance(sample, plain[0]), 4),
                "first_token": chi_square(sample, law),
                "acceptance_rate": round(spec.stats.acceptance_rate, 3),
                "mean_accepted_length": round(spec.stats.mean_accepted_length, 3),
                "by_depth": overlap.rows() if rule == "multiround" else [],
            }
            print(temperature, name, json.dumps(entry["drafts"][name]), file=sys.stderr)
        entries.append(entry)
    return entries


def reference_law(model: Any, ids: Any, logits: torch.Tensor, settings: Any) -> torch.Tensor:
    """The exact law of the first token, by transformers' own processors."""
    config = model.generation_config
    prepared, _ = model._prepare_generation_config(config, do_sample=True, **settings)
    processors = model._get_logits_processor(
        generation_config=prepared, input_ids_seq_length=ids.shape[1], device=ids.device
    )
    return processors(ids, logits.clone()).softmax(-1)[0]


def main() -> int:
    """Run, write the JSON, and fail if a distance is more than chance explains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or hub id; SmolLM2-135M-Instruct by default")
    parser.add_argument("--runs", type=int, default=4000, help="samples of each method")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = demo_model.load(args.model, torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    entries = check(model, ids, args)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "machine": {
            "platform": platform.platform(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "selfspec": commit or version("selfspec"),
            "threads": args.threads,
        },
        "settings": {
            "dtype": "float32",
            "prompt": PROMPT,
            "runs": args.runs,
            "batch": args.batch,
            "tokens": COMPARED,
            **FILTERS,
        },
        "entries": entries,
    }
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n")
    else:
        print(text)
    bad = [
        f"T = {entry['temperature']}, {name}"
        for entry in entries
        for name, found in entry["drafts"].items()
        if max(found["apart"]) > found["chance"]
        or found["first_token"]["outside_the_nucleus"]
        or any(abs(row["sigmas"]) > 3 for row in found["by_depth"])
    ]
    for line in bad:
        print("more than chance explains:", line, file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
