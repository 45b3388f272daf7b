"""How often the early layers of a model would say what all of them say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from selfspec.patch import LayerPlan
from selfspec.target import Target
from selfspec.training.answers import Answer
from selfspec.training.batches import plan
from selfspec.training.early_exits import padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = 256  # whose logits there are at a time


@torch.no_grad()
def exit_agreement(
    model: PreTrainedModel,
    answers: Sequence[Answer],
    exits: Sequence[int],
    tokens_per_batch: int = 2048,
) -> dict[int, float]:
    """By exit layer, the share of answer tokens that the exit and the whole model agree on.

    Both read the same text up to there: it is the acceptance of greedy drafts that have been right
    so far.

    Args:
        model: In evaluation mode.
        answers: Texts; only the places of answer tokens count.
        exits: Counts of layers, 1..L.
        tokens_per_batch: Most positions of a forward, padding included.

    Raises:
        ValueError: If an exit is not in 1..L, or the model's head runs on its last layer only.
    """
    target = Target(model)
    count = target.architecture.num_layers
    if wrong := [e for e in exits if not 1 <= e <= count]:
        raise ValueError(f"exits has {wrong}: the model has {count} layers, choose 1..{count}.")
    if not target.architecture.resumable:
        raise ValueError("the head of this model cannot be run on states of earlier layers.")
    lengths = [len(a.prompt_ids) + len(a.response_ids) for a in answers]
    right, total = dict.fromkeys(exits, 0), 0
    for rows in plan(range(len(answers)), lengths, tokens_per_batch, seed=0, epoch=0):
        ids, labels = padded([answers[row] for row in rows], target.device)
        run = LayerPlan(taps=frozenset({*exits, count}))
        hidden = target.read(ids, run, with_logits=False).hidden
        states = {tap: state[(labels >= 0).to(state.device)] for tap, state in hidden.items()}
        for at in range(0, len(states[count]), _POSITIONS):
            part = slice(at, at + _POSITIONS)
            said = {
                tap: target.after_last(state[None, part])[0].argmax(-1)
                for tap, state in states.items()
            }
            total += len(said[count])
            for exit_layer in exits:
                agree = said[exit_layer] == said[count].to(said[exit_layer].device)
                right[exit_layer] += int(agree.sum())
    return {exit_layer: right[exit_layer] / max(total, 1) for exit_layer in exits}
