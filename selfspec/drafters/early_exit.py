"""Early exit: draft with the first layers, and perhaps a trained exit; verify with the rest.

Elhoushi et al. 2024 (LayerSkip), https://arxiv.org/abs/2404.16710, and Zhang et al. 2023 (Draft &
Verify), https://arxiv.org/abs/2309.08168.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from selfspec_kernels.draft_topk import MAX_K

from selfspec.checkpoints.pretrained import Pretrained
from selfspec.drafters.draw import draws
from selfspec.drafters.exit_context import ExitContext
from selfspec.drafters.exit_readout import ExitReadout
from selfspec.drafters.exit_trials import exits_of, part_of
from selfspec.drafters.growth import DRAWN_CONFIDENCE, Growth, growth_of
from selfspec.drafters.partial import check_layers, draft_chain
from selfspec.drafters.trained import FittedNetwork
from selfspec.networks.exit import ExitNetwork
from selfspec.options import check_bool, check_int, check_probability
from selfspec.patch import LayerPlan
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.checkpoints.folder import Kind
    from selfspec.state import Acceptance, DecodeState, TargetOutput

_BRANCHES = 8  # of a trained exit


class EarlyExitDrafter(Pretrained):
    """Drafts with the first `exit_layer` layers and an exit.

    The exit is the model's final norm and LM head, or a trained network in their place. Keys,
    values and hidden states of those layers are shared with verification, which runs the remaining
    layers only. Pays on models that were trained for it (LayerSkip), or with a trained exit; on
    others acceptance is low, and the wrapper's off switch or another drafter is the better choice.

    Args:
        exit_layer: How many layers the draft runs, a count: `exit_layer=8` uses layers 0..7. None:
            what `network` was trained for, or the exit by which most tokens come of a second, as
            learned from the text; nothing is drafted while none is faster than plain decoding. With
            `adaptive=False`, drafts that are drawn, and models that verify chains only, a third of
            the model.
        max_draft_tokens: Longest chain.
        confidence: Go on with a row's chain while it is at least this probable, as the draft sees
            it, and verify all branches. None: go on while another token is expected to give more
            than is decoded in the time it takes, as measured, and verify the branches that pay.
            With `branches`, the rows of a batch stop together.
        branches: Draft tokens at every position, 64 at most: the best one, from which the chain
            goes on, and the next best ones, which are verified beside it while the step's budget
            (`wrap`'s `max_draft_tokens`) lasts. Models that verify chains only get the best one.
            None: 1, and 8 with a trained exit, whose next-best tokens are good ones.
        do_sample: In requests that sample, draw the draft from the layers' own distribution instead
            of taking its likeliest tokens.
        network: A trained exit.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If a number is out of range, or `exit_layer` is not that of `network`; an
            `exit_layer` beyond the model's last layer is found when the drafter first meets the
            model.
    """

    makes_valid_trees = True
    sizes_itself = True  # by what pays, as measured
    drafts_by_level = True  # fewer levels take less time
    network_kind: ClassVar[Kind] = "exit"

    def __init__(
        self,
        exit_layer: int | None = None,
        max_draft_tokens: int = 4,
        confidence: float | None = None,
        branches: int | None = None,
        do_sample: bool = False,
        network: ExitNetwork | None = None,
    ) -> None:
        if exit_layer is not None:
            check_int("exit_layer", exit_layer, 1)
        if network is not None:
            if not isinstance(network, ExitNetwork):
                raise TypeError(
                    f"network is a {type(network).__name__}; it must be an ExitNetwork."
                )
            trained = network.config.exit_layer
            if exit_layer not in (None, trained):
                raise ValueError(
                    f"exit_layer={exit_layer}: the network was trained for exit_layer={trained}."
                )
            exit_layer = trained
        check_int("max_draft_tokens", max_draft_tokens, 1)
        if confidence is not None:
            check_probability("confidence", confidence)
        if branches is None:
            branches = 1 if network is None else _BRANCHES
        check_int("branches", branches, 1, MAX_K)
        check_bool("do_sample", do_sample)
        self.exit_layer = exit_layer
        self.max_draft_tokens = max_draft_tokens
        self.confidence = confidence
        self.branches = branches
        self.do_sample = do_sample
        self.network = network
        self._fits = None if network is None else FittedNetwork(network)
        # Of a request: the network on its model, and what its attention has seen.
        self._running: ExitNetwork | None = None
        self._context: ExitContext | None = None
        self._growth: Growth | None = None  # of the last draft

    @property
    def hidden_taps(self) -> Sequence[int]:
        """The exit's layer, if the exit has attention."""
        config = None if self.network is None else self.network.config
        return (config.exit_layer,) if config is not None and config.num_heads else ()

    def bind(self, architecture: Architecture) -> None:
        """Check against a model.

        Raises:
            ValueError: If the model has fewer layers than `exit_layer`, or needs all of them.
        """
        check_layers(architecture)
        count = architecture.num_layers
        if self.exit_layer is not None and self.exit_layer > count:
            raise ValueError(
                f"exit_layer={self.exit_layer} is out of range: the model has {count} layers, "
                f"choose 1..{count}."
            )
        if self.network is not None and self._fits is not None:
            self._fits.check_sizes(architecture, self.network.config.hidden_size)

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """One chain a row from the exit, and its branches."""
        exit_layer = self._chosen(state)
        if exit_layer is None:
            return TokenTree.root_only(state.root)
        plan = LayerPlan(last=exit_layer)
        tokens = min(budget, self.max_draft_tokens)
        readout = self._exit_readout(state)
        confidence = self.confidence
        if confidence is None and self.do_sample and draws(state):
            confidence = DRAWN_CONFIDENCE
        part = part_of(exit_layer, self.network is not None)
        self._growth = growth_of(state, part, confidence)
        return draft_chain(
            state,
            plan,
            exit_layer,
            tokens,
            self._growth,
            self.branches,
            budget,
            self.do_sample,
            readout,
        )

    def _exit_readout(self, state: DecodeState) -> ExitReadout | None:
        """The trained exit over all that is committed; None without one."""
        if self._running is None:
            return None
        if self._context is not None:
            self._context.catch_up(state)
        return ExitReadout(self._running, self._context)

    def _chosen(self, state: DecodeState) -> int | None:
        """The exit to draft with, or None if that is not to be done."""
        if self.exit_layer is not None:
            return self.exit_layer
        if self._learns(state):
            return exits_of(state).best(state)
        return max(1, state.target.architecture.num_layers // 3)

    def _learns(self, state: DecodeState) -> bool:
        """Whether exits are compared on the text."""
        is_drawn = self.do_sample and draws(state)
        trees = state.target.architecture.support == "tree"
        return self.exit_layer is None and state.costs.adaptive and trees and not is_drawn

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Learn what became of the draft; keep what an exit with attention looks at."""
        if self._growth is not None:
            self._growth.learn(state)
            self._growth = None
        if self._fits is None:
            if self._learns(state):
                exits_of(state).step(state)
            return
        if self._running is None:
            target, device = state.target, state.root.device
            self._running = self._fits.for_model(
                target.architecture, target.model.dtype, device, self.bind
            )
            if self.hidden_taps:
                self._context = ExitContext(self._running, state, output)
        elif self._context is not None:
            self._context.seen.add(state, output, acceptance)

    def reset(self) -> None:
        """Forget the request before."""
        self._running = self._context = self._growth = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the request that is being decoded."""
        return {**self.__dict__, "_running": None, "_context": None, "_growth": None}
