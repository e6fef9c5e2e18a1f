"""How the process of a rank ends with the launcher that started it."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from types import TracebackType

from ddp_loop.distributed.failures import PeerFailed, RankStatus, format_error

PEER_FAILED_EXIT = 75  # of a process that was ended because another rank failed, or another host was ended
_PR_SET_PDEATHSIG = 1
_START = "DDP_LOOP_START"  # set by `run` (elastic/command.py)
_REPORTED = "_ddp_loop_is_reported"  # of an exception
_TRACE_LETTERS = 8000
_DAEMON_END_S = 5.0  # for a daemon that was terminated; then it is killed


def end_with_parent() -> bool:
    """Have the kernel kill this process when the parent's thread that started it dies; False where it cannot."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)


def follow_launcher(environment: Mapping[str, str]) -> None:
    """End this process when its launcher is killed, and leave errors to a launcher that prints them."""
    end_with_torchrun(environment)
    leave_errors_to_launcher(environment)


def end_with_torchrun(environment: Mapping[str, str]) -> None:
    """End this process when torchrun is killed, which starts its workers from its main thread."""
    parent = os.getppid()  # 1 does not mean orphaned: in a container torchrun may be the first process
    if "TORCHELASTIC_RUN_ID" in environment and end_with_parent() and os.getppid() != parent:
        os._exit(PEER_FAILED_EXIT)  # torchrun died meanwhile


def leave_errors_to_launcher(environment: Mapping[str, str]) -> None:
    """Leave it to `python -m ddp_loop run`, if that started this process, to print what this rank reports.

    It prints a failure once for all ranks. A script with a `sys.excepthook` of its own keeps that.
    """
    with suppress(KeyError, ValueError, TypeError):
        is_child = json.loads(environment[_START])["process"] == os.getppid()
        if is_child and sys.excepthook is sys.__excepthook__:
            sys.excepthook = show_unless_reported
            show_unless_reported.is_used = True  # type: ignore[attr-defined]


def show_unless_reported(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an uncaught exception to the launcher, or print it if that is not possible; a `sys.excepthook`."""
    if not is_reported(error):  # it was raised outside of the world
        report_to_launcher(error, RankStatus())
    if not is_reported(error):
        sys.__excepthook__(kind, error, trace)


def is_reported(error: BaseException) -> bool:
    """Whether the launcher prints this exception."""
    return getattr(error, _REPORTED, False)


def report_to_launcher(error: BaseException, where: RankStatus) -> None:
    """Have the launcher show the error of this rank: torchrun in its summary, `run` alone and once.

    A `PeerFailed` and a `sys.exit` are reported to `run` alone: torchrun would take the former for the culprit's.
    """
    path, is_peer = os.environ.get("TORCHELASTIC_ERROR_FILE"), isinstance(error, PeerFailed)
    leaves = getattr(show_unless_reported, "is_used", False)
    is_exit = isinstance(error, SystemExit) and error.code not in (None, 0)
    if not path or not (isinstance(error, Exception) or is_exit) or ((is_peer or is_exit) and not leaves):
        return
    text = error.summary if isinstance(error, PeerFailed) else "".join(traceback.format_exception(error))
    line, now = error.summary if isinstance(error, PeerFailed) else format_error(error), time.time()
    facts: dict[str, object] = {"py_callstack": text[-_TRACE_LETTERS:], "timestamp": str(int(now))}
    if isinstance(error, SystemExit):  # the launcher may end this process before its code is seen
        facts["py_callstack"], line = "", f"ended with exit code {error.code if isinstance(error.code, int) else 1}"
    if leaves:
        facts |= {"at": now, "where": str(where), "is_peer": is_peer, "is_shown": False}
    with suppress(OSError):
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line[-_TRACE_LETTERS:], "extraInfo": facts}}, file)
        os.replace(f"{path}.new", path)  # a rank that is killed meanwhile leaves no half
        if leaves:
            setattr(error, _REPORTED, True)


def children_except(known: set[BaseProcess]) -> set[BaseProcess]:
    """This process's living children without the known ones."""
    return set(multiprocessing.active_children()) - known


def end_daemons(children: set[BaseProcess]) -> None:
    """End those that would end with this process, such as a DataLoader's workers, and wait until they have ended."""
    daemons = [child for child in children if child.daemon]
    for child in daemons:
        child.terminate()
    deadline = time.monotonic() + _DAEMON_END_S
    for child in daemons:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
