"""Self-speculative decoding: a transformers decoder generates faster without a second model.

Shapes: B sequences, N nodes, V vocabulary, L layers, H query heads, K key/value heads, D head size,
C hidden size.
"""

__version__ = "0.1.0"

from selfspec import simulate
from selfspec.calibration import Calibration, calibrate
from selfspec.config import SpecConfig
from selfspec.drafters import (
    CombinedDrafter,
    Drafter,
    EarlyExitDrafter,
    FeatureDrafter,
    HeadsDrafter,
    LayerSkipDrafter,
    LossyExitDrafter,
    MtpDrafter,
    NGramDrafter,
    SuffixDrafter,
)
from selfspec.exit_calibration import ExitCalibration, calibrate_exit
from selfspec.metrics import SpecStats
from selfspec.model import SpeculativeModel, wrap
from selfspec.skip_set import SkipSet
from selfspec.state import Acceptance, DecodeState, TargetOutput
from selfspec.step import Step
from selfspec.tree import TokenTree

__all__ = [
    "Acceptance",
    "Calibration",
    "CombinedDrafter",
    "DecodeState",
    "Drafter",
    "EarlyExitDrafter",
    "ExitCalibration",
    "FeatureDrafter",
    "HeadsDrafter",
    "LayerSkipDrafter",
    "LossyExitDrafter",
    "MtpDrafter",
    "NGramDrafter",
    "SkipSet",
    "SpecConfig",
    "SpecStats",
    "SpeculativeModel",
    "Step",
    "SuffixDrafter",
    "TargetOutput",
    "TokenTree",
    "calibrate",
    "calibrate_exit",
    "simulate",
    "wrap",
]
