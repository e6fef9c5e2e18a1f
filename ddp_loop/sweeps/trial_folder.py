"""A trial's folder: what the trial is, how it goes, and the values of its objective as they stream in."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import EVALUATIONS, ROWS, STATUS, read_json, write_atomic
from ddp_loop.reporting import TRIAL, JsonlTail
from ddp_loop.sweeps.space import nearest
from ddp_loop.sweeps.trial_queue import Ending

EVALUATION = "evaluation."  # prefix of an objective that `evaluate` computes


def write_trial(folder: Path, **facts: object) -> None:
    """Change facts of a trial in its folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / TRIAL, {**(read_json(folder / TRIAL) or {}), **facts})


def _attempts_in(folder: Path) -> list[dict[str, Any]]:
    listed = (read_json(folder / TRIAL) or {}).get("attempts")
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def begin_attempt(folder: Path, attempt: Mapping[str, object], **facts: object) -> None:
    """Record that an attempt at a trial begins."""
    attempts = _attempts_in(folder)
    for one in attempts:
        if one.get("status") == "running":
            one["status"] = "interrupted"
    attempts.append({**attempt, "began": time.time(), "ended": None, "status": "running"})
    write_trial(folder, **facts, status="running", value=None, why=None, attempts=attempts)


def end_attempt(folder: Path, number: int, ending: Ending) -> None:
    """Record how an attempt at a trial ended."""
    attempts = _attempts_in(folder)
    for one in attempts:
        if one.get("number") == number:
            one |= {"ended": time.time(), "status": ending.status}
    begun_since = attempts and attempts[-1].get("number", number) > number  # by a worker that was quicker
    facts = {name: one for name, one in vars(ending).items() if name != "objective" or one is not None}
    if ending.value is not None and not isfinite(ending.value):
        facts["value"] = None
    write_trial(folder, **({} if begun_since else facts), attempts=attempts)


def status_of(folder: Path, since: float) -> tuple[str | None, str | None]:
    """The status of a trial's run, and why it has it; None if it was written before the time `since`."""
    status = read_json(folder / STATUS) or {}
    at = status.get("at")
    if not isinstance(at, int | float) or at < since:
        return None, None
    return status.get("status"), status.get("why")


@dataclass(frozen=True)
class Objective:
    """What trials are compared by.

    Attributes:
        name: of a column of the rows, such as "loss"; "evaluation.accuracy" is a value of `evaluate`.
        direction: "minimize" or "maximize".
        every: the updates of which the mean is reported to the pruner.
        is_usual: whether an evaluated loss is the value of a trial that has one, in place of its training loss.
    """

    name: str = "loss"
    direction: str = "minimize"
    every: int = 50
    is_usual: bool = False

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Objective:
        """That of a sweep's arguments."""
        name = facts["objective"]
        return cls(name or "loss", facts["direction"], facts["report_every"], name is None)

    @property
    def best(self) -> Any:
        """`min` or `max`."""
        return min if self.direction == "minimize" else max

    def ending(self, folder: Path, reader: ObjectiveReader) -> Ending:
        """How a trial ends by what is in its folder: with a value, or why there is none.

        Args:
            folder: of the trial.
            reader: of this objective there.
        """
        if self.is_usual:
            name = f"{EVALUATION}{self.name}"
            evaluated = ObjectiveReader(folder, replace(self, name=name))
            evaluated.poll()
            if evaluated.value is not None:
                return Ending("done", evaluated.value, None, name)
        reader.poll()
        if reader.value is None:
            return Ending("failed", None, reader.missing())
        return Ending("done", reader.value, None, self.name)


class ObjectiveReader:
    """Reads an objective from a run folder as the run goes on.

    Attributes:
        value: the last evaluation, or the mean over the samples of the last epoch's rows; None without any.
        names: of all values in the rows, to suggest one.
    """

    def __init__(self, folder: Path, objective: Objective) -> None:
        self._is_evaluated = objective.name.startswith(EVALUATION)
        self._column = objective.name.removeprefix(EVALUATION)
        self._every = objective.every
        self._tail = JsonlTail(folder / (EVALUATIONS if self._is_evaluated else ROWS))
        self._forget()

    def _forget(self) -> None:
        self.value: float | None = None
        self.names: list[str] = []
        self._epoch: object = None
        self._sum = self._weight = 0.0
        self._window: list[float] = []

    def poll(self) -> list[tuple[int, float]]:
        """Return new values as (update, value): each evaluation, or the mean of each `every` rows; NaN stays NaN."""
        found: list[tuple[int, float]] = []
        more = True
        while more:
            update = self._tail.poll()
            more = update.more
            if update.anew:
                self._forget()
            for row in update.rows:
                self.names = list(dict.fromkeys([*self.names, *row])) if len(row) > len(self.names) else self.names
                if self._column in row and type(row.get("iteration")) is int:
                    self._take(row, found)
        return found

    def _take(self, row: Mapping[str, Any], found: list[tuple[int, float]]) -> None:
        given = row[self._column]
        iteration = int(row["iteration"])
        value = float(given) if isinstance(given, int | float) else nan
        if self._is_evaluated:
            self.value = value
            found.append((iteration, value))
            return
        if row.get("epoch") != self._epoch:
            self._epoch = row.get("epoch")
            self._sum = 0.0
            self._weight = 0.0
        weight = float(row.get("samples") or 1)
        self._sum += weight * value
        self._weight += weight
        self.value = self._sum / self._weight
        self._window.append(value)
        if iteration % self._every == 0:
            found.append((iteration, sum(self._window) / len(self._window)))
            self._window = []

    def missing(self) -> str:
        """Why there is no value, with the nearest name."""
        known = [name for name in self.names if name not in ("epoch", "iteration", "samples", "elapsed_s")]
        where = "The results of dl.evaluate" if self._is_evaluated else "The rows of its Loop"
        suggestion = nearest(self._column, known).strip()
        return (
            f"{where} have no {self._column!r}{suggestion and f' ({suggestion})'}. They have "
            f"{', '.join(known) or 'no values'}. Return the value from the function, or choose another objective."
        )
