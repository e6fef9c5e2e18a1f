"""What a run folder's files say about its run: its state, its parameters, its last and best values.

[Note: Again and again] A table of runs is read once a second, from hundreds of folders. Each folder therefore has one
reader. It reads a file again only if its size or its time of change differs, and of a file of rows only the new lines.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_loop.checkpoint import (
    CHECKPOINTS,
    EVALUATIONS,
    LOGGED,
    NOTE,
    OWN_FOLDER,
    ROWS,
    RUN,
    STATUS,
    STOP,
    TITLE,
    CheckpointInfo,
    CheckpointStore,
    is_running,
    read_json,
    read_text,
    run_id_of,
)
from ddp_loop.reporting.jsonl import Columns, JsonlTail, columns_of, count, is_at_an_iteration, is_number
from ddp_loop.reporting.rows import is_averaged, sums_in, weighing_columns

TRIAL = "trial.json"
EVALUATION = "evaluation."  # before the name of a value of `evaluate`, as in a sweep's objective
ENDED = ("done", "stopped", "left", "failed")
_OF_A_RUN = frozenset(  # names of its own folders; outside of a run they may be names of experiments
    {"checkpoints", "before", "tables", "trace", "profile", "pictures", "images", "console", "usage"}
)
_TRIAL_STATES = ("waiting", "done", "pruned", "failed", "killed", "not finite", "timed out", "stopped", "interrupted")
_LOWER = re.compile(r"loss|error|perplexity|(?<![a-z])(rmse|mse|mae|nll|wer|cer)(?![a-z])", re.IGNORECASE)
_PLACE = frozenset({"epoch", "iteration", "elapsed_s"})  # of a line of logged values
_MOST_TEXT = 500  # letters of a note, or of a name
Stamp = tuple[int, int, int]
Values = npt.NDArray[np.float64]
ValuesIn = Callable[[tuple[str, ...]], Iterable[str]]  # the columns of a row that are values
_UNREAD: Stamp = (-1, -1, -1)  # of a file that was not read to its end


@dataclass(frozen=True, slots=True)
class ValueSummary:
    """One value of a run: the last one and the best one, and the steps at which they came.

    Attributes:
        last: the newest value; NaN if it was not finite.
        at: its iteration.
        best: the lowest or highest finite value, see `is_lower_better`; None if there is none.
        best_at: its iteration; the first one of several equal values.
    """

    last: float
    at: int
    best: float | None
    best_at: int | None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as one line of a table.

    Attributes:
        name: the folder's path relative to the folder that was searched.
        folder: its absolute path.
        state: see `state_of`.
        parameters: of the trial, or else from `Loop(config=...)`; flat, by name, without the run's own folder.
        rows, evaluations: the loss and the metrics of the updates, and of `evaluate`, by name.
        epoch_means: the means of the rows' values over each epoch, as the terminal prints them, and the totals of sums;
            of the last one so far.
            This and the next two are read for a table alone.
        logged: the values of `Loop.log`, by name.
        scores: the newest and the lowest score of the checkpoints, as "score"; empty if none has one.
        steps, of_steps: updates so far, and of the whole run; None if that is unknown.
        epoch: of the last update; None if unknown.
        elapsed_s: the run's time up to its last row, in seconds; None before the first.
        began: when the run or the trial's first attempt began, in seconds since 1970; None if unknown.
        ranks: the number of ranks; None if unknown.
        why: why it stopped or failed; None if nothing says so.
        note, title: the user's note, and the name that the user gave it on the page; empty without one.
        trial: the trial's number in its sweep; None for any other run.
        objective, direction: of the trial, such as "loss" and "minimize".
        value: of the objective; None without one.
        is_behind: whether the files have rows that were not read yet.
    """

    name: str
    folder: Path
    state: str
    parameters: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, ValueSummary] = field(default_factory=dict)
    evaluations: dict[str, ValueSummary] = field(default_factory=dict)
    epoch_means: dict[str, ValueSummary] = field(default_factory=dict)
    logged: dict[str, ValueSummary] = field(default_factory=dict)
    scores: dict[str, ValueSummary] = field(default_factory=dict)
    steps: int = 0
    of_steps: int | None = None
    epoch: int | None = None
    elapsed_s: float | None = None
    began: float | None = None
    ranks: int | None = None
    why: str | None = None
    note: str = ""
    title: str = ""
    trial: int | None = None
    objective: str | None = None
    direction: str | None = None
    value: float | None = None
    is_behind: bool = False


def is_lower_better(name: str) -> bool:
    """Whether the best value of this name is the lowest: it contains loss, error or perplexity, or the word mse,
    rmse, mae, nll, wer or cer. For any other name, such as accuracy, the best value is the highest.
    """
    return _LOWER.search(name) is not None


def shown_name(name: str) -> str:
    """Return a value's name as it is shown: "eval loss" for "evaluation.loss", and others as they are."""
    return f"eval {name.removeprefix(EVALUATION)}" if name.startswith(EVALUATION) else name


def state_of(folder: Path, status: Mapping[str, Any], trial: Mapping[str, Any]) -> str:
    """Return the state of a run: running, stopping, done, stopped, left, failed, lost or waiting.

    A run that is "lost" has ended without a status: its process was killed. One that is "waiting" has not begun. A
    trial can also be "pruned", "killed", "not finite", "timed out", "interrupted", or "starting", before its loop.

    Args:
        folder: of the run.
        status, trial: from its status.json and its trial.json; empty without one.
    """
    if is_running(folder):
        return "stopping" if (folder / STOP).exists() else "running"
    name = status.get("status")
    of_trial = trial.get("status")
    if of_trial == "running" and name in (None, "done", "stopped", "left"):  # before or after its loop
        return "starting" if name is None else "running"
    if of_trial in _TRIAL_STATES:
        return str(of_trial)
    if name in ENDED:
        return str(name)
    return "waiting" if name is None else "lost"


def total_steps(extent: Mapping[str, Any]) -> int | None:
    """Return the number of updates of a whole run, from its status; None if it is unknown."""
    epochs, each, steps = (count(extent.get(name)) or 0 for name in ("epochs", "steps_per_epoch", "steps"))
    return min((number for number in (epochs * each, steps) if number), default=None)


def find_runs(folder: Path) -> list[Path]:
    """Find all run folders at and below a folder: those with a run.json or a trial.json, sorted by path.

    Folders that cannot be read, links to folders, and what a run keeps in folders of its own are left out.

    Args:
        folder: to search.
    """
    found = []
    waiting = [os.path.abspath(folder)]
    while waiting:
        place = waiting.pop()
        with suppress(OSError):
            is_run, folders = look_into(place)
            waiting += [os.path.join(place, name) for name in folders]
            found += [Path(place)] if is_run else []
    return sorted(found)


def look_into(place: str, *, was_run: bool = False) -> tuple[bool, list[str]]:
    """Return whether a folder is a run's, or was one, and the names of the folders in it that can have runs.

    Raises:
        OSError: it cannot be read.
    """
    with os.scandir(place) as entries:
        is_folder = {one.name: one.is_dir(follow_symlinks=False) for one in entries}
    is_run = was_run or any(is_folder.get(name) is False for name in (RUN, TRIAL))
    others = _OF_A_RUN if is_run else ("node_modules", "__pycache__")
    return is_run, [name for name, one in is_folder.items() if one and name not in others and name[0] != "."]


def read_run(
    folder: Path,
    below: Path | None = None,
    deadline: float = math.inf,
    *,
    for_table: bool = False,
    highest: bool | None = None,
) -> RunRecord:
    """Read a run folder; what is missing or damaged is left out. Several threads may call this.

    Args:
        folder: of the run.
        below: the folder that was searched, from which the run's name starts; by default the folder's parent.
        deadline: by time.monotonic(), after which further rows are left for the next call.
        for_table: whether to read the means over epochs and the scores too, which the page does not show.
        highest: whether the best value is the highest one in any case, or by its name, see `is_lower_better`. By
            default the name decides, and of a trial's objective the sweep's direction.

    Returns:
        Its record. Of each value the best one is the lowest or the highest finite one.
    """
    folder = Path(os.path.abspath(folder))
    above = folder.parent if below is None else Path(os.path.abspath(below))
    name = folder.name if folder == above else os.path.relpath(folder, above)
    return _reader_of(folder, for_table, highest).read(name, deadline)


class _RunReader:
    """Reads one run folder again and again. See [Note: Again and again]."""

    def __init__(self, folder: Path, for_table: bool, highest: bool | None) -> None:
        self._folder = folder
        self._for_table = for_table
        self._highest = highest
        self._turn = threading.Lock()
        self._contents: dict[str, tuple[Stamp | None, Any]] = {}
        self._rows = _Values(folder / ROWS, has_means=for_table)
        self._evaluations = _Values(folder / EVALUATIONS, lambda names: filter(is_averaged, names))
        self._logged = _Values(folder / LOGGED, lambda names: [name for name in names if name not in _PLACE])

    def _content(self, name: str, read: Callable[[Path], Any]) -> Any:
        """What a small file has; None without one."""
        path = self._folder / name
        stamp = _stamp_of(path)
        known = self._contents.get(name)
        if known is None or known[0] != stamp:
            known = self._contents[name] = (stamp, None if stamp is None else read(path))
        return known[1]

    def read(self, name: str, deadline: float) -> RunRecord:
        with self._turn:
            run, trial, status = (self._content(one, read_json) or {} for one in (RUN, TRIAL, STATUS))
            objective = text_of(trial.get("objective"))
            direction = text_of(trial.get("direction"))
            decides = (objective or "").removeprefix(EVALUATION)
            wants_lower = {decides: direction != "maximize"} if decides and self._highest is None else {}
            is_lower = lambda value: not self._highest and wants_lower.get(value, is_lower_better(value))  # noqa: E731
            files = [self._evaluations, self._logged, self._rows]
            self._rows.sums = sums_in(status)
            is_behind = [one.update(is_lower, deadline) for one in files]
            given = (trial.get("parameters"), run.get("config"))
            parameters = next((one for one in given if isinstance(one, dict)), {})
            state = state_of(self._folder, status, trial)
            elapsed = [one for one in (self._rows.elapsed_s, self._evaluations.elapsed_s) if one is not None]
            step = count(status.get("iteration")) or 0
            return RunRecord(
                name,
                self._folder,
                state,
                {key: value for key, value in parameters.items() if value != OWN_FOLDER},
                dict(self._rows.summaries),
                dict(self._evaluations.summaries),
                self._rows.epoch_means,
                dict(self._logged.summaries),
                self._content(CHECKPOINTS, self._scores_in) or {} if self._for_table else {},
                steps=step if state in ENDED and step else max(step, self._rows.iteration),
                of_steps=total_steps(status),
                epoch=self._rows.epoch,
                elapsed_s=max(elapsed, default=None),
                began=_time_of(run, trial),
                ranks=count(status.get("ranks")) or count(trial.get("ranks")),
                why=plain_reason(text_of(trial.get("why")) or (text_of(status.get("why")) if state in ENDED else None)),
                note=self._content(NOTE, _note_in) or "",
                title=self._content(TITLE, _note_in) or "",
                trial=count(trial.get("trial")),
                objective=objective,
                direction=direction,
                value=_finite(trial.get("value")),
                is_behind=any(is_behind),
            )

    def _scores_in(self, checkpoints: Path) -> dict[str, ValueSummary]:
        """The scores of the checkpoints of a run that it has kept."""
        entries = checkpoints_of(checkpoints.parent)
        scores = [(one.score, one.iteration) for one in entries if one.score is not None]
        finite = [pair for pair in reversed(scores) if math.isfinite(pair[0])]  # of equals the oldest is the best
        if not finite:
            return {}
        best, best_at = (max if self._highest else min)(finite, key=itemgetter(0))
        return {"score": ValueSummary(*scores[0], best, best_at)}


_reader_of = lru_cache(maxsize=20_000)(_RunReader)


class _Values:
    """The last and best values in a file of rows, which grows; damaged and half lines are left out.

    Args:
        path: of the file.
        values_in: the columns of a row that are values; by default the losses and the metrics.
        has_means: whether the values are averaged over each epoch, too.

    Attributes:
        sums: the columns that add up over an epoch instead.
    """

    def __init__(self, path: Path, values_in: ValuesIn = weighing_columns, *, has_means: bool = False) -> None:
        self._tail = JsonlTail(path)
        self._values_in = values_in
        self._has_means = has_means
        self.sums = frozenset[str]()
        self._stamp: Stamp | None = None
        self._clear()

    def _clear(self) -> None:
        self.summaries: dict[str, ValueSummary] = {}
        self._earlier: dict[str, ValueSummary | None] = {}  # without the newest step, which may have another row
        self._means: dict[str, _EpochMean] = {}
        self.iteration = 0
        self.epoch: int | None = None
        self.elapsed_s: float | None = None

    def update(self, is_lower: Callable[[str], bool], deadline: float) -> bool:
        """Read what is new, and return whether there is more to read after the deadline."""
        if (stamp := _stamp_of(self._tail.path)) == self._stamp:
            return False
        self._stamp = _UNREAD
        if time.monotonic() > deadline:
            return True
        for update in self._tail.updates(deadline):
            if update.restarted:
                self._clear()
            rows = [row for row in update.rows if is_at_an_iteration(row)]
            if rows:
                self._take(rows, is_lower)
        if not update.more:
            self._stamp = stamp
        return update.more

    def _take(self, rows: list[dict[str, Any]], is_lower: Callable[[str], bool]) -> None:
        last = rows[-1]
        self.iteration = last["iteration"]
        self.epoch = count(last.get("epoch"))
        if (elapsed := _finite(last.get("elapsed_s"))) is not None:
            self.elapsed_s = elapsed
        for columns in columns_of(rows):
            for name in self._values_in(columns.names):
                lower = is_lower(name)
                self._take_values(name, columns.column("iteration"), columns.column(name), lower)
                if self._has_means:
                    self._means.setdefault(name, _EpochMean(lower, adds_up=name in self.sums)).take(name, columns)

    def _take_values(self, name: str, steps: Values, values: Values, lower: bool) -> None:
        """Take a value's rows; of several in a step, as of two evaluations, the last one counts."""
        is_last = np.append(np.diff(steps) != 0, True)
        steps = steps[is_last]
        values = values[is_last]
        before = self.summaries.get(name)
        if before is not None and before.at == steps[0]:
            before = self._earlier[name]
        self._earlier[name] = before = _summary(steps[:-1], values[:-1], lower, before) if len(steps) > 1 else before
        self.summaries[name] = _summary(steps[-1:], values[-1:], lower, before)

    @property
    def epoch_means(self) -> dict[str, ValueSummary]:
        """The last and best means over an epoch, a sum's totals."""
        return {name: mean.summary for name, mean in self._means.items() if mean.summary is not None}


class _EpochMean:
    """The mean of a value over each epoch, weighted as in the terminal's line; with `adds_up` the total.

    Attributes:
        summary: of the epochs so far, with the current one; None before the first row.
    """

    def __init__(self, lower: bool, *, adds_up: bool) -> None:
        self._lower = lower
        self._adds_up = adds_up
        self._epoch = -1.0
        self._sums = np.zeros(3)  # of the values, the weights and the rows of this epoch
        self._before: ValueSummary | None = None
        self.summary: ValueSummary | None = None

    def take(self, name: str, columns: Columns) -> None:
        """Take the rows of the value."""
        values = columns.column(name)
        weights = columns.column(weighing_columns(columns.names).get(name, "samples"), missing=1.0)
        counts = columns.column("skipped", missing=0.0) != 1
        epochs = columns.epochs
        starts = np.append(0, np.flatnonzero(np.diff(epochs)) + 1)
        ends = columns.column("iteration")[np.append(starts[1:], len(epochs)) - 1]
        with np.errstate(all="ignore"):  # such a mean is not finite
            parts = np.stack([values if self._adds_up else weights * values, weights, np.ones(len(values))])
            sums = np.add.reduceat(np.where(counts, parts, 0.0), starts, axis=1)
            before = self.summary
            if epochs[0] == self._epoch:
                sums[:, 0] += self._sums
                before = self._before
            means = sums[0] if self._adds_up else sums[0] / sums[1]
        means = np.where(np.isfinite(means), means, math.nan)
        is_known = sums[2] > 0
        if is_known[:-1].any():
            is_over = np.append(is_known[:-1], False)
            before = _summary(ends[is_over], means[is_over], self._lower, before)
        self._epoch = float(epochs[-1])
        self._sums = sums[:, -1]
        self._before = before
        self.summary = _summary(ends[-1:], means[-1:], self._lower, before) if is_known[-1] else before


def checkpoints_of(folder: Path) -> list[CheckpointInfo]:
    """Return the intact checkpoints of a run, the newest first."""
    run_id = run_id_of(folder)
    entries = [] if run_id is None else CheckpointStore(folder, run_id).entries()
    return [one for one in entries if one.problem is None]


def _summary(steps: Values, values: Values, lower: bool, before: ValueSummary | None) -> ValueSummary:
    """Return the last and the best value of some rows and those before them."""
    best, best_at = (None, None) if before is None else (before.best, before.best_at)
    if not np.isnan(values).all():
        place = int(np.nanargmin(values) if lower else np.nanargmax(values))
        newest = float(values[place])
        if best is None or (newest < best if lower else newest > best):
            best = newest
            best_at = int(steps[place])
    return ValueSummary(float(values[-1]), int(steps[-1]), best, best_at)


def _note_in(path: Path) -> str | None:
    with suppress(OSError):
        return read_text(path, _MOST_TEXT)
    return None


def _time_of(run: Mapping[str, Any], trial: Mapping[str, Any]) -> float | None:
    with suppress(LookupError, TypeError, AttributeError):  # another file than a trial's
        began = _finite(trial["attempts"][0].get("began"))
        if began is not None:
            return began
    return _finite(run.get("began"))


def _stamp_of(path: Path) -> Stamp | None:
    """What changes with a file: its size, its time of change, itself; None without the file."""
    try:
        form = os.stat(path)
    except OSError:
        return None
    return form.st_size, form.st_mtime_ns, form.st_ino


_FAILED = re.compile(
    r"[\w.]*\bPeerFailed: (rank \d+)(?: on host \S+ \S+)? failed in [\w ]+ of (step \d+): (.*)", re.DOTALL
)
_PATH = re.compile(r"^(?:[a-z_]\w*\.)+(?=[A-Z]\w*(?:: |$))")


def plain_reason(why: str | None) -> str | None:
    """Why a run failed, with the error first: `ValueError: no image 7 (rank 1, step 70)`, then its traceback if any.

    Args:
        why: of status.json. There the error of another rank has the words of the exception that carried it.
    """
    if why is None:
        return None
    if (peer := _FAILED.match(why)) is not None:
        rank, step, error = peer.groups()
        first, line_break, rest = error.partition("\n")
        why = f"{first} ({rank}, {step}){line_break}{rest}"
    return _PATH.sub("", why)


def text_of(value: object) -> str | None:
    """Return the start of a value that is a text, else None."""
    return value[:2000] if isinstance(value, str) and value else None


def _finite(value: object) -> float | None:
    return float(value) if is_number(value) and math.isfinite(value) else None
