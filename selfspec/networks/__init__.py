"""The trained parts of drafters: plain torch modules that know nothing of decoding."""

from selfspec.networks.exit import ExitConfig, ExitNetwork
from selfspec.networks.feature import FeatureConfig, FeatureNetwork
from selfspec.networks.heads import HeadsConfig, HeadsNetwork
from selfspec.networks.vocabulary import DraftHead

__all__ = [
    "DraftHead",
    "ExitConfig",
    "ExitNetwork",
    "FeatureConfig",
    "FeatureNetwork",
    "HeadsConfig",
    "HeadsNetwork",
]
