"""A thread that watches for peers' failures, roll calls, signals and requests to stop while the main thread works.

[Note: Interruption] A rank whose peer failed raises PeerFailed in its own collective. A rank elsewhere (in a long
forward, in a sleep, waiting for a DataLoader's worker) is interrupted by a signal whose handler raises it. A rank that
cannot be interrupted, in compiled code, is ended. So all ranks end within 3 s of a failure, wherever they are.

[Note: Lost interruptions] Python ignores an exception that leaves a finalizer, a callback of a weak reference, or other
code that it calls by itself. The handler raises nothing in those that it can tell by their frames, since they do
needed work. Python passes what it ignores in all others to `sys.unraisablehook`, and the main thread is interrupted
again.
A main thread that holds the interpreter, as in a long garbage collection, keeps the watchdog from running too. Such
time does not count: the main thread has had no chance to raise.
"""

from __future__ import annotations

import _weakrefset
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar, NamedTuple

from ddp_loop.distributed.failures import RankReport, RankStatus
from ddp_loop.distributed.processes import is_shown_by_launcher, set_line
from ddp_loop.distributed.signals import END
from ddp_loop.distributed.stops import Stops
from ddp_loop.distributed.store import RankStore
from ddp_loop.elastic import INTERRUPTED_EXIT, PEER_FAILED_EXIT, is_outside

_LOOK_S = 0.25  # between two polls of 0.1 ms
_CALLBACKS = (weakref.__file__, _weakrefset.__file__)
_INTERRUPT_S = 0.4  # until the main thread is interrupted, unless it noticed a failure by itself
_AGAIN_S = 0.02  # until a main thread that has not raised is interrupted again
_END_S = 1.6  # until the process is ended; before the pool kills it, which reports less
_OWN_END_S = 20.0  # for a failed rank to leave its world
_JOIN_S = 1.0  # for the thread to end; a store that does not answer delays it
_WRITE_S = 0.2  # for the reader of stderr
_BY = "_interrupted_by"  # an attribute of a raised interruption
_INTERRUPT = getattr(signal, "SIGRTMIN", None)  # not used by others


class _Ending(NamedTuple):
    """When the process is ended, by the watchdog's clock, with which exit code, and what is written."""

    at: float
    code: int
    message: str


_NEVER = _Ending(float("inf"), 1, "")


class Watchdog:
    """The watchdog of one world; `start` and `end` are called on the main thread where possible.

    Args:
        store: of the world.
        stops: of the world.
        where: returns where the main thread is.

    Attributes:
        noticed: a descriptor that can be read once another rank has failed, for the main thread's waits.
    """

    _open: ClassVar[list[Watchdog]] = []  # those whose main thread can be interrupted; worlds can be nested
    _handler_before: ClassVar[Any] = None
    _hook_before: ClassVar[Callable[[Any], Any]] = sys.unraisablehook

    def __init__(self, store: RankStore, stops: Stops, where: Callable[[], RankStatus]) -> None:
        self._store = store
        self._stops = stops
        self._where = where
        self._main = threading.get_ident()
        self._pending: BaseException | None = None  # what the interrupted main thread is to raise
        self._leaving = False
        self._ending = _NEVER
        self._interrupt_at = float("inf")
        self._kept_s = 0.0  # how long the thread was kept from running; it alone changes this
        self._seen_news = 0
        self._noted = RankStatus()
        self.noticed, self._notify = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="ddp_loop watcher", daemon=True)

    def start(self) -> None:
        """Start the thread, and install the handler that interrupts the main thread."""
        if _INTERRUPT is not None and threading.current_thread() is threading.main_thread():
            if not Watchdog._open:
                Watchdog._handler_before = signal.signal(_INTERRUPT, _interrupted)
                Watchdog._hook_before = sys.unraisablehook
                sys.unraisablehook = _ignored
            Watchdog._open.append(self)
        self._thread.start()

    def end(self) -> None:
        """End the thread, and restore the handlers."""
        self._stops.signals.end()
        if self in Watchdog._open:
            Watchdog._open.remove(self)
            if not Watchdog._open and sys.unraisablehook is _ignored:
                sys.unraisablehook = Watchdog._hook_before
            if not Watchdog._open and signal.getsignal(_INTERRUPT) is _interrupted:  # type: ignore[arg-type]
                with suppress(ValueError):  # outside of the main thread the handler stays, and does nothing
                    signal.signal(_INTERRUPT, Watchdog._handler_before)  # type: ignore[arg-type]
        if self._thread.ident is None:
            os.close(self._stops.signals.arrivals)  # it could not be started
        else:
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            os.close(self._notify)
            os.close(self.noticed)

    def leaving(self, *, failed: bool) -> None:
        """Stop interrupting the main thread, which leaves the world; after a failure limit its time."""
        self._leaving = True
        if failed:
            self._limit(_OWN_END_S, 1, f"ddp_loop: rank {self._store.rank} failed and could not leave its world.\n")

    def raise_pending(self) -> None:
        """Raise in the main thread what it was interrupted for."""
        pending = self._pending
        self._pending = None
        if pending is not None and not self._leaving:
            if isinstance(pending, KeyboardInterrupt):
                self._ending = _NEVER  # a notebook continues after it
            pending.__dict__[_BY] = id(self)
            raise pending

    def raise_again(self, ignored: BaseException) -> None:
        """Interrupt the main thread again: Python ignored what was raised there."""
        self._pending = ignored.with_traceback(None)
        self._interrupt_at = self._clock()

    # -- the thread ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poll = select.poll()  # select takes no descriptor above 1023
        arrivals = self._stops.signals.arrivals
        poll.register(arrivals, select.POLLIN)
        while True:
            began = time.monotonic()
            due = min(self._interrupt_at, self._ending.at) - self._clock()
            pause_s = min(max(due, 0.0), _LOOK_S)
            ready = poll.poll(1e3 * pause_s)
            for number in os.read(arrivals, 64) if ready else b"":
                if number == END:
                    os.close(arrivals)
                    return
                if self._stops.hear(number):
                    self._leave_at_once()
            # The store is gone with the launcher, which the main thread will notice; or a folder cannot be read now.
            with suppress(RuntimeError, OSError):
                self._poll()
            self._kept_s += max(time.monotonic() - began - pause_s, 0.0)
            now = self._clock()
            if now >= self._interrupt_at:
                self._interrupt()
            if now >= self._ending.at:
                self._end_process()

    def _clock(self) -> float:
        """The time that counts, in seconds: without what passed while the thread was kept from running."""
        return time.monotonic() - self._kept_s

    def _poll(self) -> None:
        self._stops.look()
        where = self._where()
        if (where.stage, where.step) != (self._noted.stage, self._noted.step):
            self._store.set_place(where)
            self._noted = where
        if (news := self._store.news()) == self._seen_news:
            return
        self._seen_news = news
        self._stops.look_into_store()
        if self._store.is_called():
            self._store.answer(RankReport(self._where(), self._stack()))
        failure = self._store.get_failure()
        if failure is not None and self._pending is None and self._ending == _NEVER:
            self._pending = failure
            os.write(self._notify, b"!")
            self._interrupt_at = self._clock() + _INTERRUPT_S
            first = str(failure).split("\n", 1)[0]
            line = f"ddp_loop: rank {self._store.rank} was ended{self._where()}: {first}\n"
            self._limit(_END_S, PEER_FAILED_EXIT, line)

    def _leave_at_once(self) -> None:
        """Raise KeyboardInterrupt in the main thread after a second Ctrl-C."""
        line = f"ddp_loop: rank {self._store.rank} was ended{self._where()} by a second Ctrl-C"
        self._pending = KeyboardInterrupt("a second Ctrl-C")
        set_line(self._pending, line)
        self._limit(_END_S, INTERRUPTED_EXIT, "" if is_shown_by_launcher() else f"{line}\n")
        self._interrupt()

    def _interrupt(self) -> None:
        """Interrupt the main thread, repeatedly until it raises. See [Note: Lost interruptions].

        One signal can be missed: Python runs the handlers and then enters the system call again. A signal between the
        two is handled when the call ends, which may be hours later.
        """
        self._interrupt_at = float("inf")
        if _INTERRUPT is not None and self._pending is not None and not self._leaving and self in Watchdog._open:
            signal.pthread_kill(self._main, _INTERRUPT)
            self._interrupt_at = self._clock() + _AGAIN_S

    def _limit(self, seconds: float, code: int, message: str) -> None:
        if (at := self._clock() + seconds) < self._ending.at:
            self._ending = _Ending(at, code, message)

    def _end_process(self) -> None:
        _, code, message = self._ending
        try:
            for child in multiprocessing.active_children():
                if child.daemon:  # a DataLoader's workers, which a normal exit would end too
                    child.kill()
            if code != INTERRUPTED_EXIT:
                stack = "".join(f"  {line}\n" for line in self._stack().rstrip().splitlines())
                message += f"Its stack was:\n{stack}"
            _write_if_read(message.encode(errors="backslashreplace"))
        finally:
            os._exit(code)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main)
        stack = [one for one in traceback.extract_stack(frame) if not is_outside(one.filename)] if frame else []
        return "".join(traceback.format_list(stack[-20:]))


def _interrupted(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename in _CALLBACKS:
            return  # the watchdog interrupts again
        frame = frame.f_back
    for watchdog in reversed(Watchdog._open):  # the innermost world first
        watchdog.raise_pending()


def _ignored(unraisable: Any) -> None:
    """Python ignores an exception, perhaps an interruption."""
    by = getattr(unraisable.exc_value, _BY, None)
    for watchdog in Watchdog._open:
        if id(watchdog) == by:
            watchdog.raise_again(unraisable.exc_value)
            return
    Watchdog._hook_before(unraisable)


def _write_if_read(text: bytes) -> None:
    """Write to stderr without waiting for a reader that has stopped reading."""
    for start in range(0, len(text), select.PIPE_BUF):
        if select.select([], [2], [], _WRITE_S)[1]:
            os.write(2, text[start : start + select.PIPE_BUF])
