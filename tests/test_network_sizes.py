"""Configs of networks: what makes no network is refused, by name and value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from selfspec.networks import (
    ExitConfig,
    FeatureConfig,
    FeatureNetwork,
    HeadsConfig,
)

FEATURE = FeatureConfig(64, 64, (1,), 64, 32, 4, 2, 16)
EXIT = ExitConfig(64, 64, 2, 32, num_heads=4, num_key_value_heads=2, head_dim=16)
HEADS = HeadsConfig(64, 64, 2)
COUNTS = [
    (config, name)
    for config, names in (
        (FEATURE, ("target_hidden_size", "hidden_size", "intermediate_size", "draft_vocab_size")),
        (FEATURE, ("num_heads", "num_key_value_heads", "head_dim", "max_positions")),
        (EXIT, ("hidden_size", "exit_layer", "intermediate_size", "num_key_value_heads")),
        (HEADS, ("hidden_size", "vocab_size", "num_heads", "num_layers", "draft_vocab_size")),
    )
    for name in names
]


@pytest.mark.parametrize(("config", "name"), COUNTS)
@pytest.mark.parametrize("value", [-1, 1.5, "4", True])
def test_counts_are_counts(config: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} must be an int of at least"):
        replace(config, **{name: value})


def test_only_what_is_optional_may_be_none() -> None:
    replace(FEATURE, draft_vocab_size=None)
    for config, name in ((FEATURE, "num_heads"), (EXIT, "exit_layer"), (HEADS, "num_layers")):
        with pytest.raises(ValueError, match=f"{name}=None must be an int"):
            replace(config, **{name: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_key_value_heads=3"),
        ({"head_dim": 3}, "head_dim=3 must be even"),
        ({"taps": (2.5,)}, r"taps=\(2.5,\) must be ints of at least 0"),
        ({"taps": (-1,)}, r"taps=\(-1,\) must be ints of at least 0"),
        ({"taps": ()}, "do not fit"),
    ],
)
def test_what_does_not_fit_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FEATURE, **changes)


@pytest.mark.parametrize("rope", [{"rope_type": "unknown"}, {"rope_type": "linear"}, 3, {}])
def test_rotary_parameters_that_make_no_angles(rope: Any) -> None:
    if rope == {}:  # transformers' defaults
        FeatureNetwork(replace(FEATURE, rope=rope))
        return
    with pytest.raises(ValueError, match="is not what transformers makes angles of"):
        FeatureNetwork(replace(FEATURE, rope=rope))
