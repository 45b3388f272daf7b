"""Finding the sublayers that a model's drafts can do without.

Zhang et al. 2023 (Draft & Verify), https://arxiv.org/abs/2309.08168, and Xia et al. 2024 (SWIFT),
https://arxiv.org/abs/2410.06916, search by matches in one parallel pass, at random and by Bayesian
optimisation; CLaSp by similarity of states. What is maximised here is not the matches but the
tokens a second that they would give with the times of this model on this machine, and it may turn
out that no set gives any.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from transformers.utils.logging import tqdm

from selfspec.checkpoints.base_model import sample
from selfspec.checkpoints.skip_sets import FoundSkipSet
from selfspec.layer_times import LayerTimes, measure_layer_times
from selfspec.options import check_int, check_probability
from selfspec.replay import Replay, ready, replay_texts
from selfspec.skip_set import SkipSet
from selfspec.target import Target
from selfspec.training.bayesian import SetProcess
from selfspec.training.skip_similarity import similar_sets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.training.answers import Answer

Method = Literal["similarity", "greedy", "bayesian"]
_FINALISTS = 8  # sets that are scored on texts that chose none of them
_SIMILAR_ROWS = 8  # texts that the dynamic programming looks at
_RANDOM = 12  # sets that the process starts from if nothing else was tried
_POOL = 200  # sets among which the process chooses
# Of a plain step: drafts that take longer are hardly faster than plain even where all are right,
# and leaving out next to nothing is what is least slow on a model that no set pays on.
_LONGEST_STEP = 0.8


@dataclass(frozen=True)
class _Score:
    acceptance: float
    speedup: float
    length: int


def find_skip_set(
    model: PreTrainedModel,
    answers: Sequence[Answer],
    *,
    methods: Sequence[Method] = ("similarity", "greedy", "bayesian"),
    evaluations: int = 200,
    texts: int = 24,
    window: int = 8,
    log: str | os.PathLike[str] | None = None,
    times: LayerTimes | None = None,
    seed: int = 0,
    say: Callable[[str], object] = lambda line: None,
) -> FoundSkipSet:
    """Search for the skip set with which layer skip is fastest, if there is one.

    Half of the texts judge the sets that are tried; the best of these are then scored on the other
    half, since the best of many looks better than it is.

    Args:
        model: In evaluation mode. It is only read.
        answers: Texts that are like those to be generated: `read_answers` of what
            `answer_prompts` has written, the model's own words.
        methods: Where sets come from, one after the other: dynamic programming by cosine
            similarity; greedily, one more sublayer at a time; a Gaussian process over all that was
            tried (it starts from random sets if nothing was).
        evaluations: Sets that are tried, all methods together.
        texts: Texts of each half.
        window: Tokens that are compared in every text, 1..32.
        log: JSONL of what was tried; another call with the same arguments goes on from it.
        times: Of the model's parts; measured if None.
        seed: Of all that is random.
        say: Called with what is worth a line.

    Returns:
        The best set that was found, what it is worth, and what it would take if that is less than
        nothing; `save` writes it where `wrap` finds it.

    Raises:
        TypeError: If `seed` is no int.
        ValueError: If there are not enough texts, an option is out of range, the model cannot run
            without some of its layers, or `log` is of another search.
    """
    if unknown := [m for m in methods if m not in get_args(Method)]:
        known = ", ".join(map(repr, get_args(Method)))
        raise ValueError(f"methods has {unknown[0]!r}; choose from {known}.")
    for name, value, most in (
        ("evaluations", evaluations, 10**6),
        ("texts", texts, 10**6),
        ("window", window, 32),
    ):
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name}={value!r} must be an int in 1..{most}.")
    check_int("seed", seed, 0)
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first.")
    target = Target(model)
    architecture = target.architecture
    fault = architecture.reason if architecture.support == "none" else architecture.layers_fault
    if fault:
        raise ValueError(f"layers cannot be left out of this model: {fault}.")
    if "similarity" in methods and not architecture.resumable:
        say("similarity: a forward of this model cannot start at a later layer; left out.")
        methods = [method for method in methods if method != "similarity"]
    chosen = _texts(answers, 2 * texts, window, seed)
    search = _Search(target, chosen, window, times, log, evaluations, seed)
    with ready([search.replay]), search.bar:
        for method in methods:
            getattr(search, f"by_{method}")()
            if best := search.best(1):
                say(f"{method}: {len(search.scores)} sets, best {_line(best[0], search)}")
        found = search.result()
    say(str(found))
    return found


class _Search:
    """What was tried, and what it scored."""

    def __init__(
        self,
        target: Target,
        texts: list[list[int]],
        window: int,
        times: LayerTimes | None,
        log: str | os.PathLike[str] | None,
        evaluations: int,
        seed: int,
    ) -> None:
        self.target, self.evaluations, self.texts = target, evaluations, texts[: len(texts) // 2]
        self.rng = np.random.default_rng(seed)
        self.scores: dict[SkipSet, _Score] = {}
        half = len(texts) // 2
        weights = [[name, sample(weight)] for name, weight in target.model.named_parameters()]
        about = json.dumps([weights, texts, window, seed])
        mark = hashlib.sha256(about.encode()).hexdigest()[:16]
        self.log = None if log is None else Path(log)
        self.known = self._read(mark)
        usual = sorted(texts, key=len)[half]
        recorded = self.known.pop("times", None)
        if times is None and recorded is not None:
            times = LayerTimes.from_dict(recorded)
        self.times = times or measure_layer_times(target, usual)
        if self.log is not None and recorded is None:
            self._write({"search": mark, "times": self.times.to_dict()})
        self.replay = replay_texts(target, texts[:half], window)
        self.check = replay_texts(target, texts[half:], window)
        self.parts = _parts(target)
        self.bar = tqdm(total=evaluations, unit="set", desc="skip sets")

    # ------------------------------------------------------------------ trying

    @property
    def left(self) -> int:
        return self.evaluations - len(self.scores)

    def score(self, skip: SkipSet) -> _Score:
        """Of a set, on the texts that judge; tried once."""
        if skip not in self.scores:
            key = json.dumps(skip.to_dict())
            acceptance = self.known.get(key)
            if acceptance is None:
                acceptance = _acceptance(self.replay, skip)
                self._write({"skip_set": skip.to_dict(), "acceptance": acceptance})
            self.scores[skip] = _Score(acceptance, *self.times.speedup(skip, acceptance))
            self.bar.update()
            self.bar.set_postfix_str(f"best {self.scores[self.best(1)[0]].speedup:.3f}x")
        return self.scores[skip]

    def best(self, count: int) -> list[SkipSet]:
        """The fastest sets, those that take too long to draft behind all others."""
        return sorted(self.scores, key=self._rank)[:count]

    def _rank(self, skip: SkipSet) -> tuple[bool, float]:
        return self.times.draft_step(skip) > _LONGEST_STEP, -self.scores[skip].speedup

    def by_similarity(self) -> None:
        """Sets of all sizes up to three quarters of the model, evenly."""
        rows = min(_SIMILAR_ROWS, len(self.texts))
        most = len(self.parts) * 3 // 4
        few = replay_texts(self.target, self.texts[:rows], self.replay.window)
        found = similar_sets(few, most)
        count = max(1, min(self.left // 2, len(found)))
        for at in np.unique(np.linspace(0, len(found) - 1, count).round().astype(int)):
            if self.left:
                self.score(found[at])

    def by_greedy(self) -> None:
        """One more part at a time: the one that costs least acceptance for the time it saves.

        Losses are looked at again only where a part comes up as the next one: they seldom shrink
        as more is left out (lazy evaluation, Minoux 1978).
        """
        current, acceptance, rounds = SkipSet(), 1.0, 0
        budget = max(1, self.left if self.left <= len(self.parts) else self.left * 2 // 3)
        last = len(self.scores) + budget
        queue = [(-np.inf, 0, at) for at in range(len(self.parts))]
        heapq.heapify(queue)
        while queue and self.left and len(self.scores) < last:
            loss, when, at = heapq.heappop(queue)
            larger = _union(current, self.parts[at])
            if when != rounds or loss == -np.inf:
                score = self.score(larger)
                saved = self.times.draft_step(current) - self.times.draft_step(larger)
                lost = float(np.log(acceptance / max(score.acceptance, 1e-3)))
                heapq.heappush(queue, (lost / max(saved, 1e-6), rounds, at))
                continue
            current, acceptance, rounds = larger, self.scores[larger].acceptance, rounds + 1
            if acceptance < 0.1:
                return

    def by_bayesian(self) -> None:
        """Where a Gaussian process over all that was tried expects most improvement."""
        for _ in range(min(_RANDOM - len(self.scores), self.left)):
            self.score(self._random())
        while self.left:
            tried = list(self.scores)
            process = SetProcess(
                np.stack([self._vector(skip) for skip in tried]),
                np.array([self.scores[skip].speedup for skip in tried]),
            )
            best = self.scores[self.best(1)[0]].speedup
            pool = [skip for skip in self._near() if skip not in self.scores]
            if not pool:
                return
            vectors = np.stack([self._vector(skip) for skip in pool])
            self.score(pool[int(np.argmax(process.expected_improvement(vectors, best)))])

    def _near(self) -> list[SkipSet]:
        """Sets that differ a little from the best ones, and a few at random."""
        best = self.best(6)
        found = {self._random() for _ in range(_POOL // 10)}
        while len(found) < _POOL:
            vector = self._vector(best[self.rng.integers(len(best))])
            for at in self.rng.choice(len(vector), self.rng.integers(1, 5), replace=False):
                vector[at] = not vector[at]
            found.add(self._set(vector))
            if len(self.parts) < 8 and len(found) >= 2 ** len(self.parts) - 1:
                break
        found = {s for s in found if s and self.times.draft_step(s) <= _LONGEST_STEP}
        return sorted(found, key=lambda skip: json.dumps(skip.to_dict()))

    def _random(self) -> SkipSet:
        share = self.rng.uniform(0.1, 0.6)
        return self._set(self.rng.random(len(self.parts)) < share)

    def _vector(self, skip: SkipSet) -> np.ndarray:
        return np.array([p.attention <= skip.attention and p.mlp <= skip.mlp for p in self.parts])

    def _set(self, vector: np.ndarray) -> SkipSet:
        found = SkipSet()
        for part, is_in in zip(self.parts, vector, strict=True):
            found = _union(found, part) if is_in else found
        return found

    # ------------------------------------------------------------------ the end

    def result(self) -> FoundSkipSet:
        """The best of the best on texts that did not choose them."""
        if not self.scores:
            raise ValueError("nothing was tried: name a method.")
        checked = {}
        for skip in self.best(_FINALISTS):
            acceptance = _acceptance(self.check, skip)
            checked[skip] = _Score(acceptance, *self.times.speedup(skip, acceptance))
        self.scores |= checked
        winner = min(checked, key=self._rank)
        score = checked[winner]
        return FoundSkipSet.of(
            self.target.model,
            winner,
            acceptance=score.acceptance,
            compared=self.check.following.numel(),
            length=score.length,
            times=self.times,
            tried=len(self.scores),
            frontier=self._frontier(),
        )

    def _frontier(self) -> tuple[tuple[float, float, float | None], ...]:
        """By time of a draft token: the best acceptance that was seen, and the one needed."""
        best: dict[int, SkipSet] = {}
        for skip, score in self.scores.items():
            tenth = int(self.times.draft_step(skip) * 10)
            if tenth not in best or score.acceptance > self.scores[best[tenth]].acceptance:
                best[tenth] = skip
        return tuple(
            (
                round(self.times.draft_step(skip), 3),
                round(self.scores[skip].acceptance, 3),
                self.times.needed(skip),
            )
            for _, skip in sorted(best.items())
        )

    # ------------------------------------------------------------------ files

    def _read(self, mark: str) -> dict[str, Any]:
        if self.log is None or not self.log.is_file():
            return {}
        found: dict[str, Any] = {}
        for at, text in enumerate(_lines(self.log), 1):
            try:
                line = json.loads(text)
                if "search" not in line:
                    check_probability("acceptance", line["acceptance"])
                    found[json.dumps(line["skip_set"])] = line["acceptance"]
                    continue
                LayerTimes.from_dict(line["times"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"log={str(self.log)!r}, line {at}, is none of a search ({error}): name "
                    "another file."
                ) from error
            if line["search"] != mark:
                raise ValueError(
                    f"log={str(self.log)!r} is of a search on another model, over other texts or "
                    "with another window or seed: name another file."
                )
            found["times"] = line["times"]
        return found

    def _write(self, line: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log, "a") as file:
                file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> Iterator[str]:
    """Of a JSONL file; a last line that was only half written is dropped."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    if len(whole) + 1 < path.stat().st_size:
        os.truncate(path, len(whole) + 1 if whole else 0)
    yield from whole.decode(errors="replace").splitlines()


def _texts(answers: Sequence[Answer], count: int, window: int, seed: int) -> list[list[int]]:
    """Beginnings of different answers, each ending `window` tokens or more into the answer."""
    by_prompt = {tuple(a.prompt_ids): a for a in answers if len(a.response_ids) >= window}
    if len(by_prompt) < count:
        raise ValueError(
            f"{len(by_prompt)} prompts with answers of {window} tokens or more are too few: "
            f"{count} are needed, half of them to check what the others choose; let the model "
            "answer more prompts, or lower texts."
        )
    rng = np.random.default_rng([seed, count])
    usable = [by_prompt[key] for key in sorted(by_prompt)]
    found = []
    for at in rng.permutation(len(usable))[:count]:
        answer = usable[at]
        end = int(rng.integers(window, len(answer.response_ids) + 1))
        ids = [*answer.prompt_ids, *answer.response_ids[:end]]
        found.append(ids if len(ids) > window else [*answer.prompt_ids[-1:], *ids])
    return found


def _parts(target: Target) -> list[SkipSet]:
    """What can be left out alone."""
    architecture, found = target.architecture, []
    for layer in range(architecture.num_layers):
        own = frozenset({layer})
        may_skip = not architecture.borrowers or layer in architecture.borrowers
        if len(architecture.sublayers[layer]) == 2:
            found += [SkipSet(attention=own)] if may_skip else []
            found.append(SkipSet(mlp=own))
        elif may_skip:
            found.append(SkipSet(own, own))
    return found


def _union(one: SkipSet, other: SkipSet) -> SkipSet:
    return SkipSet(one.attention | other.attention, one.mlp | other.mlp)


def _acceptance(replay: Replay, skip: SkipSet) -> float:
    return float(replay.hits(skip.plan).float().mean())


def _line(skip: SkipSet, search: _Search) -> str:
    score = search.scores[skip]
    return f"{score.speedup:.3f}x at acceptance {score.acceptance:.2f}, without {skip}"
