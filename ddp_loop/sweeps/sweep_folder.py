"""The folder of a sweep as its workers use it: what the sweep is, their names, and the requests to them."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import (
    MOST_WHY,
    STOP,
    FileLock,
    Locked,
    explained,
    hide_secrets,
    is_locked,
    read_json,
    read_text,
    write_atomic,
)
from ddp_loop.elastic import program_name
from ddp_loop.reporting import AGAIN, SWEEP, SWEEP_LOCK, TRIALS, WORKERS, ask_sweep_to_stop, has_workers

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
    words = list(facts["job"].get("arguments", ()))
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
    if before is None and (folder / SWEEP).exists():
        raise ValueError(f"{folder / SWEEP} is damaged. Restore it, or choose another folder.")
    if before is None and folder.exists():
        names = sorted(one.name for one in folder.iterdir())
        # A start that was killed before it wrote sweep.json leaves its lock and a temporary file.
        others = [name for name in names if name != SWEEP_LOCK and not name.startswith(f".{SWEEP}-")]
        if others:
            raise ValueError(f"{folder} has files, and no sweep: {others[0]}. Choose an empty folder or a new one.")
    _check_same(folder, before or {}, json.loads(json.dumps(dict(facts))))
    return before or {}


def _check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
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
    if before and now["trials"] < before["trials"]:
        raise ValueError(
            f"The sweep in {folder} has {before['trials']} trials. Got trials={now['trials']}. A sweep can grow, but "
            "not shrink."
        )


def _pairs(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    """What both have by name; the parts of the job and of the space by "job.script"."""
    for name in now:
        old = before.get(name)
        new = now[name]
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
    if found is None:
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


def forget_stop(folder: Path) -> None:
    """Remove the file `stop`, which was meant for former workers."""
    with suppress(OSError):
        (folder / STOP).unlink()


def asked_to_stop(folder: Path) -> str | None:
    """Who asked the sweep to stop; None without a request."""
    try:
        return read_text(folder / STOP, MOST_WHY) or "the file stop in its folder"
    except OSError:
        return None


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
            listed = (read_json(path) or {}).get("trials")
            again([one for one in listed if type(one) is int] if isinstance(listed, list) else [], path.name)
            path.unlink(missing_ok=True)
