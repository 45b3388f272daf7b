"""What the target has at every position of a text: hidden states, and what it would say next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
def observe(
    model: PreTrainedModel, layers: Sequence[nn.Module], ids: Tensor, taps: Sequence[int], k: int
) -> Observed:
    """Run the target over texts.

    Args:
        model: In evaluation mode. Hooks are on its layers during the call.
        layers: Its decoder layers.
        ids: int64 [B, T], rows padded at the end with any token.
        taps: Which hidden states.
        k: K, how many tokens.

    Raises:
        ValueError: If the model is in training mode, so that dropout could change the states, or
            if there is no such layer.
    """
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first.")
    with _tapped(layers, taps) as caught:
        logits = model(input_ids=ids.to(_device(model)), use_cache=False).logits
    flat = logits.reshape(-1, logits.shape[-1])
    k = min(k, flat.shape[-1])
    tokens = torch.empty(len(flat), k, dtype=torch.int64, device=flat.device)
    probs = torch.empty(len(flat), k, dtype=torch.float32, device=flat.device)
    for at in range(0, len(flat), _CHUNK):
        part = slice(at, at + _CHUNK)
        best, tokens[part] = flat[part].topk(k)
        probs[part] = (best.float() - flat[part].float().logsumexp(-1, keepdim=True)).exp()
    shape = (*ids.shape, k)
    return Observed(caught, tokens.view(shape), probs.view(shape))


@contextmanager
def _tapped(layers: Sequence[nn.Module], taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    caught: dict[int, Tensor] = {}
    count = len(layers)
    if wrong := [tap for tap in taps if not 0 <= tap <= count]:
        raise ValueError(
            f"taps={wrong} are out of range: the model has {count} layers, 0..{count}."
        )

    def before(layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def after(_: nn.Module, __: Any, output: Any) -> None:
        caught[count] = output[0] if isinstance(output, tuple) else output

    handles = []
    try:
        for tap in set(taps) - {count}:
            handles.append(layers[tap].register_forward_pre_hook(before(tap), with_kwargs=True))
        if count in taps:
            handles.append(layers[-1].register_forward_hook(after))
        yield caught
    finally:
        for handle in handles:
            handle.remove()


def _device(model: PreTrainedModel) -> torch.device:
    device: torch.device = model.get_input_embeddings().weight.device
    return device
