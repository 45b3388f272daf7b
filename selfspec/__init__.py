"""Self-speculative decoding: a transformers decoder generates faster without a second model.

Shapes: B sequences, N nodes, V vocabulary, L layers, H query heads, K key/value heads, D head size,
C hidden size.
"""

__version__ = "0.1.0"

from selfspec.config import SpecConfig
from selfspec.drafters import (
    CombinedDrafter,
    Drafter,
    EarlyExitDrafter,
    FeatureDrafter,
    HeadsDrafter,
    LayerSkipDrafter,
    MtpDrafter,
    NGramDrafter,
    SkipSet,
)
from selfspec.metrics import SpecStats
from selfspec.model import SpeculativeModel, wrap
from selfspec.state import Acceptance, DecodeState, TargetOutput
from selfspec.step import Step
from selfspec.tree import TokenTree

__all__ = [
    "Acceptance",
    "CombinedDrafter",
    "DecodeState",
    "Drafter",
    "EarlyExitDrafter",
    "FeatureDrafter",
    "HeadsDrafter",
    "LayerSkipDrafter",
    "MtpDrafter",
    "NGramDrafter",
    "SkipSet",
    "SpecConfig",
    "SpecStats",
    "SpeculativeModel",
    "Step",
    "TargetOutput",
    "TokenTree",
    "wrap",
]
