"""Checks of whole numbers that a user gives."""

from __future__ import annotations

from operator import index
from typing import Any


def check_count(name: str, value: Any, least: int | None = 1, *, remedy: str = "") -> int:
    """Check that `value` is a whole number of at least `least`.

    Integers of NumPy and torch are whole numbers; bool and float are not, whatever their value.

    Args:
        name: of the argument, the first word of the error message.
        value: what the user gave.
        least: the smallest allowed value; None for no bound.
        remedy: a sentence to add to the error message.

    Returns:
        `value` as Python's int.

    Raises:
        ValueError: `value` is not a whole number, or less than `least`.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f", {least} or more"
        raise ValueError(f"{name} must be a whole number{bound}. Got {value!r}.{f' {remedy}' if remedy else ''}")
    return number


def as_int(value: Any) -> Any:
    """An integer of NumPy or torch as Python's int; other values, bool too, as they are."""
    try:
        return value if isinstance(value, bool) else index(value)
    except TypeError:
        return value


def check_seed(seed: Any) -> int:
    """A seed as Python's int.

    Raises:
        ValueError: it is no integer that fits 64 bits, signed or unsigned.
    """
    number = check_count("seed", seed, None)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed must be a whole number of 64 bits. Got {seed!r}.")
    return number
