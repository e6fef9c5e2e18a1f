"""How the process of a rank ends with the launcher that started it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import TracebackType

from ddp_loop.distributed.failures import PeerFailed, RankStatus, format_error
from ddp_loop.elastic import (
    INTERRUPTED_EXIT,
    PEER_FAILED_EXIT,
    UNSAVED_EXIT,
    cut_text,
    end_with_parent,
    flush_output,
    is_reported,
    leave_error,
    show_unless_reported,
)

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_DAEMON_END_S = 5.0  # for a daemon that was terminated; then it is killed
_SHOWN_LETTERS = 2_000  # of a peer's error; the failed rank prints the whole
_LINE = "_ddp_loop_line"  # of an exception


def follow_launcher() -> None:
    """End this process when torchrun is killed, and leave errors to a launcher that prints them.

    `python -m ddp_loop run` prints a failure once for all ranks. A script's own `sys.excepthook` stays in use.
    """
    # torchrun starts its workers from its main thread. Its id may be 1, as in a container.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid(), PEER_FAILED_EXIT)
    if sys.excepthook is show_unless_reported:
        report_to_launcher.is_alone = True  # type: ignore[attr-defined]


def is_shown_by_launcher() -> bool:
    """Whether `python -m ddp_loop run` has started this process, which prints a failure once for all ranks."""
    return getattr(report_to_launcher, "is_alone", False)


def report_to_launcher(error: BaseException, where: RankStatus) -> None:
    """Have the launcher show the error of this rank: torchrun in its summary, `run` alone and once.

    A `PeerFailed`, a `sys.exit` and Ctrl-C are reported to `run` alone: torchrun would take a `PeerFailed` for the
    culprit's.
    """
    is_peer = isinstance(error, PeerFailed)
    is_alone = is_shown_by_launcher()
    text = ""
    if isinstance(error, PeerFailed):
        line = text = error.summary
    elif isinstance(error, Exception):
        line = format_error(error)
        text = "".join(traceback.format_exception(error))
    elif isinstance(error, SystemExit) and error.code not in (None, 0):
        # The launcher may end this process before its code is seen.
        line = f"ended with exit code {error.code if isinstance(error.code, int) else 1}"
    elif is_interrupt(error):
        line = "was ended by a second Ctrl-C"
    else:
        return
    if is_alone or (isinstance(error, Exception) and not is_peer):
        leave_error(error, line, text, is_shown=not is_alone, where=str(where), is_peer=is_peer)


def is_interrupt(error: BaseException) -> bool:
    """Whether this is the KeyboardInterrupt of a second Ctrl-C."""
    return isinstance(error, KeyboardInterrupt) and has_line(error)


class LineHook:
    """A `sys.excepthook` that shows in one line what has one from `set_line`.

    Args:
        usual: the hook for other exceptions.

    Attributes:
        usual: as given.
    """

    def __init__(self, usual: ExceptHook) -> None:
        self.usual: ExceptHook = usual.usual if isinstance(usual, LineHook) else usual

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = getattr(error, _LINE, None)
        if line is None:
            self.usual(kind, error, trace)
        elif is_interrupt(error):
            report_to_launcher(error, RankStatus())  # it came while the world was left
            if not is_reported(error):
                _end_at_exit(INTERRUPTED_EXIT, line, error)
        else:
            lines = [cut_text(line, _SHOWN_LETTERS), *getattr(error, "__notes__", ())]
            sys.stderr.write("".join(f"{one}\n" for one in lines))


def has_line(error: BaseException) -> bool:
    """Whether `LineHook` shows a line for it."""
    return hasattr(error, _LINE)


def set_line(error: BaseException, line: str) -> None:
    """Have `LineHook` show this instead of a traceback: others show the culprit's, or the frames are of no use."""
    setattr(error, _LINE, line)


def end_unsaved(line: str) -> None:
    """Have this process end with this last line and code 74, unless an exception ends it, since a run was not saved.

    A rank that another process started through multiprocessing, as `launch` does, prints the line at once.
    """
    if multiprocessing.parent_process() is not None:
        flush_output(f"{line}\n")
    else:
        _end_at_exit(UNSAVED_EXIT, line, None)


def _end_at_exit(code: int, line: str, by: BaseException | None) -> None:
    """Have this process end with a code and a last line if this exception, or none, ends it."""

    def end() -> None:
        atexit.unregister(end)
        atexit._run_exitfuncs()  # the others, which were registered before
        if getattr(sys, "last_value", None) is by:
            flush_output(f"{line}\n")
            os._exit(code)  # an exit function cannot change it

    atexit.register(end)


def children_except(known: set[BaseProcess]) -> set[BaseProcess]:
    """This process's living children without the known ones."""
    return set(multiprocessing.active_children()) - known


def end_daemons(children: set[BaseProcess]) -> None:
    """End those that would end with this process, such as a DataLoader's workers, and wait until they have ended."""
    here = os.getpid()  # a fork of this process knows its children too
    daemons = [child for child in children if child.daemon and getattr(child, "_parent_pid", here) == here]
    for child in daemons:
        child.terminate()
    deadline = time.monotonic() + _DAEMON_END_S
    for child in daemons:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
