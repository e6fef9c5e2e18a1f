"""A line of the list of runs: read from the folder, and again only where a file of it changed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import (
    CONSOLE,
    EVALUATIONS,
    IMAGES,
    LOGGED,
    NOTE,
    PROFILE,
    PROFILE_FILE,
    RANKS,
    ROWS,
    RUN,
    STATUS,
    STOP,
    TABLES,
    TEXTS,
    TITLE,
    USAGE,
)
from ddp_loop.monitor.run_state import RunState, finite, text_of
from ddp_loop.reporting import FAILED_TRIAL, TRIAL, RunRecord, read_run

WATCHED = frozenset(
    (
        RUN,
        STATUS,
        TRIAL,
        NOTE,
        TITLE,
        STOP,
        ROWS,
        EVALUATIONS,
        RANKS,
        TABLES,
        PROFILE,
        LOGGED,
        TEXTS,
        IMAGES,
        CONSOLE,
        USAGE,
    )
)
EVALUATION = "evaluation."  # before the name of a value that `evaluate` computes, as in a sweep's objective
MOST_VALUES = 64
MOST_TITLE = 100

Form = tuple[tuple[str, int, int], ...]


class RunSummary:
    """What the page's list shows of a run.

    Args:
        key: the run's name in requests.
        name: as the page shows it.
        folder: of Loop(run_dir=...), which may not exist yet.

    Attributes:
        is_behind: whether there is more to read now.
        said: the line, as JSON values; `version` changes whenever the curves do.
    """

    def __init__(self, key: str, name: str, folder: Path) -> None:
        self.key = key
        self.name = name
        self.folder = folder
        self.is_behind = False
        self._run = RunState(folder)
        self._record = RunRecord(name, folder, "waiting")
        self._form: Form = ()
        self.said: dict[str, Any] = {}

    def look(self, deadline: float) -> bool:
        """Read what changed, and return whether the page must know.

        Args:
            deadline: by time.monotonic(), after which all but the state is left for the next call.
        """
        form = self._form_now()
        if form == self._form and not self.is_behind and not self._run.is_active:
            return False
        is_other = form != self._form
        self._form = form
        before = self.said
        self._run.look()
        if is_other or self.is_behind:
            self._record = read_run(self.folder, deadline=deadline)
            self.is_behind = self._record.is_behind
        self.said = self._sum_up()
        return is_other or self.said != before

    def _form_now(self) -> Form:
        """Return name, time and size of each file that matters, after whether the folder exists."""
        found = [("", int(self.folder.is_dir()), 0)]
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name in WATCHED:
                    with suppress(OSError):
                        of = entry.stat()
                        found.append((entry.name, of.st_mtime_ns, of.st_size))
                        if entry.name == PROFILE:
                            of = (self.folder / PROFILE / PROFILE_FILE).stat()
                            found.append((PROFILE_FILE, of.st_mtime_ns, of.st_size))
        return tuple(sorted(found))

    # -- what the page shows -------------------------------------------------------------------------------

    def _sum_up(self) -> dict[str, Any]:
        record = self._record
        values = record.rows | {EVALUATION + name: value for name, value in record.evaluations.items()}
        # A name may come from elsewhere. It becomes one line, without signs that are not seen.
        title = " ".join("".join(letter if letter.isprintable() else " " for letter in record.title).split())
        values |= {name: value for name, value in record.logged.items() if name not in values}
        return {
            "key": self.key,
            "name": title[:MOST_TITLE] or self.name,
            "path": self.name,
            "folder": str(self.folder),
            "version": ".".join(f"{at}-{size}" for name, at, size in self._form if name in (ROWS, EVALUATIONS)),
            **self._run.about(record.steps),
            "epoch": record.epoch or None,
            "began": record.began,
            "elapsed_s": self._elapsed(),
            "last": {name: value.last if isfinite(value.last) else None for name, value in values.items()},
            "best": {name: value.best for name, value in values.items() if value.best is not None},
            "config": parameters_of(record.parameters),
            "trial": self._trial(),
            "note": record.note or None,
            "tables": self._tables(),
        }

    def _elapsed(self) -> int | None:
        if self._record.elapsed_s is None:
            return None
        since = 0.0
        if self._run.is_active:
            written = [at * 1e-9 for name, at, _ in self._form if name in (ROWS, STATUS)]
            since = max(0.0, time.time() - max(written, default=time.time()))
        return round(self._record.elapsed_s + since)

    def _trial(self) -> dict[str, Any] | None:
        record = self._record
        trial = self._run.trial
        if not trial:
            return None
        return {
            "number": record.trial,
            "value": record.value,
            "status": text_of(trial.get("status")),
            "can_again": trial.get("status") in FAILED_TRIAL and record.trial is not None,
            "why": text_of(trial.get("why")),
            "objective": record.objective,
            "direction": record.direction,
        }

    def _tables(self) -> list[str]:
        if not any(name == TABLES for name, _, _ in self._form):
            return []
        with suppress(OSError):
            return sorted(one.stem for one in (self.folder / TABLES).glob("*.json"))[:MOST_VALUES]
        return []


def parameters_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the scalars of a run's parameters, by name."""
    shown = {}
    for name, value in list(given.items())[:MOST_VALUES]:
        if value is None or isinstance(value, bool) or finite(value) is not None:
            shown[name] = value
        else:
            shown[name] = str(value)[:200]
    return shown
