"""Every causal-LM type of the installed transformers, tiny and random, against plain `generate`.

    python -m tests.families.sweep                          # all types: a table
    python -m tests.families.sweep mixtral gemma3n_text     # some
    python -m tests.families.sweep --transformers 5.12.1    # another version, in a fresh folder

The exit status is 1 if a wrapped model's text differs from plain's, or a process of a wrapped model
died. A type that cannot be built from its shrunk default configuration is listed with the reason;
that is no failure of the library's.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import selfspec
from tests.families import tiny
from tests.families.shrink import SPECIAL, VOCAB, tiny_config
from tests.oracle import OracleDrafter

ROOT = Path(__file__).parents[2]
NEW = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
SEEDS = 3
ENOUGH = 9  # different tokens in a text that a wrong position would change

DRAFTERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "ngram": lambda answers: selfspec.NGramDrafter(min_match=1, max_candidates=2, min_prob=0.0),
    "oracle-tree": lambda answers: OracleDrafter(answers, 4, (0, 3), VOCAB, branches=2),
    "early-exit": lambda answers: selfspec.EarlyExitDrafter(2, confidence=0.0, branches=2),
    "layer-skip": lambda answers: selfspec.LayerSkipDrafter([2], confidence=0.0),
    "fixed": lambda answers: OracleDrafter(answers, 4, (0, 3), VOCAB, branches=2),
}


def model_types() -> list[str]:
    """What transformers can generate text with from text alone, perhaps."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def build(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of a type, with weights that do not forgive."""
    causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > 50_000_000:
        raise MemoryError(f"{size / 1e6:.0f} million parameters, shrunk as it is")
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    tiny.redraw(model, seed)
    model.generation_config = GenerationConfig(pad_token_id=tiny.PAD)
    return model.eval()


def check(model_type: str) -> Iterator[dict[str, Any]]:
    """What is known of a type after every further step of looking."""
    row: dict[str, Any] = {"type": model_type, "support": "not built"}
    row["reason"] = "its process ended"
    yield row
    model, prompt, plain = None, {}, {}
    try:
        for seed in range(SEEDS):
            candidate = build(model_type, seed)
            prompt = {b: tiny.prompts(b, vocab=SPECIAL) for b in (1, 3)}
            texts = {b: candidate.generate(**prompt[b], **GREEDY) for b in prompt}
            variety = min(len(set(t.tolist())) for b in texts for t in texts[b][:, 17:])
            if model is None or variety > row["variety"]:
                model, plain, row["variety"] = candidate, texts, variety
            if variety >= ENOUGH:
                break
    except Exception as exception:
        yield row | {"reason": _one_line(exception)}
        return
    assert model is not None
    row |= {"class": type(model).__name__, "support": "?", "reason": "wrap ended its process"}
    yield row
    try:
        spec = selfspec.wrap(model, drafter="none")
    except ValueError as error:
        reason = (
            str(error)
            .partition("cannot be wrapped: ")[2]
            .removesuffix(". Use model.generate as it is.")
        )
        yield row | {"support": "refused", "reason": reason or _one_line(error)}
        return
    architecture = spec._target.architecture
    row |= {"support": architecture.support, "reason": architecture.reason, "results": {}}
    for batch, answers in plain.items():
        for name, make in DRAFTERS.items():
            if name == "fixed" and architecture.support != "tree":
                continue
            key = f"{name} {batch}"
            row["results"][key] = "its process ended"
            yield row
            row["results"][key] = _compare(model, name, make(answers), prompt[batch], answers)
    yield row


def _compare(
    model: PreTrainedModel, name: str, drafter: Any, prompt: dict[str, Any], plain: torch.Tensor
) -> str:
    messages = _Messages()
    logger = logging.getLogger("selfspec")
    logger.addHandler(messages)
    try:
        spec = selfspec.wrap(
            model, drafter=drafter, max_draft_tokens=12, cuda_graphs=name == "fixed"
        )
    except ValueError as error:
        return f"refused: {_one_line(error)}"
    try:
        text = spec.generate(**prompt, **GREEDY)
    except Exception as exception:
        return f"FAILS: {_one_line(exception)}"
    finally:
        logger.removeHandler(messages)
    if text.tolist() != plain.tolist():
        return f"DIFFERS: {_first_difference(model, prompt, text, plain)}"
    if spec.stats.fallbacks:
        return "stock loop: " + messages.last.partition("own loop: ")[2].rstrip(".")
    chains = spec._target.architecture.support == "chain"
    if name in ("oracle-tree", "fixed") and not chains and not spec.stats.accepted:
        return "same, but nothing was accepted"
    return "same"


def _first_difference(
    model: PreTrainedModel, prompt: dict[str, Any], text: torch.Tensor, plain: torch.Tensor
) -> str:
    if text.shape != plain.shape:
        return f"shape {tuple(text.shape)} for {tuple(plain.shape)}"
    row, column = (text != plain).nonzero()[0].tolist()
    logits = model.generate(
        **prompt, **GREEDY, output_logits=True, return_dict_in_generate=True
    ).logits
    new = column - prompt["input_ids"].shape[1]
    best, second = logits[new][row].float().topk(2).values.tolist()
    return f"row {row}, new token {new}; plain's best two logits are {best - second:.2g} apart"


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def _one_line(exception: BaseException) -> str:
    where = traceback.extract_tb(exception.__traceback__)[-1]
    place = f" ({Path(where.filename).name}:{where.lineno})"
    return f"{type(exception).__name__}: {' '.join(str(exception).split())[:200]}{place}"


# ------------------------------------------------------------------------------- running


def _child(model_type: str, pipe: Any) -> None:
    _quiet()
    for row in check(model_type):
        pipe.send(row)


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def run(model_type: str, seconds: float) -> dict[str, Any]:
    """Check one type in a process of its own, which may die or hang."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, theirs), daemon=True)
    start = time.monotonic()
    process.start()
    theirs.close()
    row: dict[str, Any] = {}
    try:
        while mine.poll(max(0.0, start + seconds - time.monotonic())):
            row = mine.recv()
        process.kill()
        if row.get("results"):
            last = list(row["results"])[-1]
            row["results"][last] = f"FAILS: took longer than {seconds:.0f} s"
        else:
            row["reason"] = f"took longer than {seconds:.0f} s"
    except EOFError:
        pass
    process.join()
    return row | {"seconds": round(time.monotonic() - start, 1)}


def verdict(row: dict[str, Any]) -> str:
    """One word or line for all results of a type."""
    results: dict[str, str] = row.get("results", {})
    bad = {k: v for k, v in results.items() if v.startswith(("DIFFERS", "FAILS", "its process"))}
    if bad:
        return "; ".join(f"{k}: {v}" for k, v in bad.items())
    kinds = Counter(results.values())
    return "; ".join(v if v == "same" else f"{n}x {v}" for v, n in kinds.most_common())


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Types by what holds for them: names alone where every text is plain's own."""
    same: dict[str, list[str]] = {}
    others: dict[str, dict[str, str]] = {}
    for row in rows:
        note = verdict(row)
        if note == "same":
            same.setdefault(row["support"], []).append(row["type"])
        else:
            others.setdefault(row["support"], {})[row["type"]] = note or row["reason"]
    return {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "identical": same,
        "otherwise": others,
    }


def is_defect(row: dict[str, Any]) -> bool:
    """Whether a wrapped model gives another text, or does not survive being wrapped."""
    return row["support"] == "?" or any(
        v.startswith(("DIFFERS", "FAILS", "its process")) for v in row.get("results", {}).values()
    )


def main() -> int:
    """Run the sweep; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("types", nargs="*", help="model types; all if none is given")
    parser.add_argument("--transformers", metavar="VERSION", help="install and use this version")
    parser.add_argument("--target", type=Path, help="where to install it; by default temporary")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a type")
    parser.add_argument("--json", type=Path, help="write a summary here, too")
    options = parser.parse_args()
    if options.transformers and options.transformers != transformers.__version__:
        return _with_version(options.transformers, options.target)
    _quiet()
    # Imported once here, not once in every process.
    tiny.build("llama").generate(**tiny.prompts(1), **GREEDY)
    rows = []
    for model_type in options.types or model_types():
        row = run(model_type, options.seconds)
        rows.append(row)
        note = verdict(row)
        _say(" | ".join([row["type"], row["support"], row["reason"], note]))
    defects = [row["type"] for row in rows if is_defect(row)]
    counts = Counter(row["support"] for row in rows)
    _say(f"transformers {transformers.__version__}: {dict(counts)}; defects: {defects or 'none'}")
    if options.json:
        options.json.write_text(json.dumps(summary(rows), indent=1) + "\n")
    return bool(defects)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _with_version(version: str, folder: Path | None) -> int:
    """Start this script anew with another transformers before the installed one."""
    with tempfile.TemporaryDirectory() as temporary:
        target = str((folder or Path(temporary)).resolve())
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--target", target, f"transformers=={version}"], check=True)
        paths = [target, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "tests.families.sweep", *sys.argv[1:]]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
