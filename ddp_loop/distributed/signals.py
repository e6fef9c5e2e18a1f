"""SIGINT and SIGTERM taken as requests: what they ask for, and how they arrive also while a collective blocks.

[Note: Ctrl-C] The first Ctrl-C asks all ranks to stop after the step, the second raises KeyboardInterrupt at once, the
third ends the process. SIGTERM asks for a stop. A request that was followed is over: its echo, from a launcher that
signals its ranks one after the other, is ignored; a new one means that the script is to end now.

A Python handler runs in the main thread alone, between two of its instructions, so not while a collective blocks; the
number that the C handler writes to the wakeup descriptor is there at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, Literal

REQUESTS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 0.3  # signals that come closer together are one: a terminal and a launcher both pass Ctrl-C on
_ECHO_S = 5.0  # a launcher hands SIGTERM to its ranks one after the other
_taken: list[Signals] = []  # by this process; what a fork must undo
_obeying: list[threading.Thread] = []  # in a forked process


class StopRequests:
    """What a request means, by those that came before it. See [Note: Ctrl-C].

    Attributes:
        has_followed: whether the ranks have stopped, and no loop was begun since.
    """

    def __init__(self) -> None:
        self.has_followed, self._followed_at = False, 0.0
        self._interrupts: list[float] = []

    def begin(self) -> None:
        """A loop begins: requests that were followed are over."""
        if self.has_followed:
            self.has_followed, self._interrupts = False, []

    def follow(self) -> None:
        """All ranks have stopped."""
        self.has_followed, self._followed_at = True, time.monotonic()

    def meaning_of(self, number: int) -> Literal["nothing", "stop", "interrupt", "exit"]:
        """What to do now that one of `REQUESTS` has arrived."""
        now = time.monotonic()
        if number == signal.SIGINT and self._is_same(now):
            return "nothing"
        times = len(self._interrupts)
        if self.has_followed:
            if now - self._followed_at < _ECHO_S and times < 2:
                return "nothing"
            if number != signal.SIGINT:
                return "exit"  # what the script does after the stop is not waited for
            times = max(times, 2)
        if number != signal.SIGINT or times == 1:
            return "stop"
        return "interrupt" if times == 2 else "exit"

    def _is_same(self, now: float) -> bool:
        """Whether this Ctrl-C is the last one again; else it counts."""
        if self._interrupts and now - self._interrupts[-1] < _SAME_S:
            return True
        self._interrupts.append(now)
        return False


class Signals:
    """Takes the signals, and puts the handlers back that were there.

    Args:
        descriptor: each signal's number is written there, in a byte; it must not block.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def take(self) -> bool:
        """Take them from now on; False outside of the main thread, where Python takes none."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._before:
            self._wakeup_before = signal.set_wakeup_fd(self._descriptor, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, _record_signal) for number in REQUESTS}
            _undo_in_forks()
            _taken.append(self)
        return True

    def restore(self) -> None:
        """Give them back."""
        if not self._before or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) is _record_signal:  # else somebody took it since
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        now = signal.set_wakeup_fd(-1)
        with suppress(ValueError, OSError):  # it was closed since
            signal.set_wakeup_fd(self._wakeup_before if now == self._descriptor else now)
        self._before = {}
        _taken.remove(self)

    def pass_on(self, number: int) -> None:
        """Hand a signal that is no request to whom signals were told before, such as an event loop."""
        if self._wakeup_before != -1:
            with suppress(OSError):
                os.write(self._wakeup_before, bytes([number]))


def _record_signal(number: int, frame: FrameType | None) -> None:
    """The descriptor was told already."""


def _undo_in_forks() -> None:
    """In a forked process (a worker of a DataLoader) signals are not the run's: its descriptor is the parent's own.

    Ctrl-C reaches all of a terminal's processes, and torchrun, or a cluster, sends SIGTERM to a rank with its workers;
    the step under way needs them until it is over. So they obey their parent alone.
    """
    if not getattr(_undo_in_forks, "done", False):
        os.register_at_fork(after_in_child=_undo)
        _undo_in_forks.done = True  # type: ignore[attr-defined]


def _undo() -> None:
    if _taken:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _taken.clear()
        if hasattr(signal, "sigwaitinfo"):
            # Blocked, since torch gives its workers a handler that lets anybody's SIGTERM end them.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            _obeying.append(threading.Thread(target=_obey_parent, name="ddp_loop SIGTERM", daemon=True))
            _obeying[0].start()
    elif _obeying:  # a fork of the fork
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        _obeying.clear()


def _obey_parent() -> None:
    while True:
        sender = signal.sigwaitinfo([signal.SIGTERM]).si_pid
        if sender == os.getppid():
            os._exit(0)  # as a worker of torch's ends then
