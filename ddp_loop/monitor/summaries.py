"""A line of the list of runs: read from the folder, and again only where a file of it changed."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import EVALUATIONS, PROFILE, PROFILE_FILE, RANKS, ROWS, STATUS, STOP, read_json
from ddp_loop.monitor.run_state import TRIAL, RunState, count, finite, text_of
from ddp_loop.reporting import JsonlTail

RUN, NOTE, TABLES = "run.json", "note.txt", "tables"
WATCHED = frozenset({RUN, STATUS, TRIAL, NOTE, STOP, ROWS, EVALUATIONS, RANKS, TABLES, PROFILE})
NO_METRIC = ("iteration", "epoch", "elapsed_s", "samples", "weight", "skipped")
MOST_VALUES, MOST_NOTE = 64, 500
GREATER = ("accuracy", "acc", "f1", "auc", "precision", "recall", "score", "r2", "iou", "dice", "bleu", "psnr", "ssim")

Form = tuple[tuple[str, int, int], ...]


class RunSummary:
    """What the page's list shows of a run.

    Args:
        key: the run's name in requests.
        name: as the page shows it.
        folder: of Loop(run_dir=...), which may not exist yet.

    Attributes:
        is_behind: whether there is more to read now.
    """

    def __init__(self, key: str, name: str, folder: Path) -> None:
        self.key, self.name, self.folder = key, name, folder
        self.is_behind = False
        self._run = RunState(folder)
        self._tails = {"": JsonlTail(folder / ROWS), "evaluation.": JsonlTail(folder / EVALUATIONS)}
        self._form: Form = ()
        self._said: dict[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._at: dict[str, float | int | None] = {}  # the last row's place
        self._written = 0.0
        self._last: dict[str, float | int | None] = {}
        self._best: dict[str, float | int] = {}

    def look(self, deadline: float) -> bool:
        """Read what changed, and return whether the page must know.

        Args:
            deadline: by time.monotonic(), after which rows are left for the next call.
        """
        form = self._form_now()
        if form == self._form and not self.is_behind and not self._run.is_active:
            return False
        is_other, self._form = form != self._form, form
        before = self._said
        self._run.look()
        if is_other or self.is_behind:
            self._read(deadline)
        self._said = self._sum_up()
        return is_other or self._said != before

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

    def _read(self, deadline: float) -> None:
        self.is_behind = False
        for prefix, tail in self._tails.items():
            while not self.is_behind:
                if time.monotonic() > deadline:
                    self.is_behind = True
                    return
                update = tail.poll()
                if update.anew:
                    self._forget()
                    self._tails = {prefix: JsonlTail(tail.path) for prefix, tail in self._tails.items()}
                    self.is_behind = True
                    return
                self._take(prefix, update.rows)
                if not update.more:
                    break

    def _take(self, prefix: str, rows: list[dict[str, Any]]) -> None:
        if not prefix and rows and count(rows[-1].get("iteration")) is not None:
            self._at = {name: finite(rows[-1].get(name)) for name in ("iteration", "epoch", "elapsed_s")}
        for name in dict.fromkeys(name for row in rows for name in row if name not in NO_METRIC):
            key = prefix + name
            given = [row[name] for row in rows if name in row]
            values = [value for value in map(finite, given) if value is not None]
            if (given[-1] is not None and not values) or (key not in self._last and len(self._last) >= MOST_VALUES):
                continue
            self._last[key] = finite(given[-1])
            if values:
                best = max if is_better_if_greater(name) else min
                self._best[key] = best(self._best.get(key, values[0]), best(values))

    # -- what the page shows -------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the line, as JSON values; `version` changes whenever the curves do."""
        return self._said

    def _sum_up(self) -> dict[str, Any]:
        run, about = self._run, read_json(self.folder / RUN) or {}
        iteration = run.iteration(self._at.get("iteration"))
        return {
            "key": self.key,
            "name": self.name,
            "folder": str(self.folder),
            "version": ".".join(f"{at}-{size}" for name, at, size in self._form if name in (ROWS, EVALUATIONS)),
            "state": run.state,
            "says": run.says(iteration),
            "fraction": run.fraction(iteration),
            "iteration": iteration,
            "steps": run.total(),
            "epoch": self._at.get("epoch") or None,
            "epochs": run.epochs,
            "began": finite(about.get("began")) or self._began(),
            "elapsed_s": self._elapsed(),
            "last": self._last.copy(),
            "best": self._best.copy(),
            "config": parameters_of(run.trial.get("parameters") if run.trial else about.get("config")),
            "trial": self._trial(),
            "note": self._note(),
            "tables": self._tables(),
            "can_stop": run.state == "running",
        }

    def _began(self) -> float | int | None:
        attempts = self._run.trial.get("attempts")
        if isinstance(attempts, list) and attempts and isinstance(attempts[0], dict):
            return finite(attempts[0].get("began"))
        return None

    def _elapsed(self) -> int | None:
        elapsed = self._at.get("elapsed_s")
        if elapsed is None:
            return None
        since = 0.0
        if self._run.is_active:
            written = [at * 1e-9 for name, at, _ in self._form if name in (ROWS, STATUS)]
            since = max(0.0, time.time() - max(written, default=time.time()))
        return round(elapsed + since)

    def _trial(self) -> dict[str, Any] | None:
        trial = self._run.trial
        if not trial:
            return None
        texts = {name: text_of(trial.get(name)) for name in ("status", "why", "objective", "direction")}
        return {"number": count(trial.get("trial")), "value": finite(trial.get("value")), **texts}

    def _note(self) -> str | None:
        if not any(name == NOTE for name, _, _ in self._form):
            return None
        with suppress(OSError):
            return (self.folder / NOTE).read_bytes()[: 4 * MOST_NOTE].decode("utf-8", "replace")[:MOST_NOTE] or None
        return None

    def _tables(self) -> list[str]:
        if not any(name == TABLES for name, _, _ in self._form):
            return []
        with suppress(OSError):
            return sorted(one.stem for one in (self.folder / TABLES).glob("*.json"))[:MOST_VALUES]
        return []


def parameters_of(given: object) -> dict[str, Any]:
    """Return the scalars of a run's parameters, by name."""
    if not isinstance(given, dict):
        return {}
    shown = {}
    for name, value in list(given.items())[:MOST_VALUES]:
        if value is None or isinstance(value, bool) or finite(value) is not None:
            shown[name] = value
        else:
            shown[name] = str(value)[:200]
    return shown


def is_better_if_greater(metric: str) -> bool:
    """Whether the best value of a metric is its greatest, by its name; of a loss or an error it is the least."""
    return any(word in GREATER for word in re.split(r"[^a-z0-9]+", metric.lower()))
