"""Runs servers, and ends them and all that they started when its standard input ends: `python guard.py COMMANDS`.

COMMANDS is a JSON list of `{"command": [...], "log": path, "makes": path}`, started in this order, each when the
one before it has made its file. A daemon leaves its parent; the kernel then makes it a child of this process, the
nearest subreaper (prctl(2)), so that it is found and ended by its id. The input ends too if the test process dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
LOOK_S, END_S = 0.05, 5.0


def children() -> list[int]:
    """The ids of this process's children, those that ended left out."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]


def descendants(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with suppress(FileNotFoundError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from descendants(int(child))


def input_ended(within_s: float) -> bool:
    """Whether the standard input was closed; nothing is ever written to it."""
    return bool(select.select([sys.stdin], [], [], within_s)[0])


def start(command: list[str], log: str, makes: str) -> None:
    """Start a server, and wait until it has made its file, or has ended, or it is time to end."""
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    while process.poll() is None and not os.path.exists(makes) and not input_ended(LOOK_S):
        pass


def end_all() -> None:
    """Ask the servers to end, the last first, and kill what is left."""
    for pid in reversed(children()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while (left := children()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    while left := children():
        for pid in [below for child in left for below in descendants(child)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which close the input
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        for server in json.loads(sys.argv[1]):
            start(**server)
        while not input_ended(1.0):
            children()
    finally:
        end_all()


if __name__ == "__main__":
    main()
