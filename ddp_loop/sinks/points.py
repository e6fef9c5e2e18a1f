"""Points of curves on their way to a service: the common part of sinks that draw curves."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ddp_loop.reporting import PLACE, RunStart, WeightedMeans, is_averaged

Row = Mapping[str, Any]


class Point(NamedTuple):
    """Values of one step.

    Attributes:
        kind: "row", "evaluation", "logged", or one of the sink's own.
        values: by name; an evaluation puts its names below `evaluation/`.
        iteration: the step.
        at_s: when it came, in seconds since 1970.
    """

    kind: str
    values: Mapping[str, Any]
    iteration: int
    at_s: float


class PointSink:
    """A sink of points, which wait to be sent: of rows the mean since the last one that was sent, of all else each one.

    Args:
        every_s: seconds between two calls of `_send`, at least, but for evaluations and `flush`.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._means = WeightedMeans()
        self._last: Row = {}
        self._waiting: list[Point] = []
        self._sent_at = time.monotonic()

    def _send(self, points: list[Point]) -> None:
        """Send the points that waited, in order."""
        raise NotImplementedError

    def _add(self, kind: str, values: Mapping[str, Any], iteration: int) -> None:
        self._waiting.append(Point(kind, values, iteration, time.time()))
        self._flush_if_time()

    def __call__(self, row: Row) -> None:
        """Take a row; the first one is sent at once."""
        is_first = not self._last
        self._means.add(int(row["samples"]), row)
        self._last = dict(row)
        if is_first:
            self._send_waiting()
        else:
            self._flush_if_time()

    def evaluated(self, line: Row) -> None:
        """Take the result of an evaluation, and send it; null is NaN."""
        self._add("evaluation", {f"evaluation/{name}": value for name, value in _values_of(line)}, line["iteration"])
        self.flush()

    def logged(self, line: Row) -> None:
        """Take logged values; null is NaN."""
        self._add("logged", dict(_values_of(line)), line["iteration"])

    def _flush_if_time(self) -> None:
        if time.monotonic() - self._sent_at >= self._every_s:
            self._send_waiting()

    def flush(self) -> None:
        """Send the points so far."""
        self._send_waiting()

    def _send_waiting(self) -> None:
        if self._means.rows:
            last = {name: one for name, one in self._last.items() if name not in PLACE and not is_averaged(name)}
            self._waiting.append(Point("row", last | self._means.means(), self._last["iteration"], time.time()))
            self._means = WeightedMeans()
        waiting = self._waiting
        self._waiting = []
        self._sent_at = time.monotonic()
        if waiting:
            self._send(waiting)


def _values_of(line: Row) -> list[tuple[str, float]]:
    return [(name, math.nan if one is None else one) for name, one in line.items() if name not in PLACE]


def require(package: str) -> None:
    """Raise ImportError unless the package of a sink is there."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(f'{package}_sink needs {package}. Run pip install "ddp_loop[{package}]"')


def keep(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file for a resumed run into the run folder, whole or not at all: a process may be killed here."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


def kept(run: RunStart, name: str) -> dict[str, Any] | None:
    """Read the file that an earlier process of a resumed run kept; None for a new run."""
    path = None if run.folder is None or run.iteration == 0 else run.folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else None
