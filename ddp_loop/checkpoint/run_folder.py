"""The run folder: its lock, the run's fingerprint and status, and requests to stop.

[Note: Another run] A run goes on only with the same facts that fix a position in an epoch: the samples, the size of a
mini-batch. The facts that fix the bits must be the same too, but `resume=True` accepts other shards or another seed.
Everything else may change, such as the script, its arguments, learning rates and epochs. One notice lists the changes,
and every start is a line of starts.jsonl.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint.atomic_files import (
    explained,
    is_folder,
    open_private,
    read_start,
    read_text,
    write_atomic,
    write_text_atomic,
)
from ddp_loop.checkpoint.config import Config, changes_between
from ddp_loop.checkpoint.file_locks import FileLock, Locked, is_locked
from ddp_loop.checkpoint.secrets import hide_in_config, hide_secrets
from ddp_loop.checkpoint.starting import lacks_secret, start_command, way_on, working_directory
from ddp_loop.elastic import MOST_LETTERS

RUN = "run.json"
LOCK = "lock"
STATUS = "status.json"
STOP = "stop"
ROWS = "rows.jsonl"
BEFORE = "before"
EVALUATIONS = "evaluations.jsonl"
RANKS = "ranks.jsonl"
PICTURES = "pictures"
TABLE = "rows.csv"
STARTS = "starts.jsonl"
PROFILE = "profile"
PROFILE_FILE = "profile.json"  # the file is in the folder
TABLES = "tables"
NOTE = "note.txt"
TITLE = "name.txt"
LOGGED = "logged.jsonl"
TEXTS = "texts.jsonl"
IMAGES = "images.jsonl"
IMAGE_FOLDER = "images"
CONSOLE = "console"
USAGE = "usage"  # folders with a file of each rank
_MOVED = (
    *("checkpoints", "trace", ROWS, EVALUATIONS, RANKS, STARTS, PICTURES, PROFILE, TABLES, NOTE, TABLE, STATUS, RUN),
    *(TITLE, LOGGED, TEXTS, IMAGES, IMAGE_FOLDER, CONSOLE, USAGE),
)
_DAMAGED = "*.damaged*.jsonl"  # their damaged lines
ERROR = "error.rank-{rank}.txt"  # the whole of an error's text of which messages have the ends alone
_OF_POSITIONS = ("samples", "batch_size", "drop_last", "partition", "until", "parts")  # a run with others is another
_CONTENT = "the script's content"
_SHOWN = 6  # changes in a notice
OWN_FOLDER = "RUN_DIR"  # in kept values, for the path of the folder itself, which may be moved
_LOOK_S = 0.2
MOST_JSON = 1 << 26  # bytes
MOST_WHY = 200  # letters of a request to stop


def fingerprint(facts: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Return a description of a run: its script's name and content, its arguments, and these facts."""
    main = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    content = ""
    with suppress(OSError):
        content = hashlib.sha256(main.read_bytes()).hexdigest()
    arguments = " ".join(_without_path(one, os.path.realpath(folder)) for one in hide_secrets(sys.argv[1:]))
    return {"script": main.name, _CONTENT: content, "arguments": arguments, **facts}


def _without_folder(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Replace the run folder's path in a config. Of several values that read as it, words stay: a data set's name."""
    replaced = {name: _without_path(one, folder) for name, one in config.items() if isinstance(one, str)}
    changed = [name for name, one in replaced.items() if one != config[name]]
    kept = {name: config[name] for name in changed if len(changed) > 1 and os.sep not in config[name]}
    return {**config, **replaced, **kept}


def _without_path(argument: str, folder: str) -> str:
    """Replace the run folder's path: it may be spelled differently, and a folder may be moved."""
    option, equals, path = argument.rpartition("=")
    return f"{option}{equals}{OWN_FOLDER}" if path and os.path.realpath(path) == folder else argument


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing or damaged."""
    try:
        value = json.loads(read_start(path, MOST_JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def set_failed(folder: Path, facts: Mapping[str, object]) -> None:
    """Write into a run folder's status that the run failed, in place of its rank 0; an OSError is ignored."""
    with suppress(OSError):
        now = {**read_json(folder / STATUS), "status": "failed", "at": time.time(), **facts}
        write_atomic(folder / STATUS, now, is_private=True)


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Write an error's whole text into a run folder where it is too long for the ranks' messages."""
    if len(text := "".join(traceback.format_exception(error))) > MOST_LETTERS:
        with suppress(OSError):
            (folder / ERROR.format(rank=rank)).write_text(text, encoding="utf-8", errors="replace")


class RunFolder:
    """A run's folder, locked by rank 0 until `close`.

    Args:
        folder: created if it is missing.
        facts: they make a run another one if they differ. See [Note: Another run].
        resume: what to do with a run that is in the folder. None resumes it if the facts are the same. True resumes it
            also with other shards or another seed. False starts over, and moves its files to `before/`.
        settings: facts that may change.
        config: the user's hyper-parameters, which may change too; None keeps the last start's.

    Attributes:
        id: of the run, stored in its checkpoints.
        news: messages for the user about locks and moved files.
        changed: the changes since the run's last start.

    Raises:
        OSError: the folder cannot be created or written.
        RuntimeError: another process, or a Loop of this one, has locked it.
        ValueError: it has another run.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, object],
        resume: bool | None,
        settings: Mapping[str, object] | None = None,
        config: Config | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self.news = list[str]()
        self.changed = list[str]()
        self._command = {"command": hide_secrets(sys.argv), **start_command(directory=working_directory())}
        self._is_kept = False
        what = f"The run folder {self.folder} cannot be created or written"
        remedy = "Make room there, make it writable, or pass another run_dir=."
        if os.path.lexists(self.folder) and not os.path.isdir(self.folder):  # which raises nothing
            remedy = "It is a file, or a link to nothing. Pass a folder as run_dir=."
        with explained(what, remedy):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        try:
            before = self._read_run()
            with explained(what, remedy):
                self._open(before, facts, settings or {}, resume, config)
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        try:
            self._lock = FileLock(self.folder / LOCK, "Loop")
        except Locked as error:
            remedy = (
                f"Wait for it, stop it (python -m ddp_loop stop {self.folder}), or pass another run_dir=. A notebook "
                "that left its loop holds the folder until it calls world.leave() or ends."
            )
            if error.is_here:
                remedy = (
                    "It is being iterated. Let it end, leave it by a break, drop its iterator, or pass another "
                    "run_dir=."
                )
            raise RuntimeError(f"{self.folder} is held by {error}. {remedy}") from None
        if not self._lock.holds:
            self.news.append(f"{self.folder} is on a file system without locks. Start no second run in it.")

    def _read_run(self) -> dict[str, Any] | None:
        """Read run.json; None if it is missing or damaged. While it cannot be read, no new run may take its place.

        Raises:
            OSError: it cannot be read now.
        """
        path = self.folder / RUN
        remedy = "Start again when it can be read."
        with explained(f"{path} cannot be read now", remedy), suppress(FileNotFoundError, IsADirectoryError):
            path.read_bytes()
        before = read_json(path)
        is_whole = isinstance(before.get("id"), str) and isinstance(before.get("fingerprint"), dict)
        return before if is_whole else None

    def _open(
        self,
        before: dict[str, Any] | None,
        facts: Mapping[str, object],
        settings: Mapping[str, object],
        resume: bool | None,
        config: Config | None,
    ) -> None:
        forget_stop(self.folder)
        if resume is False and any(os.path.lexists(self.folder / name) for name in _MOVED):
            self._move_away()
            before = None
        folder = self.folder / "checkpoints"
        has_checkpoints = any(folder.glob("step-*"))
        self._check_no_link(folder)
        if before is None and has_checkpoints:
            raise ValueError(
                f"{self.folder} has checkpoints, but its run.json is missing or damaged. Restore it, or pass "
                "resume=False to start over, which moves them away."
            )
        now = fingerprint({**facts, **settings}, self.folder)
        if config is not None:
            config = _without_folder(config, os.path.realpath(self.folder))
        if before is None:
            self._run = {"id": secrets.token_hex(8), "began": time.time(), "fingerprint": now, "config": config or {}}
            write_atomic(self.folder / RUN, self._run, is_private=True)
            self._on_disk = self._run
        else:
            former = dict(before["fingerprint"])
            if isinstance(arguments := former.get("arguments"), str):  # an older version kept secrets
                former["arguments"] = " ".join(hide_secrets(arguments.split(" ")))
            self._check_same(_changed(former, facts), resume)
            newest = read_json(self.folder / STATUS).get("checkpoint")
            if newest and not has_checkpoints:  # starting over would cut its rows to nothing
                raise ValueError(
                    f"{self.folder} had the checkpoint {newest}, but {folder} has none. Put it back, or pass "
                    "resume=False to start over (the other files move to before/)."
                )
            self.changed = list(_changed(former, now).values())
            self._on_disk = before
            self._run = {**before, "fingerprint": {**former, **now}}
            if config is not None:
                kept = before.get("config")
                self.changed += changes_between(hide_in_config(kept) if isinstance(kept, dict) else {}, config)
                self._run["config"] = config
        self.id = str(self._run["id"])

    def _check_same(self, changed: Mapping[str, str], resume: bool | None) -> None:
        """Raise ValueError if these facts make the run another one. See [Note: Another run]."""
        lost = [name for name in changed if name in _OF_POSITIONS]
        if not changed or (resume and not lost):
            return
        status = read_json(self.folder / STATUS).get("status", "not ended")
        remedy = "Pass resume=True to continue it with other bits,"
        if lost:
            remedy = "Its checkpoints count an epoch's mini-batches, which are others now. Restore these values, pass"
        raise ValueError(
            f"{self.folder} has another run (status: {status}): {'; '.join(changed.values())}. {remedy} resume=False "
            "to start over (its files move to before/), or another run_dir=."
        )

    def _check_no_link(self, folder: Path) -> None:
        """Raise ValueError if a link or a file stands in the place of the folder of checkpoints."""
        if os.path.lexists(folder) and not is_folder(folder):
            raise ValueError(
                f"{folder} must be a folder of its own, since no checkpoint is read or written through a link. It is a "
                f"{'link' if folder.is_symlink() else 'file'}. Move the folder back there, make the whole run folder a "
                "link, or pass resume=False to start over."
            )

    @property
    def notice(self) -> str:
        """The changes, as a message for the user; empty without any."""
        if not self.changed:
            return ""
        shown = self.changed[:_SHOWN]
        if len(self.changed) > _SHOWN:
            shown.append(f"and {len(self.changed) - _SHOWN} more")
        changes = "; ".join(shown).replace(OWN_FOLDER, str(self.folder))
        if self._is_kept:
            kept = f"{self.folder} keeps the config and the command of its steps."
            return f"{kept} This start makes none with: {changes}."
        return f"{self.folder} continues with changes: {changes}."

    def keep_record(self) -> None:
        """Keep run.json and the command in status.json, since this start makes no step."""
        self._is_kept = True
        before = read_json(self.folder / STATUS)
        self._command = {name: before.get(name, value) for name, value in self._command.items()}

    def record_start(self, **facts: object) -> None:
        """Record this start in starts.jsonl, and in run.json the facts with which training begins here.

        Raises:
            OSError: a file cannot be written.
        """
        line = {"at": time.time(), **facts, **self._process(), "changed": self.changed}
        line |= {"fingerprint": self._run["fingerprint"], "config": self._run.get("config", {})}
        path = self.folder / STARTS
        with explained(f"{path} could not be written", "Training continues."), open_private(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            ending = b"" if file.read() in (b"", b"\n") else b"\n"  # a killed process may leave half a line
            file.write(ending + json.dumps(line).encode() + b"\n")
        if self._run != self._on_disk and not self._is_kept:
            write_atomic(self.folder / RUN, self._run, is_private=True)

    def _move_away(self) -> None:
        number = 1
        while (target := self.folder / BEFORE / str(number)).exists():
            number += 1
        target.mkdir(parents=True)
        others = [path.name for pattern in (_DAMAGED, ERROR.format(rank="*")) for path in self.folder.glob(pattern)]
        for name in (*_MOVED, *others):
            if os.path.lexists(self.folder / name):
                (self.folder / name).rename(target / name)
        self.news.append(f"{self.folder} starts over; its earlier files are in {target}")

    def write_status(self, status: str, **facts: object) -> None:
        """Write status.json; the status is running, done, stopped, left or failed.

        Raises:
            OSError: it cannot be written, or the folder was replaced by another run's.
        """
        if run_id_of(self.folder) != self.id:
            raise FileNotFoundError(errno.ENOENT, f"{self.folder} is no longer the folder of this run")
        content = {"status": status, "at": time.time(), **self._process(), **facts}
        write_atomic(self.folder / STATUS, content, is_private=True)

    def _process(self) -> dict[str, object]:
        return {"process": os.getpid(), **self._command}

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, str]:
    """The differences between two fingerprints, in words, by name."""
    return {
        name: f"{name} has changed" if name == _CONTENT else f"{name}: was {before[name]!r}, is {now[name]!r}"
        for name in now
        if name in before and before[name] != now[name]
    }


# -- from outside ------------------------------------------------------------------------------------------


def asked_to_stop(folder: Path) -> str | None:
    """Why the file `stop` asks a run, or a sweep, to stop; None if there is no such file."""
    path = folder / STOP
    if not os.path.exists(path):  # Path.exists raises if the folder cannot be searched
        return None
    why = ""
    with suppress(OSError):
        why = read_text(path, MOST_WHY)
    return why or "the file stop in its folder"


def forget_stop(folder: Path) -> None:
    """Remove the file `stop`, which was obeyed or was meant for an earlier run, or for earlier workers."""
    with suppress(OSError):
        (folder / STOP).unlink()


def is_running(run: Path) -> bool:
    """Whether a process has locked the run folder."""
    locked = is_locked(run / LOCK)
    return read_json(run / STATUS).get("status") == "running" if locked is None else locked


def check_output(file: Path, suffix: str) -> None:
    """Refuse to replace a file of a run.

    Args:
        file: that a command writes.
        suffix: of its own files; such a one beside a run.json is an older output.

    Raises:
        ValueError: it is one of a run, which would be lost.
    """
    file = file.resolve()
    for folder in file.parents if file.exists() else ():
        if (folder / RUN).is_file() and (file.suffix, file.parent) != (suffix, folder):
            raise ValueError(f"{file} is a file of the run in {folder}, and would be lost. Name another file.")


def run_id_of(run: Path) -> str | None:
    """Return the id in run.json; None if it cannot be read."""
    found = read_json(run / RUN).get("id")
    return found if isinstance(found, str) else None


def some_of(names: Sequence[str], most: int = 6) -> str:
    """Names in a message, such as "a, b and 5 more"; "none" for none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def no_run(folder: Path, why: str) -> ValueError:
    """The error of a folder that is none of a run; of a folder of runs it names some."""
    runs: list[Path] = []
    with suppress(OSError):
        found = sorted(folder.glob(f"*/{RUN}")) or sorted(folder.glob(f"*/*/{RUN}"))
        runs = [one.parent for one in found if run_id_of(one.parent) is not None]
    if runs:
        return ValueError(f"{folder} is a folder of runs: {some_of([*map(str, runs)], 3)}. Pass one of them.")
    return ValueError(f"{folder} {why}. Pass the folder of Loop(run_dir=...).")


def ask_to_stop(run: Path, why: str) -> None:
    """Ask a run to stop after its current step, with a checkpoint.

    Raises:
        ValueError: no run is active in this folder.
    """
    if not (run / RUN).is_file():
        raise no_run(run, "has no run.json")
    if not is_running(run):
        status = read_json(run / STATUS).get("status", "unknown")
        raise ValueError(f"No run is active in {run} (status: {status}). Pass the folder of a run that is training.")
    write_text_atomic(run / STOP, why)


def stop_and_wait(run: Path, timeout_s: float, say: Callable[[str], None]) -> bool:
    """Ask a run to stop, wait for its end, and print how it ended; returns whether it stopped in time.

    Raises:
        ValueError: no run is active in this folder.
    """
    ask_to_stop(run, "python -m ddp_loop stop")
    say(f"{run}: stopping after the current step")
    deadline = time.monotonic() + timeout_s
    while is_running(run):
        if time.monotonic() > deadline:
            say(f"{run}: still running after {timeout_s:g} s")
            return False
        time.sleep(_LOOK_S)
    end = read_json(run / STATUS)
    at = f" at step {end['iteration']}" if "iteration" in end else ""
    kept = f", checkpoint {end['checkpoint']}" if end.get("checkpoint") else ", no checkpoint"
    say(f"{run}: {end.get('status', 'ended without a status')}{at}{kept}")
    if end.get("status") == "stopped" and (command := way_on(end)):
        say(f"to go on: {command}")
        if secret := lacks_secret(end):
            say(secret)
    return end.get("status") in ("stopped", "done")
