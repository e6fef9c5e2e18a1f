"""The folders of a sweep and of its trials: what the sweep is, its workers, requests to them, and how the trials go."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import (
    EVALUATIONS,
    ROWS,
    STATUS,
    FileLock,
    Locked,
    explained,
    forget_stop,
    hide_secrets,
    is_locked,
    read_json,
    write_atomic,
)
from ddp_loop.elastic import program_name
from ddp_loop.reporting import (
    AGAIN,
    EVALUATION,
    PLACE,
    SWEEP,
    SWEEP_LOCK,
    TRIAL,
    TRIALS,
    WORKERS,
    JsonlTail,
    ask_sweep_to_stop,
    has_workers,
    pass_weights,
    sums_in,
    weighing_columns,
)
from ddp_loop.sweeps.jobs import nearest

STUDY = "study.db"
LOOK_S = 0.2
_PRIVATE = 0o700
_MAY_CHANGE = ("began", "trials", "storage", "id", "name")
_FORMER_OBJECTIVE = ("objective", "loss", None)  # the usual one of an older version, which stays


@contextmanager
def begun_folder(folder: Path, facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Begin a sweep in a folder, or go on with it, and lock the folder while this is open.

    Args:
        folder: created if it is missing.
        facts: the sweep as JSON. A folder with another sweep is refused.

    Returns:
        What sweep.json has.

    Raises:
        OSError: the folder cannot be written.
        ValueError: another process runs the sweep, or the folder has another sweep or something else.
    """
    with ExitStack() as ending:
        remedy = "Make room there, make it writable, or choose another folder."
        with explained(f"The sweep's folder {folder} cannot be created or written", remedy):
            _read_before(folder, facts)  # an error leaves nothing behind
            folder.mkdir(parents=True, exist_ok=True)
            try:
                ending.callback(FileLock(folder / SWEEP_LOCK, "sweep").close)
            except Locked as error:
                raise ValueError(
                    f"The sweep in {folder} is run by {error}. To help it, start {program_name()} sweep work "
                    f"{folder}. To stop it, start {program_name()} stop {folder}."
                ) from None
            found = _begin(folder, facts)
        yield found


def _begin(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write sweep.json under the lock: another process may have begun a sweep here since the folder was read."""
    before = _read_before(folder, facts)
    job = facts["job"]
    words = [*job.get("arguments", ()), *(f"{name}={value}" for name, value in job.get("keywords", {}).items())]
    if hide_secrets(words) != words:  # workers need them, so the folder's files and its trials' have them
        folder.chmod(_PRIVATE)
    found = {"began": time.time(), "id": secrets.token_hex(8), **before, **facts}
    if before and facts["objective"] is None:
        found["objective"] = before["objective"]
    write_atomic(folder / SWEEP, found)
    (folder / TRIALS).mkdir(exist_ok=True)
    forget_stop(folder)
    return found


def _read_before(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The sweep that is in the folder, which must be the same; {} without one."""
    before = read_json(folder / SWEEP)
    if not before:
        if (folder / SWEEP).exists():
            raise ValueError(f"{folder / SWEEP} is damaged. Restore it, or choose another folder.")
        names = sorted(one.name for one in folder.iterdir()) if folder.exists() else []
        # A start that was killed before it wrote sweep.json leaves its lock and a temporary file.
        for name in names:
            if name != SWEEP_LOCK and not name.startswith(f".{SWEEP}-"):
                raise ValueError(f"{folder} has files, and no sweep: {name}. Choose an empty folder or a new one.")
        return {}
    now = json.loads(json.dumps(dict(facts)))
    changed = [
        f"{name}: was {old!r}, is {new!r}"
        for name, old, new in _pairs(before, now)
        if name not in _MAY_CHANGE and old != new and (name, old, new) != _FORMER_OBJECTIVE
    ]
    if changed:
        raise ValueError(
            f"{folder} has another sweep: {'; '.join(changed)}. Restore these, or choose another folder. Nothing was "
            "changed."
        )
    if now["trials"] < before["trials"]:
        raise ValueError(
            f"The sweep in {folder} has {before['trials']} trials. Got trials={now['trials']}. A sweep can grow, but "
            "not shrink."
        )
    return before


def _pairs(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    """What both have by name; the parts of the job and of the space by "job.script"."""
    for name, new in now.items():
        old = before.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and set(old) == set(new):
            yield from ((f"{name}.{part}", old[part], new[part]) for part in new)
        elif name in before:
            yield name, old, new


def read_sweep(folder: Path) -> dict[str, Any]:
    """Read sweep.json.

    Raises:
        ValueError: the folder has no sweep.
    """
    found = read_json(folder / SWEEP)
    if not found:
        raise ValueError(f"{folder} has no sweep.json, or a damaged one. Pass the folder of a sweep.")
    return found


@contextmanager
def worker_name(folder: Path) -> Iterator[str]:
    """A name in a sweep's folder that no other process has, locked while this is open: so others see who lives.

    The file is removed at the end, so that only dead workers leave theirs.
    """
    (folder / WORKERS).mkdir(parents=True, exist_ok=True)
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    path = folder / WORKERS / name
    with closing(FileLock(path, "worker")):
        try:
            yield name
        finally:
            with suppress(OSError):
                path.unlink()


def is_dead(folder: Path, worker: str) -> bool | None:
    """Whether the worker of this name is known to have ended; None if its lock cannot be seen here."""
    path = folder / WORKERS / Path(worker).name
    if not path.exists():
        return True if worker.startswith(f"{socket.gethostname()}-") and (folder / WORKERS).is_dir() else None
    locked = is_locked(path)
    return None if locked is None else not locked


# -- requests ----------------------------------------------------------------------------------------------


def stop_sweep(folder: Path, timeout_s: float, say: Callable[[str], None]) -> bool:
    """Ask a sweep's workers to stop, and wait until they have ended; returns whether they did in time.

    Raises:
        ValueError: the sweep has no worker.
    """
    ask_sweep_to_stop(folder, "python -m ddp_loop stop")
    say(f"{folder}: its trials stop after the current step, with checkpoints")
    deadline = time.monotonic() + timeout_s
    while has_workers(folder) is not False:
        if time.monotonic() > deadline:
            say(f"{folder}: still running after {timeout_s:g} s")
            return False
        time.sleep(LOOK_S)
    say(f"{folder}: stopped. Start the sweep again to go on.")
    return True


def has_requests(folder: Path) -> bool:
    """Whether trials are asked for that no worker has put in line yet."""
    return any((folder / AGAIN).glob("*.json"))


def answer_requests(folder: Path, again: Callable[[list[int], str], None]) -> None:
    """Have the trials run again that are asked for, unless another worker does that now.

    Args:
        folder: of the sweep.
        again: puts trials in line, by the name of the request. The file of the request is removed after that, so a kill
            in between loses no request.
    """
    if not has_requests(folder):
        return
    try:
        lock = FileLock(folder / AGAIN / SWEEP_LOCK, "worker")
    except Locked:  # it also writes into the trials' folders, which a second one would overwrite
        return
    with closing(lock):
        for path in sorted((folder / AGAIN).glob("*.json")):
            again(read_json(path).get("trials", []), path.name)
            path.unlink(missing_ok=True)


# -- trials -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: "done", "pruned", "failed", "killed", "not finite", "timed out" or "stopped".

    Attributes:
        status: one of these.
        value: of the objective, if there is one.
        why: the reason in words.
        objective: what the value is of, such as "loss" or "evaluation.loss".
    """

    status: str
    value: float | None = None
    why: str | None = None
    objective: str | None = None


def write_trial(folder: Path, **facts: object) -> None:
    """Change facts of a trial in its folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / TRIAL, {**read_json(folder / TRIAL), **facts})


def _attempts_in(folder: Path) -> list[dict[str, Any]]:
    attempts: list[dict[str, Any]] = read_json(folder / TRIAL).get("attempts", [])
    return attempts


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
    status = read_json(folder / STATUS)
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
        """The objective in a sweep's arguments."""
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
        value: the last evaluation, or the weighted mean over the last epoch's rows, as in the terminal, of a sum the
            total; None without any.
        names: of all values in the rows, to suggest one.
    """

    def __init__(self, folder: Path, objective: Objective) -> None:
        self._is_evaluated = objective.name.startswith(EVALUATION)
        self._column = objective.name.removeprefix(EVALUATION)
        self._every = objective.every
        self._status = folder / STATUS
        self._tail = JsonlTail(folder / (EVALUATIONS if self._is_evaluated else ROWS))
        self._forget()

    def _forget(self) -> None:
        self.value: float | None = None
        self.names: list[str] = []
        self._epoch: object = None
        self._sum = self._weight = 0.0
        self._adds_up = False
        self._window: list[float] = []

    def poll(self) -> list[tuple[int, float]]:
        """Return new values as (update, value): each evaluation, or the mean of each `every` rows; NaN stays NaN."""
        found: list[tuple[int, float]] = []
        for update in self._tail.updates():
            if update.restarted:
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
            self._adds_up = self._column in sums_in(read_json(self._status))
        if not row.get("skipped"):
            by = weighing_columns(tuple(row)).get(self._column, "weight")
            counted = row.get(by, row.get("samples", 1))
            weight = float(counted) if isinstance(counted, int | float) else nan
            self._sum += value if self._adds_up else weight * value
            self._weight = 1.0 if self._adds_up else self._weight + weight
            self._window.append(value)
        self.value = self._sum / self._weight if self._weight else nan  # until a step of the epoch counts
        if iteration % self._every == 0:
            found.append((iteration, sum(self._window) / len(self._window) if self._window else nan))
            self._window = []

    def missing(self) -> str:
        """Why there is no value, with the nearest name."""
        if not self.names and not self._is_evaluated:
            return "Its run folder has no rows. Pass run_dir to the Loop, or return the value from the function."
        own = () if self._is_evaluated else pass_weights(tuple(self.names)).values()
        known = [name for name in self.names if name not in PLACE.union(own)]
        where = "The results of dl.evaluate" if self._is_evaluated else "The rows of its Loop"
        suggestion = nearest(self._column, known).strip()
        return (
            f"{where} have no {self._column!r}{suggestion and f' ({suggestion})'}. They have "
            f"{', '.join(known) or 'no values'}. Return the value from the function, or choose another objective."
        )
