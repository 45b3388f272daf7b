"""Layer skip: draft with the target minus some of its sublayers.

Zhang et al. 2023 (Draft & Verify), https://arxiv.org/abs/2309.08168; Xia et al. 2024 (SWIFT),
https://arxiv.org/abs/2410.06916.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from selfspec_kernels.draft_topk import MAX_K

from selfspec.drafters.draw import draws
from selfspec.drafters.growth import DRAWN_CONFIDENCE, Growth, growth_of
from selfspec.drafters.partial import check_layers, draft_chain
from selfspec.drafters.skip_trials import part_of, trials_of
from selfspec.options import check_bool, check_int, check_probability
from selfspec.skip_set import SkipSet
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.checkpoints.skip_sets import FoundSkipSet
    from selfspec.state import Acceptance, DecodeState, TargetOutput


class LayerSkipDrafter:
    """Drafts with the target's own layers, leaving out those in `skip_set`.

    Layers before the first skipped one are complete and shared with verification; keys and values
    of later ones are the draft's own approximation and are overwritten by verification.

    Args:
        skip_set: A `SkipSet`, an iterable of whole layers, or what `find_skip_set` found, by which
            nothing is drafted if it does not pay. None: search one on the text while it is
            generated, in 3 % of the time, and draft nothing until one is found that pays; with
            `adaptive=False`, drafts that are drawn, and models that verify chains only, skip every
            second layer of the middle half of the model.
        max_draft_tokens: Longest chain.
        confidence: Go on with a row's chain while it is at least this probable, as the draft sees
            it, and verify all branches. None: go on while another token is expected to give more
            than is decoded in the time it takes, as measured, and verify the branches that pay.
            With `branches`, the rows of a batch stop together.
        branches: Draft tokens at every position, 64 at most: the best one, from which the chain
            goes on, and the next best ones, which are verified beside it while the step's budget
            (`wrap`'s `max_draft_tokens`) lasts. Models that verify chains only get the best one.
        do_sample: In requests that sample, draw the draft from the layers' own distribution instead
            of taking its likeliest tokens.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If a number is out of range; layers the model does not have are found when the
            drafter first meets the model.
    """

    hidden_taps: Sequence[int] = ()
    makes_valid_trees = True
    sizes_itself = True  # by what pays, as measured
    drafts_by_level = True  # fewer levels take less time

    def __init__(
        self,
        skip_set: SkipSet | Iterable[int] | FoundSkipSet | None = None,
        max_draft_tokens: int = 4,
        confidence: float | None = None,
        branches: int = 1,
        do_sample: bool = False,
    ) -> None:
        check_int("max_draft_tokens", max_draft_tokens, 1)
        if confidence is not None:
            check_probability("confidence", confidence)
        check_int("branches", branches, 1, MAX_K)
        check_bool("do_sample", do_sample)
        self.found = None if isinstance(skip_set, SkipSet | None) else _found(skip_set)
        if self.found is not None:
            skip_set = self.found.skip_set
        if skip_set is not None and not isinstance(skip_set, SkipSet):
            if not isinstance(skip_set, Iterable):
                raise TypeError(
                    f"skip_set={skip_set!r} must be a SkipSet or a list of layers, like [3, 5]."
                )
            skip_set = SkipSet.layers(skip_set)
        self.skip_set = skip_set
        self.max_draft_tokens = max_draft_tokens
        self.confidence = confidence
        self.branches = branches
        self.do_sample = do_sample
        self._growth: Growth | None = None  # of the last draft

    def bind(self, architecture: Architecture) -> None:
        """Check against a model.

        Raises:
            ValueError: If a layer does not exist or a sublayer cannot be left out alone.
        """
        check_layers(architecture)
        if self.skip_set is None:
            return
        count = architecture.num_layers
        for name in ("attention", "mlp"):
            for layer in sorted(getattr(self.skip_set, name)):
                if not 0 <= layer < count:
                    raise ValueError(
                        f"skip_set.{name} has layer {layer}: the model has layers 0..{count - 1}."
                    )
        borrowers = architecture.borrowers
        if borrowers and (lenders := sorted(self.skip_set.attention - borrowers)):
            raise ValueError(
                f"skip_set.attention has layers {lenders}, whose keys and values later layers may "
                f"read; in this model only {sorted(borrowers)} can be left out."
            )
        alone = self.skip_set.attention ^ self.skip_set.mlp
        for layer in sorted(alone):
            if len(architecture.sublayers[layer]) < 2:
                raise ValueError(
                    f"skip_set leaves out one half of layer {layer}, but its attention and MLP "
                    "were not told apart in this model; skip the whole layer."
                )

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """One chain a row from the layers that are left, and its branches."""
        num_layers = state.target.architecture.num_layers
        skip = self._chosen(state)
        if skip is None:
            return TokenTree.root_only(state.root)
        plan = skip.plan
        shared = num_layers if skip.first is None else skip.first
        tokens = min(budget, self.max_draft_tokens)
        confidence = self.confidence
        if confidence is None and self.do_sample and draws(state):
            confidence = DRAWN_CONFIDENCE
        self._growth = growth_of(state, part_of(skip), confidence)
        return draft_chain(
            state,
            plan,
            shared,
            tokens,
            self._growth,
            self.branches,
            budget,
            self.do_sample,
        )

    def _chosen(self, state: DecodeState) -> SkipSet | None:
        """The set to draft with, or None if that is not to be done."""
        if self.found is not None and not self.found.pays:
            return None
        if self.skip_set is not None:
            return self.skip_set
        if self._searches(state):
            return trials_of(state).best(state)
        found = state.target.architecture
        middle = range(found.num_layers // 4, max(1, found.num_layers - found.num_layers // 4))
        return SkipSet.layers((sorted(found.borrowers) or middle)[::2])

    def _searches(self, state: DecodeState) -> bool:
        """Whether a set is searched on the text."""
        is_drawn = self.do_sample and draws(state)
        trees = state.target.architecture.support == "tree"
        return self.skip_set is None and state.costs.adaptive and trees and not is_drawn

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Learn what became of the draft; go on with the search, if there is one."""
        if self._growth is not None:
            self._growth.learn(state)
            self._growth = None
        if self._searches(state):
            trials_of(state).step(state)

    def reset(self) -> None:
        """Forget the draft before."""
        self._growth = None


def _found(value: object) -> FoundSkipSet | None:
    from selfspec.checkpoints.skip_sets import FoundSkipSet  # costs time only where it is needed

    return value if isinstance(value, FoundSkipSet) else None
