"""What part of a plain step some of the layers take, by the weights that they read.

One token at a time a step takes as long as its weights take to be read. Good enough to choose by
until draft steps have been timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from selfspec.architectures import Architecture
    from selfspec.skip_set import SkipSet


@dataclass(frozen=True)
class LayerShares:
    """Of all weights that a token goes through, LM head included.

    Attributes:
        attention: Of every layer's attention; 0 where it is not told apart.
        mlp: Of every layer's MLP, likewise.
        layer: Of every whole layer.
    """

    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    layer: tuple[float, ...]

    @classmethod
    def of(cls, architecture: Architecture) -> LayerShares:
        """Count the weights of a model."""
        attention, mlp, layers = [], [], []
        for layer, parts in zip(architecture.layers, architecture.sublayers, strict=True):
            layers.append(_size(layer))
            attention.append(sum(_size(module) for module, is_attention in parts if is_attention))
            mlp.append(sum(_size(module) for module, is_attention in parts if not is_attention))
        head = architecture.head()
        whole = sum(layers) + (_size(head) if head is not None else 0)
        every = max(whole, 1)
        return cls(*(tuple(size / every for size in sizes) for sizes in (attention, mlp, layers)))

    def draft_step(self, skip: SkipSet) -> float:
        """Of a draft token without some sublayers, over a plain step."""
        left_out = 0.0
        for i, whole in enumerate(self.layer):
            attention, mlp = i in skip.attention, i in skip.mlp
            if attention and mlp:
                left_out += whole
            else:
                left_out += attention * self.attention[i] + mlp * self.mlp[i]
        return 1.0 - left_out

    def exit_step(self, exit_layer: int) -> float:
        """Of a draft token by the first layers, over a plain step."""
        return 1.0 - sum(self.layer[exit_layer:])

    def shared(self, first: int) -> float:
        """Of the first layers, over a plain step."""
        return sum(self.layer[:first])


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
