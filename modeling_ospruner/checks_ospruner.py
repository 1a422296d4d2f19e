"""Checks of settings: the errors name the field, what was given, and what is allowed."""

from __future__ import annotations

import math


def check_integer(owner: str, name: str, value: object, low: int | None = None) -> None:
    """Checks that a setting is an integer (True and False are none), and not below `low`.

    Raises:
        TypeError: it is of another type.
        ValueError: it is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} is {value!r}; it must be an integer")
    if low is not None and value < low:
        raise ValueError(f"{owner}: {name} is {value}; it must be {low} or more")


def check_number(
    owner: str, name: str, value: object, low: float, high: float, open_low: bool = False
) -> None:
    """Checks that a setting is a number (True and False are none) in [low, high].

    Args:
        owner: whose setting it is.
        name: the setting.
        value: what was given.
        low: the least allowed value.
        high: the greatest.
        open_low: whether `low` itself is not allowed.

    Raises:
        TypeError: it is of another type.
        ValueError: it lies outside, or is NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: {name} is {value!r}; it must be a number")
    inside = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise ValueError(f"{owner}: {name} is {value}; it must lie in {bracket}{low}, {high:.4g}]")


def check_flag(owner: str, name: str, value: object) -> None:
    """Checks that a setting is True or False.

    Raises:
        TypeError: it is anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} is {value!r}; it must be True or False")
