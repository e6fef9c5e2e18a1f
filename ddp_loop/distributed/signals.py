"""SIGINT and SIGTERM as requests to stop, which arrive even while a collective blocks.

[Note: Ctrl-C] The first Ctrl-C asks all ranks to stop after the step. The second raises KeyboardInterrupt at once. The
third ends the process. SIGTERM asks for a stop. After the ranks have stopped, the same request may arrive once more,
from a launcher that signals its ranks one after the other, and is ignored. A new one ends the script.

Python runs handlers only in the main thread, between two instructions, so not while a collective blocks. The C handler
writes the signal's number to the wakeup descriptor at once. A script can replace that descriptor: asyncio sets its own
for a signal handler of its own, and none when it removes the last one. Then the Python handler writes the number.

[Note: In workers] The current step needs a DataLoader's workers until it ends. Ctrl-C reaches all processes of a
terminal, and torchrun or a cluster sends SIGTERM to a rank and its workers. A worker handles both signals and does
nothing, until its rank has released it or is gone. It neither ignores nor blocks them: programs that it starts would
inherit that, but they do not inherit a handler.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any, Literal

REQUESTS = (signal.SIGINT, signal.SIGTERM)
END = 255  # what arrives after the last signal; no signal has this number
TERMINATED = "SIGTERM at rank "  # the reason of a stop, before the rank's number
_SAME_S = 0.3  # signals closer together are one: a terminal and a launcher both pass Ctrl-C on
_ECHO_S = 5.0  # a launcher sends SIGTERM to its ranks one after the other
_taken: list[Signals] = []  # by this process; a fork must undo them
_NONE = -1  # no workers are needed
_needed: list[ctypes.c_long] = []  # all that this process has; in memory that it shares with its workers


class Signals:
    """Takes over the signals, says what each means, and restores the former handlers. See [Note: Ctrl-C].

    Attributes:
        arrivals: a descriptor from which each signal's number can be read, a byte each; its reader closes it.
        has_followed: whether the ranks have stopped, and no loop began since.
    """

    def __init__(self) -> None:
        self.has_followed = False
        self._followed_at = 0.0
        self._interrupts: list[float] = []  # when each Ctrl-C came
        self.arrivals, self._descriptor = os.pipe()
        os.set_blocking(self._descriptor, False)
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def take(self) -> None:
        """Take over the signals as a loop begins, and forget requests that were followed.

        Outside of the main thread Python allows no handlers.
        """
        if self.has_followed:
            self.has_followed = False
            self._interrupts = []
        if not self._before and threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._descriptor, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, _hear) for number in REQUESTS}
            _taken.append(self)

    def restore(self) -> None:
        if not self._before or threading.current_thread() is not threading.main_thread():
            return
        self.restore_handlers()
        now = signal.set_wakeup_fd(-1)
        with suppress(ValueError, OSError):  # it was closed since
            signal.set_wakeup_fd(self._wakeup_before if now == self._descriptor else now)
        self._before = {}
        _taken.remove(self)

    def end(self) -> None:
        """Restore the former handlers, and let `END` arrive."""
        self.restore()
        os.write(self._descriptor, bytes([END]))
        os.close(self._descriptor)

    def restore_handlers(self) -> None:
        """Restore the former handlers alone."""
        for number, handler in self._before.items():
            if signal.getsignal(number) is _hear:  # otherwise another handler was installed since
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def hear(self, number: int) -> None:
        """Write a signal's number to the descriptor if the C handler has not, since the script has replaced it."""
        now = signal.set_wakeup_fd(self._descriptor, warn_on_full_buffer=False)
        if now == self._descriptor:
            return
        with suppress(OSError):
            os.write(self._descriptor, bytes([number]))
        if now != -1:  # it is an event loop's that goes on
            with suppress(ValueError, OSError):  # or was closed
                signal.set_wakeup_fd(now)

    def follow(self) -> None:
        """Note that all ranks have stopped."""
        self.has_followed = True
        self._followed_at = time.monotonic()

    def meaning_of(self, number: int) -> Literal["nothing", "stop", "interrupt", "exit"]:
        """What to do about a signal of `REQUESTS` that has just arrived."""
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._interrupts and now - self._interrupts[-1] < _SAME_S:
                return "nothing"
            self._interrupts.append(now)
        times = len(self._interrupts)
        if self.has_followed:
            if now - self._followed_at < _ECHO_S and times < 2:
                return "nothing"
            if number != signal.SIGINT:
                return "exit"  # without waiting for the rest of the script
            times = max(times, 2)
        if number != signal.SIGINT or times == 1:
            return "stop"
        return "interrupt" if times == 2 else "exit"

    def pass_on(self, number: int) -> None:
        """Pass a signal that is no request to the former wakeup descriptor, such as an event loop's."""
        if self._wakeup_before != -1:
            with suppress(OSError):
                os.write(self._wakeup_before, bytes([number]))


def _hear(number: int, frame: FrameType | None) -> None:
    """See [Note: Ctrl-C]."""
    if _taken:
        _taken[-1].hear(number)


def do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the C handler has written the number to the wakeup descriptor."""


def _undo() -> None:
    """Give a forked process the former handlers: the descriptor belongs to its parent, and it runs no loop."""
    if _taken:
        signal.set_wakeup_fd(-1)
        _taken[0].restore_handlers()
        _taken.clear()


os.register_at_fork(after_in_child=_undo)


class WorkerSignals:
    """The `worker_init_fn` of workers that are started inside `starting`. See [Note: In workers].

    Args:
        begin: the user's own `worker_init_fn`.

    Attributes:
        has_workers: whether workers were started and not released.
    """

    def __init__(self, begin: Callable[[int], object] | None) -> None:
        self._begin = begin
        self.has_workers = False
        self._started = 0  # how many times; workers of an earlier time are not needed
        self._needed: ctypes.c_long = RawValue(ctypes.c_long, _NONE)
        if not _needed:  # a process that ends terminates its workers and waits for them
            util.Finalize(None, _release_all, exitpriority=100)
        _needed.append(self._needed)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Start workers inside, which SIGINT and SIGTERM do not end if a loop takes them as requests."""
        self.has_workers = True
        self._started += 1
        self._needed.value = self._started if _taken else _NONE
        before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)  # until the workers have their handlers
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def release(self) -> None:
        """Let SIGTERM end the workers from now on."""
        self.has_workers = False
        self._needed.value = _NONE

    def __call__(self, number: int) -> None:
        """Begin a worker; runs in it."""
        if self._needed.value == self._started:
            self._install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
        if self._begin is not None:
            self._begin(number)

    def _install(self) -> None:
        """Install handlers; torch's own for SIGTERM ends the worker, whoever sends it."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        for one in REQUESTS:
            signal.signal(one, do_nothing)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_restore)
        threading.Thread(target=self._obey, args=(read, os.getppid()), name="ddp_loop signals", daemon=True).start()

    def _obey(self, read: int, parent: int) -> None:
        while True:
            os.read(read, 64)
            if self._needed.value != self._started or os.getppid() != parent:
                os._exit(0)  # as torch's own handler does


def _restore() -> None:
    """In a fork of a worker."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _release_all() -> None:
    for one in _needed:
        one.value = _NONE
