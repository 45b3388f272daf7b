"""Trained heads on the target's last hidden state, verified as a static tree.

Cai et al. 2024 (Medusa), https://arxiv.org/abs/2401.10774; Ankner et al. 2024 (Hydra),
https://arxiv.org/abs/2402.05109.
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
from selfspec.drafters.static_tree import (
    Level,
    Path,
    StaticTree,
    Table,
    assumed_accuracies,
    best_paths,
    check_paths,
    products,
    static_tree,
)
from selfspec.drafters.trained import FittedNetwork, best_tokens
from selfspec.networks.heads import HeadsNetwork
from selfspec.options import check_bool, check_probability
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from selfspec.architectures import Architecture
    from selfspec.checkpoints.folder import Kind
    from selfspec.state import Acceptance, DecodeState, TargetOutput


class HeadsDrafter(Pretrained):
    """Drafts with a `HeadsNetwork`: no forward of the target, and nothing kept but one state a row.

    That state is the one whose logits gave the root, after the model's final norm. Heads that are
    not conditioned are computed all at once; conditioned ones depth by depth, all nodes of a depth
    together. The tree has the nodes that pay, by the rank accuracies in the network's config (or by
    typical ones if there are none) and by what a node costs, as measured; at most the step's budget
    (`wrap`'s `max_draft_tokens`). Models that verify chains only get the best token of every head.

    The network is not changed: models of another device or dtype get a copy of it, made once.

    Args:
        network: The heads. One drafter may serve several models, as far as the heads fit.
        tree: Rank paths, such as `[[0], [1], [0, 0]]` for the best token, the second-best beside
            it, and the best one after the best; cut behind the budget. None has it fitted.
        do_sample: In requests that sample, draw the draft from the heads' own distribution instead
            of taking its likeliest tokens.
        min_prob: Least probability of a node, by the accuracies, to be drafted. None: the tokens
            that are decoded in the time that a node adds, as measured.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If `tree` does not fit the heads. Whether they fit a model is found when the
            drafter first meets it.
    """

    network_kind: ClassVar[Kind] = "heads"
    hidden_taps: Sequence[int] = ()
    makes_valid_trees = True
    sizes_itself = True  # by what pays, as measured

    def __init__(
        self,
        network: HeadsNetwork,
        tree: Sequence[Sequence[int]] | None = None,
        do_sample: bool = False,
        min_prob: float | None = None,
    ) -> None:
        if not isinstance(network, HeadsNetwork):
            raise TypeError(f"network is a {type(network).__name__}; it must be a HeadsNetwork.")
        check_bool("do_sample", do_sample)
        if min_prob is not None:
            check_probability("min_prob", min_prob)
        self.network = network
        self.min_prob = min_prob
        self.do_sample = do_sample
        self._ranks = min(MAX_K, network.head(0).size)
        self.tree = None if tree is None else check_paths(tree, self._depth, self._ranks)
        self._fits = FittedNetwork(network)
        self._seen: tuple[Tensor, int] | None = None

    @property
    def _depth(self) -> int:
        return self.network.config.num_heads

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows that are being decoded."""
        return {**self.__dict__, "_seen": None}

    def __copy__(self) -> HeadsDrafter:
        """For a request beside another one: shares what depends on the model alone."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    # ------------------------------------------------------------------ one model

    def bind(self, architecture: Architecture) -> None:
        """Check against a model.

        Raises:
            ValueError: If the heads were made for other sizes, could draft a token that the model
                does not have, or need a part of it that was not found.
        """
        config, readout = self.network.config, architecture.readout
        if readout is None:
            raise ValueError(
                "HeadsDrafter reads the state after the model's final norm, and it was not found "
                "how this model goes from its last layer to its logits; use another drafter."
            )
        self._fits.check_sizes(architecture, config.hidden_size, embeds=config.conditioned)
        self.hidden_taps = (architecture.num_layers,)

    # ------------------------------------------------------------------ steps

    def draft(self, state: DecodeState, budget: int) -> TokenTree:
        """One tree a row, of the same shape for all."""
        assert self._seen is not None, "the prefill is observed before anything is drafted"
        hidden, vocab_size = self._seen
        architecture = state.target.architecture
        network = self._fits[architecture]
        drawn = self.do_sample and draws(state)
        paths = self._paths(budget, state, drawn)
        if not paths:
            return TokenTree.root_only(state.root)
        shape = static_tree(paths, state.root.device)
        if drawn:
            drafts, log_q = _drawn(network, hidden, shape, state, vocab_size)
            return shape.filled(state, drafts, log_q)
        # A tree that was named may have ranks that nobody measured.
        expected = products(self._table, paths) if self.tree is None else None
        if network.config.conditioned:
            drafts = _by_depth(network, hidden, shape, state)
        else:
            drafts = _at_once(network, hidden, shape)
        return shape.filled(state, drafts, expected=expected)

    def _paths(self, budget: int, state: DecodeState, drawn: bool) -> tuple[Path, ...]:
        depth = self._depth
        if state.target.architecture.support == "chain":
            return tuple((0,) * d for d in range(1, min(depth, budget) + 1))
        if self.tree is not None:
            return self.tree[:budget]
        table = self._table
        # At least the best token is drafted, though it was never right.
        paths = best_paths(table, budget, self.min_prob or 0.0) or ((0,),)
        if self.min_prob is not None:
            return paths
        # Drawn by what is measured, a seed's text would be another one every time.
        costs = ASSUMED if drawn else state.costs
        return paths[: costs.choose(state.batch, products(table, paths))]

    @property
    def _table(self) -> Table:
        """Rank accuracies, as they were measured or as they may be."""
        table = self.network.accuracies or assumed_accuracies(self._depth)
        return tuple(row[: self._ranks] for row in table)

    def observe(self, state: DecodeState, output: TargetOutput, acceptance: Acceptance) -> None:
        """Keep the state of every row whose logits gave its new root.

        Raises:
            ValueError: If the drafter was made part of another model meanwhile.
        """
        architecture = state.target.architecture
        tapped = output.hidden.get(architecture.num_layers)
        if tapped is None:
            raise ValueError(
                f"HeadsDrafter reads the output of layer {architecture.num_layers}, and taps "
                f"{sorted(output.hidden)} were asked for: it has met a model of another depth "
                "since; make one drafter for each."
            )
        if output.logits.shape[1] == 1:  # the prompt, whose last token gave the root, or a root
            last = tapped[:, -1]
        else:
            node = acceptance.path.gather(1, acceptance.num_accepted[:, None].long())
            node = node.to(tapped.device, torch.int64)[..., None]
            last = tapped.gather(1, node.expand(-1, -1, tapped.shape[2]))[:, 0]
        assert architecture.readout is not None
        hidden = architecture.readout.norm(last).to(state.root.device)
        if self._seen is None:
            self._fits.for_model(architecture, hidden.dtype, hidden.device, self.bind)
        self._seen = hidden, output.logits.shape[-1]

    def reset(self) -> None:
        """Forget the rows."""
        self._seen = None


def _at_once(network: HeadsNetwork, hidden: Tensor, shape: StaticTree) -> Tensor:
    """int64 [B, N - 1] by heads that see the state [B, C] alone."""
    depths = range(len(shape.levels))
    if network.config.own_head:
        found = [best_tokens(network.head(k), network(k, hidden), shape.ranks)[0] for k in depths]
        candidates = torch.cat(found, dim=1)
    else:
        states = torch.stack([network(k, hidden) for k in depths], dim=1)
        candidates = best_tokens(network.head(0), states, shape.ranks)[0].flatten(1)
    return candidates.index_select(1, shape.rank_picks)


def _by_depth(
    network: HeadsNetwork, hidden: Tensor, shape: StaticTree, state: DecodeState
) -> Tensor:
    """int64 [B, N - 1] by heads that see the tokens before theirs, too."""
    paths = state.root[:, None, None]  # tokens up to every node that is gone on from
    found: list[Tensor] = []
    for k, level in enumerate(shape.levels):
        if k:
            paths = _longer(paths, found[-1], level)
        states = _conditioned(network, k, hidden, paths, state)
        found.append(best_tokens(network.head(k), states, level.ranks)[0].flatten(1))
    return torch.cat(found, dim=1).index_select(1, shape.picks)


def _drawn(
    network: HeadsNetwork, hidden: Tensor, shape: StaticTree, state: DecodeState, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """int64 [B, N - 1] tokens and float32 [B, N, V], the law that the children of a node follow."""
    batch, paths = hidden.shape[0], state.root[:, None, None]
    found: list[Tensor] = []
    log_q = hidden.new_zeros(batch, shape.one.width, vocab_size, dtype=torch.float32)
    for k, level in enumerate(shape.levels):
        if k:
            paths = _longer(paths, found[-1], level)
        head, count = network.head(k), level.nodes.shape[0]
        if network.config.conditioned:
            logits = head(_conditioned(network, k, hidden, paths, state))
        else:
            logits = head(network(k, hidden))[:, None].expand(-1, count, -1)
        known = head.spread(logits.float(), vocab_size)
        tokens, law = draw_children(
            state, known, paths[:, :, 1:], level.nodes, level.ranks, head.ids
        )
        log_q.index_copy_(1, level.nodes, law)
        found.append(tokens.flatten(1))
    return torch.cat(found, dim=1).index_select(1, shape.picks), log_q


def _longer(paths: Tensor, candidates: Tensor, level: Level) -> Tensor:
    """int64 [B, M, k + 1] tokens up to the nodes of `level`, from those of the level above it."""
    tokens = candidates.index_select(1, level.candidate)
    return torch.cat([paths.index_select(1, level.parent), tokens[..., None]], dim=-1)


def _conditioned(
    network: HeadsNetwork, k: int, hidden: Tensor, paths: Tensor, state: DecodeState
) -> Tensor:
    """[B, M, C], what head `k` reads after paths [B, M, k + 1]."""
    embedded: Tensor = state.target.architecture.embeddings()(paths)
    embedded = embedded.to(hidden.device, hidden.dtype)
    states: Tensor = network(k, hidden[:, None].expand(-1, paths.shape[1], -1), embedded)
    return states
