"""Learning when an exit agrees with the whole model, from text that stays exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from selfspec.acceptance_model import AcceptanceModel
from selfspec.drafters.exit_cascade import draft_cascade
from selfspec.drafters.lossy_exit import LossyExitDrafter, describe, judged_by

if TYPE_CHECKING:
    from selfspec.drafters.candidates import Candidates
    from selfspec.networks.exit import ExitNetwork
    from selfspec.state import Acceptance, DecodeState, TargetOutput
    from selfspec.tree import TokenTree


class ExitWatch(LossyExitDrafter):
    """Asks every exit about one token a step, keeps none unseen, and learns what came of them.

    Args:
        exit_layers: See `LossyExitDrafter`.
        network: Likewise.

    Attributes:
        models: By exit layer.
    """

    is_lossy = False

    def __init__(
        self, exit_layers: int | Sequence[int] | None = None, network: ExitNetwork | None = None
    ) -> None:
        super().__init__(exit_layers, max_exits=1, delta=None, network=network)
        self.models = {exit_layer: AcceptanceModel() for exit_layer in self.exit_layers}
        self._said: dict[int, tuple[np.ndarray, list[int]]] = {}
        self._lengths: list[int] = []

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """One token a row, of the deepest exit."""
        self._said, self._lengths = {}, list(state.length)

        def judge(exit_layer: int, found: Candidates) -> Tensor:
            self._said[exit_layer] = judged_by(describe(found)), found.ids[:, 0].tolist()
            return torch.zeros(state.batch, dtype=torch.bool)

        tree = draft_cascade(state, self.exit_layers, 1, judge, self._exit_readout(state))
        return replace(tree, given=None)

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """See what followed."""
        super().observe(state, output, acceptance)
        for exit_layer, (described, ids) in self._said.items():
            for b, before in enumerate(self._lengths):
                if state.length[b] == before:
                    continue
                came = int(state.tokens(b)[before - state.length[b]])
                self.models[exit_layer].add(described[b][None], np.array([ids[b] == came]))
        self._said = {}

    def weights_found(self) -> dict[int, list[float]]:
        """What `LossyExitDrafter` takes, by all that was seen."""
        for model in self.models.values():
            model.fit()
        return {exit_layer: model.weights.tolist() for exit_layer, model in self.models.items()}
