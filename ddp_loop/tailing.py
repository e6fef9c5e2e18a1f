"""A file of JSON lines that another process writes, read as it grows. See [Note: Cut back]."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# [Note: Cut back] A run that goes on cuts its files back to its checkpoint and appends again, so a file may be as long
# as it was and say something else. Therefore the bytes just before the place reached are read again at each look: lines
# have the seconds in them, so those made twice differ. If they do, or the file is another one, all is read again.

CHUNK = 1 << 20  # bytes at a time, and the most in a line that can be read
SEEN = 256  # bytes before the place reached that are compared


@dataclass(frozen=True)
class News:
    """What a look found.

    Attributes:
        anew: whether what was read before is void, and `rows` are from the start.
        rows: the whole lines that are JSON objects, in order.
        more: whether there is more to read at once.
    """

    anew: bool
    rows: list[dict[str, Any]]
    more: bool


class Tail:
    """Reads a growing file of JSON lines, each look going on where the one before ended.

    Attributes:
        is_there: whether the last look found the file.
        lines: whole lines so far.
        unreadable: how many of them are no JSON objects.
        first_unreadable: the number of the first such line, counted from 1; 0 if there is none.
        half: bytes behind the last whole line: one being written, or one whose writer was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_there = False
        self._forget()

    def _forget(self) -> None:
        self.lines = self.unreadable = self.first_unreadable = self.half = 0
        self._at = 0  # where the first line that was not yet read begins
        self._before = b""
        self._file: tuple[int, int] | None = None
        self._skips = False  # inside a line that is too long

    def look(self) -> News:
        """Read what is new, some CHUNK bytes at most; a file that is gone is one without lines."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return self._look(file)
            finally:
                os.close(file)
        except OSError:  # it is gone, or a folder; a disk fails
            anew, self.is_there = self._at > 0, False
            self._forget()
            return News(anew, [], False)

    def _look(self, file: int) -> News:
        form = os.fstat(file)
        identity, anew = (form.st_dev, form.st_ino), False
        before = os.pread(file, len(self._before), self._at - len(self._before))
        if self._file not in (None, identity) or before != self._before:
            self._forget()
            anew = True
        self._file, self.is_there = identity, True
        data = os.pread(file, CHUNK, self._at)
        whole = data.rfind(b"\n") + 1
        rows = self._parse(data[:whole])
        if not whole and len(data) == CHUNK:  # a line this long cannot be read
            self._skips, whole = True, CHUNK
        if whole:
            self._before = (self._before + data[:whole])[-SEEN:]
            self._at += whole
        size = os.fstat(file).st_size
        more = size > self._at and len(data) == CHUNK
        self.half = max(0, size - self._at) if not more else 0
        return News(anew, rows, more)

    def _parse(self, data: bytes) -> list[dict[str, Any]]:
        rows = []
        for line in data[:-1].split(b"\n") if data else ():
            self.lines += 1
            row = None if self._skips else _row(line)
            self._skips = False
            if row is None:
                self.unreadable += 1
                self.first_unreadable = self.first_unreadable or self.lines
            else:
                rows.append(row)
        return rows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of such a file that are JSON objects; none if it is not there."""
    tail, more = Tail(path), True
    rows: list[dict[str, Any]] = []
    while more:
        news = tail.look()
        rows = [] if news.anew else rows
        rows += news.rows
        more = news.more
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
