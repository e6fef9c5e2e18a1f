"""A trial's folder: what the trial is, how it goes, and the values of its objective as they stream in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import EVALUATIONS, ROWS, STATUS, read_json, write_atomic
from ddp_loop.reporting import TRIAL, JsonlTail
from ddp_loop.sweeps.space import nearest

EVALUATION = "evaluation."  # prefix of an objective that `evaluate` computes


def write_trial(folder: Path, **facts: object) -> None:
    """Change facts of a trial in its folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / TRIAL, {**(read_json(folder / TRIAL) or {}), **facts})


def begin_attempt(folder: Path, attempt: Mapping[str, object], **facts: object) -> None:
    """Record that an attempt at a trial begins."""
    before = read_json(folder / TRIAL) or {}
    listed = before.get("attempts")
    attempts = [_interrupted(one) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    began = {**attempt, "began": time.time(), "ended": None, "status": "running"}
    write_trial(folder, **facts, status="running", value=None, why=None, attempts=[*attempts, began])


def _interrupted(attempt: dict[str, Any]) -> dict[str, Any]:
    return {**attempt, "status": "interrupted"} if attempt.get("status") == "running" else attempt


def end_attempt(folder: Path, number: int, status: str, value: float | None, why: str | None) -> None:
    """Record how an attempt at a trial ended."""
    listed = (read_json(folder / TRIAL) or {}).get("attempts")
    attempts = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    for one in attempts:
        if one.get("number") == number:
            one |= {"ended": time.time(), "status": status}
    finite = value if value is None or isfinite(value) else None
    begun_since = attempts and attempts[-1].get("number", number) > number  # by a worker that was quicker
    ended = {} if begun_since else {"status": status, "value": finite, "why": why}
    write_trial(folder, **ended, attempts=attempts)


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
    """

    name: str = "loss"
    direction: str = "minimize"
    every: int = 50

    @property
    def is_evaluated(self) -> bool:
        return self.name.startswith(EVALUATION)

    @property
    def column(self) -> str:
        return self.name.removeprefix(EVALUATION)

    def best(self, values: Sequence[float]) -> float:
        return min(values) if self.direction == "minimize" else max(values)


class ObjectiveReader:
    """Reads an objective from a run folder as the run goes on.

    Attributes:
        value: the last evaluation, or the mean over the samples of the last epoch's rows; None without any.
        names: of all values in the rows, to suggest one.
    """

    def __init__(self, folder: Path, objective: Objective) -> None:
        self._objective = objective
        self._tail = JsonlTail(folder / (EVALUATIONS if objective.is_evaluated else ROWS))
        self._forget()

    def _forget(self) -> None:
        self.value: float | None = None
        self.names: list[str] = []
        self._epoch: object = None
        self._sum = self._weight = 0.0
        self._window: list[float] = []
        self._reported = 0

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
                if self._objective.column in row and type(row.get("iteration")) is int:
                    self._take(row, found)
        return found

    def _take(self, row: Mapping[str, Any], found: list[tuple[int, float]]) -> None:
        given = row[self._objective.column]
        iteration = int(row["iteration"])
        value = float(given) if isinstance(given, int | float) else nan
        if self._objective.is_evaluated:
            self.value = value
            found.append((iteration, value))
            return
        if row.get("epoch") != self._epoch:
            self._epoch = row.get("epoch")
            self._sum = 0.0
            self._weight = 0.0
        weight = float(row.get("samples") or 1)
        self._sum = self._sum + weight * value
        self._weight = self._weight + weight
        self.value = self._sum / self._weight
        self._window.append(value)
        if iteration % self._objective.every == 0:
            found.append((iteration, sum(self._window) / len(self._window)))
            self._window = []

    def missing(self) -> str:
        """Why there is no value, with the nearest name."""
        known = [name for name in self.names if name not in ("epoch", "iteration", "samples", "elapsed_s")]
        where = "the results of dl.evaluate" if self._objective.is_evaluated else "the rows of its Loop"
        suggestion = nearest(self._objective.column, known)
        return (
            f"{where[0].upper()}{where[1:]} have no {self._objective.column!r}"
            f"{f' ({suggestion.strip()})' if suggestion else ''}. They have {', '.join(known) or 'no values'}. Return "
            "the value from the function, or choose another objective."
        )
