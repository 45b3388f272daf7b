"""Refusing a drafter's options by name, value and remedy."""

from __future__ import annotations


def check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse what is no int of at least `least` and at most `most`.

    Raises:
        TypeError: If it is no int.
        ValueError: If it is too small or too large.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int.")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}.")
    if most is not None and value > most:
        raise ValueError(f"{name}={value} must be at most {most}.")


def check_probability(name: str, value: object) -> None:
    """Refuse what is no number in 0..1.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is out of range.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number.")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must be a probability, 0..1.")


def check_bool(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        TypeError: If it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False.")
