"""Options of a training: refused by name and value, and the same after a round trip."""

from __future__ import annotations

import json
from typing import Any

import pytest

from selfspec.training import TrainConfig


def test_round_trip_through_json() -> None:
    config = TrainConfig(kind="heads", taps=(1, 5), draft_vocab_size=None, learning_rate=1e-4)
    values = json.loads(json.dumps(config.to_dict()))
    assert "selfspec_version" in values
    assert TrainConfig.from_dict(values) == config
    assert TrainConfig.from_dict({"kind": "exit"}) == TrainConfig(kind="exit")


def test_unknown_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown option lr, warmup; known: .*learning_rate"):
        TrainConfig.from_dict({"lr": 1, "warmup": 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "medusa"),
        ("loss", "mse"),
        ("optimizer", "sgd"),
        ("dtype", "float16"),
        ("start", "zero"),
        ("steps", 0),
        ("steps", True),
        ("tokens_per_batch", 10.0),
        ("draft_vocab_size", 0),
        ("exit_layer", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("prompt_weight", -0.1),
        ("step_decay", 1.1),
        ("held_out", 0.0),
        ("held_out", 1.0),
        ("held_out", ".2"),
        ("learning_rate", "0.1"),
        ("checkpoint_seconds", None),
        ("clip", True),
        ("own_head", "false"),
        ("conditioned", 1),
    ],
)
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        TrainConfig(**{name: value})


def test_depths() -> None:
    assert TrainConfig(steps=5).depths == 5
    assert TrainConfig(kind="heads", num_draft_heads=2, steps=5).depths == 2
