"""The cell of a notebook, which shows HTML in the place of the last, also for the ranks that `launch` started.

[Note: From a rank] A rank has no kernel. It sends what is to be seen as datagrams through a socket that its worker got
at its start; the notebook's process receives them while it waits for the ranks. A datagram arrives whole or not at all,
and a rank never waits for the notebook, except for a moment with its last view. The environment variable names the
socket and the process, since programs that the rank starts inherit the variable, but not the socket.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import sys
import threading
from contextlib import suppress
from typing import Protocol

CELL = "DDP_LOOP_CELL"
_MOST_BYTES = 1 << 17  # of a datagram
_LAST_S = 1.0  # how long the last view waits for room
_CUT = "<div><small>The ranks ended here.</small></div>"


class Cell(Protocol):
    """Shows HTML in the output of a notebook's cell."""

    def show(self, html: str, text: str, *, last: bool) -> None:
        """Show it in the place of what was shown before.

        Args:
            html: to show.
            text: for a notebook that shows no HTML.
            last: whether nothing follows.

        Raises:
            OSError: it cannot be shown.
        """


def open_cell() -> Cell | None:
    """Return the cell in which this process shows something; None if no notebook started it."""
    if in_notebook():
        return NotebookCell()
    process, _, descriptor = os.environ.get(CELL, "").partition(":")
    return LaunchedCell(int(descriptor)) if process == str(os.getpid()) else None


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython is not imported to find out."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None


def shows_ranks() -> bool:
    """Whether ranks that this thread starts have a cell: other threads, such as a sweep's, start many runs."""
    return in_notebook() and threading.current_thread() is threading.main_thread()


class NotebookCell:
    """A cell of the notebook whose kernel this process is."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(8)
        self._is_shown = False

    def show(self, html: str, text: str, *, last: bool) -> None:
        """Show it in the place of what was shown before."""
        from IPython.display import display

        try:
            display({"text/html": html, "text/plain": text}, raw=True, display_id=self._key, update=self._is_shown)  # type: ignore[no-untyped-call]
        except Exception as error:  # a view is not worth a run
            raise OSError(f"The notebook shows nothing more: {error!r}") from error
        self._is_shown = True


class LaunchedCell:
    """A cell of the notebook that started this rank; see [Note: From a rank].

    Args:
        descriptor: of the worker's socket.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._key = secrets.token_hex(8)

    def show(self, html: str, text: str, *, last: bool) -> None:
        """Send it; a view that finds no room is left out, since another one follows."""
        parts = {"key": self._key, "html": html, "text": text, "last": last}
        word = json.dumps(parts, ensure_ascii=False).encode(errors="replace")
        if len(word) > _MOST_BYTES:
            raise OSError(f"A view of {len(word)} bytes does not fit into a message of {_MOST_BYTES}.")
        with socket.socket(fileno=os.dup(self._descriptor)) as sending:
            if last:
                select.select([], [sending], [], _LAST_S)
            try:
                sending.send(word, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return


def cell_sockets() -> tuple[socket.socket, socket.socket]:
    """Return where a launcher receives, and where its worker sends."""
    receiving, sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_BYTES)
    return receiving, sending


class LaunchedCells:
    """What the ranks of a task show, in the notebook that started them.

    Args:
        shows: whether there is a notebook; otherwise what arrives is discarded.

    Attributes:
        shows: likewise.
    """

    def __init__(self, *, shows: bool) -> None:
        self.shows = shows
        self._cells: dict[str, NotebookCell] = {}
        self._newest: dict[str, tuple[str, str]] = {}  # of those that do not show their last

    def take(self, receiving: socket.socket) -> None:
        """Show what has arrived from a rank."""
        while True:
            try:
                word = json.loads(receiving.recv(_MOST_BYTES, socket.MSG_DONTWAIT))
            except OSError:  # nothing more is there
                break
            if self.shows:
                self._show(**word)

    def end(self) -> None:
        """State below what shows no last view that the ranks have ended."""
        for key, (html, text) in list(self._newest.items()):
            self._show(key, html + _CUT, text, last=True)

    def _show(self, key: str, html: str, text: str, *, last: bool) -> None:
        self._newest[key] = html, text
        if last:
            del self._newest[key]
        with suppress(OSError):  # the notebook is gone; the ranks' results count
            self._cells.setdefault(key, NotebookCell()).show(html, text, last=last)
