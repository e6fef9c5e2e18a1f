"""Points of curves, from rows and other lines: what sinks have in common that draw curves."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddp_loop.reporting import WeightedMeans, is_averaged

Row = Mapping[str, Any]
BESIDE = ("epoch", "iteration", "samples", "weight", "skipped", "elapsed_s")  # of a line: its place, no values


class RowMeans:
    """Points of curves: each is the mean of the rows since the last point.

    Args:
        write: called with the values of a point, by name, and its iteration.
        every_s: seconds between two points, at least.
    """

    def __init__(self, write: Callable[[dict[str, float], int], None], every_s: float) -> None:
        self._write = write
        self._every_s = every_s
        self._means = WeightedMeans()
        self._last = dict[str, float]()
        self._written = -math.inf  # the clock counts from the machine's start, which may be a moment ago

    def add(self, row: Row) -> None:
        """Add a row, and perhaps write a point."""
        self._means.add(int(row["samples"]), row)
        self._last = dict(row)
        if time.monotonic() - self._written >= self._every_s:
            self.flush()

    def flush(self) -> None:
        """Write the point of the rows so far."""
        if not self._means.rows:
            return
        values = {name: value for name, value in self._last.items() if not is_averaged(name)} | self._means.means()
        for name in BESIDE:
            values.pop(name, None)
        self._means = WeightedMeans()
        self._written = time.monotonic()
        self._write(values, int(self._last["iteration"]))


def values_of(line: Row) -> dict[str, float]:
    """The values of an evaluation or of logged values, by name; null is NaN."""
    return {name: math.nan if one is None else one for name, one in line.items() if name not in BESIDE}


def keep(path: Path, content: Mapping[str, Any]) -> None:
    """Write what a resumed run needs to a file of the run folder, whole or not at all: a process may be killed here."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)
