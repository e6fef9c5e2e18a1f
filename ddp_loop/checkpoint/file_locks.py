"""Locks of files that end with their process, however it ends.

[Note: The lock] A lock of the process (`lockf`) is given up when any part of it opens and closes the file, as
`shutil.copytree` does. This one belongs to the open file. A forked process would keep it, so it closes its copy.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

_FLOCK = "hhqqi4x"  # Linux's struct flock: kind, whence, start, length, process
_WHOLE_FILE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_open_here: dict[Path, int] = {}  # the descriptors of this process's locks; a file system may have no locks


class Locked(Exception):
    """A process holds the lock; the text names it.

    Attributes:
        is_here: whether it is this process.
    """

    def __init__(self, who: str, *, is_here: bool = False) -> None:
        super().__init__(who)
        self.is_here = is_here


class FileLock:
    """A lock that this process holds until `close` or its end. See [Note: The lock].

    Args:
        path: of the file, which is created; its folder exists.
        holder: a word for the owner of the lock.

    Attributes:
        holds: whether the file is locked; False on a file system without locks.

    Raises:
        Locked: another process, or another part of this one, holds it.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, holder: str) -> None:
        self._place = Path(os.path.realpath(path))
        self.holds = True
        if self._place in _open_here:
            raise Locked(f"another {holder} of this process", is_here=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock_file(self._descriptor)
        except (BlockingIOError, PermissionError):
            who = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise Locked(who or "another process") from None
        except OSError:
            self.holds = False
        with suppress(OSError):  # a full disk has no room for a name
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _close_in_forked_processes()
        _open_here[self._place] = self._descriptor

    def close(self) -> None:
        """Unlock the file; once more, it does nothing."""
        if self._descriptor >= 0:
            if _open_here.pop(self._place, None) is not None:  # else this is a forked process
                os.close(self._descriptor)
            self._descriptor = -1


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a file; None if the file system has no locks."""
    if Path(os.path.realpath(path)) in _open_here:
        return True
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        if sys.platform == "linux":  # only Linux can tell without taking the lock, which could refuse a new one
            kind: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WHOLE_FILE))[0]
            return kind != fcntl.F_UNLCK
        try:
            _lock_file(descriptor)
        except (BlockingIOError, PermissionError):
            return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _lock_file(descriptor: int) -> None:
    """Lock an open file.

    Raises:
        BlockingIOError, PermissionError: it is locked.
        OSError: the file system has no locks.
    """
    if sys.platform == "linux":
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@cache
def _close_in_forked_processes() -> None:
    """Let processes that are forked from now on close their copies of this process's locks."""

    def close() -> None:
        while _open_here:
            os.close(_open_here.popitem()[1])

    os.register_at_fork(after_in_child=close)
