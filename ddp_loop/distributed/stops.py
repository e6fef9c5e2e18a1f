"""Stops: what one rank is asked, and what all ranks then do at the same place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ddp_loop.distributed.failures import Stopped
from ddp_loop.distributed.watchdog import Watchdog


class Stops:
    """Requests to stop, as a world's ranks follow them together.

    Args:
        rank: of this process.
        gather: returns what each rank was asked, in rank order; every rank must call it.

    Attributes:
        watchdog: sees the requests; None until the world was joined.
    """

    def __init__(self, rank: int, gather: Callable[[], Sequence[str | None]]) -> None:
        self._rank, self._gather = rank, gather
        self.watchdog: Watchdog | None = None
        self._stop_here: Callable[[str], None] | None = None

    @property
    def asked(self) -> str | None:
        """Why the ranks were asked to stop, as far as this one knows; None without a request or a running loop."""
        return None if self.watchdog is None or self._stop_here is None else self.watchdog.stop

    def install_handlers(self, elsewhere: Callable[[], str | None], stop_here: Callable[[str], None]) -> None:
        """Take SIGINT, SIGTERM and what `elsewhere` returns as requests to stop; `stop_here` saves the work so far."""
        if self.watchdog is not None:
            self.watchdog.look_for_stop, self.watchdog.say = elsewhere, self._say
            self.watchdog.install_stop_handlers()
            self._stop_here = stop_here

    def restore_handlers(self) -> None:
        """Restore the former handlers; after a stop only on leaving, since the same request may arrive twice."""
        if self.watchdog is not None:
            self.watchdog.look_for_stop = lambda: None
            if not self.watchdog.requests.has_followed:
                self.watchdog.signals.restore()
            self._stop_here = None

    def followed(self) -> str | None:
        """Note that all ranks stopped at the same step; returns the reason of the request, if it had one."""
        return None if self.watchdog is None else self.watchdog.stop_followed()

    def raise_if_stopped(self) -> None:
        """Raise Stopped if the ranks have stopped, and no loop began since; no collective, the same on every rank."""
        if self.watchdog is not None and self.watchdog.requests.has_followed:
            raise Stopped

    def agree(self) -> None:
        """Leave on every rank if one was asked to stop, outside of a step. Every rank must call this.

        Raises:
            Stopped: the work so far is saved.
        """
        if self._stop_here is not None and any(asked := self._gather()):
            self._stop_here(next(why for why in asked if why))
            self.followed()
            raise Stopped

    def _say(self, line: str) -> None:
        if self._rank == 0:
            sys.stderr.write(f"ddp_loop: {line}\n")
