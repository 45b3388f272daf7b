"""A threshold for lossy early exit whose risk is bounded: run it on prompts, and test.

How probable it is that an exit agrees with the whole model is learned from the first prompts, the
threshold of that probability is tested on the others: a test on prompts that anything was learned
from would not be one. The loss of a prompt is counted on texts that were generated with the
threshold: what is kept unseen becomes the text that the rest goes on from, and a bound on anything
else would not be one on that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import tqdm

from selfspec.checkpoints.base_model import BaseModel
from selfspec.config import SpecConfig
from selfspec.drafters.exit_watch import ExitWatch
from selfspec.drafters.lossy_exit import LossyExitDrafter
from selfspec.metrics import SpecStats
from selfspec.model import SpeculativeModel
from selfspec.options import check_int, check_probability
from selfspec.prompts import prompt_rows
from selfspec.risk_control import Guarantee, RiskTest, choose_threshold, prompts_needed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.networks.exit import ExitNetwork

logger = logging.getLogger("selfspec")

THRESHOLDS = (
    *(0.99, 0.97, 0.95, 0.925, 0.9, 0.875, 0.85, 0.825, 0.8, 0.775, 0.75, 0.725, 0.7),
    *(0.65, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
)
_PROBED = 8  # prompts that are to show that something is kept unseen
_LEARN, _MOST = 4, 64  # a quarter of the prompts is learned from, and no more than so many

Score = Callable[[Sequence[int], Sequence[int]], float]


@dataclass(frozen=True, eq=False)
class ExitCalibration:
    """What every threshold did on the prompts, and which one is certified.

    Attributes:
        exit_layers: Layers before each exit.
        num_layers: L.
        thresholds: Those that were run, falling.
        losses: float64 [n, K], of n prompts at K thresholds, in 0..1; prompts that were learned
            from are not among them.
        disagreement: float64 [n, K], share of tokens that are not the whole model's; the losses,
            unless there was a score.
        given: float64 [n, K], share of tokens that were kept unseen.
        layers: float64 [n, K], layers that ran one after the other for a token, in the mean. Those
            of a token kept unseen are the ones before its exit: its deep layers run together with
            those of the next token that is not sure.
        weights: By exit layer, of the probability that it agrees; None: its own probability.
        guarantee: The loosest threshold that was certified; None if none was.
        advice: What to do if none was; else empty.
        network: The trained exit, if there was one.
        base: The model.
    """

    exit_layers: tuple[int, ...]
    num_layers: int
    thresholds: tuple[float, ...]
    losses: np.ndarray = field(repr=False)
    disagreement: np.ndarray = field(repr=False)
    given: np.ndarray = field(repr=False)
    layers: np.ndarray = field(repr=False)
    weights: dict[int, list[float]] | None
    guarantee: Guarantee | None
    advice: str = ""
    network: ExitNetwork | None = None
    base: BaseModel | None = field(default=None, repr=False)

    @property
    def layers_per_token(self) -> np.ndarray:
        """float64 [K], the mean of `layers` over prompts."""
        return np.asarray(self.layers.mean(0))

    def drafter(self) -> LossyExitDrafter:
        """What keeps tokens at the certified threshold, to be passed to `wrap` or saved.

        Live text is watched for tokens that differ; where losses were scores of the user's, which
        live text does not show, nobody watches.

        Raises:
            ValueError: If none was certified.
        """
        if self.guarantee is None:
            raise ValueError(f"no threshold is certified: {self.advice}")
        drafter = LossyExitDrafter(
            self.exit_layers,
            self.guarantee.threshold,
            delta=self.guarantee.delta if self.losses is self.disagreement else None,
            network=self.network,
            weights=self.weights,
        )
        drafter.calibrated_for = self.base
        return drafter

    def __str__(self) -> str:
        """A table, and what is certified."""
        lines = [
            f"threshold  mean loss  disagreement  kept unseen  layers a token, of {self.num_layers}"
        ]
        for k, threshold in enumerate(self.thresholds):
            loss, differs, given = (
                part[:, k].mean() for part in (self.losses, self.disagreement, self.given)
            )
            lines.append(
                f"{threshold:9.3f}  {loss:9.4f}  {differs:12.4f}  {given:11.2f}  "
                f"{self.layers_per_token[k]:14.1f}"
            )
        found = self.guarantee
        if found is None:
            return "\n".join([*lines, f"no threshold is certified: {self.advice}"])
        return "\n".join(
            [
                *lines,
                f"{found.threshold}: the expected loss of a prompt is at most {found.delta}, with "
                f"probability {1 - found.epsilon:g} over {found.prompts} prompts ({found.test}).",
            ]
        )


def calibrate_exit(
    model: PreTrainedModel,
    prompts: Iterable[Tensor | Sequence[int]],
    exit_layers: int | Sequence[int] | None = None,
    *,
    delta: float = 0.05,
    epsilon: float = 0.1,
    thresholds: Sequence[float] = THRESHOLDS,
    test: RiskTest = "hoeffding-bentkus",
    network: ExitNetwork | None = None,
    score: Score | None = None,
    max_new_tokens: int = 64,
    learn: int | None = None,
    run_all: bool = False,
) -> ExitCalibration:
    """Find how sure an early layer has to be for its tokens to be kept unseen. LOSSY.

    Learn-then-Test (see `selfspec.risk_control`): thresholds are run from the strictest on, and
    the first that is not certified ends it. The guarantee is over prompts: of those that are drawn
    as these were, the mean share of tokens which are not the whole model's is at most `delta`, and
    that is true with probability `1 - epsilon` over the draw of these. It holds for greedy texts
    of up to `max_new_tokens` tokens.

    Args:
        model: In evaluation mode.
        prompts: Token ids, drawn independently from what the model is to be used on; a hundred or
            more (see `prompts_needed`), in random order.
        exit_layers: Layers before the exit, or before each of several; None: what `network` was
            trained for.
        delta: See above.
        epsilon: See above.
        thresholds: Of the probability that the whole model agrees, falling; fixed before anything
            is measured.
        test: "hoeffding-bentkus", or "betting", which takes fewer prompts where losses vary little.
        network: A trained exit.
        score: Of a prompt and its answer, in 0..1, 1 is best; then the loss is 1 minus that, in
            place of tokens that differ.
        max_new_tokens: Of every answer.
        learn: On how many prompts, the first ones, that probability is learned, from exact text;
            None: a quarter of them, 64 at most; 0: it is the exit's own.
        run_all: Whether thresholds behind the first that fails are run, too, to be looked at.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If there are no prompts to be tested on, numbers are out of range, or requests
            of this model keep nothing unseen, whatever the threshold: because they are not plainly
            greedy (`model.generation_config` may say so), or go to transformers' own loop.
    """
    thresholds = _checked_thresholds(thresholds, delta, epsilon, test)
    if score is not None and not callable(score):
        raise TypeError(f"score={score!r} must be a function of a prompt and its answer, or None.")
    check_int("max_new_tokens", max_new_tokens, 1)
    probe = SpeculativeModel(
        model, LossyExitDrafter(exit_layers, 0.0, delta=None, network=network), SpecConfig()
    )
    num_layers = probe._target.architecture.num_layers
    rows = prompt_rows(prompts, probe._target.architecture.vocabulary)
    if not rows:
        raise ValueError("prompts is empty: draw a hundred or more.")
    if learn is None:
        learn = min(len(rows) // _LEARN, _MOST)
    check_int("learn", learn, 0)
    if learn >= len(rows):
        raise ValueError(f"learn={learn}: there are {len(rows)} prompts; leave some to test on.")
    least = prompts_needed(0.0, delta, epsilon)
    if test == "hoeffding-bentkus" and least is not None and len(rows) - learn < least:
        logger.warning(
            "selfspec: %d prompts to test on are too few, even if nothing differs: %d would do%s.",
            len(rows) - learn,
            least,
            f", and {learn} to learn from" if learn else "",
        )
    _check_effect(probe, rows, max_new_tokens)
    weights = None
    if learn:
        weights = _learned(model, rows[:learn], exit_layers, network, max_new_tokens)
    rows = rows[learn:]
    columns: list[list[tuple[float, ...]]] = []
    found: Guarantee | None = None
    advice = ""
    with tqdm(total=len(rows) * len(thresholds), unit="prompt", desc="lossy exits") as bar:
        for k, threshold in enumerate(thresholds):
            drafter = LossyExitDrafter(
                exit_layers, threshold, delta=None, network=network, weights=weights
            )
            spec = SpeculativeModel(model, drafter, SpecConfig())
            columns.append([_answer(spec, ids, max_new_tokens, score, bar.update) for ids in rows])
            losses = np.array([[loss for loss, *_ in column] for column in columns]).T
            certified = choose_threshold(losses, thresholds[: k + 1], delta, epsilon, test)
            if certified is not None and certified.threshold == threshold:
                found = certified
            elif not advice:
                advice = _advice(float(losses[:, k].mean()), threshold, delta, epsilon, len(rows))
                if not run_all:
                    break
    table = list(np.array(columns).transpose(2, 1, 0))  # four of [n, K]
    return ExitCalibration(
        exit_layers=drafter.exit_layers,
        num_layers=num_layers,
        thresholds=tuple(thresholds[: len(columns)]),
        losses=table[1] if score is None else table[0],
        disagreement=table[1],
        given=table[2],
        layers=table[3],
        weights=weights,
        guarantee=found,
        advice=advice if found is None else "",
        network=network,
        base=BaseModel.of(model),
    )


def _checked_thresholds(
    thresholds: Sequence[float], delta: float, epsilon: float, test: RiskTest
) -> tuple[float, ...]:
    """As floats; all that can be wrong about a test is found before anything is run.

    Raises:
        TypeError: If something is not numbers.
        ValueError: If something is out of range, or thresholds do not fall.
    """
    if isinstance(thresholds, str) or not isinstance(thresholds, Iterable):
        raise TypeError(f"thresholds={thresholds!r} must be probabilities, falling.")
    steps = list(thresholds)
    if not steps:
        raise ValueError("thresholds is empty: leave it out for those that are usual.")
    for step in steps:
        check_probability("thresholds", step)
    choose_threshold(np.zeros((1, len(steps))), steps, delta, epsilon, test)
    return tuple(map(float, steps))


def _check_effect(probe: SpeculativeModel, rows: list[Tensor], max_new_tokens: int) -> None:
    """Refuse what would be certified because nothing happens.

    Raises:
        ValueError: If a threshold of 0 keeps nothing unseen in any of the first prompts.
    """
    for ids in rows[:_PROBED]:
        _generate(probe, ids, max_new_tokens)
        if probe.stats.fallbacks:
            raise ValueError("requests of this model go to transformers' own loop: see the log.")
        if probe.stats.given:
            return
    raise ValueError(
        "nothing would be kept unseen, whatever the threshold: answers are shorter than three "
        f"tokens (max_new_tokens={max_new_tokens}), or not plainly greedy, as by a "
        "repetition_penalty in model.generation_config."
    )


def _learned(
    model: PreTrainedModel,
    rows: list[Tensor],
    exit_layers: int | Sequence[int] | None,
    network: ExitNetwork | None,
    max_new_tokens: int,
) -> dict[int, list[float]]:
    """Weights by exit layer."""
    watch = ExitWatch(exit_layers, network)
    spec = SpeculativeModel(model, watch, SpecConfig())
    for ids in tqdm(rows, unit="prompt", desc="exits that agree"):
        _generate(spec, ids, max_new_tokens)
    return watch.weights_found()


def _generate(spec: SpeculativeModel, ids: Tensor, max_new_tokens: int) -> list[int]:
    """New tokens of a greedy answer."""
    here = ids.to(spec.device)
    out = spec.generate(
        here,
        attention_mask=torch.ones_like(here),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=False,
    )
    answer: list[int] = out[0, ids.shape[1] :].tolist()
    return answer


def _answer(
    spec: SpeculativeModel,
    ids: Tensor,
    max_new_tokens: int,
    score: Score | None,
    tick: Callable[[], object],
) -> tuple[float, ...]:
    """Loss, disagreement, share of tokens kept unseen and layers a token of one prompt."""
    spec.stats = SpecStats()
    answer = _generate(spec, ids, max_new_tokens)
    stats, emitted = spec.stats, max(spec.stats.emitted, 1)
    loss = stats.disagreement
    if score is not None:
        value = score(ids[0].tolist(), answer)
        check_probability("score(prompt, answer)", value)
        loss = 1 - float(value)
    tick()
    whole = emitted - stats.given
    layers = (whole * spec._target.architecture.num_layers + stats.given_layers) / emitted
    return loss, stats.disagreement, stats.given / emitted, layers


def _advice(mean: float, threshold: float, delta: float, epsilon: float, prompts: int) -> str:
    needed = prompts_needed(mean, delta, epsilon) if mean < delta else None
    if needed is None:
        return (
            f"at {threshold} the mean loss is {mean:.3f} already; allow a larger delta, a later "
            "exit, or strict thresholds."
        )
    return (
        f"at {threshold} the mean loss is {mean:.4f} on {prompts} prompts, and about "
        f"{max(needed, prompts + 1)} would certify that (those that are learned from not counted)."
    )
