"""SIGINT and SIGTERM in a DataLoader's workers, which the current step needs until it ends.

Ctrl-C reaches all processes of a terminal, and torchrun or a cluster sends SIGTERM to a rank and its workers. A worker
handles both signals and does nothing, until its rank has released it or is gone. It neither ignores nor blocks them:
programs that it starts would inherit that, but they do not inherit a handler.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from multiprocessing.sharedctypes import RawValue

from ddp_loop.distributed.signals import REQUESTS, are_taken, do_nothing

_NONE = -1  # no workers are needed
_needed: list[ctypes.c_long] = []  # all that this process has; in memory that it shares with its workers


class WorkerSignals:
    """The `worker_init_fn` of workers that are started inside `starting`.

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
        self._started = self._started + 1
        self._needed.value = self._started if are_taken() else _NONE
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
