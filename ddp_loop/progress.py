"""What rank 0 learns of a run while it goes on: a row per update, to the run folder, a callback, the terminal."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch

FLUSH_S = 0.5  # rows.jsonl grows in whole lines, at least this often


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


def _keep_rows(path: Path, after: int) -> float:
    """Leave in a file of rows those up to iteration `after`, whole lines alone; returns the last one's elapsed_s."""
    if not path.exists():
        return 0.0
    kept, size, elapsed_s = 0, path.stat().st_size, 0.0
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                if not line.endswith(b"\n") or row["iteration"] > after:
                    break
                elapsed_s = float(row["elapsed_s"])
            except (ValueError, KeyError, TypeError):
                break
            kept += len(line)
    if kept < size:
        os.truncate(path, kept)
    return elapsed_s


class Rows:
    """Takes a run's rows on rank 0 and hands each on, in order; on other ranks it is not made.

    Args:
        run: the run folder, where rows.jsonl is appended; None writes nothing.
        on_row: called with each row, a dict, soon after its update.
        say: prints a line, at the end of each epoch; None prints nothing.
        after: the iteration that the run goes on from; rows of later ones, of steps that are made again, are taken out.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        run: Path | None,
        on_row: Callable[[dict[str, Any]], None] | None,
        say: Callable[[str], None] | None,
        after: int = 0,
    ) -> None:
        elapsed_s = 0.0 if run is None else _keep_rows(run / "rows.jsonl", after)
        self._file = None if run is None else (run / "rows.jsonl").open("a", encoding="utf-8")
        self._on_row, self._say = on_row, say
        self._arrivals = Arrivals()
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._began = self._flushed - elapsed_s
        self._sums: dict[str, float] = {}
        self._weight = 0.0
        self._skipped = 0

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
        """Hand on what is still on its way, and close the file."""
        self.hand_on_all()
        if self._file is not None:
            self._file.close()
            self._file = None

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
            self._sums, self._weight, self._skipped = {}, 0.0, 0

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._file is not None and self._lines:
            self._file.write("".join(self._lines))
            self._file.flush()
            self._lines = []
