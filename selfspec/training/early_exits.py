"""Training a model so that its early layers can speak: layer dropout and early-exit losses.

Elhoushi et al. 2024 (LayerSkip), https://arxiv.org/abs/2404.16710: later layers are left out at
random, more often the later they are, and the model's own norm and head are taught to read earlier
layers. There exits are taught the text; here, unless told otherwise, what the whole model says
after it, all of its distribution, which is what drafts are compared with. It changes the model;
whoever does not own it trains an exit instead (`TrainConfig(kind="exit")`).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils.logging import tqdm

from selfspec.checkpoints.base_model import BaseModel
from selfspec.checkpoints.tensors import read_header, read_json, write_json, write_tensors
from selfspec.config import Options
from selfspec.options import check_bool, check_int, check_number
from selfspec.patch import LayerPlan
from selfspec.target import Target
from selfspec.training.answers import Answer
from selfspec.training.batches import plan, split
from selfspec.training.config import TrainConfig
from selfspec.training.optimizer import Optimizer
from selfspec.training.states import usable

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel

CHECKPOINT, CONFIG, LOG = "checkpoint.safetensors", "early_exit_config.json", "log.jsonl"
_POSITIONS = 256  # whose logits over the whole vocabulary are in float32 at a time


@dataclass(frozen=True)
class EarlyExitConfig(Options):
    """How a model is trained for early exit.

    Attributes:
        exits: Layers that are taught to speak, as counts (8: after layers 0..7).
        exits_per_step: How many of them in a step, in turn; None: all.
        targets: What exits are taught: "model", the whole model's distribution (the model is not
            taught by it), or "text", the next token, as the last layer always is.
        exit_weight: Weight of the mean loss of exits, next to 1 for the last layer's.
        dropout: How often the last layer is left out; layer l of L is with this times
            `exp(l ln 2 / (L - 1)) - 1`.
        train_embeddings: Whether embeddings and LM head are trained, too.
        learning_rate: Of AdamW, after the warm-up; falls linearly to a tenth of itself.
        weight_decay: Of AdamW.
        warmup_steps: Over which the learning rate rises.
        tokens_per_batch: Most positions of a batch, padding included.
        total_tokens: Tokens in all, prompts included, padding not.
        max_length: Longer texts are cut.
        held_out: Share of the prompts that is not trained on, about.
        max_held_out: About how many texts are not trained on at most.
        checkpoint_seconds: Longest time between two checkpoints.
        seed: Of everything random.
    """

    exits: tuple[int, ...]
    exits_per_step: int | None = None
    targets: Literal["model", "text"] = "model"
    exit_weight: float = 1.0
    dropout: float = 0.1
    train_embeddings: bool = False
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    warmup_steps: int = 30
    tokens_per_batch: int = 1024
    total_tokens: int = 1_000_000
    max_length: int = 512
    held_out: float = 0.05
    max_held_out: int = 120
    checkpoint_seconds: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check values.

        Raises:
            TypeError: If one is of another type.
            ValueError: If one is out of range.
        """
        exits = self.exits
        if not isinstance(exits, Sequence) or not exits or any(type(e) is not int for e in exits):
            raise ValueError(f"exits={exits!r} must be counts of layers, like (4, 8, 12).")
        if len(set(exits)) < len(exits):
            raise ValueError(f"exits={exits!r} has a layer twice.")
        object.__setattr__(self, "exits", tuple(exits))
        per_step = self.exits_per_step
        if per_step is not None and (type(per_step) is not int or not 1 <= per_step <= len(exits)):
            raise ValueError(f"exits_per_step={per_step!r} must be None, or in 1..{len(exits)}.")
        if self.targets not in ("model", "text"):
            raise ValueError(f'targets={self.targets!r} must be "model" or "text".')
        check_number("dropout", self.dropout, least=0)
        if not self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} must be in 0..1, 1 excluded.")
        check_number("exit_weight", self.exit_weight, least=0)
        check_number("learning_rate", self.learning_rate, least=0)
        check_int("max_length", self.max_length, 2)
        check_int("seed", self.seed, 0)
        check_bool("train_embeddings", self.train_embeddings)
        self._optimizer_config()

    def _optimizer_config(self) -> TrainConfig:
        """The same as the drafts' training has it; checks what it checks."""
        return TrainConfig(
            kind="exit",
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            clip=1.0,
            warmup_steps=self.warmup_steps,
            final_learning_rate=0.1,
            tokens_per_batch=self.tokens_per_batch,
            total_tokens=self.total_tokens,
            held_out=self.held_out,
            max_held_out=self.max_held_out,
            checkpoint_seconds=self.checkpoint_seconds,
            seed=self.seed,
        )


def train_early_exits(
    model: PreTrainedModel,
    answers: Sequence[Answer],
    out: str | os.PathLike[str],
    config: EarlyExitConfig,
    say: Callable[[str], object] = lambda line: None,
) -> list[Answer]:
    """Train the model itself, in place, in the dtype that it is in; float32 is meant.

    Args:
        model: On its device. Its weights change, but for those that do not require a gradient.
        answers: Texts: prompts and what should be said to them. Only the latter count.
        out: Folder of this run: `log.jsonl`, the config, and a checkpoint to go on from. Another
            run with the same config and texts goes on where the one before was stopped.
        config: How.
        say: Called with what is worth a line.

    Returns:
        The texts that were held out.

    Raises:
        ValueError: If the model cannot run without some of its layers, has fewer layers than an
            exit or no weight that may be trained, or `out` belongs to a run of another model or
            with another config or other texts.
    """
    with torch.inference_mode(False), torch.enable_grad():
        run = _Run(model, answers, Path(out), config, say)
        try:
            run.finish()
        finally:
            run.release()
        return [run.answers[row] for row in run.held]


class _Run:
    def __init__(
        self,
        model: PreTrainedModel,
        answers: Sequence[Answer],
        out: Path,
        config: EarlyExitConfig,
        say: Callable[[str], object],
    ) -> None:
        self.model, self.out, self.config, self.say = model, out, config, say
        self.target = Target(model)
        found = self.target.architecture
        self.num_layers = found.num_layers
        if found.support == "none" or found.layers_fault:
            fault = found.reason if found.support == "none" else found.layers_fault
            raise ValueError(f"layers cannot be left out of this model: {fault}.")
        if not found.resumable:
            raise ValueError("the head of this model cannot be run on states of earlier layers.")
        if wrong := [e for e in config.exits if not 1 <= e < self.num_layers]:
            raise ValueError(
                f"exits has {wrong}: the model has {self.num_layers} layers, choose exits in "
                f"1..{self.num_layers - 1}."
            )
        self.answers = usable(answers, config.max_length, self.target.vocab_size)
        self.lengths = [len(a.prompt_ids) + len(a.response_ids) for a in self.answers]
        prompts = [json.dumps(a.prompt_ids) for a in self.answers]
        self.rows, self.held = split(prompts, config.held_out, config.max_held_out, config.seed)
        self._required = {p: p.requires_grad for p in model.parameters()}
        frozen = set() if config.train_embeddings else set(_embeddings(model))
        for parameter in frozen:
            parameter.requires_grad_(False)
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("every parameter of the model is frozen: there is nothing to train.")
        self.base = _model_mark(model, config.train_embeddings)
        self.optimizer = Optimizer(model, config._optimizer_config())
        self.training = model.training
        self.step = self.tokens = self.epoch = self.position = 0
        if out.exists() and not out.is_dir():
            raise ValueError(f"out={str(out)!r} is a file; name a folder.")
        out.mkdir(parents=True, exist_ok=True)
        if (out / CHECKPOINT).is_file():
            self._resume()
        else:
            (out / LOG).unlink(missing_ok=True)
            write_json(config.to_dict(), out / CONFIG)
        say(f"{json.dumps(config.to_dict())}\n{len(self.rows)} texts, step {self.step}")
        self.saved = time.monotonic()

    def release(self) -> None:
        """Leave the model's flags as they were."""
        self.optimizer.drop()
        self.model.train(self.training)
        for parameter, required in self._required.items():
            parameter.requires_grad_(required)

    def finish(self) -> None:
        total = self.config.total_tokens
        self.model.train()
        start, before = time.monotonic(), self.tokens
        with tqdm(total=total, initial=self.tokens, unit="token", desc="early exits") as bar:
            while self.tokens < total:
                every = plan(
                    self.rows,
                    self.lengths,
                    self.config.tokens_per_batch,
                    self.config.seed,
                    self.epoch,
                )
                for rows in every[self.position :]:
                    losses = self._step(rows)
                    count = sum(self.lengths[row] for row in rows)
                    self.step, self.tokens = self.step + 1, self.tokens + count
                    self.position += 1
                    bar.update(count)
                    bar.set_postfix_str(" ".join(f"{k} {v:.2f}" for k, v in losses.items()))
                    rate = (self.tokens - before) / (time.monotonic() - start)
                    self._log({**losses, "tokens_per_second": round(rate, 1)})
                    if self.tokens >= total:
                        break
                    if time.monotonic() - self.saved >= self.config.checkpoint_seconds:
                        self._checkpoint()
                else:
                    self.epoch, self.position = self.epoch + 1, 0
        self._checkpoint()

    def _step(self, rows: list[int]) -> dict[str, float]:
        """One step; what an exit is taught and which layers are left out goes by its number."""
        config = self.config
        answers = [self.answers[row] for row in rows]
        ids, labels = padded(answers, self.target.device)
        rng = np.random.default_rng([config.seed, self.step])
        chances = config.dropout * (
            np.exp(np.arange(self.num_layers) * math.log(2) / max(1, self.num_layers - 1)) - 1
        )
        dropped = frozenset(np.flatnonzero(rng.random(self.num_layers) < chances).tolist())
        every = len(config.exits)
        count = config.exits_per_step or every
        exits = [config.exits[(self.step * count + i) % every] for i in range(count)]
        taps = frozenset({*exits, self.num_layers})
        run = LayerPlan(skip_attention=dropped, skip_mlp=dropped, taps=taps)
        hidden = self.target.read(ids, run, with_logits=False).hidden
        wanted = labels >= 0
        states = {tap: state[wanted.to(state.device)] for tap, state in hidden.items()}
        leaves = {tap: state.detach().requires_grad_() for tap, state in states.items()}
        losses = self._losses(leaves, labels[wanted], exits)
        if all(math.isfinite(loss) for loss in losses.values()):
            # Where all layers before an exit are frozen its state has nothing behind it.
            taught = [tap for tap, state in states.items() if state.requires_grad]
            torch.autograd.backward(
                [states[tap] for tap in taught], [leaves[tap].grad for tap in taught]
            )
            self.optimizer.step(self.step, self.tokens / config.total_tokens)
        self.optimizer.drop()
        return losses

    def _losses(
        self, leaves: dict[int, Tensor], labels: Tensor, exits: list[int]
    ) -> dict[str, float]:
        """Losses, and their gradients, of states [P, C] that the model's norm and head read.

        Some positions at a time: the logits of all are large.
        """
        count, weight = len(labels), self.config.exit_weight / len(exits)
        sums = dict.fromkeys(["last", *map(str, exits)], 0.0)
        for at in range(0, count, _POSITIONS):
            part = slice(at, at + _POSITIONS)

            def logits(tap: int, part: slice = part) -> Tensor:
                return self.target.after_last(leaves[tap][None, part])[0].float()

            last = logits(self.num_layers)
            own = labels[part].to(last.device)
            losses = {"last": nn.functional.cross_entropy(last, own, reduction="sum")}
            wanted = last.detach().softmax(-1) if self.config.targets == "model" else own
            for tap in exits:
                found = nn.functional.cross_entropy(logits(tap), wanted, reduction="sum")
                losses[str(tap)] = found
            total = losses["last"] + weight * torch.stack([losses[str(e)] for e in exits]).sum()
            (total / count / (1 + self.config.exit_weight)).backward()
            for name, loss in losses.items():
                sums[name] += float(loss.detach())
        return {name: round(total / count, 4) for name, total in sums.items()}

    # ------------------------------------------------------------------ files

    def _log(self, values: dict[str, float]) -> None:
        line = {"step": self.step, "tokens": self.tokens, **values}
        with open(self.out / LOG, "a") as file:
            file.write(json.dumps(line) + "\n")

    def _checkpoint(self) -> None:
        numbers = {n: getattr(self, n) for n in ("step", "tokens", "epoch", "position")}
        # In one file, since two cannot be replaced at once.
        progress = json.dumps({**numbers, "texts": _mark(self.answers), "model": self.base})
        write_tensors(self.optimizer.tensors(), self.out / CHECKPOINT, {"progress": progress})
        self.saved = time.monotonic()

    def _resume(self) -> None:
        before = read_json(self.out / CONFIG)
        now = json.loads(json.dumps(self.config.to_dict()))
        if {**before, "selfspec_version": ""} != {**now, "selfspec_version": ""}:
            raise ValueError(
                f"{self.out} holds a run with another config; choose another folder, or the "
                f"config that is in {CONFIG}."
            )
        progress = json.loads(read_header(self.out / CHECKPOINT)["progress"])
        if progress.pop("texts") != _mark(self.answers):
            raise ValueError(f"{self.out} holds a run with other texts; choose another folder.")
        if progress.pop("model", self.base) != self.base:
            raise ValueError(f"{self.out} holds a run of another model; choose another folder.")
        if not (self.out / LOG).is_file():
            raise ValueError(f"{self.out} lacks {LOG} of its run; choose another folder.")
        for name, value in progress.items():
            setattr(self, name, value)
        self.optimizer.load(load_file(self.out / CHECKPOINT))
        log = (self.out / LOG).read_text().splitlines()
        (self.out / LOG).write_text("".join(f"{line}\n" for line in log[: self.step]))


def padded(answers: Sequence[Answer], device: torch.device) -> tuple[Tensor, Tensor]:
    """Texts as one tensor.

    Returns:
        int64 [B, T] ids, rows padded at the end with 0, and int64 [B, T] labels: the token that
        comes next, where it is one of the answer, else -1.
    """
    longest = max(len(a.prompt_ids) + len(a.response_ids) for a in answers)
    ids = torch.zeros(len(answers), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -1)
    for b, answer in enumerate(answers):
        text = torch.tensor([*answer.prompt_ids, *answer.response_ids])
        ids[b, : len(text)] = text
        first = len(answer.prompt_ids)
        labels[b, first - 1 : len(text) - 1] = text[first:]
    return ids.to(device), labels.to(device)


def _embeddings(model: PreTrainedModel) -> list[nn.Parameter]:
    parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [p for part in parts if part is not None for p in part.parameters()]


def _model_mark(model: PreTrainedModel, trains_embeddings: bool) -> str:
    """What a run on it leaves as it is: its shapes, and its embeddings if they are not trained."""
    shapes = [[name, list(weight.shape)] for name, weight in model.named_parameters()]
    embedding = "" if trains_embeddings else BaseModel.of(model).embedding
    return hashlib.sha256(json.dumps([shapes, embedding]).encode()).hexdigest()


def _mark(answers: Sequence[Answer]) -> str:
    whole = json.dumps([[a.prompt_ids, a.response_ids] for a in answers])
    return hashlib.sha256(whole.encode()).hexdigest()
