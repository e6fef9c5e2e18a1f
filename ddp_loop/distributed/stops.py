"""Stops: what one rank is asked, and what all ranks then do at the same place.

[Note: A host that leaves] torchrun sends SIGTERM to its ranks when it is ended itself, and on every host when one joins
or leaves; then it starts them again. Each launcher notices at a time of its own, and all ranks stop, with a checkpoint,
at the first signal. A rank that ended with code 0 before its own launcher noticed would be regarded as done. So after a
SIGTERM on another host a rank waits a moment for its own, and ends with another code if none comes: its launcher then
starts it again, or fails, as its --max-restarts says. Ctrl-C and all other requests end all hosts with code 0.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from ddp_loop.distributed.devices import RankEnv
from ddp_loop.distributed.failures import Stopped
from ddp_loop.distributed.signals import REQUESTS, TERMINATED, Signals
from ddp_loop.distributed.store import RankStore
from ddp_loop.elastic import PEER_FAILED_EXIT

_LAUNCHER_S = 5.0  # for torchrun on this host to notice too; it looks every 0.1 s (--monitor-interval)


class Stoppable(Protocol):
    """A loop, as a stop sees it."""

    def asked_to_stop(self) -> str | None:
        """Why something besides signals asks it to stop, such as a file; None without a request."""

    def is_inside_step(self) -> bool:
        """Whether the script is in the body of a step that a resumed run does not repeat; the same on every rank."""

    def stop_here(self, why: str) -> None:
        """Save the work so far and make no further step. Every rank must call this."""


class Stops:
    """Requests to stop, as a world's ranks follow them together.

    Loops may be nested. A stop is one of all loops that are open, and a request that comes after the last fold of one
    holds for what follows.

    Args:
        place: of this process.
        store: of the world; the watchdog's thread uses it too.
        gather: returns what each rank was asked, in rank order; every rank must call it.

    Attributes:
        signals: which are taken, and what they mean.
        asked_here: why the script of this rank asked for a stop; None without a request.
        asked_outside: why a signal, a file or another rank asked for one; None without a request.
    """

    def __init__(self, place: RankEnv, store: RankStore, gather: Callable[[], Sequence[str | None]]) -> None:
        self._place = place
        self._store = store
        self._gather = gather
        self.signals = Signals()
        self._loops: list[Stoppable] = []  # those with handlers, the innermost last
        self.asked_here: str | None = None
        self.asked_outside: str | None = None
        self._terminated = threading.Event()  # this process got SIGTERM while a loop takes it as a request
        self._lock = threading.Lock()  # guards what the watchdog's thread changes
        self._has_begun = False  # whether any loop had handlers, on every rank alike
        self._why = ""  # the reason of the last stop

    @property
    def asked(self) -> str | None:
        """Why the ranks were asked to stop, as far as this one knows; None without a request."""
        return self.asked_here or self.asked_outside

    @property
    def can_stop_here(self) -> bool:
        """Whether a stop between two steps is obeyed at this place; the same on every rank."""
        return self._has_begun and not any(loop.is_inside_step() for loop in self._loops)

    @property
    def breaks_off(self) -> bool:
        """Whether this rank should break off what it does, and call `agree`."""
        return self.asked is not None and self.can_stop_here

    def ask(self, why: str) -> None:
        """Ask all ranks to stop at the next place where they agree on it."""
        self.asked_here = why

    def install_handlers(self, loop: Stoppable) -> None:
        """Take SIGINT, SIGTERM and what asks the loop as requests to stop, until `restore_handlers`."""
        if loop not in self._loops:
            self._loops.append(loop)
        self._has_begun = True
        self.signals.take()

    def restore_handlers(self, loop: Stoppable) -> None:
        """Restore the former handlers after the outermost loop; after a stop only on leaving, since the same request
        may arrive twice."""
        if loop in self._loops:
            self._loops.remove(loop)
        if not self._loops and not self.signals.has_followed:
            self.signals.restore()

    def follow(self, inner: Stoppable | None = None, why: str | None = None) -> str:
        """Stop all open loops, on every rank at the same place. Every rank must call this.

        Args:
            inner: a loop that has stopped already.
            why: the reason; by default the request's.

        Returns:
            The reason.
        """
        why = why or self._reason() or "loop.stop()"
        for loop in reversed(self._loops):
            if loop is not inner:
                loop.stop_here(why)
        self.asked_here = None
        self._why = why
        with self._lock:
            self._store.stop_followed()
            self.asked_outside = None
            self.signals.follow()
        return why

    def _reason(self) -> str | None:
        """The reason of a request, even if this rank has not seen it before; None without one."""
        with self._lock, suppress(RuntimeError):  # the store is gone with the launcher
            return self.asked_outside or self._store.get_stop()
        return None

    def ended(self) -> Stopped:
        """The exception that ends the script after a stop. See [Note: A host that leaves]."""
        rank = self._why.removeprefix(TERMINATED)  # that got a SIGTERM
        is_terminated = rank != self._why and "TORCHELASTIC_RUN_ID" in os.environ
        if not is_terminated or int(rank) in self._place.node or self._terminated.wait(_LAUNCHER_S):
            return Stopped()
        if self._place.local_rank == 0:
            sys.stderr.write(
                f"ddp_loop: Another host was ended ({self._why}), and this one was not. The work is saved. Rank "
                f"{self._place.rank} ends with exit code {PEER_FAILED_EXIT}, so that --max-restarts goes on.\n"
            )
        return Stopped(PEER_FAILED_EXIT)

    def raise_if_stopped(self) -> None:
        """Raise Stopped if the ranks have stopped, and no loop began since; no collective, the same on every rank."""
        if self.signals.has_followed:
            raise self.ended()

    def agree(self) -> None:
        """Stop on every rank if one was asked to, outside of a step. Every rank must call this.

        Raises:
            Stopped: the work so far is saved.
        """
        if self.can_stop_here and any(asked := self._gather()):
            self.follow(why=next(why for why in asked if why))
            raise self.ended()

    # -- on the watchdog's thread --------------------------------------------------------------------------

    def look(self) -> None:
        """See whether a loop is asked to stop by something besides signals."""
        if self.asked_outside is None:
            why = next((why for loop in self._loops[:] if (why := loop.asked_to_stop())), None)
            if why is not None:
                self._ask_all(why)

    def look_into_store(self) -> None:
        """See whether another rank was asked."""
        with self._lock:
            if self.asked_outside is None:
                self.asked_outside = self._store.get_stop()

    def hear(self, number: int) -> bool:
        """Follow a signal that arrived; return whether the main thread must be interrupted."""
        if number not in REQUESTS:  # every signal with a handler arrives here, such as SIGCHLD
            self.signals.pass_on(number)
            return False
        if number == signal.SIGTERM:
            self._terminated.set()
        meaning = self.signals.meaning_of(number)
        if meaning == "stop" and number == signal.SIGINT:
            self._ask_all(f"Ctrl-C at rank {self._place.rank}")
            self._say("Stopping after this step (Ctrl-C). Press it again to leave at once, without a checkpoint.")
        elif meaning == "stop" and self.asked_outside is None:
            self._ask_all(f"{TERMINATED}{self._place.rank}")
            self._say(f"Stopping after this step ({signal.Signals(number).name}).")
        elif meaning == "exit":
            os._exit(128 + number)
        return meaning == "interrupt"

    def _ask_all(self, why: str) -> None:
        """Ask all ranks to stop, unless they have just stopped: a file that requests it exists for a moment longer."""
        with self._lock:
            if self.signals.has_followed:
                return
            with suppress(RuntimeError):  # the store is gone with the launcher
                self._store.set_stop(why)
            # After the store: a rank that sees the stop in a fold finds its reason there.
            self.asked_outside = self.asked_outside or why

    def _say(self, line: str) -> None:
        if self._place.rank == 0:
            with suppress(OSError, ValueError):  # its reader is gone, but the watchdog must live on
                sys.stderr.write(f"ddp_loop: {line}\n")
