"""Real early exit, which is LOSSY: tokens that an early layer is sure of are kept unseen.

Schuster et al. 2022 (CALM), https://arxiv.org/abs/2207.07061. The deep layers that such tokens left
out are run for all of them at once when the next token is not sure (their keys and values have to
be there for it); what those layers say of them comes too late to change the text, but it is
counted: that is the disagreement in the statistics, and what the drift monitor watches.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.drafters.early_exit import EarlyExitDrafter
from selfspec.drafters.growth import Growth
from selfspec.drafters.options import check_int, check_probability
from selfspec.drift import DriftMonitor

if TYPE_CHECKING:
    from selfspec.drafters.candidates import Candidates
    from selfspec.networks.exit import ExitNetwork
    from selfspec.state import Acceptance, DecodeState, TargetOutput
    from selfspec.tree import TokenTree

logger = logging.getLogger("selfspec")

WORK = "drift of lossy exits"  # in what is kept
_EXACT = 3  # alarms after which nothing is kept unseen any more


class LossyExitDrafter(EarlyExitDrafter):
    """LOSSY: the text is no longer the model's. Keeps what an early layer is sure of.

    Takes effect in requests that are plainly greedy; with sampling or processors the same drafts
    are verified, and the text is exact.

    Args:
        exit_layer: How many layers run before the exit, a count; None: what `network` was trained
            for.
        threshold: Least probability, by the exit, of a token that is kept. `calibrate_exit` finds
            one with a guarantee.
        max_exits: Most tokens in a row that are kept unseen.
        delta: Share of tokens that may differ. Where live text has more of them, the threshold is
            raised, and after three such alarms the text is exact; both are logged. None: nobody
            watches.
        network: A trained exit.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If a number is out of range, or neither exit nor network is given.
    """

    is_lossy = True
    sizes_itself = True

    def __init__(
        self,
        exit_layer: int | None = None,
        threshold: float = 0.95,
        max_exits: int = 8,
        delta: float | None = 0.05,
        network: ExitNetwork | None = None,
    ) -> None:
        check_int("max_exits", max_exits, 1)
        check_probability("threshold", threshold)
        if delta is not None:
            check_probability("delta", delta)
        if delta is not None and not 0 < delta < 1:
            raise ValueError(f"delta={delta} must be more than 0 and less than 1.")
        if exit_layer is None and network is None:
            raise ValueError("exit_layer is missing: name a layer, or pass a trained network.")
        super().__init__(exit_layer, max_exits, 0.0, branches=1, network=network)
        self.threshold = threshold
        self.delta = delta

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """A chain, and how much of it is to be kept."""
        tree = super().draft(state, budget)
        growth = self._growth
        return replace(tree, given=growth.given) if isinstance(growth, _SureGrowth) else tree

    def _decides(self, state: DecodeState, part: str, confidence: float | None) -> Growth:
        monitor = self._monitor(state)
        alarms = 0 if monitor is None else monitor.alarms
        if alarms >= _EXACT:
            return super()._decides(state, part, None)
        # Half as far from certain after every alarm.
        return _SureGrowth(state, 1 - (1 - self.threshold) / 2**alarms)

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Watch what the whole model says of tokens that were kept."""
        super().observe(state, output, acceptance)
        monitor = self._monitor(state)
        if acceptance.differs is None or acceptance.given is None or monitor is None:
            return
        rows = [b for b in range(state.batch) if not state.frozen[b]]
        counts = torch.stack([acceptance.differs.sum(1), acceptance.given.long()]).tolist()
        differing, given = (sum(counts[i][b] for b in rows) for i in (0, 1))
        # One token more a row, which the whole model chose itself.
        if monitor.add(differing, given + len(rows)):
            self._warn(state, monitor)

    def _monitor(self, state: DecodeState) -> DriftMonitor | None:
        if self.delta is None:
            return None
        found = state.costs.kept.get(WORK)
        if not isinstance(found, DriftMonitor):
            state.costs.kept[WORK] = found = DriftMonitor(self.delta)
        return found

    def _warn(self, state: DecodeState, monitor: DriftMonitor) -> None:
        alarms = monitor.alarms
        what = (
            "from here on the text is exact"
            if alarms >= _EXACT
            else f"the threshold is {1 - (1 - self.threshold) / 2**alarms:.4f} from here on"
        )
        note = (
            f"more than {100 * monitor.delta:.0f} % of the tokens that an early exit gives differ "
            f"from the whole model's; {what}"
        )
        state.costs.notes[WORK] = note
        logger.warning("selfspec: %s.", note)


class _SureGrowth(Growth):
    """Goes on while every token by itself is probable enough, and counts those that are.

    Attributes:
        given: int32 [B].
    """

    def __init__(self, state: DecodeState, threshold: float) -> None:
        super().__init__(state, threshold)
        self._sure = torch.ones(state.batch, dtype=torch.bool, device=state.root.device)
        self.given = torch.zeros(state.batch, dtype=torch.int32, device=state.root.device)

    @property
    def asks(self) -> bool:
        """Always."""
        return True

    def after(self, found: Candidates, growing: Tensor) -> Tensor:
        """See `Growth.after`."""
        assert found.probable is not None
        self._sure = self._sure & (found.probable[:, 0] >= self._least)
        self.given = self.given + self._sure.int()
        return growing & self._sure
