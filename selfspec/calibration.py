"""Learning, before there are users, what a wrapper otherwise learns from their requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils.logging import tqdm

from selfspec.acceptance_model import AcceptanceModel, Reliability
from selfspec.metrics import SpecStats
from selfspec.prompts import prompt_rows

if TYPE_CHECKING:
    from selfspec.model import SpeculativeModel

_PREFIX = "acceptance of "
_FEW = 50  # tokens, with which an error of a tenth is chance


@dataclass(frozen=True)
class Calibration:
    """What is known after some prompts.

    Attributes:
        reliability: By what drafts (an exit, the layers that are left), what was said of the
            likeliest draft tokens beside what became of them; of the second half of the prompts.
        notes: What was found out, in words: which exit or skip set pays, or that none does.
        stats: Of the second half of the prompts.
    """

    reliability: dict[str, Reliability] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def expected_calibration_error(self) -> float:
        """Over all draft tokens, 0 if there were none."""
        counts = {part: sum(found.counts) for part, found in self.reliability.items()}
        errors = (
            counts[part] * found.expected_calibration_error
            for part, found in self.reliability.items()
        )
        return sum(errors) / max(sum(counts.values()), 1)

    def __str__(self) -> str:
        """A report."""
        parts = [f"{self.stats}", *self.notes]
        for part, found in self.reliability.items():
            error = f"expected calibration error {found.expected_calibration_error:.3f}"
            few = ", too few to say" if (count := sum(found.counts)) < _FEW else ""
            parts.append(f"{part}: {error} over {count} tokens{few}\n{found}")
        return "\n".join(parts)


def calibrate(
    spec: SpeculativeModel,
    prompts: Iterable[Tensor | Sequence[int]],
    *,
    max_new_tokens: int = 64,
    **options: Any,
) -> Calibration:
    """Generate answers to prompts, so that the wrapper knows its drafts when requests come.

    It learns what it learns from any request: what steps take, which exit or skip set pays, how
    often copies hold, and how probable it is that a draft token of early exit or layer skip is
    accepted, by margin, entropy and depth. The last is also reported: what was said of draft tokens
    beforehand, beside what became of them.

    Args:
        spec: What `wrap` returned, with `adaptive` on.
        prompts: Token ids, int64 [T] or lists; like those to come.
        max_new_tokens: Of every answer.
        **options: Of `generate`, as requests will have them; greedy if nothing is said.

    Raises:
        TypeError: If `spec` is no wrapper, or a prompt no token ids.
        ValueError: If there are not two prompts, one is empty or has ids that the model does not
            have, or the wrapper does not adapt.

    Example:
        >>> print(selfspec.calibrate(spec, [tokenizer(text)["input_ids"] for text in texts]))
    """
    if not hasattr(spec, "options"):
        raise TypeError(f"spec is a {type(spec).__name__}; pass what wrap returned.")
    if not spec.options.adaptive:
        raise ValueError("adaptive=False: this wrapper learns nothing; wrap the model without it.")
    rows = prompt_rows(prompts, spec._target.architecture.vocabulary)
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} prompts are too few: one half is learned, one is judged.")
    settings = {"do_sample": False, **options, "max_new_tokens": max_new_tokens}
    before = spec.stats
    try:
        for at, ids in enumerate(tqdm(rows, unit="prompt", desc="calibrate")):
            if at == len(rows) // 2:
                before, spec.stats = spec.stats, SpecStats()
                for model in _models(spec).values():
                    model.forget_reliability()
            here = ids.to(spec.device)
            spec.generate(here, attention_mask=torch.ones_like(here), **settings)
        judged = SpecStats() + spec.stats
    finally:
        if spec.stats is not before:
            spec.stats = before + spec.stats
    reliability = {part: model.reliability for part, model in _models(spec).items()}
    return Calibration(
        {part: found for part, found in reliability.items() if found.counts},
        tuple(spec.costs.notes.values()),
        judged,
    )


def _models(spec: SpeculativeModel) -> dict[str, AcceptanceModel]:
    return {
        name.removeprefix(_PREFIX): model
        for name, model in spec.costs.kept.items()
        if isinstance(model, AcceptanceModel)
    }
