"""Hidden states of answered prompts: written once as safetensors shards, or made when needed.

A shard is written under another name and renamed, and its name tells what it is made of: a run that
was killed goes on with the shards that are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.logging import tqdm

from selfspec.checkpoints.base_model import BaseModel, check_base
from selfspec.checkpoints.folder import TAPS
from selfspec.checkpoints.tensors import read_json, write_tensors, write_text
from selfspec.target import Target
from selfspec.training.answers import Answer
from selfspec.training.batches import Batch
from selfspec.training.observe import observe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSION = "selfspec-states", 1
MANIFEST = "manifest.json"
_OPEN_SHARDS = 256


class States(Protocol):
    """Where batches come from.

    Attributes:
        lengths: Tokens of every sequence.
        prompts: Of every sequence, what tells its prompt from others.
        token_counts: int64 [V], how often each token was answered.
        taps: Layers whose states there are.
        identity: Differs for other texts or states.
        in_memory: Whether `read` only copies, so that it may run in another thread.
    """

    lengths: list[int]
    prompts: list[str]
    token_counts: Tensor
    taps: tuple[int, ...]
    identity: str
    in_memory: bool

    def read(self, rows: Sequence[int], taps: Sequence[int]) -> Batch:
        """Sequences `rows` with the states of `taps`, side by side in this order."""
        ...


def usable(answers: Sequence[Answer], max_length: int, vocab_size: int) -> list[Answer]:
    """Answers to train on: cut to `max_length` tokens, without those that have none left.

    Raises:
        ValueError: If none is left, or a token is none of the model's.
    """
    for answer in answers:
        ids = [*answer.prompt_ids, *answer.response_ids]
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
        if wrong:
            raise ValueError(
                f"answer {answer.id!r} has the token {wrong[0]!r}, and the model has tokens "
                f"0..{vocab_size - 1}: answer the prompts with this model."
            )
    cut = [
        Answer(a.id, a.prompt_ids, a.response_ids[: max_length - len(a.prompt_ids)])
        for a in answers
        if 0 < len(a.prompt_ids) < max_length and a.response_ids
    ]
    if not cut:
        raise ValueError(
            f"none of {len(answers)} answers has a token after a prompt of less than "
            f"max_length={max_length} tokens: answer more prompts, or raise max_length."
        )
    return cut


def write_states(
    model: PreTrainedModel,
    answers: Sequence[Answer],
    folder: str | os.PathLike[str],
    taps: Sequence[int],
    *,
    top_k: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    max_length: int = 1024,
    tokens_per_batch: int = 2048,
    tokens_per_shard: int = 16384,
) -> ShardedStates:
    """Run the target over answered prompts and keep its states on disk.

    A token takes `2 C` bytes a tap and `8 top_k` bytes more.

    Args:
        model: The target, in evaluation mode.
        answers: Prompts and what the target answered.
        folder: Made if it is not there. Shards of the same texts that are there already are kept.
        taps: Layers whose input is kept; L is the output of the last one.
        top_k: How many of the target's most probable tokens are kept at every position.
        dtype: Of the states.
        max_length: Longer answers are cut; prompts that are as long are left out.
        tokens_per_batch: Most positions of a forward, padding included.
        tokens_per_shard: About how many tokens a shard has; a kill loses one shard at most.

    Returns:
        The states, to be trained on.

    Raises:
        ValueError: If no answer is left, the model is in training mode or does not have a token,
            or an option is out of range.
    """
    if not taps:
        raise ValueError("taps is empty: name the layers whose states are kept.")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} must be a floating one.")
    sizes = {"tokens_per_batch": tokens_per_batch, "tokens_per_shard": tokens_per_shard}
    for name, value in {"top_k": top_k, **sizes}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = Target(model)
    answers = usable(answers, max_length, target.vocab_size)
    taps = tuple(sorted(set(taps)))
    base = BaseModel.of(model)
    options = [base.shape, base.embedding, taps, top_k, str(dtype), tokens_per_batch]
    shards = list(_shards(answers, tokens_per_shard))
    names = [_name(shard, options) for shard in shards]
    for unfinished in folder.glob(".states-*"):
        unfinished.unlink()
    with tqdm(total=sum(map(_length, answers)), unit="token", desc="states") as bar:
        for shard, name in zip(shards, names, strict=True):
            if not _is_whole(folder / name):
                tensors: dict[str, list[Tensor]] = {}
                for batch in _batches(shard, tokens_per_batch):
                    read = _observed(target, batch, taps, top_k, dtype)
                    for key, tensor in _flat(read, taps).items():
                        tensors.setdefault(key, []).append(tensor)
                whole = {key: torch.cat(parts) for key, parts in tensors.items()}
                write_tensors(whole, folder / name, {"format": FORMAT})
            bar.update(sum(map(_length, shard)))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "base": asdict(base),
        "taps": taps,
        "tap_convention": TAPS,
        "top_k": top_k,
        "dtype": str(dtype).removeprefix("torch."),
        "sequences": len(answers),
        "tokens": sum(map(_length, answers)),
        "shards": names,
        "token_counts": _counts(answers, base.shape["vocab_size"]).tolist(),
    }
    write_text(json.dumps(manifest), folder / MANIFEST)
    return ShardedStates(folder)


class ShardedStates:
    """States that `write_states` has written.

    Args:
        folder: Of the shards.
        model: If given, they must be states of this model.

    Raises:
        ValueError: If there is no manifest, a shard is missing, the format is another, or the
            states are another model's.
    """

    in_memory = True

    def __init__(
        self, folder: str | os.PathLike[str], model: PreTrainedModel | None = None
    ) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise ValueError(f"{path} does not exist: run write_states (again, if it was stopped).")
        self.manifest = read_json(path)
        found = {k: self.manifest.get(k) for k in ("format", "version", "tap_convention")}
        known = {"format": FORMAT, "version": VERSION, "tap_convention": TAPS}
        if found != known:
            raise ValueError(f"states in {self.folder} are {found}, this version reads {known}.")
        if model is not None:
            check_base(BaseModel.from_dict(self.manifest["base"], path), model)
        self.taps = tuple(self.manifest["taps"])
        self.token_counts = torch.tensor(self.manifest["token_counts"])
        names = self.manifest["shards"]
        self.identity = hashlib.sha256("".join(names).encode()).hexdigest()[:16]
        if missing := [name for name in names if not (self.folder / name).is_file()]:
            raise ValueError(f"{self.folder} lacks {', '.join(missing)}: run write_states again.")
        self._open = lru_cache(_OPEN_SHARDS)(self._open_shard)
        self.lengths: list[int] = []
        self.prompts: list[str] = []
        self._places: list[tuple[str, int, int]] = []  # shard, first token, prompt length
        for name in names:
            shard = self._open(name)
            lengths = shard.get_tensor("lengths").tolist()
            prompts = shard.get_tensor("prompt_lengths").tolist()
            starts = np.cumsum([0, *lengths]).tolist()
            self._places += zip([name] * len(lengths), starts[:-1], prompts, strict=True)
            self.lengths += lengths
            ids = shard.get_tensor("ids").numpy()
            self.prompts += [
                _prompt_key(ids[start : start + length])
                for start, length in zip(starts[:-1], prompts, strict=True)
            ]

    def _open_shard(self, name: str) -> Any:
        try:
            return safe_open(self.folder / name, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{self.folder / name} is broken ({error}): run write_states again, which makes it "
                "anew."
            ) from error

    def read(self, rows: Sequence[int], taps: Sequence[int]) -> Batch:
        """See `States.read`; nothing but what is asked for is read from the files."""
        lengths = [self.lengths[row] for row in rows]
        parts = []
        for row, length in zip(rows, lengths, strict=True):
            name, start, _ = self._places[row]
            shard = self._open(name)
            keys = ["ids", "top", "probs", *(f"tap.{tap}" for tap in taps)]
            parts.append([shard.get_slice(key)[start : start + length] for key in keys])
        ids, top, probs, *_ = parts[0]
        shape = len(rows), max(lengths)
        width = sum(part.shape[1] for part in parts[0][3:])
        batch = Batch(
            ids=torch.zeros(shape, dtype=torch.int64),
            prompt_lengths=torch.tensor([self._places[row][2] for row in rows]),
            lengths=torch.tensor(lengths),
            taps=torch.zeros(*shape, width, dtype=parts[0][-1].dtype),
            top=torch.zeros(*shape, top.shape[1], dtype=torch.int64),
            probs=torch.zeros(*shape, probs.shape[1]),
        )
        for b, (ids, top, probs, *states) in enumerate(parts):
            n = lengths[b]
            batch.ids[b, :n], batch.top[b, :n], batch.probs[b, :n] = ids, top, probs
            if states:
                torch.cat(states, -1, out=batch.taps[b, :n])
        return batch


class StreamedStates:
    """States that are made when a batch is read, with nothing on disk: for many tokens, or few.

    Every pass runs the target again, which is slower than reading.

    Args:
        model: The target, in evaluation mode.
        answers: Prompts and what the target answered.
        top_k: See `write_states`.
        max_length: See `write_states`.

    Raises:
        ValueError: If no answer is left, or the model does not have a token.
    """

    in_memory = False

    def __init__(
        self,
        model: PreTrainedModel,
        answers: Sequence[Answer],
        *,
        top_k: int = 16,
        max_length: int = 1024,
    ) -> None:
        self.model = model
        self._target = Target(model)
        self.answers = usable(answers, max_length, self._target.vocab_size)
        self.top_k = top_k
        self.taps = tuple(range(self._target.architecture.num_layers + 1))
        self.lengths = [_length(a) for a in self.answers]
        self.prompts = [_prompt_key(np.array(a.prompt_ids)) for a in self.answers]
        base = BaseModel.of(model)
        self.token_counts = _counts(self.answers, base.shape["vocab_size"])
        self.identity = _name(self.answers, [base.shape, base.embedding, top_k])

    def read(self, rows: Sequence[int], taps: Sequence[int]) -> Batch:
        """See `States.read`."""
        batch = [self.answers[row] for row in rows]
        return _observed(self._target, batch, taps, self.top_k, self.model.dtype)


def _is_whole(path: Path) -> bool:
    """Whether a shard is there and complete; its size is told by its header."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _length(answer: Answer) -> int:
    return len(answer.prompt_ids) + len(answer.response_ids)


def _prompt_key(ids: np.ndarray) -> str:
    return hashlib.sha256(ids.astype(np.int32).tobytes()).hexdigest()[:16]


def _counts(answers: Sequence[Answer], vocab_size: int) -> Tensor:
    every = np.concatenate([np.asarray(a.response_ids, dtype=np.int64) for a in answers])
    return torch.from_numpy(np.bincount(every, minlength=vocab_size))


def _shards(answers: Sequence[Answer], tokens: int) -> Iterator[list[Answer]]:
    """In the order of the file, so that answers that are added later leave shards as they are."""
    shard: list[Answer] = []
    held = 0
    for answer in answers:
        if shard and held + _length(answer) > tokens:
            yield sorted(shard, key=_length)
            shard, held = [], 0
        shard.append(answer)
        held += _length(answer)
    yield sorted(shard, key=_length)


def _batches(answers: Sequence[Answer], tokens: int) -> Iterator[list[Answer]]:
    batch: list[Answer] = []
    for answer in answers:
        if batch and (len(batch) + 1) * _length(answer) > tokens:
            yield batch
            batch = []
        batch.append(answer)
    yield batch


def _name(answers: Sequence[Answer], options: list[Any]) -> str:
    texts = [[a.prompt_ids, a.response_ids] for a in answers]
    digest = hashlib.sha256(json.dumps([options, texts]).encode()).hexdigest()
    return f"states-{digest[:16]}.safetensors"


def _observed(
    target: Target,
    answers: Sequence[Answer],
    taps: Sequence[int],
    top_k: int,
    dtype: torch.dtype,
) -> Batch:
    lengths = torch.tensor([_length(a) for a in answers])
    ids = torch.zeros(len(answers), int(lengths.max()), dtype=torch.int64)
    for row, answer in zip(ids, answers, strict=True):
        row[: _length(answer)] = torch.tensor([*answer.prompt_ids, *answer.response_ids])
    seen = observe(target, ids, taps, top_k)
    device = seen.probs.device
    states = torch.cat([seen.taps[tap].to(device, dtype) for tap in taps], dim=-1)
    padding = torch.arange(ids.shape[1]) >= lengths[:, None]
    states = states.masked_fill(padding.to(device)[..., None], 0)
    prompts = torch.tensor([len(a.prompt_ids) for a in answers])
    return Batch(ids, prompts, lengths, states, seen.tokens, seen.probs)


def _flat(batch: Batch, taps: Sequence[int]) -> dict[str, Tensor]:
    """As a shard has it: sequences one after another, without padding."""
    real = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    here = real.to(batch.taps.device)
    states = batch.taps[here].cpu().chunk(len(taps), dim=-1)
    return {
        "ids": batch.ids[real].int(),
        "top": batch.top[here].int().cpu(),
        "probs": batch.probs[here].cpu(),
        "lengths": batch.lengths,
        "prompt_lengths": batch.prompt_lengths,
        **{f"tap.{tap}": s.contiguous() for tap, s in zip(taps, states, strict=True)},
    }
