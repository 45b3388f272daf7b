"""Refusing options by name, value and remedy."""

from __future__ import annotations

import math
from numbers import Integral, Real


def check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse what is no int of at least `least` and at most `most`.

    Raises:
        TypeError: If it is no int.
        ValueError: If it is too small or too large.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int.")
    if int(value) < least:
        raise ValueError(f"{name}={value} must be at least {least}.")
    if most is not None and int(value) > most:
        raise ValueError(f"{name}={value} must be at most {most}.")


def check_probability(name: str, value: object) -> None:
    """Refuse what is no number in 0..1.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is out of range.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number.")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"{name}={value} must be a probability, 0..1.")


def check_number(name: str, value: object, least: float = -math.inf) -> None:
    """Refuse what is no finite number of at least `least`.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is infinite, NaN, or too small.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number.")
    if not math.isfinite(value) or float(value) < least:
        bound = f" of at least {least:g}" if math.isfinite(least) else ""
        raise ValueError(f"{name}={value} must be a finite number{bound}.")


def check_bool(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        TypeError: If it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False.")
