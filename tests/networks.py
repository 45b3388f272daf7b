"""Random draft networks, and drafters that make one for the model that they meet."""

from __future__ import annotations

from typing import Any

import torch

from selfspec import EarlyExitDrafter, FeatureDrafter, HeadsDrafter
from selfspec.networks import (
    ExitConfig,
    ExitNetwork,
    FeatureConfig,
    FeatureNetwork,
    HeadsConfig,
    HeadsNetwork,
)


def random_heads(size: int, vocab_size: int, seed: int = 0, **kind: Any) -> HeadsNetwork:
    """Three heads, unless `kind` says otherwise, of random weights."""
    network = HeadsNetwork(HeadsConfig(size, vocab_size, **{"num_heads": 3, **kind}))
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return network


class RandomHeads(HeadsDrafter):
    """Random heads for the model that it meets."""

    def __init__(self) -> None:
        super().__init__(random_heads(64, 64))

    def bind(self, architecture: Any) -> None:
        size = None if architecture.readout is None else architecture.readout.norm.weight.shape[0]
        if size not in (None, self.network.config.hidden_size):
            super().__init__(random_heads(size, 64))
        super().bind(architecture)


def random_feature(size: int, vocab_size: int, seed: int = 0, **kind: Any) -> FeatureNetwork:
    """Of random weights that make every input count; reads layers 0 and 1 unless `kind` differs."""
    sizes: dict[str, Any] = {
        "taps": (0, 1),
        "hidden_size": size,
        "intermediate_size": 24,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "draft_vocab_size": min(40, vocab_size),
    }
    generator = torch.Generator().manual_seed(seed)
    network = FeatureNetwork(FeatureConfig(size, vocab_size, **{**sizes, **kind}))
    for parameter in network.parameters():
        mean = float(parameter.ndim == 1)
        torch.nn.init.normal_(parameter, mean=mean, std=0.4, generator=generator)
    if network.head.ids is not None:
        ids = torch.randperm(vocab_size, generator=generator)[: network.head.size]
        network.head.choose(ids.sort().values)
    return network.requires_grad_(False)


def random_exit(
    size: int, vocab_size: int, exit_layer: int, seed: int = 0, attends: bool = True
) -> ExitNetwork:
    """Of random weights."""
    heads = {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 8} if attends else {}
    network = ExitNetwork(
        ExitConfig(size, vocab_size, exit_layer, 24, draft_vocab_size=20, **heads)
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        mean = float(parameter.ndim == 1)
        torch.nn.init.normal_(parameter, mean=mean, std=0.3, generator=generator)
    return network.requires_grad_(False)


class RandomFeature(FeatureDrafter):
    """A random feature network for the model that it meets."""

    def __init__(self) -> None:
        super().__init__(random_feature(64, 64), 4, 3, 0.0, 0.0)

    def bind(self, architecture: Any) -> None:
        size = architecture.embeddings().weight.shape[1]
        if size != self.network.config.hidden_size:
            super().__init__(random_feature(size, 64), 4, 3, 0.0, 0.0)
        super().bind(architecture)


class RandomExit(EarlyExitDrafter):
    """A random exit for the model that it meets."""

    def __init__(self) -> None:
        super().__init__(branches=2, confidence=0.0, network=random_exit(64, 64, 2))

    def bind(self, architecture: Any) -> None:
        size = architecture.embeddings().weight.shape[1]
        if self.network is None or size != self.network.config.hidden_size:
            super().__init__(branches=2, confidence=0.0, network=random_exit(size, 64, 2))
        super().bind(architecture)
