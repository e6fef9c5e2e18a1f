"""What rank 0 learns of a run while it goes on: a row per update, to the run folder, a callback, the terminal."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch

from ddp_loop.durable import explained

FILE = "rows.jsonl"  # in a run folder
FLUSH_S = 0.5  # it grows in whole lines, at least this often
_PLACE = ("epoch", "iteration", "observations", "elapsed_s")
MOST_LINES = 100_000  # that wait for room, some 20 MB; then the oldest are left out


@dataclass(frozen=True, slots=True)
class Moment:
    """When a row was made, and of how many observations; epoch and iteration are counted from 1."""

    epoch: int
    iteration: int
    observations: int
    elapsed_s: float
    ends_epoch: bool


class Arrivals:
    """Values on their way from the device to the host, in order; on a GPU nobody waits for them."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Moment, tuple[str, ...], torch.Tensor, torch.cuda.Event | None]] = deque()

    def send(self, moment: Moment, names: tuple[str, ...], values: torch.Tensor) -> None:
        """Start the copy of `values`, (len(names),), to the host."""
        event = None
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((moment, names, values, event))

    def take(self, *, wait: bool) -> list[tuple[Moment, dict[str, float]]]:
        """Those that have arrived, in order; with `wait` all."""
        arrived = []
        while self._waiting:
            moment, names, values, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._waiting.popleft()
            arrived.append((moment, dict(zip(names, values.tolist(), strict=True))))
        return arrived


def jsonl_line(moment: Moment, values: dict[str, float]) -> str:
    """A row as a line of JSON; a value that is not finite is null, since JSON has no word for it.

    Written out, since `json.dumps` takes 30 microseconds for a row and this 5.
    """
    said = "".join(
        f'"{name}": {value!r}, ' if isfinite(value) else f'"{name}": null, ' for name, value in values.items()
    )
    return (
        f'{{"epoch": {moment.epoch}, "iteration": {moment.iteration}, "observations": {moment.observations}, '
        f'{said}"elapsed_s": {moment.elapsed_s:.4f}}}\n'
    )


class Lines:
    """A file of rows that grows by whole lines: one that could be written in part alone is taken out again.

    Args:
        path: the file, made unless it is there.
        after: rows of later iterations are taken out, as is what is no whole row.

    Attributes:
        elapsed_s: of the last row that stays.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, after: int) -> None:
        self._path = path
        self.elapsed_s, self._size = 0.0, 0  # of what is whole
        self._last_rows: list[dict[str, Any]] = []
        with self._explaining():
            self._file = path.open("a+b", buffering=0)  # what could not be written waits nowhere else
            try:
                self._keep(after)
            except BaseException:
                self._file.close()
                raise

    def append(self, lines: str) -> None:
        """Add lines.

        Raises:
            OSError: that is not possible; the file is as it was.
        """
        data = memoryview(lines.encode())
        with self._explaining():
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "it was removed")
            self._cut()
            try:
                written = 0
                while written < len(data):  # a disk that is almost full takes a part
                    written += self._file.write(data[written:]) or 0
            except OSError:
                with suppress(OSError):
                    self._cut()
                raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # some file systems write only now
            self._file.close()

    def _cut(self) -> None:
        """Leave the whole lines."""
        if os.fstat(self._file.fileno()).st_size > self._size:
            self._file.truncate(self._size)

    def _keep(self, after: int) -> None:
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as file:
            for line in file:
                try:
                    row = json.loads(line)
                    if not line.endswith(b"\n") or row["iteration"] > after:
                        break
                    self.elapsed_s = float(row["elapsed_s"])
                    if self._last_rows and self._last_rows[0]["epoch"] != row["epoch"]:
                        self._last_rows = []
                    self._last_rows.append(row)
                except (ValueError, KeyError, TypeError):
                    break
                self._size += len(line)
        self._cut()

    def take_last_epoch(self) -> list[dict[str, Any]]:
        """The rows that stayed of the last epoch; once, since they may be many."""
        rows, self._last_rows = self._last_rows, []
        return rows

    def _explaining(self) -> AbstractContextManager[None]:
        rule = f"a row is written for each update; writing to {self._path} failed"
        return explained(rule, "make room there, make it writable, or put it back; what is in it stays")


class Rows:
    """Takes a run's rows on rank 0 and hands each on, in order; on other ranks it is not made.

    Args:
        run: the run folder, where rows.jsonl is appended; None writes nothing.
        on_row: called with each row, a dict, soon after its update.
        say: prints a line, at the end of each epoch; None prints nothing.
        after: the iteration that the run goes on from; rows of later ones, of steps that are made again, are taken out.
        warn: called with a line when the file cannot be written, and when it can again.
        goes_on: whether rows then wait for that, instead of an error.

    Raises:
        OSError: the file cannot be written; what is in it stays, in whole lines.
    """

    def __init__(
        self,
        run: Path | None,
        on_row: Callable[[dict[str, Any]], None] | None,
        say: Callable[[str], None] | None,
        after: int = 0,
        warn: Callable[[str], None] = lambda line: None,
        *,
        goes_on: bool = False,
    ) -> None:
        self._file = None if run is None else Lines(run / FILE, after)
        elapsed_s = 0.0 if self._file is None else self._file.elapsed_s
        self._on_row, self._say, self._warn, self._goes_on = on_row, say, warn, goes_on
        self._problem: OSError | None = None  # while the file cannot be written
        self._closes = False
        self._arrivals = Arrivals()
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._began = self._flushed - elapsed_s
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self._skipped = self._epoch = 0
        for row in [] if self._file is None else self._file.take_last_epoch():  # that it may go on in
            values = {name: nan if one is None else one for name, one in row.items() if name not in _PLACE}
            self._add_up(Moment(row["epoch"], row["iteration"], row["observations"], 0.0, ends_epoch=False), values)

    def add(self, epoch: int, iteration: int, observations: int, ends_epoch: bool,
            names: tuple[str, ...], values: torch.Tensor) -> None:  # fmt: skip
        """Take the row of an update: `values`, shape (len(names),), may still be on the device."""
        moment = Moment(epoch, iteration, observations, time.monotonic() - self._began, ends_epoch)
        self._arrivals.send(moment, names, values)
        if ends_epoch:
            self.hand_on()

    def hand_on(self) -> None:
        """Hand on the rows that have arrived."""
        for row in self._arrivals.take(wait=False):
            self._hand_on(*row)
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def hand_on_all(self) -> None:
        """Hand on what is still on its way too, and write it: before a checkpoint, whose rows must be there."""
        for row in self._arrivals.take(wait=True):
            self._hand_on(*row)
        self._flush()

    def close(self) -> None:
        """Hand on what is still on its way, and close the file; what cannot be written is a line, and no error."""
        self._closes = True
        try:
            self.hand_on_all()
            if self._problem is not None:
                self._warn(f"the last {len(self._lines)} rows were not written: {self._problem}")
        finally:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._lines = None, []

    def _hand_on(self, moment: Moment, values: dict[str, float]) -> None:
        if self._file is not None:
            self._lines.append(jsonl_line(moment, values))
        if self._on_row is not None:
            self._on_row(
                {
                    "epoch": moment.epoch,
                    "iteration": moment.iteration,
                    "observations": moment.observations,
                    **values,
                }
            )
        if self._say is not None:
            self._add_up(moment, dict(values))

    def _add_up(self, moment: Moment, values: dict[str, float]) -> None:
        if moment.epoch != self._epoch:
            self._sums, self._weight, self._skipped, self._epoch = {}, 0.0, 0, moment.epoch
        weight = values.pop("weight", float(moment.observations))  # as the step's own means are weighted
        if values.pop("skipped", 0.0):
            self._skipped += 1
        else:
            for name, value in values.items():
                self._sums[name] = self._sums.get(name, 0.0) + weight * value
            self._weight += weight
        if moment.ends_epoch and self._say is not None:
            means = {name: total / self._weight if self._weight else nan for name, total in self._sums.items()}
            said = ", ".join(f"{name.capitalize()}: {mean:.4f}" for name, mean in means.items())
            if self._skipped:
                said += f"{', ' if said else ''}{self._skipped} steps skipped, not finite"
            self._say(f"Epoch: {moment.epoch}, {said}")
            self._epoch = 0

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._file is None or not self._lines:
            return
        try:
            self._file.append("".join(self._lines))
        except OSError as error:
            self._take(error)
            return
        if self._problem is not None:
            self._warn(f"rows are written again, with the {len(self._lines)} that waited")
        self._lines, self._problem = [], None

    def _take(self, error: OSError) -> None:
        """The file cannot be written now."""
        if not self._goes_on and not self._closes:
            self._close_file()  # whoever closes this is not told again
            raise error
        if self._problem is None and not self._closes:
            self._warn(f"no rows are written for now, training goes on: {error}")
        self._problem = error
        del self._lines[:-MOST_LINES]
