"""Real early exit, which is LOSSY: tokens that an early layer is sure of are kept unseen.

Schuster et al. 2022 (CALM), https://arxiv.org/abs/2207.07061. The deep layers that such tokens left
out are run for all of them at once when the next token is not sure (their keys and values have to
be there for it); what those layers say of them comes too late to change the text, but it is
counted: that is the disagreement in the statistics, and what the drift monitor watches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from selfspec.acceptance_model import FEATURES, features, logistic
from selfspec.drafters.early_exit import EarlyExitDrafter
from selfspec.drafters.exit_cascade import draft_cascade
from selfspec.drift import DRIFT, DriftMonitor
from selfspec.options import check_int, check_probability
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedModel
    from typing_extensions import Self

    from selfspec.architectures import Architecture
    from selfspec.checkpoints.base_model import BaseModel
    from selfspec.drafters.candidates import Candidates
    from selfspec.networks.exit import ExitNetwork
    from selfspec.state import Acceptance, DecodeState, TargetOutput

logger = logging.getLogger("selfspec")

_EXACT = 3  # alarms after which nothing is kept unseen any more


class LossyExitDrafter(EarlyExitDrafter):
    """LOSSY: the text is no longer the model's. Keeps what an early layer is sure of.

    Takes effect in requests that are plainly greedy; with sampling or processors the same drafts
    are verified, and the text is exact.

    Args:
        exit_layers: How many layers run before an exit, a count, or several, rising: a token goes
            on to the next exit where the one before is not sure enough. None: what `network` was
            trained for.
        threshold: Least probability of a token that is kept; 1 keeps none. `calibrate_exit` finds
            one with a guarantee.
        max_exits: Most tokens in a row that are kept unseen.
        delta: Share of tokens that may differ. Where live text has more of them, the threshold is
            raised, and after three such alarms decoding is plain; both are logged. None: nobody
            watches.
        network: A trained exit, for one exit layer.
        weights: By exit layer, what makes the probability that the whole model agrees: weights of
            `selfspec.acceptance_model.features`, as `calibrate_exit` fits them. None: the exit's
            own probability, which means something else at every exit.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If a number is out of range, exits do not rise or are not those of `weights`, or
            neither exits nor a network are given.
    """

    is_lossy = True
    sizes_itself = True

    def __init__(
        self,
        exit_layers: int | Sequence[int] | None = None,
        threshold: float = 0.95,
        max_exits: int = 8,
        delta: float | None = 0.05,
        network: ExitNetwork | None = None,
        weights: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        check_int("max_exits", max_exits, 1)
        check_probability("threshold", threshold)
        if delta is not None:
            check_probability("delta", delta)
        if delta is not None and not 0 < delta < 1:
            raise ValueError(f"delta={delta} must be more than 0 and less than 1.")
        exits = _checked(exit_layers)
        single = exits[0] if len(exits) == 1 else None
        if len(exits) > 1 and network is not None:
            raise ValueError(f"exit_layers={exits}: a trained exit is for one of them.")
        super().__init__(single, max_exits, branches=1, network=network)
        self.exit_layers = exits or ((self.exit_layer,) if self.exit_layer is not None else ())
        if not self.exit_layers:
            raise ValueError("exit_layers is missing: name layers, or pass a trained network.")
        self.threshold = float(threshold)
        self.delta = delta
        self.weights = None if weights is None else _fitting(weights, self.exit_layers)
        self.calibrated_for: BaseModel | None = None  # the model that threshold and weights fit
        self._before: list[int] = []  # length of every row when this request drafted last

    def bind(self, architecture: Architecture) -> None:
        """Check against a model.

        Raises:
            ValueError: If the model has fewer layers, or cannot go on from an exit.
        """
        super().bind(architecture)
        count, deepest = architecture.num_layers, self.exit_layers[-1]
        if deepest > count:
            raise ValueError(
                f"exit_layers={list(self.exit_layers)} is out of range: the model has {count} "
                f"layers, choose 1..{count}."
            )
        if len(self.exit_layers) > 1 and not architecture.resumable:
            raise ValueError(
                f"exit_layers={list(self.exit_layers)}: this model's layers cannot be resumed, "
                "which several exits ask for; name one."
            )

    def save_pretrained(
        self,
        folder: str | PathLike[str],
        *,
        base: PreTrainedModel | BaseModel | None = None,
        **card: Any,
    ) -> Path:
        """Write exits, threshold and weights to `lossy_exit.json`, and the network if there is one.

        Args:
            folder: Is made if need be.
            base: The model; may be left out for what `calibrate_exit` found or was loaded.
            **card: As for a trained draft, if there is a network.

        Returns:
            The folder.

        Raises:
            ValueError: If the model is not known.
        """
        from selfspec.checkpoints.base_model import BaseModel
        from selfspec.checkpoints.lossy_exits import write_lossy_exit

        known = self.calibrated_for
        if base is not None:
            known = base if isinstance(base, BaseModel) else BaseModel.of(base)
        if known is None:
            raise ValueError("base is missing: pass the model that the threshold was found on.")
        if self.network is not None:
            super().save_pretrained(folder, base=base, **card)
        own = {
            "exit_layers": list(self.exit_layers),
            "threshold": self.threshold,
            "max_exits": self.max_draft_tokens,
            "delta": self.delta,
            "weights": None
            if self.weights is None
            else {layer: row.tolist() for layer, row in self.weights.items()},
        }
        return write_lossy_exit(own, Path(folder), known).parent

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        *,
        model: PreTrainedModel | None = None,
        strict_base: bool = True,
        **options: Any,
    ) -> Self:
        """Load what `save_pretrained` wrote, or a trained exit alone.

        Args:
            source: A folder, or a repository on the Hugging Face Hub.
            model: The model that it is for, to be checked at once; else `wrap` does.
            strict_base: Whether what was found on another model is refused.
            options: Of the drafter, in place of those that are saved.

        Raises:
            ValueError: If there is nothing of the kind, or it is of another model.
        """
        from selfspec.checkpoints.base_model import check_base
        from selfspec.checkpoints.find import has_network, local
        from selfspec.checkpoints.lossy_exits import FILE, read_lossy_exit

        folder = local(source)
        if not (folder / FILE).is_file():
            return super().from_pretrained(folder, model=model, strict_base=strict_base, **options)
        saved, base = read_lossy_exit(folder)
        if model is not None:
            check_base(base, model, strict_base)
        options = {**saved, **options}
        if not has_network(folder):
            found = cls(**options)
        else:
            del options["exit_layers"]  # the network's
            found = super().from_pretrained(folder, model=model, strict_base=strict_base, **options)
        found.calibrated_for = base if strict_base else None
        return found

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """A chain, and how much of it is to be kept."""
        alarms = self._alarms(state)
        self._before = list(state.length)
        if alarms >= _EXACT:  # plain decoding: an exit that is wrong so often is no draft either
            return TokenTree.root_only(state.root)
        least = self._least(alarms)

        def judge(exit_layer: int, found: Candidates) -> Tensor:
            # Rounding may say that something is certain; a threshold of 1 lets nothing pass.
            return torch.from_numpy((self.probability(exit_layer, found) >= least) & (least < 1))

        tokens = min(budget, self.max_draft_tokens)
        return draft_cascade(state, self.exit_layers, tokens, judge, self._exit_readout(state))

    def probability(self, exit_layer: int, found: Candidates) -> np.ndarray:
        """That the whole model agrees with the likeliest token of an exit, float64 [B]."""
        described = describe(found)
        if self.weights is None:
            return described[:, 0]
        return logistic(judged_by(described) @ self.weights[exit_layer])

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Watch what the whole model says of tokens that were kept."""
        super().observe(state, output, acceptance)
        monitor = self._monitor(state)
        if acceptance.differs is None or acceptance.given is None or monitor is None:
            return
        differs: list[bool] = []
        for row, now, before in zip(
            acceptance.differs.tolist(), state.length, self._before, strict=True
        ):
            # Those that came, also of rows that have ended by now. What the whole model chose
            # itself, behind what was drafted, does not differ.
            came = now - before
            differs += (row + [False] * came)[:came]
        self._before = list(state.length)
        if monitor.add(differs):
            self._warn(state, monitor)

    def _learns(self, state: DecodeState) -> bool:
        return False

    def _alarms(self, state: DecodeState) -> int:
        monitor = self._monitor(state)
        return 0 if monitor is None else monitor.alarms

    def _least(self, alarms: int) -> float:
        """Half as far from certain after every alarm."""
        return 1 - (1 - self.threshold) / 2**alarms

    def _monitor(self, state: DecodeState) -> DriftMonitor | None:
        if self.delta is None:
            return None
        found = state.costs.kept.get(DRIFT)
        if not isinstance(found, DriftMonitor):
            state.costs.kept[DRIFT] = found = DriftMonitor(self.delta)
        return found

    def _warn(self, state: DecodeState, monitor: DriftMonitor) -> None:
        alarms = monitor.alarms
        what = (
            "from here on decoding is plain"
            if alarms >= _EXACT
            else f"the threshold is {self._least(alarms):.4f} from here on"
        )
        note = (
            f"more than {100 * monitor.delta:.0f} % of the tokens that an early exit gives differ "
            f"from the whole model's; {what}"
        )
        state.costs.notes[DRIFT] = note
        logger.warning("selfspec: %s.", note)


def describe(found: Candidates) -> np.ndarray:
    """Probability, second probability and entropy, float64 [B, 3], in one copy from the device."""
    assert found.probable is not None
    assert found.second is not None
    assert found.entropy is not None
    columns = [found.probable[:, 0], found.second, found.entropy]
    return np.asarray(torch.stack(columns, dim=1).double().cpu().numpy())


def judged_by(described: np.ndarray) -> np.ndarray:
    """Features [B, 5] of what was described; a token is not judged by its depth in a draft."""
    probable, second, entropy = described.T
    return features(probable[:, None], second, entropy, 1)[:, 0]


def _checked(exit_layers: int | Sequence[int] | None) -> tuple[int, ...]:
    if exit_layers is None:
        return ()
    several = isinstance(exit_layers, Iterable) and not isinstance(exit_layers, str)
    given: list[Any] = list(exit_layers) if several else [exit_layers]  # type: ignore[arg-type]
    for exit_layer in given:
        check_int("exit_layers", exit_layer, 1)
    if not given or given != sorted(set(given)):
        raise ValueError(f"exit_layers={exit_layers} must be one layer or several, rising.")
    return tuple(map(int, given))


def _fitting(weights: Mapping[int, Sequence[float]], exits: Sequence[int]) -> dict[int, np.ndarray]:
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights={weights!r} must have {FEATURES} numbers by exit layer.")
    found = {layer: np.asarray(row, float) for layer, row in weights.items()}
    right = (row.shape == (FEATURES,) and np.isfinite(row).all() for row in found.values())
    if set(found) != set(exits) or not all(right):
        raise ValueError(
            f"weights has {list(found)}; it must have {FEATURES} numbers, none of them infinite or "
            f"NaN, for each of the exits {list(exits)}."
        )
    return found
