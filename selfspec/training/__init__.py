"""Training drafts on what the target itself says: answers, their states, a network."""

from selfspec.training.answers import Answer, answer_prompts, read_answers, read_prompts
from selfspec.training.config import TrainConfig
from selfspec.training.estimate import Estimate
from selfspec.training.states import ShardedStates, StreamedStates, write_states
from selfspec.training.train import train

__all__ = [
    "Answer",
    "Estimate",
    "ShardedStates",
    "StreamedStates",
    "TrainConfig",
    "answer_prompts",
    "read_answers",
    "read_prompts",
    "train",
    "write_states",
]
