"""The list of the page: the runs that were named, and all below the folders that were named, also later ones.

[Note: Looking again] A folder is listed again only if its time of modification changed, which adding and removing a
folder do. A change in the same tick of the file system's clock would not show, so a folder that changed less than two
seconds ago is listed again too. A run's folder is not listed.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from ddp_loop.monitor.run_state import RunState, finite
from ddp_loop.reporting import EVALUATION, FAILED_TRIAL, TRIAL, RunRecord, look_into, read_run, text_of

LOOK_S = 0.4  # between two looks, at least
READ_S = 0.5  # for the rows of all runs in one look; the first look at many runs takes several
YOUNG_NS = 2_000_000_000
MOST_FOLDERS = 20_000
ACTIONS = frozenset(
    {"curves", "values", "stop", "note", "name", "tables", "again", "console", "usage", "texts", "images", "continue"}
)  # what follows a key in a request
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
MOST_VALUES = 64
MOST_TITLE = 100

Form = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Listing:
    """What a folder held when it was listed.

    Attributes:
        changed: its time of modification, in nanoseconds; None if that was just before the listing.
        is_run: whether it is the folder of a run, or was one before.
        folders: names of the folders in it, sorted, but for those that a run keeps for itself.
    """

    changed: int | None
    is_run: bool
    folders: list[str]


def runs_below(path: str, before: Mapping[str, Listing], listed: dict[str, Listing]) -> Iterator[str]:
    """Yield the paths of the run folders at and below a folder, each before those below it.

    Args:
        path: of the folder, which may not exist yet.
        before: what the folders held in the last look, by path; see [Note: Looking again].
        listed: gets what they hold now.
    """
    known = before.get(path)
    try:
        changed = os.stat(path).st_mtime_ns
        if known is None or known.changed != changed:
            known = list_folder(path, changed, known is not None and known.is_run)
    except OSError:
        return
    if len(listed) >= MOST_FOLDERS:
        return
    listed[path] = known
    if known.is_run:
        yield path
    for name in known.folders:
        yield from runs_below(f"{path}/{name}", before, listed)


def list_folder(path: str, changed: int, was_run: bool) -> Listing:
    """List a folder whose time of modification is `changed`.

    Raises:
        OSError: it cannot be read.
    """
    is_young = time.time_ns() - changed < YOUNG_NS
    is_run, folders = look_into(path, was_run=was_run)
    return Listing(None if is_young else changed, is_run, sorted(folders))


# -- a line ------------------------------------------------------------------------------------------------


class RunSummary:
    """What the page's list shows of a run.

    Args:
        key: the run's name in requests.
        name: as the page shows it.
        folder: of Loop(run_dir=...), which may not exist yet.

    Attributes:
        record: of the last look.
        said: the line, as JSON values; `version` changes whenever the curves do.
    """

    def __init__(self, key: str, name: str, folder: Path) -> None:
        self.key = key
        self.name = name
        self.folder = folder
        self._run = RunState(folder)
        self.record = RunRecord(name, folder, "waiting")
        self._form: Form = ()
        self.said: dict[str, Any] = {}

    def look(self, deadline: float) -> bool:
        """Read what changed, and return whether the page must know.

        Args:
            deadline: by time.monotonic(), after which all but the state is left for the next call.
        """
        form = self._form_now()
        is_other = form != self._form
        if not is_other and not self.record.is_behind and not self._run.is_active:
            return False
        self._form = form
        before = self.said
        self._run.look()
        if is_other or self.record.is_behind:
            self.record = read_run(self.folder, deadline=deadline)
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

    def _sum_up(self) -> dict[str, Any]:
        record = self.record
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
            "why": self._run.why(),
            "tables": self._tables(),
        }

    def _elapsed(self) -> int | None:
        if self.record.elapsed_s is None:
            return None
        since = 0.0
        if self._run.is_active:
            written = [at * 1e-9 for name, at, _ in self._form if name in (ROWS, STATUS)]
            since = max(0.0, time.time() - max(written, default=time.time()))
        return round(self.record.elapsed_s + since)

    def _trial(self) -> dict[str, Any] | None:
        record = self.record
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
        with suppress(OSError):
            return sorted(one.stem for one in (self.folder / TABLES).glob("*.json"))[:MOST_VALUES]
        return []


def parameters_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the scalars of a run's parameters, by name."""
    shown = {}
    for name, value in list(given.items())[:MOST_VALUES]:
        is_exact = type(value) is not int or abs(value) < 2**53  # in a browser, which has floats alone
        if value is None or isinstance(value, bool) or (finite(value) is not None and is_exact):
            shown[name] = value
        else:
            shown[name] = str(value)[:200]
    return shown


# -- the list ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """The runs at one moment.

    Attributes:
        version: rises with each change.
        lines: of each run, by key: the version of its last change, and its summary as JSON.
        removed: the version of its removal, by key.
        given: the folders of the page.
    """

    version: int = 0
    lines: dict[str, tuple[int, str]] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    given: tuple[str, ...] = ()

    def changes(self, since: int | None = None) -> str:
        """Return as JSON what changed after a version; without one, everything."""
        lines = self.lines.values() if since is None else (line for line in self.lines.values() if line[0] > since)
        gone = [] if since is None else [key for key, version in self.removed.items() if version > since]
        about = {"version": self.version, "all": since is None, "folders": self.given, "removed": gone}
        return f'{as_json(about)[:-1]},"runs":[{",".join(text for _, text in lines)}]}}'


class RunList:
    """The runs of the page. Several threads may use it.

    Args:
        given: run folders, and folders with runs below them; either may not exist yet.

    Attributes:
        now: what the last look found.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        self._given = list(dict.fromkeys(os.path.abspath(path) for path in given))
        self._listed: dict[str, dict[str, Listing]] = {path: {} for path in self._given}
        self._turn = threading.Lock()
        self._looked = -LOOK_S
        self._runs: dict[str, RunSummary] = {}  # by folder
        self._keys: dict[str, str] = {}  # by folder, also of runs that were removed
        self.now = Snapshot(given=tuple(_named(path) for path in self._given))

    def look(self) -> Snapshot:
        """Look at all runs again, unless that was just done."""
        with self._turn:
            if time.monotonic() - self._looked >= LOOK_S:
                self._look()
                self._looked = time.monotonic()
            return self.now

    def folder_of(self, key: str) -> Path | None:
        """Return a known run's folder."""
        if key not in self.now.lines:
            self.look()
        return self.folders().get(key)

    def folders(self) -> dict[str, Path]:
        """Return the known runs' folders, by key."""
        return {run.key: run.folder for run in list(self._runs.values())}

    def _look(self) -> None:
        deadline = time.monotonic() + READ_S
        version = self.now.version + 1
        runs: dict[str, RunSummary] = {}  # other threads see the last look's meanwhile
        lines: dict[str, tuple[int, str]] = {}
        for folder, name in self._find():
            if (run := self._runs.get(folder)) is None:
                safe = "/".join(f"{part}-" if part in ACTIONS else part for part in name.split("/"))
                run = RunSummary(key_of(self._keys, folder, safe), name, Path(folder))
            runs[folder] = run
            is_changed = run.look(deadline)
            known = self.now.lines.get(run.key)
            lines[run.key] = (version, as_json(run.said)) if is_changed or known is None else known
        self._runs = runs
        removed = {key: at for key, at in self.now.removed.items() if key not in lines}
        removed |= {key: version for key in self.now.lines if key not in lines}
        if any(at == version for at, _ in lines.values()) or version in removed.values():
            self.now = Snapshot(version, lines, removed, self.now.given)

    def _find(self) -> Iterator[tuple[str, str]]:
        """Yield folder and name of each run, once."""
        seen = set()
        for given in self._given:
            top = os.path.basename(given) or "run"
            listed: dict[str, Listing] = {}
            below = list(runs_below(given, self._listed[given], listed))
            self._listed[given] = listed
            below = [] if given in below else below  # a run folder is one run, whatever lies below it
            prefix = f"{top}/" if len(self._given) > 1 else ""
            for folder, name in [(one, prefix + os.path.relpath(one, given)) for one in below] or [(given, top)]:
                if folder not in seen:
                    seen.add(folder)
                    yield folder, _named(name)


def key_of(keys: dict[str, str], folder: str, name: str) -> str:
    """Return a folder's unique name for requests, which it keeps in `keys`."""
    if folder not in keys:
        base = key = re.sub(r"[^\w.,=+@/-]", "-", name)
        number = 1
        while key in keys.values():
            number += 1
            key = f"{base}-{number}"
        keys[folder] = key
    return keys[folder]


def _named(path: str) -> str:
    """Return a path as text, also where its bytes are none."""
    return os.fsencode(path).decode("utf-8", "replace")


def as_json(value: Mapping[str, Any]) -> str:
    """Return values as JSON that a browser reads: without NaN."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
