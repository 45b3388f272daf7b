"""What the parts of a model take, measured: a token by all layers and by none, blocks of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from selfspec.config import Options
from selfspec.patch import LayerPlan
from selfspec.speedup import acceptance_needed, chain_speedup
from selfspec.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from selfspec.skip_set import SkipSet
    from selfspec.target import Target

_NODES = (1, 2, 3, 5, 9, 17)
_ROUNDS = 7


@dataclass(frozen=True)
class LayerTimes(Options):
    """Times of one sequence's forwards, in seconds.

    Attributes:
        num_layers: L.
        empty: Of one token through no layer: embedding, norm, LM head, and the call itself.
        attention: Of one attention.
        mlp: Of one MLP.
        rest: What else a layer takes, its norms for the most part; saved where all of it is left
            out.
        nodes: Sizes of blocks that were measured, the first is 1.
        verify: Times of blocks of these sizes through all layers.
    """

    num_layers: int
    empty: float
    attention: float
    mlp: float
    rest: float
    nodes: tuple[int, ...]
    verify: tuple[float, ...]

    @property
    def plain(self) -> float:
        """Of a step without drafts."""
        return self.verify[0]

    @property
    def verify_ratios(self) -> np.ndarray:
        """Of verifying 1, 2, ... nodes, over a plain step; between measured sizes by lines."""
        wanted = np.arange(1, self.nodes[-1] + 1)
        times = np.maximum.accumulate(np.interp(wanted, self.nodes, self.verify))
        return np.asarray(times / self.plain)

    def draft_step(self, skip: SkipSet) -> float:
        """Of one draft token without the sublayers of a skip set, over a plain step."""
        left = self.num_layers - len(skip.attention & skip.mlp)
        seconds = self.empty + left * self.rest
        seconds += (self.num_layers - len(skip.attention)) * self.attention
        seconds += (self.num_layers - len(skip.mlp)) * self.mlp
        return seconds / self.plain

    def exit_step(self, exit_layer: int) -> float:
        """Of one draft token by the first layers, over a plain step."""
        return (self.empty + self.layers(exit_layer)) / self.plain

    def shared(self, first: int) -> float:
        """Of the first layers, where drafts run them complete, over a plain step."""
        return self.layers(first) / self.plain

    def layers(self, count: int) -> float:
        """Seconds of so many whole layers."""
        return count * (self.attention + self.mlp + self.rest)

    def speedup(self, skip: SkipSet, acceptance: float) -> tuple[float, int]:
        """What drafts without some sublayers give over plain decoding, and the best length."""
        return chain_speedup(acceptance, *self._chain(skip))

    def needed(self, skip: SkipSet) -> float | None:
        """The acceptance from which they pay; None if they cannot."""
        return acceptance_needed(*self._chain(skip))

    def _chain(self, skip: SkipSet) -> tuple[float, np.ndarray, float]:
        first = self.num_layers if skip.first is None else skip.first
        return self.draft_step(skip), self.verify_ratios, self.shared(first)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerTimes:
        """The inverse of `to_dict`."""
        lists = {name: tuple(values[name]) for name in ("nodes", "verify")}
        return super().from_dict({**values, **lists})


@torch.no_grad()
def measure_layer_times(
    target: Target, prefix: Sequence[int], rounds: int = _ROUNDS, nodes: Sequence[int] = _NODES
) -> LayerTimes:
    """Time forwards of one sequence in turns; medians.

    Args:
        target: The model, in evaluation mode.
        prefix: Token ids that are cached; as long as texts are expected to be.
        rounds: How often each is timed, after one that is not.
        nodes: Sizes of blocks; the first is 1.
    """
    count, device = target.architecture.num_layers, target.device
    every = frozenset(range(count))
    cache = target.architecture.new_cache(1, reserve=len(prefix) + 64, longest=len(prefix) + 64)
    ids = torch.tensor([list(prefix)], device=device)
    no_layer: frozenset[int] = frozenset()
    left_out = {
        "whole": (no_layer, no_layer),
        "attention": (every, no_layer),
        "mlp": (no_layer, every),
        "empty": (every, every),
    }
    seconds: dict[Any, list[float]] = {}

    def timed(name: Any, tree: TokenTree, plan: LayerPlan | None) -> None:
        start = time.perf_counter()
        target.run(tree, tree.width, cache, plan).argmax(-1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    with target.ready():
        target.fill(ids, cache)
        trees = {n: TokenTree.chain(ids[:, 0], ids[:, :1].repeat(1, n - 1)) for n in nodes}
        for _ in range(rounds + 1):
            for name, (attentions, mlps) in left_out.items():
                timed(name, trees[1], LayerPlan(skip_attention=attentions, skip_mlp=mlps))
            for n, tree in trees.items():
                timed(n, tree, None)
    usual = {name: median(times[1:]) for name, times in seconds.items()}
    whole, empty = usual["whole"], min(usual["empty"], usual["whole"])
    without_attention, without_mlp = usual["attention"], usual["mlp"]
    per_layer = (whole - empty) / count
    attention = min(max((whole - without_attention) / count, 0.0), per_layer)
    mlp = min(max((whole - without_mlp) / count, 0.0), per_layer - attention)
    return LayerTimes(
        num_layers=count,
        empty=empty,
        attention=attention,
        mlp=mlp,
        rest=per_layer - attention - mlp,
        nodes=tuple(nodes),
        verify=tuple(usual[n] for n in nodes),
    )
