"""The run folder: its lock, the run's fingerprint and status, and requests to stop."""

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
_DAMAGED = "*.damaged*.jsonl"  # their damaged lines
ERROR = "error.rank-{rank}.txt"  # the whole of an error's text that was too long for the ranks' messages
_LOOK_S = 0.2
_FLOCK = "hhqqi4x"  # Linux's struct flock: kind, whence, start, length, process
_open_here: set[Path] = set()  # the kernel does not refuse a second lock of the same process


def fingerprint(facts: Mapping[str, object]) -> dict[str, object]:
    """Return what identifies a run: its script's name and content, its arguments, and these facts."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script, content = ("", "") if main is None else (Path(main).name, "")
    if main is not None:
        with suppress(OSError):
            content = hashlib.sha256(Path(main).read_bytes()).hexdigest()
    arguments = " ".join(sys.argv[1:])
    return {"script": script, "the script's content": content, "arguments": arguments, **facts}


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class RunFolder:
    """A run's folder, locked by rank 0 until `close`.

    Args:
        folder: created if it is missing.
        facts: of the loop, for the fingerprint.
        resume: what to do with a run that is in the folder. None resumes it if script, arguments and facts are the
            same, and refuses it otherwise. True resumes it in any case. False starts over, and moves its files to
            `before/`.

    Attributes:
        id: of the run, stored in its checkpoints.
        news: messages for the user about changed facts and moved files.

    Raises:
        OSError: the folder cannot be created or written.
        RuntimeError: another process has locked it.
        ValueError: it has a run of another script, or with other arguments or facts.
    """

    def __init__(self, folder: Path, facts: Mapping[str, object], resume: bool | None) -> None:
        self.folder, self.news = folder.absolute(), list[str]()
        self._directory: str | None = None
        with suppress(OSError):  # the directory was removed
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
            raise RuntimeError(_locked(self.folder, "another Loop of this process"))
        with self._explaining():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            who = os.pread(lock, 200, 0).decode(errors="replace").strip()
            os.close(lock)
            raise RuntimeError(_locked(self.folder, who or "another process")) from None
        except OSError:
            self.news.append(f"{self.folder} is on a file system without locks. Start no second run in it.")
        with suppress(OSError):  # a full disk has no room for a name
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
                f"{self.folder} has checkpoints, but its run.json is missing or damaged. Restore it, or pass "
                "resume=False to start over, which moves them away."
            )
        if known and before is not None:
            self.id: str = before["id"]
            changed = _changed(before.get("fingerprint") or {}, now)
            if changed and resume is None:
                status = (read_json(self.folder / STATUS) or {}).get("status", "not ended")
                raise ValueError(
                    f"{self.folder} has a run (status: {status}) that is not the same: {'; '.join(changed)}. Pass "
                    "resume=True to resume it anyway, resume=False to start over (its files move to before/), or "
                    "another run_dir=."
                )
            self.news += [f"{self.folder} is resumed although it changed: {one}" for one in changed]
            now = now if changed else before.get("fingerprint", now)
        else:
            self.id = secrets.token_hex(8)
        began = before["began"] if known and before is not None and "began" in before else time.time()
        run = {"id": self.id, "began": began, "fingerprint": now}
        if run != before:  # the disk may be full until the files of a killed save are removed
            write_atomic(self.folder / RUN, run)

    def _move_away(self) -> None:
        number = 1
        while (target := self.folder / BEFORE / str(number)).exists():
            number += 1
        target.mkdir(parents=True)
        others = [path.name for pattern in (_DAMAGED, ERROR.format(rank="*")) for path in self.folder.glob(pattern)]
        for name in (*_MOVED, *others):
            if (self.folder / name).exists():
                (self.folder / name).rename(target / name)
        self.news.append(f"{self.folder} starts over; its earlier files are in {target}")

    def write_status(self, status: str, **facts: object) -> None:
        """Write status.json; the status is running, done, stopped, left or failed.

        Raises:
            OSError: it cannot be written, or the folder was replaced by another run's.
        """
        if (read_json(self.folder / RUN) or {}).get("id") != self.id:
            raise FileNotFoundError(errno.ENOENT, f"{self.folder} is no longer the folder of this run")
        began = {"process": os.getpid(), "command": sys.argv, "directory": self._directory}
        write_atomic(self.folder / STATUS, {"status": status, "at": time.time(), **began, **facts})

    def asked_to_stop(self) -> str | None:
        """Why the file `stop` asks the run to stop; None if there is no such file."""
        if not os.path.exists(self.folder / STOP):  # Path.exists raises if the folder cannot be searched
            return None
        with suppress(OSError):
            return (self.folder / STOP).read_text(errors="replace")[:200].strip() or "the file stop in its folder"
        return "the file stop in its folder"

    def forget_stop(self) -> None:
        """Remove the file `stop`, which was obeyed or was meant for an earlier run."""
        with suppress(OSError):
            (self.folder / STOP).unlink()

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock >= 0:
            _open_here.discard(self._place)
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path, who: str) -> str:
    return (
        f"{folder} is held by {who}. Wait for it, stop it (python -m ddp_loop stop {folder}), or pass another run_dir=."
    )


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [
        "the script's content has changed"
        if name == "the script's content"
        else f"{name}: was {before.get(name)!r}, is {now.get(name)!r}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]


# -- from outside ------------------------------------------------------------------------------------------


def is_running(run: Path) -> bool:
    """Whether a process has locked the run folder."""
    if Path(os.path.realpath(run)) in _open_here:
        return True  # this process would lose its lock by opening and closing the file
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
    """Whether another process has the lock. Only Linux can tell without taking it, which could refuse a new run."""
    if sys.platform == "linux":
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(lock, fcntl.F_GETLK, query))[0]
        return kind != fcntl.F_UNLCK
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    return False


def ask_to_stop(run: Path, why: str) -> None:
    """Ask a run to stop after its current step, with a checkpoint.

    Raises:
        ValueError: no run is active in this folder.
    """
    if not (run / RUN).is_file():
        raise ValueError(f"{run} has no run.json. Pass the folder of Loop(run_dir=...).")
    if not is_running(run):
        status = (read_json(run / STATUS) or {}).get("status", "unknown")
        raise ValueError(f"No run is active in {run} (status: {status}). Pass the folder of a run that is training.")
    (run / STOP).write_text(why, encoding="utf-8")


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
    end = read_json(run / STATUS) or {}
    at = f" at step {end['iteration']}" if "iteration" in end else ""
    kept = f", checkpoint {end['checkpoint']}" if end.get("checkpoint") else ", no checkpoint"
    say(f"{run}: {end.get('status', 'ended without a status')}{at}{kept}")
    return end.get("status") in ("stopped", "done")
