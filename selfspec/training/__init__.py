"""Training drafts on what the target itself says: answers, their states, a network."""

from selfspec.training.answers import Answer, answer_prompts, read_answers, read_prompts
from selfspec.training.config import TrainConfig
from selfspec.training.early_exits import EarlyExitConfig, train_early_exits
from selfspec.training.estimate import Estimate
from selfspec.training.exit_agreement import exit_agreement
from selfspec.training.skip_search import find_skip_set
from selfspec.training.states import ShardedStates, StreamedStates, write_states
from selfspec.training.train import train

__all__ = [
    "Answer",
    "EarlyExitConfig",
    "Estimate",
    "ShardedStates",
    "StreamedStates",
    "TrainConfig",
    "answer_prompts",
    "exit_agreement",
    "find_skip_set",
    "read_answers",
    "read_prompts",
    "train",
    "train_early_exits",
    "write_states",
]
