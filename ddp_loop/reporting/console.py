"""What the process of a rank writes to stdout and stderr while a run has its folder, kept there: console/rank-R.log.

[Note: Followed streams] A stream's own `write` is followed: the stream object stays the same, is still a terminal where
it is one, and keeps its descriptor. So `input`, the debugger, handlers of logging that hold the stream, redirections
and rich work as before. Descriptors 1 and 2 are left alone. A pipe in their place would be no terminal, would lose what
it holds where the process is killed, and could block. What C code and other programs write there, such as faulthandler,
is therefore not kept. Workers that the process forks are followed too, since appended lines do not mix; no lock is
held, so a fork is safe at any time.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import CONSOLE, RUN

MOST_BYTES = 8 << 20  # of a file
_CUT = b"\n[the console output is cut here: 8 MiB]\n"
_START = "--- start {number}, {time} ---\n"


class _Followed:
    """The `write` of a stream that a log follows.

    Attributes:
        log: gets what is written.
        own: the stream's own attribute before, such as another log's; None if it had none.
        beside: writes without this log.
    """

    def __init__(self, stream: Any, log: ConsoleLog) -> None:
        self.log = log
        self.own = vars(stream).get("write")
        self.beside = stream.write
        self._held = ""  # a line that is being drawn anew
        self._is_inside = False  # whether the last line in the file has no end

    def __call__(self, text: str) -> Any:
        try:
            return self.beside(text)
        finally:
            self.log.take(self, text)

    def settle(self, text: str) -> str:
        """What of a text is final; of a line that "\\r" draws anew only the last drawing is."""
        if "\r" not in text and not self._held:
            self._is_inside = not text.endswith("\n")
            return text
        *whole, rest = (self._held + text).split("\n")
        self._held = ""
        lines = [_last_drawing(line) + "\n" for line in whole]
        if "\r" in text or not lines:
            core = rest.rstrip("\r")
            self._held = rest[core.rfind("\r") + 1 :]
            rest = ""
        settled = "".join(lines) + rest
        if settled and self._is_inside and not settled.startswith("\n"):
            settled = "\n" + settled  # the beginning of this line is in the file
        self._is_inside = bool(rest) or (self._is_inside and not settled)
        return settled

    def rest(self) -> str:
        """The line that was drawn last, at the end."""
        held = _last_drawing(self._held)
        self._held = ""
        return ("\n" if self._is_inside else "") + held + "\n" if held else ""


def _last_drawing(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _chain(stream: Any) -> Iterator[_Followed]:
    """The logs that follow a stream, the last one first."""
    with suppress(TypeError):  # a stream of C code without attributes
        now = vars(stream).get("write")
        while isinstance(now, _Followed):
            yield now
            now = now.own


class Unrecorded:
    """A stream whose writes no log follows: a display's, which draws the same lines over and over."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        """Write to the stream alone."""
        logs = list(_chain(self._stream))
        return (logs[-1].beside if logs else self._stream.write)(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def follow_instead(before: Any, now: Any) -> None:
    """Let the logs that follow a stream follow its substitute too, such as a live display's."""
    if now is not before:
        for one in list(_chain(before)):
            one.log.follow(now)


class ConsoleLog:
    """Appends what this process writes to stdout and stderr to a file of the run folder; see [Note: Followed streams].

    A failure of the file is one warning, and never one of the script.

    Args:
        warn: shows the user a line.

    Attributes:
        has_ended: whether its loop has ended; the next log that opens then closes it.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.has_ended = False
        self._file: int | None = None
        self._path = Path()
        self._streams: list[tuple[Any, _Followed]] = []

    @property
    def is_open(self) -> bool:
        """Whether it still takes what is written."""
        return self._file is not None

    def open(self, folder: Path, rank: int) -> None:
        """Follow stdout and stderr from now on, if this machine has the run folder."""
        for stream in (sys.stdout, sys.stderr):
            for one in list(_chain(stream)):
                if one.log.has_ended:
                    one.log.close()
        if not (folder / RUN).is_file():
            return
        self._path = folder / CONSOLE / f"rank-{rank}.log"
        try:
            self._path.parent.mkdir(exist_ok=True)
            starts = _starts_in(self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            self._give_up(error)
            return
        if starts:
            moment = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self._append(_START.format(number=starts + 1, time=moment))
        for stream in (sys.stdout, sys.stderr) if self.is_open else ():  # it may be full already
            self.follow(stream)

    def follow(self, stream: Any) -> None:
        """Follow one more stream; one that is None or takes no attributes is left alone."""
        if stream is None or any(one.log is self for one in _chain(stream)):
            return
        with suppress(AttributeError, TypeError):
            followed = _Followed(stream, self)
            stream.write = followed
            self._streams.append((stream, followed))

    def take(self, source: _Followed, text: object) -> None:
        """Append a text that a stream was given; one that it refused too."""
        if self._file is not None and isinstance(text, str) and (settled := source.settle(text)):
            self._append(settled)

    def _append(self, text: str) -> None:
        if self._file is None:
            return
        data = text.encode(errors="backslashreplace")
        try:
            room = MOST_BYTES - os.fstat(self._file).st_size
            is_cut = len(data) > room
            if is_cut:
                data = b"" if room < 0 else data[:room].decode(errors="ignore").encode() + _CUT
            while data:  # an almost full disk accepts a part
                data = data[os.write(self._file, data) :]
            if is_cut:
                self._release()  # so that further output costs nothing
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._release()
        reason = error.strerror or type(error).__name__
        with suppress(OSError, ValueError):  # nor can the warning be written
            self._warn(f"{self._path} gets no more of the console output. {reason}. Training continues.")

    def close(self, error: BaseException | None = None) -> None:
        """Give the streams back, and close the file.

        Args:
            error: that ends the script, whose traceback is kept: it is printed later, or by another process.
        """
        for _, followed in self._streams:
            if rest := followed.rest():
                self._append(rest)
        if error is not None and not isinstance(error, SystemExit):
            self._append("".join(traceback.format_exception(error)))
        self._release()

    def _release(self) -> None:
        file = self._file
        self._file = None
        for stream, followed in self._streams:
            if next(_chain(stream), None) is followed:
                _give_back(stream, followed.own)
        self._streams = []
        if file is not None:
            with suppress(OSError):  # some file systems write only now
                os.close(file)


def _give_back(stream: Any, before: Any) -> None:
    """Let a stream have the `write` that it had before; logs that were closed meanwhile are left out."""
    while isinstance(before, _Followed) and not before.log.is_open:
        before = before.own
    if before is None:
        del stream.write
    else:
        stream.write = before


def _starts_in(path: Path) -> int:
    """How many starts of the run a file has the output of."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    return 1 + sum(line.startswith(b"--- start ") for line in data.split(b"\n")) if data else 0
