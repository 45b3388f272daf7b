"""Self-distillation data: prompts, answered by the target itself.

A draft has to guess what the target says, so that is what it is trained on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils.logging import tqdm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Answer:
    """One prompt and what the target says to it, as token ids."""

    id: str
    prompt_ids: list[int]
    response_ids: list[int]


def read_answers(path: str | os.PathLike[str]) -> list[Answer]:
    """What `answer_prompts` has written (`.gz` is read as well), in the order of the file.

    Raises:
        ValueError: If a line is no JSON, or lacks `id`, `prompt_ids` or `response_ids`.
    """
    found = []
    for number, row in _rows(Path(path)):
        if missing := [k for k in ("id", "prompt_ids", "response_ids") if k not in row]:
            raise ValueError(f"{path}, line {number}: {', '.join(missing)} missing.")
        found.append(Answer(str(row["id"]), row["prompt_ids"], row["response_ids"]))
    return found


def read_prompts(path: str | os.PathLike[str], tokenizer: Any = None) -> dict[str, dict[str, Any]]:
    """Prompts of a JSONL file, by id.

    Args:
        path: Every line has `prompt`, a user's message, or `prompt_ids`; and `id`, else the number
            of the line is one. Other fields are kept. `.gz` is read as well.
        tokenizer: Makes `prompt_ids` of `prompt`, by its chat template if it has one.

    Raises:
        ValueError: If a line is no JSON or has no prompt, if ids repeat, or if there is a `prompt`
            and no tokenizer.
    """
    found: dict[str, dict[str, Any]] = {}
    for number, row in _rows(Path(path)):
        name = str(row.get("id", number))
        if name in found:
            raise ValueError(f"{path}, line {number}: id {name!r} is there twice.")
        if "prompt_ids" not in row:
            if "prompt" not in row:
                raise ValueError(f"{path}, line {number}: neither prompt nor prompt_ids.")
            if tokenizer is None:
                raise ValueError(f"{path}, line {number}: a prompt of text needs a tokenizer.")
            row = {**row, "prompt_ids": _ids(row["prompt"], tokenizer)}
        _check_ids(row["prompt_ids"], f"{path}, line {number},")
        if not row["prompt_ids"]:
            raise ValueError(f"{path}, line {number}: the prompt has no tokens.")
        found[name] = {k: v for k, v in row.items() if k not in ("prompt", "id")}
    return found


def _ids(prompt: str, tokenizer: Any) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    return list(tokenizer.apply_chat_template(message, **options)["input_ids"])


def answer_prompts(
    model: PreTrainedModel,
    prompts: Mapping[str, Mapping[str, Any]],
    out: str | os.PathLike[str],
    *,
    max_new_tokens: int = 256,
    temperatures: Sequence[float] = (0.0, 0.0, 0.7),
    top_p: float = 0.95,
    batch_size: int = 32,
    seed: int = 0,
) -> int:
    """Let the target answer prompts, by its own `generate`, in batches of similar length.

    Lines are appended batch by batch; prompts that `out` has answers to are passed by, and a last
    line that was only half written is dropped. So a run that was killed is simply started again.

    Args:
        model: The target.
        prompts: Of `read_prompts`.
        out: JSONL; every line has `id`, `temperature`, `prompt_ids`, `response_ids` (the end token
            included) and what else the prompt had.
        max_new_tokens: Of an answer.
        temperatures: Every prompt has one of these, by its id; 0 is greedy. A prompt that has a
            `temperature` itself is answered at that one.
        top_p: Nucleus of answers that are sampled.
        batch_size: Prompts at a time.
        seed: Which prompt has which temperature, and what is drawn.

    Returns:
        How many answers were added.

    Raises:
        ValueError: If a temperature is no number of at least 0, or there is none; if a size is less
            than 1, or a prompt is no list of tokens.
    """
    if not temperatures:
        raise ValueError("temperatures is empty: pass one number or more.")
    for name, value in {"batch_size": batch_size, "max_new_tokens": max_new_tokens}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    chosen = {
        name: row.get("temperature", temperatures[_number(seed, name) % len(temperatures)])
        for name, row in prompts.items()
    }
    for temperature in (*temperatures, *chosen.values()):
        if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature!r} must be a number of at least 0.")
    for name, row in prompts.items():
        _check_ids(row["prompt_ids"], f"prompt {name!r}")
    out = Path(out)
    _drop_half_line(out)
    done = {answer.id for answer in read_answers(out)} if out.exists() else set()
    added = 0
    with open(out, "a") as file, tqdm(total=len(prompts), unit="prompt", desc="answers") as bar:
        bar.update(sum(name in done for name in prompts))
        for temperature in sorted(set(chosen.values())):
            names = [n for n in prompts if n not in done and chosen[n] == temperature]
            names.sort(key=lambda n: len(prompts[n]["prompt_ids"]))
            for at in range(0, len(names), batch_size):
                batch = names[at : at + batch_size]
                ids = [list(prompts[n]["prompt_ids"]) for n in batch]
                answers = _generate(
                    model, ids, max_new_tokens, temperature, top_p, _number(seed, *batch)
                )
                for name, response in zip(batch, answers, strict=True):
                    row = {"id": name, **prompts[name], "temperature": temperature}
                    file.write(json.dumps({**row, "response_ids": response}) + "\n")
                file.flush()
                added += len(batch)
                bar.update(len(batch))
    return added


def _generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> list[list[int]]:
    longest = max(map(len, prompts))
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for b, prompt in enumerate(prompts):
        ids[b, longest - len(prompt) :] = torch.tensor(prompt)
        mask[b, longest - len(prompt) :] = 1
    ends = end_tokens(model)
    pad = model.generation_config.pad_token_id
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad if pad is not None else (ends or [0])[0],
            return_dict_in_generate=False,
            **options,
        )
    answers = []
    for row in out[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        answers.append(row[: end + 1])
    return answers


def _check_ids(ids: Any, whose: str) -> None:
    if not isinstance(ids, list | tuple) or any(type(i) is not int or i < 0 for i in ids):
        raise ValueError(f"prompt_ids of {whose} must be a list of tokens, got {str(ids)[:40]!r}.")


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Tokens that end the model's texts."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _number(seed: int, *names: str) -> int:
    """The same in every process, unlike `hash`."""
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: no JSON ({error}).") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: no JSON object.")
            yield number, row


def _drop_half_line(path: Path) -> None:
    """Cut what follows the last line end: a line whose writing was interrupted."""
    if path.exists():
        whole = path.read_bytes().rpartition(b"\n")
        os.truncate(path, len(whole[0]) + len(whole[1]))
