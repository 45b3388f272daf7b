"""Refusing a network's sizes by name and value, before they become a shape."""

from __future__ import annotations

from typing import Any


def check_counts(config: Any, optional: tuple[str, ...] = (), **least: int) -> None:
    """Hold fields to be ints.

    Args:
        config: Whose fields they are.
        optional: Those of the fields that may be None.
        least: The smallest value of every field.

    Raises:
        ValueError: If one is no int, or too small.
    """
    for name, low in least.items():
        value = getattr(config, name)
        if value is None and name in optional:
            continue
        if type(value) is not int or value < low:
            raise ValueError(f"{name}={value!r} must be an int of at least {low}.")


def check_attention(config: Any) -> None:
    """Hold `num_heads`, `num_key_value_heads`, `head_dim` and `max_positions` to make an attention.

    Raises:
        ValueError: If they do not.
    """
    check_counts(config, num_heads=1, num_key_value_heads=1, head_dim=2, max_positions=1)
    if config.num_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_heads={config.num_heads} must be a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}."
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} must be even: its halves are rotated.")


def check_layers(name: str, layers: tuple[Any, ...]) -> None:
    """Hold numbers of layers to be ints of at least 0.

    Raises:
        ValueError: If one is not.
    """
    if any(type(layer) is not int or layer < 0 for layer in layers):
        raise ValueError(f"{name}={layers} must be ints of at least 0.")
