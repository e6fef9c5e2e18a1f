"""How the process of a rank ends with the launcher that started it."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess

from ddp_loop.distributed.failures import PeerFailed, RankStatus, format_error
from ddp_loop.elastic import leave_error, show_unless_reported

PEER_FAILED_EXIT = 75  # of a process that was ended because another rank failed, or another host was ended
UNSAVED_EXIT = 74  # of a process whose run was not saved whole, with on_save_error="warn"; EX_IOERR of sysexits.h
_PR_SET_PDEATHSIG = 1
_DAEMON_END_S = 5.0  # for a daemon that was terminated; then it is killed


def end_with_parent() -> bool:
    """Have the kernel kill this process when the parent's thread that started it dies; False where it cannot."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0)


def follow_launcher(environment: Mapping[str, str]) -> None:
    """End this process when its launcher is killed, and leave errors to a launcher that prints them.

    `python -m ddp_loop run` prints a failure once for all ranks. A script's own `sys.excepthook` stays in use.
    """
    end_with_torchrun(environment)
    if sys.excepthook is show_unless_reported:
        report_to_launcher.is_alone = True  # type: ignore[attr-defined]


def end_with_torchrun(environment: Mapping[str, str]) -> None:
    """End this process when torchrun is killed, which starts its workers from its main thread."""
    parent = os.getppid()  # 1 does not mean orphaned: in a container torchrun may be the first process
    if "TORCHELASTIC_RUN_ID" in environment and end_with_parent() and os.getppid() != parent:
        os._exit(PEER_FAILED_EXIT)  # torchrun died meanwhile


def report_to_launcher(error: BaseException, where: RankStatus) -> None:
    """Have the launcher show the error of this rank: torchrun in its summary, `run` alone and once.

    A `PeerFailed` and a `sys.exit` are reported to `run` alone: torchrun would take the former for the culprit's.
    """
    is_peer = isinstance(error, PeerFailed)
    is_alone = getattr(report_to_launcher, "is_alone", False)
    is_exit = isinstance(error, SystemExit) and error.code not in (None, 0)
    if not (isinstance(error, Exception) or is_exit) or ((is_peer or is_exit) and not is_alone):
        return
    text = error.summary if isinstance(error, PeerFailed) else "".join(traceback.format_exception(error))
    line = error.summary if isinstance(error, PeerFailed) else format_error(error)
    if isinstance(error, SystemExit):  # the launcher may end this process before its code is seen
        text = ""
        line = f"ended with exit code {error.code if isinstance(error.code, int) else 1}"
    leave_error(error, line, text, is_shown=not is_alone, where=str(where), is_peer=is_peer)


def end_unsaved(line: str) -> None:
    """Have this process end with this last line and code 74, unless an exception ends it, since a run was not saved.

    A rank that another process started through multiprocessing, as `launch` does, prints the line at once.
    """

    def end() -> None:
        atexit.unregister(end)
        atexit._run_exitfuncs()  # the others, which were registered before
        if getattr(sys, "last_value", None) is None:
            _say_last(line)
            os._exit(UNSAVED_EXIT)  # an exit function cannot change the code

    if multiprocessing.parent_process() is not None:
        _say_last(line)
    else:
        atexit.register(end)


def _say_last(line: str) -> None:
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"{line}\n")):
        with suppress(AttributeError, OSError, ValueError):  # it is closed, or its reader is gone
            stream.write(text)
            stream.flush()


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
