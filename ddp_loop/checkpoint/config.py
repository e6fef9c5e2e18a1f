"""A run's hyper-parameters, as run.json keeps them: one flat object of names and plain values."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from ddp_loop.checkpoint.secrets import hide_in_config
from ddp_loop.determinism import as_int

Config = dict[str, bool | int | float | str | None]
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # another one in each process
_MOST_LETTERS = 500  # of a value's text


def flatten_config(config: object) -> Config:
    """Return hyper-parameters by name, nested ones as "optimizer.rate" or "sinks.0.name".

    Values are None, bool, int, float or str. Numbers of NumPy and torch become Python's. Everything else is kept as
    its text: paths, enums, tuples, functions by their names, and numbers that are not finite. The
    value of a name that looks like a secret's, such as api_key, is "***".

    Args:
        config: a mapping, an `argparse.Namespace` or an instance of a dataclass, also nested.

    Raises:
        ValueError: it is none of these, or two of its parts have one name.
    """
    if _parts_of(config) is None or isinstance(config, list | tuple):
        raise ValueError(
            "config must be a mapping, an argparse.Namespace or an instance of a dataclass. Got "
            f"{config if isinstance(config, type) else type(config).__name__}. Pass a dict of names and values."
        )
    flat: Config = {}
    for name, value in _leaves("", config):
        if name in flat:
            raise ValueError(f"Each part of config needs a name of its own. Two are named {name!r}. Rename one.")
        flat[name] = _plain(value)
    return hide_in_config(flat)


def _parts_of(value: object) -> Mapping[Any, object] | None:
    """The parts of a nested value by name; None for any other value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Namespace):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, list | tuple) and any(map(_parts_of, value)):
        return dict(enumerate(value))
    return None


def _leaves(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    for key, part in (_parts_of(value) or {}).items():
        name = f"{prefix}{key}"
        if _parts_of(part):
            yield from _leaves(f"{name}.", part)
        else:
            yield name, part


def _plain(value: Any) -> bool | int | float | str | None:
    if isinstance(value, Enum):
        return str(value)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()  # of NumPy or torch
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)[:_MOST_LETTERS]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(number := as_int(value), int):
        return number
    text = getattr(value, "__qualname__", None) if callable(value) else None
    return _ADDRESS.sub("", text if isinstance(text, str) else str(value))[:_MOST_LETTERS]


def changes_between(before: Mapping[str, object], now: Config) -> list[str]:
    """Return the differences of two runs' hyper-parameters, in words; none if there were none before."""
    if not before:
        return []
    both = [name for name in now if name in before]
    lines = [f"config: {name} was {before[name]!r}, is {now[name]!r}" for name in both if before[name] != now[name]]
    lines += [f"config: {name} is new, {now[name]!r}" for name in now if name not in before]
    return lines + [f"config: {name} was {before[name]!r}, is left out" for name in before if name not in now]
