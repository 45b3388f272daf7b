"""A threshold for lossy early exit whose risk is bounded: run it on prompts, and test.

The loss of a prompt is counted on texts that were generated with the threshold: what is kept unseen
becomes the text that the rest goes on from, and a bound on anything else would not be one on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import tqdm

from selfspec.config import SpecConfig
from selfspec.drafters.lossy_exit import LossyExitDrafter
from selfspec.model import SpeculativeModel
from selfspec.risk_control import Guarantee, RiskTest, choose_threshold, prompts_needed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfspec.networks.exit import ExitNetwork

THRESHOLDS = (0.99, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)

Score = Callable[[Sequence[int], Sequence[int]], float]


@dataclass(frozen=True, eq=False)
class ExitCalibration:
    """What every threshold did on the prompts, and which one is certified.

    Attributes:
        exit_layer: Layers before the exit.
        num_layers: L.
        thresholds: Those that were run, falling.
        losses: float64 [n, K], of n prompts at K thresholds, in 0..1.
        disagreement: float64 [n, K], share of tokens that are not the whole model's; the losses,
            unless there was a score.
        given: float64 [n, K], share of tokens that were kept unseen.
        guarantee: The loosest threshold that was certified; None if none was.
        advice: What to do if none was; else empty.
        network: The trained exit, if there was one.
    """

    exit_layer: int
    num_layers: int
    thresholds: tuple[float, ...]
    losses: np.ndarray
    disagreement: np.ndarray
    given: np.ndarray
    guarantee: Guarantee | None
    advice: str = ""
    network: ExitNetwork | None = None

    @property
    def layers_per_token(self) -> np.ndarray:
        """float64 [K], layers that run one after the other for a token, in the mean.

        Those of tokens kept unseen are the first ones: their deep layers run together with those
        of the next token that is not sure.
        """
        share = self.given.mean(0)
        return np.asarray(share * self.exit_layer + (1 - share) * self.num_layers)

    def drafter(self) -> LossyExitDrafter:
        """What keeps tokens at the certified threshold, to be passed to `wrap`.

        Live text is watched for tokens that differ; where losses were scores of the user's, which
        live text does not show, nobody watches.

        Raises:
            ValueError: If none was certified.
        """
        if self.guarantee is None:
            raise ValueError(f"no threshold is certified: {self.advice}")
        return LossyExitDrafter(
            self.exit_layer,
            self.guarantee.threshold,
            delta=self.guarantee.delta if self.losses is self.disagreement else None,
            network=self.network,
        )

    def __str__(self) -> str:
        """A table, and what is certified."""
        lines = ["threshold  mean loss  disagreement  kept unseen  layers a token"]
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
    exit_layer: int | None = None,
    *,
    delta: float = 0.05,
    epsilon: float = 0.1,
    thresholds: Sequence[float] = THRESHOLDS,
    test: RiskTest = "hoeffding-bentkus",
    network: ExitNetwork | None = None,
    score: Score | None = None,
    max_new_tokens: int = 64,
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
            more (see `prompts_needed`).
        exit_layer: Layers before the exit; None: what `network` was trained for.
        delta: See above.
        epsilon: See above.
        thresholds: Of the exit's probability, falling; fixed before anything is measured.
        test: "hoeffding-bentkus", or "betting", which takes fewer prompts where losses vary little.
        network: A trained exit.
        score: Of a prompt and its answer, in 0..1, 1 is best; then the loss is 1 minus that, in
            place of tokens that differ.
        max_new_tokens: Of every answer.
        run_all: Whether thresholds behind the first that fails are run, too, to be looked at.

    Raises:
        ValueError: If there are no prompts, or numbers are out of range.
    """
    rows = [torch.as_tensor(prompt, dtype=torch.int64).view(1, -1) for prompt in prompts]
    if not rows:
        raise ValueError("prompts is empty: draw a hundred or more.")
    columns: list[list[tuple[float, float, float]]] = []
    found: Guarantee | None = None
    advice, num_layers = "", 0
    with tqdm(total=len(rows) * len(thresholds), unit="prompt", desc="lossy exits") as bar:
        for k, threshold in enumerate(thresholds):
            drafter = LossyExitDrafter(exit_layer, threshold, delta=None, network=network)
            spec = SpeculativeModel(model, drafter, SpecConfig())
            num_layers = spec._target.architecture.num_layers
            columns.append([_answer(spec, ids, max_new_tokens, score, bar.update) for ids in rows])
            losses = np.array([[loss for loss, _, _ in column] for column in columns]).T
            certified = choose_threshold(losses, thresholds[: k + 1], delta, epsilon, test)
            if certified is not None and certified.threshold == threshold:
                found = certified
            elif not advice:
                advice = _advice(float(losses[:, k].mean()), threshold, delta, epsilon, len(rows))
                if not run_all:
                    break
    table = list(np.array(columns).transpose(2, 1, 0))  # three of [n, K]
    layer = exit_layer if network is None else network.config.exit_layer
    assert layer is not None
    return ExitCalibration(
        exit_layer=layer,
        num_layers=num_layers,
        thresholds=tuple(thresholds[: len(columns)]),
        losses=table[1] if score is None else table[0],
        disagreement=table[1],
        given=table[2],
        guarantee=found,
        advice=advice if found is None else "",
        network=network,
    )


def _answer(
    spec: SpeculativeModel,
    ids: Tensor,
    max_new_tokens: int,
    score: Score | None,
    tick: Callable[[], object],
) -> tuple[float, float, float]:
    """Loss, disagreement and share of tokens kept unseen of one prompt."""
    before = spec.stats.emitted, spec.stats.differing, spec.stats.given
    here = ids.to(spec.device)
    out = spec.generate(
        here,
        attention_mask=torch.ones_like(here),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=False,
    )
    stats = spec.stats
    after = stats.emitted, stats.differing, stats.given
    emitted, differing, given = (b - a for a, b in zip(before, after, strict=True))
    disagreement = differing / max(emitted, 1)
    loss = disagreement
    if score is not None:
        answer = out[0, ids.shape[1] :].tolist()
        loss = 1 - float(score(ids[0].tolist(), answer))
    tick()
    return loss, disagreement, given / max(emitted, 1)


def _advice(mean: float, threshold: float, delta: float, epsilon: float, prompts: int) -> str:
    needed = prompts_needed(mean, delta, epsilon) if mean < delta else None
    if needed is None:
        return (
            f"at {threshold} the mean loss is {mean:.3f} already; allow a larger delta, a later "
            "exit, or strict thresholds."
        )
    return (
        f"at {threshold} the mean loss is {mean:.4f} on {prompts} prompts, and about "
        f"{max(needed, prompts + 1)} would certify that."
    )
