"""Drafts by one trained layer that runs on the target's hidden states.

Li et al. 2025 (EAGLE-3), https://arxiv.org/abs/2503.01840, with the dynamic trees of EAGLE-2, and
EAGLE's own networks; see `selfspec.networks.feature` and `selfspec.drafters.dynamic_tree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from selfspec_kernels.draft_topk import MAX_K
from torch import Tensor

from selfspec.checkpoints.pretrained import Pretrained
from selfspec.costs import ASSUMED
from selfspec.drafters.draw import draw_children, draws
from selfspec.drafters.drawn_tree import DrawnTree
from selfspec.drafters.dynamic_tree import DynamicTree, Size
from selfspec.drafters.feature_steps import Expansion, FeatureSteps
from selfspec.drafters.outlook import Outlook
from selfspec.drafters.trained import FittedNetwork
from selfspec.networks.feature import FeatureNetwork
from selfspec.options import check_bool, check_int, check_probability
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.checkpoints.folder import Kind
    from selfspec.state import Acceptance, DecodeState, TargetOutput


class FeatureDrafter(Pretrained):
    """Drafts with a `FeatureNetwork`, in trees that grow where it is sure.

    Its keys and values are kept from step to step, made from the target's own states as soon as
    those are known; states of steps that ran without it wait until it drafts again.

    Args:
        network: Trained for the model.
        max_depth: Most draft steps, and so the longest draft.
        width: Nodes that are expanded at a level, and children each of them gets, 64 at most.
        min_gain: Tokens that another draft step must promise, beyond what its nodes cost. None:
            what is decoded in the time of one, as measured.
        min_prob: Least probability of a node, as the draft sees it, to be verified. None: the
            tokens that are decoded in the time that a node adds, as measured.
        do_sample: In requests that sample, draw `branches` children of every node that is expanded
            from the draft's distribution, `width // 2` nodes a level, instead of taking likely
            ones. (Taking them is as lossless, and mostly accepts more.)
        branches: See `do_sample`.

    Raises:
        TypeError: If an option is of another type.
        ValueError: If a number is out of range; what the model does not fit is found when the
            drafter first meets it.
    """

    makes_valid_trees = True
    network_kind: ClassVar[Kind] = "feature"
    sizes_itself = True  # by what the draft expects to be accepted
    drafts_by_level = True  # fewer levels take less time

    def __init__(
        self,
        network: FeatureNetwork,
        max_depth: int = 5,
        width: int = 6,
        min_gain: float | None = None,
        min_prob: float | None = None,
        do_sample: bool = False,
        branches: int = 3,
    ) -> None:
        check_int("max_depth", max_depth, 1)
        check_int("width", width, 1, MAX_K)
        for option, value in (("min_gain", min_gain), ("min_prob", min_prob)):
            if value is not None:
                check_probability(option, value)
        check_bool("do_sample", do_sample)
        check_int("branches", branches, 1, MAX_K)
        if not isinstance(network, FeatureNetwork):
            raise TypeError(f"network is a {type(network).__name__}; it must be a FeatureNetwork.")
        self.network = network
        self._fits = FittedNetwork(network)
        self.max_depth = max_depth
        self.width = width
        self.min_gain = min_gain
        self.min_prob = min_prob
        self.do_sample = do_sample
        self.branches = branches
        self._steps: FeatureSteps | None = None

    @property
    def hidden_taps(self) -> Sequence[int]:
        """Those of the network."""
        return self.network.config.taps

    def bind(self, architecture: Architecture) -> None:
        """Check against a model.

        Raises:
            ValueError: If the network was made for other sizes, could draft a token that the model
                does not have, or needs a part of it that was not found.
        """
        config = self.network.config
        self._fits.check_sizes(architecture, config.target_hidden_size, embeds=True)
        if config.layout == "eagle" and architecture.readout is None:
            raise ValueError(
                "drafts of the first EAGLE layout read states behind the model's final norm, which "
                "was not found; use another draft."
            )

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """A tree a row, up to `max_depth` levels."""
        depth = min(self.max_depth, budget, state.max_draft_tokens)
        if self._steps is None or depth < 1:
            return TokenTree.root_only(state.root)
        with torch.no_grad():
            hidden = self._steps.catch_up(state)
            if self.do_sample and draws(state):
                return self._drawn(hidden, state, self._steps, depth, budget)
            return self._likely(hidden, state, self._steps, depth, budget)

    def _likely(
        self, hidden: Tensor, state: DecodeState, steps: FeatureSteps, depth: int, budget: int
    ) -> TokenTree:
        """The most probable tokens after the root's `hidden` [B, 1, C]."""
        width = min(self.width, budget) if _branches(state) else 1
        tree = DynamicTree(state.root, width, _rooms(state), self._node_price(state))
        nodes = Expansion(steps, state.root.device)
        outlook = Outlook(state, type(self).__name__, self.min_gain)
        for level in range(1, depth + 1):
            tokens, log_probs = steps.best(hidden, width)
            parent, chosen = tree.grow(tokens.to(state.root.device), log_probs)
            if level == depth or not outlook.goes_on(tree.outlook()):
                break
            hidden = nodes.run(hidden, parent, chosen)
        return tree.finish(budget, None if self.min_prob is not None else _size(state))

    def _node_price(self, state: DecodeState) -> float:
        return state.costs.node_price(state.batch) if self.min_prob is None else self.min_prob

    def _drawn(
        self, hidden: Tensor, state: DecodeState, steps: FeatureSteps, depth: int, budget: int
    ) -> TokenTree:
        """Tokens drawn after the root's `hidden` [B, 1, C]; one a level where none may branch."""
        head, device = steps.network.head, state.root.device
        known = None if head.ids is None else head.ids.to(device)
        branches = _branches(state)
        most = min(self.branches if branches else 1, budget, head.size - 1)
        # Of assumed costs: what is measured would make a seed's text another one every time.
        least = ASSUMED.level_price(1, "") if self.min_gain is None else self.min_gain
        tree = DrawnTree(state.root, max(1, self.width // 2) if branches else 1, _rooms(state))
        nodes = Expansion(steps, state.root.device)
        for level in range(1, depth + 1):
            logits = head.spread(head(steps.network.readout(hidden)), steps.vocab_size)
            tokens, log_q = draw_children(
                state, logits.to(device), tree.paths, tree.open, most, known
            )
            parent, chosen = tree.grow(tokens, log_q)
            budget -= tokens[0].numel()
            if level == depth or tree.cost(most) > budget:
                break
            if float(tree.expected().max()) * ASSUMED.worth_of_mass("") < least:
                break
            hidden = nodes.run(hidden, parent, chosen)
        return tree.finish()

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Keep the target's states of what was accepted."""
        if self._steps is None:
            architecture = state.target.architecture
            dtype, device = output.hidden[self.hidden_taps[-1]].dtype, state.root.device
            network = self._fits.for_model(architecture, dtype, device, self.bind)
            self._steps = FeatureSteps(network, state, output)
        else:
            self._steps.seen.add(state, output, acceptance)

    def reset(self) -> None:
        """Forget the request before."""
        self._steps = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the request that is being decoded."""
        return {**self.__dict__, "_steps": None}


def _branches(state: DecodeState) -> bool:
    return state.target.architecture.support == "tree"


def _size(state: DecodeState) -> Size:
    """Of ranks' sums over rows: a step takes the time of one, whatever a row gains."""
    rows = max(1, state.frozen.count(False))

    def size(sums: Sequence[float]) -> int:
        return state.costs.choose(state.batch, [one / rows for one in sums])

    return size


def _rooms(state: DecodeState) -> list[int]:
    """Deepest draft that every row has room for; the target adds a token of its own."""
    return [max(0, state.room(b) - 1) for b in range(state.batch)]
