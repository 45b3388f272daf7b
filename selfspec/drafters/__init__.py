"""Drafters: one file each, and the protocol that anybody's own can follow."""

from selfspec.drafters.combined import CombinedDrafter
from selfspec.drafters.early_exit import EarlyExitDrafter
from selfspec.drafters.feature import FeatureDrafter
from selfspec.drafters.heads import HeadsDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.lossy_exit import LossyExitDrafter
from selfspec.drafters.mtp import MtpDrafter
from selfspec.drafters.ngram import NGramDrafter
from selfspec.drafters.protocol import Drafter
from selfspec.drafters.suffix import SuffixDrafter

__all__ = [
    "CombinedDrafter",
    "Drafter",
    "EarlyExitDrafter",
    "FeatureDrafter",
    "HeadsDrafter",
    "LayerSkipDrafter",
    "LossyExitDrafter",
    "MtpDrafter",
    "NGramDrafter",
    "SuffixDrafter",
]
