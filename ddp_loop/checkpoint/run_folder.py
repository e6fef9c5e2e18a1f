"""The folder of a run: who is in it, what it is a run of, how it ended, and how it is asked to stop."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint.atomic_files import explained, write_atomic

RUN, LOCK, STATUS, STOP, ROWS, BEFORE = "run.json", "lock", "status.json", "stop", "rows.jsonl", "before"
EVALUATIONS, RANKS, PICTURES, TABLE = "evaluations.jsonl", "ranks.jsonl", "pictures", "rows.csv"
_MOVED = ("checkpoints", ROWS, EVALUATIONS, RANKS, PICTURES, TABLE, STATUS, RUN)
_DAMAGED = "*.damaged*.jsonl"  # what was kept aside of them
_LOOK_S = 0.2
_FLOCK = "hhqqi4x"  # Linux's struct flock: kind, whence, start, length, process
_open_here: set[Path] = set()  # the kernel's lock is this process's, and does not refuse a second one of its own


def fingerprint(facts: Mapping[str, object]) -> dict[str, object]:
    """What a run is a run of: the script's name and content, its arguments, and these facts."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script, content = ("", "") if main is None else (Path(main).name, "")
    if main is not None:
        with suppress(OSError):
            content = hashlib.sha256(Path(main).read_bytes()).hexdigest()
    arguments = " ".join(sys.argv[1:])
    return {"script": script, "the script's content": content, "arguments": arguments, **facts}


def read_json(path: Path) -> dict[str, Any] | None:
    """What the file says; None if it is not there or not whole."""
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


class RunFolder:
    """A run's folder, held by rank 0 until `close`.

    Args:
        folder: made unless it is there.
        facts: of the loop, for the fingerprint.
        resume: whether to go on with the run that is there: None if it is a run of the same script, arguments and
            facts, else refuse; True in any case; False to begin anew, what is there being moved to `before/`.

    Attributes:
        id: the run's own, kept in its checkpoints.
        news: lines for the user: what changed, what was moved.

    Raises:
        OSError: it cannot be made or written.
        RuntimeError: another process runs in it.
        ValueError: the run that is there is one of something else.
    """

    def __init__(self, folder: Path, facts: Mapping[str, object], resume: bool | None) -> None:
        self.folder, self.news = folder.absolute(), list[str]()
        self._directory: str | None = None
        with suppress(OSError):  # it was removed
            self._directory = os.getcwd()
        self._lock = self._take_lock()
        try:
            with self._explaining():
                self._open(fingerprint(facts), resume)
        except BaseException:
            self.close()
            raise

    def _explaining(self) -> AbstractContextManager[None]:
        remedy = "Make room there, make it writable, or pass another run_dir=."
        return explained(f"The run folder {self.folder} cannot be created or written", remedy)

    def _take_lock(self) -> int:
        self._place = Path(os.path.realpath(self.folder))
        if self._place in _open_here:
            raise RuntimeError(_second(self.folder, "another Loop of this process"))
        with self._explaining():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            who = os.pread(lock, 200, 0).decode(errors="replace").strip()
            os.close(lock)
            raise RuntimeError(_second(self.folder, who or "another process")) from None
        except OSError:
            self.news.append(f"{self.folder} lies where files cannot be locked: see that no second run writes there")
        with suppress(OSError):  # on a full disk it is held without a word
            os.truncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _open_here.add(self._place)
        return lock

    def _open(self, now: dict[str, object], resume: bool | None) -> None:
        self.forget_stop()
        before = read_json(self.folder / RUN)
        known = before is not None and isinstance(before.get("id"), str)
        if resume is False and any((self.folder / name).exists() for name in _MOVED):
            self._move_away()
            known = False
        if not known and any((self.folder / "checkpoints").glob("step-*")):
            raise ValueError(
                f"checkpoints belong to the run that run.json names; in {self.folder} it is missing or damaged: bring "
                "it back, or begin anew (resume=False), which moves them away"
            )
        if known and before is not None:
            self.id: str = before["id"]
            changed = _changed(before.get("fingerprint") or {}, now)
            if changed and resume is None:
                status = (read_json(self.folder / STATUS) or {}).get("status", "not ended")
                raise ValueError(
                    "a run is gone on with by the script and the arguments that began it; that in "
                    f"{self.folder} ({status}) had others: {'; '.join(changed)}. Say Loop(resume=True) to go on all "
                    "the same, resume=False to begin anew (what is there is moved away), or give another run_dir="
                )
            self.news += [f"{self.folder} goes on although it changed: {one}" for one in changed]
            now = now if changed else before.get("fingerprint", now)
        else:
            self.id = secrets.token_hex(8)
        began = before["began"] if known and before is not None and "began" in before else time.time()
        said = {"id": self.id, "began": began, "fingerprint": now}
        if said != before:  # a full disk is cleaned of what a killed save left, after this
            write_atomic(self.folder / RUN, said)

    def _move_away(self) -> None:
        number = 1
        while (there := self.folder / BEFORE / str(number)).exists():
            number += 1
        there.mkdir(parents=True)
        for name in (*_MOVED, *(path.name for path in self.folder.glob(_DAMAGED))):
            if (self.folder / name).exists():
                (self.folder / name).rename(there / name)
        self.news.append(f"{self.folder} begins anew; what was there is in {there}")

    # -- what it says --------------------------------------------------------------------------------------

    def write_status(self, status: str, **facts: object) -> None:
        """Say in status.json what becomes of the run: running, done, stopped, left, failed.

        Raises:
            OSError: it cannot be written, or another run's folder stands in the place of this one's.
        """
        if (read_json(self.folder / RUN) or {}).get("id") != self.id:
            raise FileNotFoundError(errno.ENOENT, f"{self.folder} is no longer the folder of this run")
        began = {"process": os.getpid(), "command": sys.argv, "directory": self._directory}
        write_atomic(self.folder / STATUS, {"status": status, "at": time.time(), **began, **facts})

    def asked_to_stop(self) -> str | None:
        """Why the run is asked to stop by a file in its folder, if it is."""
        if not os.path.exists(self.folder / STOP):  # that of Path raises where the folder cannot be looked into
            return None
        with suppress(OSError):
            return (self.folder / STOP).read_text(errors="replace")[:200].strip() or "the file stop in its folder"
        return "the file stop in its folder"

    def forget_stop(self) -> None:
        """Take the request back: it was followed, or is one of a run before."""
        with suppress(OSError):
            (self.folder / STOP).unlink()

    def close(self) -> None:
        """Let others in."""
        if self._lock >= 0:
            _open_here.discard(self._place)
            os.close(self._lock)
            self._lock = -1


def _second(folder: Path, who: str) -> str:
    return (
        f"one process runs in a run folder at a time; {folder} is held by {who}: wait for it, stop it "
        f"(python -m ddp_loop stop {folder}), or give another run_dir="
    )


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    lines = []
    for name in [*before, *(name for name in now if name not in before)]:
        if before.get(name) != now.get(name):
            if name == "the script's content":
                lines.append("the script's content is another one")
            else:
                lines.append(f"{name}: was {before.get(name)!r}, is {now.get(name)!r}")
    return lines


# -- from outside ------------------------------------------------------------------------------------------


def is_running(run: Path) -> bool:
    """Whether a process holds the run folder."""
    if Path(os.path.realpath(run)) in _open_here:
        return True  # to open the lock and close it again would give it up
    try:
        lock = os.open(run / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return _is_locked(lock)
    except OSError:
        return (read_json(run / STATUS) or {}).get("status") == "running"
    finally:
        os.close(lock)


def _is_locked(lock: int) -> bool:
    """Whether another process has the lock. Linux is asked: to take it for a moment could keep a run from beginning."""
    if sys.platform == "linux":
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(lock, fcntl.F_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    return False


def ask_to_stop(run: Path, why: str) -> None:
    """Ask the run to stop with a checkpoint after the step under way.

    Raises:
        ValueError: no run is under way there.
    """
    if not (run / RUN).is_file():
        raise ValueError(
            f"a run folder has a run.json; {run} has none: give the folder that Loop(run_dir=...) was given"
        )
    if not is_running(run):
        said = (read_json(run / STATUS) or {}).get("status", "unknown")
        raise ValueError(f"only a run under way can be stopped; {run} is not (its status: {said})")
    (run / STOP).write_text(why, encoding="utf-8")


def stop_and_wait(run: Path, timeout_s: float, say: Callable[[str], None]) -> bool:
    """Ask a run to stop, wait until it has, and say how it ended; False if it has not within the time.

    Raises:
        ValueError: no run is under way there.
    """
    ask_to_stop(run, "python -m ddp_loop stop")
    say(f"{run}: stopping after the step under way")
    deadline = time.monotonic() + timeout_s
    while is_running(run):
        if time.monotonic() > deadline:
            say(f"{run}: still running after {timeout_s:g} s")
            return False
        time.sleep(_LOOK_S)
    said = read_json(run / STATUS) or {}
    at = f" at step {said['iteration']}" if "iteration" in said else ""
    kept = f", checkpoint {said['checkpoint']}" if said.get("checkpoint") else ", no checkpoint"
    say(f"{run}: {said.get('status', 'ended without a word')}{at}{kept}")
    return said.get("status") in ("stopped", "done")
