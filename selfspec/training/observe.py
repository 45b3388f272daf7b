"""What the target has at every position of a text: hidden states, and what it would say next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.patch import LayerPlan

if TYPE_CHECKING:
    from selfspec.target import Target

# Positions whose logits over the whole vocabulary are in float32 at a time.
_CHUNK = 128


@dataclass(frozen=True, eq=False)
class Observed:
    """Of one forward over [B, T] tokens.

    Attributes:
        taps: {layer: [B, T, C]} input of the layer; L: output of the last one.
        tokens: int64 [B, T, K], the most probable next tokens, best first.
        probs: float32 [B, T, K], their probabilities among all V.
    """

    taps: dict[int, Tensor]
    tokens: Tensor
    probs: Tensor


@torch.no_grad()
def observe(target: Target, ids: Tensor, taps: Sequence[int], k: int) -> Observed:
    """Run the target over texts, tapped as it is when it drafts.

    Args:
        target: Of a model in evaluation mode.
        ids: int64 [B, T], rows padded at the end with any token.
        taps: Which hidden states.
        k: K, how many tokens.

    Raises:
        ValueError: If the model is in training mode, so that dropout could change the states,
            there is no such layer, or its states are no vectors.
    """
    if target.model.training:
        raise ValueError("the model is in training mode: call model.eval() first.")
    if fault := target.architecture.states_fault:
        raise ValueError(f"nothing can be trained on this model's states between layers: {fault}.")
    count = target.architecture.num_layers
    if wrong := [tap for tap in taps if not 0 <= tap <= count]:
        raise ValueError(
            f"taps={wrong} are out of range: the model has {count} layers, 0..{count}."
        )
    seen = target.read(ids.to(target.device), LayerPlan(taps=frozenset(taps)))
    flat = seen.logits.reshape(-1, seen.logits.shape[-1])
    k = min(k, flat.shape[-1])
    tokens = torch.empty(len(flat), k, dtype=torch.int64, device=flat.device)
    probs = torch.empty(len(flat), k, dtype=torch.float32, device=flat.device)
    for at in range(0, len(flat), _CHUNK):
        part = slice(at, at + _CHUNK)
        best, tokens[part] = flat[part].topk(k)
        probs[part] = (best.float() - flat[part].float().logsumexp(-1, keepdim=True)).exp()
    shape = (*ids.shape, k)
    return Observed(seen.hidden, tokens.view(shape), probs.view(shape))
