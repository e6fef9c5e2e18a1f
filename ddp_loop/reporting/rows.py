"""Rows in order: to the run folder, to callbacks, to the terminal; and means over several rows."""

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
from ddp_loop.reporting.throughput import Throughput

NORM, RATE = "gradient_norm", "learning_rate"
_BESIDE = frozenset({"epoch", "iteration", "samples", "weight", "skipped", NORM, "samples_per_s", "elapsed_s", "loss"})


def is_metric(name: str) -> bool:
    """Whether a row's value of this name is one that the script gave beside the loss."""
    return name not in _BESIDE and not name.startswith(RATE)


def is_averaged(name: str) -> bool:
    """Whether it is one of a mini-batch that has a mean over several: the loss, a metric."""
    return name == "loss" or is_metric(name)


@lru_cache(maxsize=256)
def _averaged(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(is_averaged, names))


class WeightedMeans:
    """sum_i(w_i value_i) / sum_i(w_i) over rows, w_i a row's weight; steps that were skipped do not count.

    Attributes:
        rows: how many were added.
        samples: theirs.
        skipped: how many of them were of a step that was skipped.
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
        """Add another one's rows."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
        self._weight += other._weight
        self.rows += other.rows
        self.samples += other.samples
        self.skipped += other.skipped

    def means(self) -> dict[str, float]:
        """By name; NaN where all weights are 0."""
        return {name: total / self._weight if self._weight else nan for name, total in self._sums.items()}


class EpochMeans:
    """The means over one epoch's rows: of the one that came last.

    Attributes:
        means: so far.
    """

    def __init__(self) -> None:
        self.means, self._epoch = WeightedMeans(), 0

    def turn_to(self, epoch: int) -> None:
        """Rows of this epoch come now."""
        if epoch != self._epoch:
            self.means, self._epoch = WeightedMeans(), epoch

    def begin(self) -> Callable[[Mapping[str, Any]], None]:
        """Forget all; returns what rows are recalled by, from the first one on."""
        self.means, self._epoch = WeightedMeans(), 0
        return self.recall

    def recall(self, row: Mapping[str, Any]) -> None:
        """A row that was written before this process went on."""
        self.turn_to(row["epoch"])
        self.means.add(row["samples"], {name: nan if one is None else one for name, one in row.items()})


FLUSH_S = 0.5  # rows.jsonl grows in whole lines, at least this often
BATCH_S = 0.05  # and so often rows are handed on, at most: several at once cost less each

OnRow = Callable[[dict[str, Any]], None]


class RowMeta(NamedTuple):
    """When a row was made, and of how many samples; epoch and iteration are counted from 1."""

    epoch: int
    iteration: int
    samples: int
    elapsed_s: float
    is_last_of_epoch: bool


_Sent = tuple[RowMeta, tuple[str, ...], HostCopy, dict[str, float]]


class DeviceToHostQueue:
    """Values on their way from the device to the host, in order; on a GPU nobody waits for them."""

    def __init__(self) -> None:
        self._waiting: deque[_Sent] = deque()

    def send(self, moment: RowMeta, names: tuple[str, ...], values: torch.Tensor, known: dict[str, float]) -> None:
        """Start the copy of `values`, (len(names),), to the host; `known` is there already."""
        self._waiting.append((moment, names, HostCopy(values), known))

    def take(self, *, wait: bool) -> list[tuple[RowMeta, dict[str, float]]]:
        """Those that have arrived, in order; with `wait` all."""
        arrived = []
        while self._waiting:
            moment, names, values, known = self._waiting[0]
            if not (wait or values.ready()):
                break
            self._waiting.popleft()
            arrived.append((moment, dict(zip(names, values.wait().tolist(), strict=True)) | known))
        return arrived


def jsonl_line(moment: RowMeta, values: dict[str, float]) -> str:
    """A row as a line of JSON; a value that is not finite is null, since JSON has no word for it.

    Written by a form, since `json.dumps` takes 30 microseconds for a row and this 3.
    """
    told: tuple[object, ...] = tuple(values.values())
    if not isfinite(sum(values.values())):
        told = tuple([value if isfinite(value) else _Null() for value in values.values()])
    return _form(tuple(values)) % (moment.epoch, moment.iteration, moment.samples, *told, moment.elapsed_s)


@lru_cache(maxsize=256)
def _form(names: tuple[str, ...]) -> str:
    """Of a line with these values."""
    said = "".join(f"{json.dumps(name).replace('%', '%%')}: %r, " for name in names)
    return f'{{"epoch": %d, "iteration": %d, "samples": %d, {said}"elapsed_s": %.4f}}\n'


class _Null:
    """Its `repr` is JSON's null."""

    def __repr__(self) -> str:
        return "null"


class RowDisplay(Protocol):
    """Shows rows to someone."""

    def take(self, moment: RowMeta, values: Mapping[str, float]) -> None:
        """A row has come."""

    def refresh(self) -> None:
        """It may be time to show something; called often."""

    def close(self, last_words: str | None = None) -> None:
        """No more rows come."""


class RowDispatcher:
    """Takes a run's rows on rank 0 and hands each on, in order; on other ranks it is not made.

    Args:
        lines: of rows.jsonl; None writes nothing.
        receivers: called with each row, a dict, soon after its update; see `sinks`.
        terminal: is shown each row; None shows nothing.
        began: when the run began, on the monotonic clock; earlier by what it had taken before it went on.

    Raises:
        OSError: the file cannot be written; what is in it stays, in whole lines.
    """

    def __init__(
        self, lines: JsonlWriter | None, receivers: Sequence[OnRow], terminal: RowDisplay | None, began: float
    ) -> None:
        self._lines, self._receivers, self._terminal, self._began = lines, receivers, terminal, began
        self._arrivals = DeviceToHostQueue()
        self._flushed = self._due = time.monotonic()
        self._rate = Throughput(self._flushed - began)

    @property
    def is_due(self) -> bool:
        """Whether it is time to hand rows on."""
        return time.monotonic() >= self._due

    def add(self, epoch: int, iteration: int, samples: int, is_last_of_epoch: bool,
            names: tuple[str, ...], values: torch.Tensor, known: dict[str, float]) -> None:  # fmt: skip
        """Take the row of an update: `values`, shape (len(names),), may still be on the device; `known` are not."""
        elapsed_s = round(time.monotonic() - self._began, 4)
        self._arrivals.send(RowMeta(epoch, iteration, samples, elapsed_s, is_last_of_epoch), names, values, known)
        if is_last_of_epoch:
            self.flush_ready()

    def flush_ready(self) -> None:
        """Hand on the rows that have arrived."""
        self._due = time.monotonic() + BATCH_S
        self._dispatch(self._arrivals.take(wait=False))
        if self._terminal is not None:
            self._terminal.refresh()
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def flush_all(self) -> None:
        """Hand on what is still on its way too, and write it: before a checkpoint, whose rows must be there."""
        self._dispatch(self._arrivals.take(wait=True))
        self._flush()
        for receiver in self._receivers:
            getattr(receiver, "flush", _nothing)()

    def close(self, last_words: str | None = None) -> None:
        """Hand on what is still on its way, and close the file, the receivers, and what shows them."""
        with ExitStack() as ending:
            if self._terminal is not None:
                ending.callback(self._terminal.close, last_words)
            for receiver in self._receivers:
                ending.callback(getattr(receiver, "close", _nothing))
            if self._lines is not None:
                ending.callback(self._lines.close)
            self._dispatch(self._arrivals.take(wait=True))

    def _dispatch(self, rows: Sequence[tuple[RowMeta, dict[str, float]]]) -> None:
        """Hand these on; to the file all at first, which a receiver that raises does not keep them from."""
        if self._lines is not None:
            for moment, values in rows:
                self._lines.add(jsonl_line(moment, values))
        for moment, values in rows:
            if self._receivers:
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
        for receiver in self._receivers:
            receiver(row.copy())

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._lines is not None:
            self._lines.flush()


def _nothing() -> None:
    """What a plain function does when rows are written, or end."""
