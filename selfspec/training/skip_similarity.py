"""Skip sets by dynamic programming: layers whose states are much like those that they were given.

Chen et al. 2025 (CLaSp), https://arxiv.org/abs/2505.24196.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.patch import LayerPlan
from selfspec.skip_set import SkipSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from selfspec.replay import Replay


@dataclass(frozen=True, eq=False)
class _Way:
    """One way through the layers so far, and the states [B, W, C] at its end."""

    states: Tensor
    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    def without(self, layer: int, attention: bool, mlp: bool) -> _Way:
        return _Way(
            self.states,
            self.attention | ({layer} if attention else set()),
            self.mlp | ({layer} if mlp else set()),
        )


def similar_sets(
    replay: Replay, most: int, tick: Callable[[], object] = lambda: None
) -> list[SkipSet]:
    """For 1, 2, ... sublayers left out, the set that keeps the states closest to the model's.

    Of all ways to a point in the model with as many sublayers left out, the one whose states have
    the largest cosine with those of the whole model is followed; so it takes `L * most` runs of a
    sublayer, and no LM head.

    Args:
        replay: Of texts; patches are on.
        most: Sublayers left out at most.
        tick: Called after every layer.

    Returns:
        Sets by size, those of a size that cannot be had (where sublayers cannot be told apart)
        left out.
    """
    architecture = replay.target.architecture
    count, borrowers = architecture.num_layers, architecture.borrowers
    whole = LayerPlan(taps=frozenset(range(count + 1)))
    replay.run(whole, with_logits=False)
    truth = whole.captured
    ways = {0: _Way(truth[0])}
    for layer in range(count):
        may_skip = not borrowers or layer in borrowers
        if len(architecture.sublayers[layer]) == 2:
            half = _run(replay, layer, truth[layer], attention=True, mlp=False)
            ways = _next(replay, ways, layer, half, most, may_skip, attention=True, mlp=False)
            ways = _next(replay, ways, layer, truth[layer + 1], most, True, False, True)
        else:
            ways = _next(replay, ways, layer, truth[layer + 1], most, may_skip, True, True)
        tick()
    return [SkipSet(way.attention, way.mlp) for size, way in sorted(ways.items()) if size]


def _next(
    replay: Replay,
    ways: dict[int, _Way],
    layer: int,
    truth: Tensor,
    most: int,
    may_skip: bool,
    attention: bool,
    mlp: bool,
) -> dict[int, _Way]:
    """Ways that run a part of a layer, or leave it out, whichever is closer to `truth`."""
    size, found = attention + mlp, {}
    for skipped, way in ways.items():
        states = _run(replay, layer, way.states, attention, mlp)
        found[skipped] = _Way(states, way.attention, way.mlp)
    for skipped, way in ways.items() if may_skip else ():
        at = skipped + size
        if at > most:
            continue
        other = way.without(layer, attention, mlp)
        if at not in found or _cosine(other.states, truth) > _cosine(found[at].states, truth):
            found[at] = other
    return found


def _run(replay: Replay, layer: int, states: Tensor, attention: bool, mlp: bool) -> Tensor:
    own = frozenset({layer})
    plan = LayerPlan(
        first=layer,
        last=layer + 1,
        resume=states,
        skip_attention=frozenset() if attention else own,
        skip_mlp=frozenset() if mlp else own,
        taps=frozenset({layer + 1}),
    )
    replay.run(plan, with_logits=False)
    return plan.captured[layer + 1]


def _cosine(states: Tensor, truth: Tensor) -> float:
    pair = states.float(), truth.to(states.device).float()
    return float(torch.cosine_similarity(*pair, dim=-1).mean())
