"""Tables of numbers in a run folder, such as a confusion matrix: tables/NAME.json."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import TABLES, write_atomic

Labels = Sequence[object] | None
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def make_table(name: str, values: Any, rows: Labels, columns: Labels, iteration: int) -> dict[str, Any]:
    """Return a table as its file has it; numbers that are not finite become None.

    Args:
        name: of the table and its file.
        values: numbers in two dimensions: nested sequences, an array or a tensor.
        rows, columns: their labels; by default they are numbered from 0.
        iteration: the step after which the table was made.

    Raises:
        ValueError: another name than a plain word, other values, or other numbers of labels.
    """
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise ValueError(
            f"A table's name must be a plain word of ASCII letters, digits, - and _, 64 at most. Got {name!r}. It "
            "becomes the name of a file."
        )
    numbers = _numbers(name, values)
    return {
        "name": name,
        "rows": _labels(name, "rows", rows, len(numbers)),
        "columns": _labels(name, "columns", columns, len(numbers[0])),
        "values": numbers,
        "iteration": iteration,
        "at": time.time(),
    }


def _numbers(name: str, values: Any) -> list[list[float | int | None]]:
    rows = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(rows, Sequence) and not isinstance(rows, str) and rows:
        lines = [list(row) if isinstance(row, list | tuple) else [] for row in rows]
        lines = [[one.item() if hasattr(one, "item") else one for one in line] for line in lines]
        is_flat = all(isinstance(one, int | float) for line in lines for one in line)
        if is_flat and len({len(line) for line in lines}) == 1 and lines[0]:
            return [[_finite(one) for one in line] for line in lines]
    shape = getattr(values, "shape", None)
    what = type(values).__name__ if shape is None else f"shape {tuple(shape)}"
    raise ValueError(
        f"A table's values must be numbers in two dimensions, (rows, columns), one of each at least. Table {name!r} "
        f"got {what}. Pass rows of equal length."
    )


def _finite(value: int | float) -> int | float | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value + 0  # bool becomes int


def _labels(name: str, which: str, labels: Labels, number: int) -> list[str]:
    if labels is None:
        return [str(place) for place in range(number)]
    if isinstance(labels, str) or len(found := [str(label) for label in labels]) != number:
        count = "one text" if isinstance(labels, str) else "1 label" if len(found) == 1 else f"{len(found)} labels"
        raise ValueError(
            f"Table {name!r} has {number} {which}. Got {count} for them. Pass {which}= one label for each."
        )
    return found


def tables_of(run: Path, iteration: int) -> list[dict[str, Any]]:
    """Return the tables of a run folder that were made after a step. A file that cannot be read is left out."""
    found = []
    for path in (run / TABLES).glob("*.json"):
        with suppress(OSError, ValueError):
            table = json.loads(path.read_bytes())
            if isinstance(table, dict) and table.get("iteration") == iteration:
                found.append(table)
    return found


def write_table(run: Path, table: dict[str, Any]) -> None:
    """Write a table into a run folder, in place of an earlier one of its name.

    Raises:
        OSError: it cannot be written.
    """
    (run / TABLES).mkdir(exist_ok=True)
    write_atomic(run / TABLES / f"{table['name']}.json", table)
