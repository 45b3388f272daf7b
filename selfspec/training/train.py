"""Training a draft: the loop, its log, and checkpoints from which a killed run goes on.

Nothing in a run is random but what the seed and the number of the pass tell, so that a run which
was stopped and started again is, step by step, the run that was not stopped.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.logging import tqdm

from selfspec.checkpoints.find import load
from selfspec.checkpoints.folder import save
from selfspec.checkpoints.tensors import write_json, write_tensors
from selfspec.networks.heads import HeadsNetwork
from selfspec.target import Target
from selfspec.training.batches import Batch, ahead, plan, split
from selfspec.training.estimate import Estimate, estimate
from selfspec.training.initial import Network, attach_head, initial_network
from selfspec.training.objectives import Objective
from selfspec.training.optimizer import Optimizer
from selfspec.training.states import ShardedStates, States

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.training.config import TrainConfig

logger = logging.getLogger("selfspec")

CONFIG, LOG, CHECKPOINT = "train_config.json", "log.jsonl", "checkpoint.safetensors"
BEST, LAST = "best", "last"
_SMOOTH = 0.95  # of the running means that are shown
# What may differ between a run and its continuation.
_FREE = {"checkpoint_seconds", "selfspec_version"}


def train(
    config: TrainConfig,
    model: PreTrainedModel,
    states: States | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    initial: Network | None = None,
    license: str | None = None,  # the word that model cards use
    say: Callable[[str], object] = logger.info,
) -> Network:
    """Train a draft for `model`, or go on with a run that was stopped.

    In `out`: `best/` and `last/`, drafts in the own format, config and estimate with them;
    `log.jsonl`, a line every `config.log_every` steps and one for every estimate;
    `train_config.json`; and `checkpoint.safetensors` to go on from.

    Args:
        config: What to train, on how much, and how.
        model: The target; it is only read.
        states: Of answered prompts, or the folder of `write_states`.
        out: Folder of this run.
        initial: Go on from this network, of its own sizes whatever the config says, instead of one
            that is made anew. It is not changed.
        license: Of the draft, to be written beside it.
        say: Called with the config, estimates, and what else is worth a line.

    Returns:
        The network that was best on held-out texts, in evaluation mode.

    Raises:
        ValueError: If states and model, or `out` and config, do not belong together; if a layer
            that the network reads is not among the states; or if no draft can be used with this
            model.
    """
    # A caller's no_grad or inference_mode is about the caller's model.
    with torch.inference_mode(False), torch.enable_grad():
        found = ShardedStates(states, model) if isinstance(states, str | os.PathLike) else states
        return _Run(config, model, found, Path(out), initial, license, say).finish()


class _Run:
    """One training, from its first step or from its checkpoint to its end."""

    def __init__(
        self,
        config: TrainConfig,
        model: PreTrainedModel,
        states: States,
        out: Path,
        initial: Network | None,
        license: str | None,
        say: Callable[[str], object],
    ) -> None:
        self.config, self.model, self.states, self.out = config, model, states, out
        self.license, self.say = license, say
        architecture = Target(model).architecture
        if architecture.support == "none":
            raise ValueError(f"no draft can be used with this model: {architecture.reason}.")
        network = initial_network(config, model, architecture, states.token_counts)
        if initial is not None:
            network = _copy(initial, type(network))
        self.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.network = network.to(self.device, self.dtype).train()
        attach_head(self.network, architecture)
        self.objective = Objective(self.network, architecture, config)
        if missing := sorted(set(self.objective.taps) - set(states.taps)):
            raise ValueError(
                f"the network reads layers {missing}, and the states are of {list(states.taps)}: "
                "write states with these taps, or choose others."
            )
        self.optimizer = Optimizer(self.network, config)
        self.rows, self.held = split(
            states.prompts, config.held_out, config.max_held_out, config.seed
        )
        self.step = self.tokens = self.epoch = self.position = self.skipped = 0
        self.best = -math.inf
        self.shown: list[float] = []
        out.mkdir(parents=True, exist_ok=True)
        if (out / CHECKPOINT).is_file():
            self._resume()
        else:
            (out / LOG).unlink(missing_ok=True)
            write_json(config.to_dict(), out / CONFIG)
        parameters = sum(p.numel() for p in self.network.parameters())
        self.say(f"{json.dumps(config.to_dict())}\n{parameters:,} parameters, step {self.step}")
        self.saved = time.monotonic()

    # ------------------------------------------------------------------ the loop

    def finish(self) -> Network:
        """Train until all tokens have been seen."""
        total, is_over = self.config.total_tokens, self.tokens >= self.config.total_tokens
        start, before = time.monotonic(), self.tokens
        with tqdm(total=total, initial=self.tokens, unit="token", desc=self.config.kind) as bar:
            while self.tokens < total:
                for batch in self._batches():
                    self._step(batch)
                    bar.update(batch.num_tokens)
                    bar.set_postfix_str(self._line())
                    if self.step % self.config.log_every == 0:
                        rate = (self.tokens - before) / (time.monotonic() - start)
                        self._log({"tokens_per_second": round(rate, 1), **self._numbers()})
                    if self.tokens >= total:
                        break
                    if self.step % self.config.evaluate_every == 0:
                        self._evaluate()
                    if time.monotonic() - self.saved >= self.config.checkpoint_seconds:
                        self._checkpoint()
        if not is_over:
            self._evaluate()
            self._save(LAST, self.last)
            self._checkpoint()
        if self.best <= 1.0:
            self.say(
                f"not one draft token was right after {self.tokens:,} tokens in {self.step} steps: "
                "this draft gains nothing. Train on more tokens, of more texts."
            )
        return self._best_network()

    def _batches(self) -> Iterator[Batch]:
        """What is left of this pass; the place in it counts up as batches are given out."""
        every = plan(
            self.rows,
            self.states.lengths,
            self.config.tokens_per_batch,
            self.config.seed,
            self.epoch,
        )
        for batch in self._read(every[self.position :]):
            self.position += 1
            if self.position == len(every):
                self.epoch, self.position = self.epoch + 1, 0
            yield batch

    def _read(self, batches: list[list[int]]) -> Iterator[Batch]:
        def read(rows: list[int]) -> Batch:
            batch: Batch = self.states.read(rows, self.objective.taps)
            return batch

        # On a CPU a second thread takes time from the first: the threads of its operations spin.
        apart = self.states.in_memory and self.device.type != "cpu"
        found = ahead(read, batches) if apart else map(read, batches)
        for batch in found:
            yield batch.to(self.device, self.dtype)

    def _step(self, batch: Batch) -> None:
        losses = self.objective(batch)
        decay = self.config.step_decay
        total = torch.stack([found.loss * decay**s for s, found in enumerate(losses)]).sum()
        used = any(found.weight for found in losses) and bool(total.isfinite())
        if used:
            total.backward()
            used = self.optimizer.step(self.step, self.tokens / self.config.total_tokens)
        self.optimizer.drop()
        self.step += 1
        self.tokens += batch.num_tokens
        if not used:
            self.skipped += 1
            return
        numbers = [float(f.loss.detach()) for f in losses] + [f.hits for f in losses]
        self.shown = [
            _SMOOTH * old + (1 - _SMOOTH) * new
            for old, new in zip(self.shown or numbers, numbers, strict=True)
        ]

    # ------------------------------------------------------------------ what it tells

    def _numbers(self) -> dict[str, Any]:
        depths = self.objective.depths
        return {
            "loss": self.shown[:depths],
            "acceptance": self.shown[depths:],
            "skipped": self.skipped,
        }

    def _line(self) -> str:
        depths = self.objective.depths
        loss, hits = self.shown[:depths], self.shown[depths:]
        return f"loss {_rounded(loss)} hits {_rounded(hits)}"

    def _log(self, values: dict[str, Any]) -> None:
        with open(self.out / LOG, "a") as file:
            file.write(json.dumps({"step": self.step, "tokens": self.tokens, **values}) + "\n")

    def _evaluate(self) -> None:
        batches = plan(self.held, self.states.lengths, self.config.tokens_per_batch, 0, 0)
        self.network.eval()
        self.last = estimate(self.objective, self._read(batches), self.config.ranks)
        self.network.train()
        if isinstance(self.network, HeadsNetwork):
            self.network.accuracies = self.last.ranks  # what its trees are fitted to
        self._log({"held_out": self.last.to_dict()})
        self.say(
            f"step {self.step}: held-out acceptance {_rounded(self.last.acceptance)}, "
            f"tau {self.last.tau:.3f} ({self.last.positions} positions)"
        )
        if self.last.tau > self.best:
            self.best = self.last.tau
            self._save(BEST, self.last)

    # ------------------------------------------------------------------ files

    def _save(self, name: str, found: Estimate) -> None:
        training = {**self.config.to_dict(), "step": self.step, "tokens": self.tokens}
        save(
            self.network,
            self.out / name,
            base=self.model,
            license=self.license,
            training=training,
            evaluation={"held_out": found.to_dict()},
        )

    def _checkpoint(self) -> None:
        place = {
            "config": self.config.to_dict(),
            "states": self.states.identity,
            "step": self.step,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "position": self.position,
            "skipped": self.skipped,
            "best": None if math.isinf(self.best) else self.best,
            "shown": self.shown,
        }
        write_tensors(self.optimizer.tensors(), self.out / CHECKPOINT, {"place": json.dumps(place)})
        self.saved = time.monotonic()

    def _resume(self) -> None:
        path = self.out / CHECKPOINT
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                place = json.loads(file.metadata()["place"])
                tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{path} is broken ({error}): delete it to train anew, and copy {self.out / BEST} "
                "first, to keep the draft that was best."
            ) from error
        mine, theirs = self.config.to_dict(), place["config"]
        changed = [k for k in mine if k not in _FREE and _listed(mine[k]) != theirs.get(k)]
        if changed:
            values = ", ".join(f"{k}={mine[k]!r} (before: {theirs.get(k)!r})" for k in changed)
            raise ValueError(
                f"{self.out} has a run with another config: {values}. Choose another folder (out=, "
                "--out of train_drafts.py), with initial= (--initial) to go on from its weights."
            )
        if place["states"] != self.states.identity:
            raise ValueError(
                f"{self.out} has a run on other states: choose another folder (out=, --out of "
                "train_drafts.py), with initial= (--initial) to go on from its weights."
            )
        self.optimizer.load(tensors)
        for name in ("step", "tokens", "epoch", "position", "skipped", "shown"):
            setattr(self, name, place[name])
        self.best = -math.inf if place["best"] is None else place["best"]
        _cut_log(self.out / LOG, self.step)

    def _best_network(self) -> Network:
        network: Any = load(self.out / BEST)
        network.to(self.device, self.dtype)
        attach_head(network, self.objective.architecture)
        best: Network = network.eval()
        return best


def _copy(network: Network, expected: type[Network]) -> Network:
    """A network of its own with the same weights, in float32: what training starts from.

    Raises:
        ValueError: If it is of another kind than the config says.
    """
    if not isinstance(network, expected):
        raise ValueError(
            f"initial is a {type(network).__name__}, and the config's kind makes a "
            f"{expected.__name__}."
        )
    made: Any = type(network)(network.config)  # type: ignore[arg-type]
    made.load_state_dict(network.state_dict())
    copy: Network = made
    return copy


def _cut_log(path: Path, step: int) -> None:
    """Drop lines about steps that will be made again, and one that was half written."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] > step:
                break
        except json.JSONDecodeError:
            break
        kept.append(line + "\n")
    path.write_text("".join(kept))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _rounded(values: Any) -> str:
    return " ".join(f"{value:.3f}" for value in values)
