"""What rank 0 learns of a run while it goes on: a row per update, to the run folder, to callbacks, to the terminal."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple, Protocol

import torch

from ddp_loop.lines import PatientLines
from ddp_loop.rates import Rate

FLUSH_S = 0.5  # rows.jsonl grows in whole lines, at least this often
BATCH_S = 0.05  # and so often rows are handed on, at most: several at once cost less each

OnRow = Callable[[dict[str, Any]], None]


class Moment(NamedTuple):
    """When a row was made, and of how many observations; epoch and iteration are counted from 1."""

    epoch: int
    iteration: int
    observations: int
    elapsed_s: float
    ends_epoch: bool


_Sent = tuple[Moment, tuple[str, ...], torch.Tensor | list[float], dict[str, float], torch.cuda.Event | None]


class Arrivals:
    """Values on their way from the device to the host, in order; on a GPU nobody waits for them."""

    def __init__(self) -> None:
        self._waiting: deque[_Sent] = deque()

    def send(self, moment: Moment, names: tuple[str, ...], values: torch.Tensor, known: dict[str, float]) -> None:
        """Start the copy of `values`, (len(names),), to the host; `known` is there already."""
        if values.device.type == "cpu":  # read now: the script may write into what it was given
            self._waiting.append((moment, names, values.tolist(), known, None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((moment, names, host, known, event))

    def take(self, *, wait: bool) -> list[tuple[Moment, dict[str, float]]]:
        """Those that have arrived, in order; with `wait` all."""
        arrived = []
        while self._waiting:
            moment, names, values, known, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._waiting.popleft()
            told = values.tolist() if isinstance(values, torch.Tensor) else values
            arrived.append((moment, dict(zip(names, told, strict=True)) | known))
        return arrived


def jsonl_line(moment: Moment, values: dict[str, float]) -> str:
    """A row as a line of JSON; a value that is not finite is null, since JSON has no word for it.

    Written by a form, since `json.dumps` takes 30 microseconds for a row and this 3.
    """
    told: tuple[object, ...] = tuple(values.values())
    if not isfinite(sum(values.values())):
        told = tuple([value if isfinite(value) else _Null() for value in values.values()])
    return _form(tuple(values)) % (moment.epoch, moment.iteration, moment.observations, *told, moment.elapsed_s)


@lru_cache(maxsize=256)
def _form(names: tuple[str, ...]) -> str:
    """Of a line with these values."""
    said = "".join(f"{json.dumps(name).replace('%', '%%')}: %r, " for name in names)
    return f'{{"epoch": %d, "iteration": %d, "observations": %d, {said}"elapsed_s": %.4f}}\n'


class _Null:
    """Its `repr` is JSON's null."""

    def __repr__(self) -> str:
        return "null"


class Shows(Protocol):
    """Shows rows to someone."""

    def take(self, moment: Moment, values: Mapping[str, float]) -> None:
        """A row has come."""

    def look(self) -> None:
        """It may be time to show something; called often."""

    def close(self, last_words: str | None = None) -> None:
        """No more rows come."""


class Rows:
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
        self, lines: PatientLines | None, receivers: Sequence[OnRow], terminal: Shows | None, began: float
    ) -> None:
        self._lines, self._receivers, self._terminal, self._began = lines, receivers, terminal, began
        self._arrivals = Arrivals()
        self._flushed = self._due = time.monotonic()
        self._rate = Rate(self._flushed - began)

    @property
    def is_due(self) -> bool:
        """Whether it is time to hand rows on."""
        return time.monotonic() >= self._due

    def add(self, epoch: int, iteration: int, observations: int, ends_epoch: bool,
            names: tuple[str, ...], values: torch.Tensor, known: dict[str, float]) -> None:  # fmt: skip
        """Take the row of an update: `values`, shape (len(names),), may still be on the device; `known` are not."""
        elapsed_s = round(time.monotonic() - self._began, 4)
        self._arrivals.send(Moment(epoch, iteration, observations, elapsed_s, ends_epoch), names, values, known)
        if ends_epoch:
            self.hand_on()

    def hand_on(self) -> None:
        """Hand on the rows that have arrived."""
        self._due = time.monotonic() + BATCH_S
        self._hand_on(self._arrivals.take(wait=False))
        if self._terminal is not None:
            self._terminal.look()
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def hand_on_all(self) -> None:
        """Hand on what is still on its way too, and write it: before a checkpoint, whose rows must be there."""
        self._hand_on(self._arrivals.take(wait=True))
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
            self._hand_on(self._arrivals.take(wait=True))

    def _hand_on(self, rows: Sequence[tuple[Moment, dict[str, float]]]) -> None:
        """Hand these on; to the file all at first, which a receiver that raises does not keep them from."""
        if self._lines is not None:
            for moment, values in rows:
                self._lines.add(jsonl_line(moment, values))
        for moment, values in rows:
            if self._receivers:
                self._give(moment, values)
            if self._terminal is not None:
                self._terminal.take(moment, values)

    def _give(self, moment: Moment, values: dict[str, float]) -> None:
        row = {
            "epoch": moment.epoch,
            "iteration": moment.iteration,
            "observations": moment.observations,
            **values,
            "observations_per_s": round(self._rate.take(moment.elapsed_s, moment.observations), 1),
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
