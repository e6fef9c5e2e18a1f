"""Rows of a run, handed on in order to its file, to callbacks and to the terminal; means over several rows."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from math import isfinite, nan
from typing import Any, NamedTuple, Protocol

import torch

from ddp_loop.accelerators import HostCopy
from ddp_loop.reporting.jsonl import JsonlWriter
from ddp_loop.reporting.logged_values import LoggedValues
from ddp_loop.reporting.sink_calls import SinkCalls
from ddp_loop.reporting.throughput import Throughput

NORM = "gradient_norm"
RATE = "learning_rate"
UNUSED = "unused_samples"
UNUSED_AT_LEAST = "unused_samples_at_least"  # of an epoch, in its last row
_BESIDE = frozenset({"epoch", "iteration", "samples", "weight", "skipped", NORM, "samples_per_s", "elapsed_s", "loss"})
_BESIDE |= {UNUSED, UNUSED_AT_LEAST}


def is_metric(name: str) -> bool:
    """Whether a row's value of this name is a metric of the script."""
    return name not in _BESIDE and not name.startswith(RATE)


def is_averaged(name: str) -> bool:
    """Whether a row's value of this name, the loss or a metric, is averaged over rows."""
    return name == "loss" or is_metric(name)


@lru_cache(maxsize=256)
def _averaged(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(is_averaged, names))


class WeightedMeans:
    """Means over rows, sum_i(w_i value_i) / sum_i(w_i) with row weights w_i; skipped steps do not count.

    Attributes:
        rows: the number of rows.
        samples: the number of their samples.
        skipped: the number of rows of skipped steps.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self.rows = self.samples = self.skipped = 0

    def add(self, samples: int, values: Mapping[str, float]) -> None:
        """Add a row."""
        self.rows += 1
        self.samples += samples
        if values.get("skipped"):
            self.skipped += 1
            return
        weight = values.get("weight", samples)
        sums = self._sums
        for name in _averaged(tuple(values)):
            sums[name] = sums.get(name, 0.0) + weight * values[name]
        self._weight += weight

    def add_all(self, other: WeightedMeans) -> None:
        """Add the rows of other means."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
        self._weight += other._weight
        self.rows += other.rows
        self.samples += other.samples
        self.skipped += other.skipped

    def means(self) -> dict[str, float]:
        """Return the means by name; NaN if all weights are 0."""
        return {name: total / self._weight if self._weight else nan for name, total in self._sums.items()}


class EpochMeans:
    """The means over the rows of the current epoch.

    Attributes:
        means: so far.
    """

    def __init__(self) -> None:
        self.means = WeightedMeans()
        self._epoch = 0

    def turn_to(self, epoch: int) -> None:
        """Start over if this is another epoch."""
        if epoch != self._epoch:
            self.means = WeightedMeans()
            self._epoch = epoch

    def begin(self) -> Callable[[Mapping[str, Any]], None]:
        """Start over; returns `recall`, for all rows from the first one on."""
        self.means = WeightedMeans()
        self._epoch = 0
        return self.recall

    def recall(self, row: Mapping[str, Any]) -> None:
        """Add a row that was written before this process resumed the run."""
        self.turn_to(row["epoch"])
        self.means.add(row["samples"], {name: nan if one is None else one for name, one in row.items()})


FLUSH_S = 0.5  # between two flushes of rows.jsonl
BATCH_S = 0.05  # between two dispatches: several rows at once cost less each


class RowMeta(NamedTuple):
    """A row's place and time; epoch and iteration are counted from 1."""

    epoch: int
    iteration: int
    samples: int
    elapsed_s: float
    is_last_of_epoch: bool


_Sent = tuple[RowMeta, tuple[str, ...], HostCopy, dict[str, float]]


class DeviceToHostQueue:
    """Copies values from the device to the host, in order, without waiting for a GPU."""

    def __init__(self) -> None:
        self._waiting: deque[_Sent] = deque()

    def send(self, moment: RowMeta, names: tuple[str, ...], values: torch.Tensor, known: dict[str, float]) -> None:
        """Start to copy `values`, shape (len(names),), to the host; `known` is on the host already."""
        self._waiting.append((moment, names, HostCopy(values), known))

    def look(self) -> list[tuple[RowMeta, dict[str, float]]]:
        """Return the values that have arrived, up to an epoch's last row, and leave them here; for another thread."""
        arrived = []
        for moment, names, values, known in list(self._waiting):
            if moment.is_last_of_epoch or not values.ready():
                break
            arrived.append((moment, dict(zip(names, values.wait().tolist(), strict=True)) | known))
        return arrived

    def take(self, *, wait: bool) -> list[tuple[RowMeta, dict[str, float]]]:
        """Return the values that have arrived, in order; with `wait` all."""
        arrived = []
        while self._waiting:
            moment, names, values, known = self._waiting[0]
            if not (wait or values.ready()):
                break
            self._waiting.popleft()
            arrived.append((moment, dict(zip(names, values.wait().tolist(), strict=True)) | known))
        return arrived


def jsonl_line(moment: RowMeta, values: dict[str, float]) -> str:
    """Format a row as a line of JSON; values that are not finite become null.

    A cached format string takes 3 microseconds for a row, `json.dumps` 30.
    """
    numbers: tuple[object, ...] = tuple(values.values())
    if not isfinite(sum(values.values())):
        numbers = tuple([value if isfinite(value) else _Null() for value in values.values()])
    return _form(tuple(values)) % (moment.epoch, moment.iteration, moment.samples, *numbers, moment.elapsed_s)


@lru_cache(maxsize=256)
def _form(names: tuple[str, ...]) -> str:
    """The format string of a line with these values."""
    fields = "".join(f"{json.dumps(name).replace('%', '%%')}: %r, " for name in names)
    return f'{{"epoch": %d, "iteration": %d, "samples": %d, {fields}"elapsed_s": %.4f}}\n'


class _Null:
    """Its `repr` is JSON's null."""

    def __repr__(self) -> str:
        return "null"


class RowDisplay(Protocol):
    """Shows rows."""

    def take(self, moment: RowMeta, values: Mapping[str, float]) -> None:
        """Take a row."""

    def refresh(self) -> None:
        """Show something if it is time; called often."""

    def watch(self, hand_on: Callable[[], None]) -> None:
        """Show rows that `hand_on` brings, from another thread, where the main thread does not."""

    def close(self, last_words: str | None = None) -> None:
        """End the display, with a last message."""


class RowDispatcher:
    """Hands the rows of a run on, in order, on rank 0.

    Args:
        lines: the writer of rows.jsonl; None writes nothing.
        sinks: get each row, a dict, soon after its update; see `sinks`.
        logged: what the script logs beside the rows.
        terminal: shows the rows; None shows nothing.
        began: when the run began, on the monotonic clock, less the time of earlier processes.

    Raises:
        OSError: the file cannot be written; the lines in it are intact.
    """

    def __init__(
        self,
        lines: JsonlWriter | None,
        sinks: SinkCalls,
        logged: LoggedValues,
        terminal: RowDisplay | None,
        began: float,
    ) -> None:
        self._lines = lines
        self._sinks = sinks
        self._logged = logged
        self._terminal = terminal
        self._began = began
        self._arrivals = DeviceToHostQueue()
        self._flushed = self._due = time.monotonic()
        self._rate = Throughput(self._flushed - began)
        if terminal is not None:
            terminal.watch(self._show_arrived)

    def _show_arrived(self) -> None:
        for moment, values in self._arrivals.look():
            if self._terminal is not None:
                self._terminal.take(moment, values)

    @property
    def is_due(self) -> bool:
        """Whether it is time to hand rows on."""
        return time.monotonic() >= self._due

    def add(self, epoch: int, iteration: int, samples: int, is_last_of_epoch: bool,
            names: tuple[str, ...], values: torch.Tensor, known: dict[str, float]) -> None:  # fmt: skip
        """Add the row of an update: `values`, shape (len(names),), on any device, and `known` values of the host."""
        elapsed_s = round(time.monotonic() - self._began, 4)
        self._arrivals.send(RowMeta(epoch, iteration, samples, elapsed_s, is_last_of_epoch), names, values, known)
        if is_last_of_epoch:
            self._logged.end_line()
            self.flush_ready()

    def flush_ready(self) -> None:
        """Hand on the rows that have arrived."""
        self._due = time.monotonic() + BATCH_S
        self._logged.flush_ready()
        self._dispatch(self._arrivals.take(wait=False))
        if self._terminal is not None:
            self._terminal.refresh()
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def flush_all(self) -> None:
        """Wait for all rows, hand them on and write them, as a checkpoint requires."""
        self._logged.flush_all()
        self._dispatch(self._arrivals.take(wait=True))
        self._flush()
        self._sinks.flush()

    def close(self, last_words: str | None = None) -> None:
        """Wait for all rows, hand them on, and close the file, the receivers and the terminal."""
        with ExitStack() as ending:
            if self._terminal is not None:
                ending.callback(self._terminal.close, last_words)
            ending.callback(self._sinks.end_loop)
            if self._lines is not None:
                ending.callback(self._lines.close)
            self._logged.flush_all()
            self._dispatch(self._arrivals.take(wait=True))

    def _dispatch(self, rows: Sequence[tuple[RowMeta, dict[str, float]]]) -> None:
        """Hand rows on; first all to the file, so that a receiver that raises loses none."""
        if self._lines is not None:
            for moment, values in rows:
                self._lines.add(jsonl_line(moment, values))
        for moment, values in rows:
            if self._sinks:
                self._give(moment, values)
            if self._terminal is not None:
                self._terminal.take(moment, values)

    def _give(self, moment: RowMeta, values: dict[str, float]) -> None:
        row = {
            "epoch": moment.epoch,
            "iteration": moment.iteration,
            "samples": moment.samples,
            **values,
            "samples_per_s": round(self._rate.take(moment.elapsed_s, moment.samples), 1),
            "elapsed_s": moment.elapsed_s,
        }
        self._sinks.row(row)

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        self._logged.write()
        if self._lines is not None:
            self._lines.flush()
