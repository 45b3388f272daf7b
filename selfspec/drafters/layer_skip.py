"""Layer skip: draft with the target minus some of its sublayers.

Zhang et al. 2023 (Draft & Verify), https://arxiv.org/abs/2309.08168; Xia et al. 2024 (SWIFT),
https://arxiv.org/abs/2410.06916.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfspec_kernels.draft_topk import MAX_K

from selfspec.drafters.draw import draws
from selfspec.drafters.growth import DRAWN_CONFIDENCE, Growth
from selfspec.drafters.options import check_bool, check_int, check_probability
from selfspec.drafters.partial import check_layers, draft_chain
from selfspec.patch import LayerPlan

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.state import Acceptance, DecodeState, TargetOutput
    from selfspec.tree import TokenTree


@dataclass(frozen=True)
class SkipSet:
    """Sublayers that a draft leaves out, 0-based.

    Attributes:
        attention: Layers without attention.
        mlp: Layers without MLP.
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Take any iterable of layers; refuse what is no layer number with a TypeError."""
        for name in ("attention", "mlp"):
            layers = frozenset(getattr(self, name))
            for layer in layers:
                check_int(f"skip_set.{name} layer", layer, 0)
            object.__setattr__(self, name, layers)

    @classmethod
    def layers(cls, indices: Iterable[int]) -> SkipSet:
        """Whole layers."""
        whole = frozenset(indices)
        return cls(whole, whole)

    @property
    def first(self) -> int | None:
        """First layer that is not complete, or None if nothing is skipped."""
        return min(self.attention | self.mlp, default=None)


class LayerSkipDrafter:
    """Drafts with the target's own layers, leaving out those in `skip_set`.

    Layers before the first skipped one are complete and shared with verification; keys and values
    of later ones are the draft's own approximation and are overwritten by verification.

    Args:
        skip_set: A `SkipSet`, or an iterable of whole layers. None skips every second layer of the
            middle half of the model.
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

    def __init__(
        self,
        skip_set: SkipSet | Iterable[int] | None = None,
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
        skip = self.skip_set
        if skip is None:
            middle = range(num_layers // 4, max(1, num_layers - num_layers // 4))
            skip = SkipSet.layers((sorted(state.target.architecture.borrowers) or middle)[::2])
        plan = LayerPlan(skip_attention=skip.attention, skip_mlp=skip.mlp)
        shared = num_layers if skip.first is None else skip.first
        tokens = min(budget, self.max_draft_tokens)
        confidence = self.confidence
        if confidence is None and self.do_sample and draws(state):
            confidence = DRAWN_CONFIDENCE
        return draft_chain(
            state,
            plan,
            shared,
            tokens,
            Growth(state, type(self).__name__, confidence),
            self.branches,
            budget,
            self.do_sample,
        )

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Nothing to keep: the cache is the target's own."""

    def reset(self) -> None:
        """Nothing to forget."""
