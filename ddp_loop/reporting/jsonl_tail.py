"""A file of JSON lines that another process writes, read as it grows. See [Note: Cut back]."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# [Note: Cut back] A run that goes on cuts its files back to its checkpoint and appends again, so a file may be as long
# as it was and say something else. Therefore the bytes just before the place reached are read again at each look: lines
# have the seconds in them, so those made twice differ. If they do, or the file is another one, all is read again.

CHUNK = 1 << 20  # bytes at a time, and the most in a line that can be read
SEEN = 256  # bytes before the place reached that are compared
MOST_STEPS = 10**12


@dataclass(frozen=True)
class TailUpdate:
    """What a look found.

    Attributes:
        anew: whether what was read before is void, and `rows` are from the start.
        rows: the whole lines that are JSON objects, in order.
        more: whether there is more to read at once.
    """

    anew: bool
    rows: list[dict[str, Any]]
    more: bool


class JsonlTail:
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

    def poll(self) -> TailUpdate:
        """Read what is new, some CHUNK bytes at most; a file that is gone is one without lines."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return self._poll(file)
            finally:
                os.close(file)
        except OSError:  # it is gone, or a folder; a disk fails
            anew, self.is_there = self._at > 0, False
            self._forget()
            return TailUpdate(anew, [], False)

    def _poll(self, file: int) -> TailUpdate:
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
        return TailUpdate(anew, rows, more)

    def _parse(self, data: bytes) -> list[dict[str, Any]]:
        rows = []
        for line in data[:-1].split(b"\n") if data else ():
            self.lines += 1
            row = None if self._skips else object_of(line)
            self._skips = False
            if row is None:
                self.unreadable += 1
                self.first_unreadable = self.first_unreadable or self.lines
            else:
                rows.append(row)
        return rows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of such a file that are numbers at an iteration; none if it is not there."""
    tail, more = JsonlTail(path), True
    rows: list[dict[str, Any]] = []
    while more:
        news = tail.poll()
        rows = [] if news.anew else rows
        rows += filter(has_numbers, news.rows)
        more = news.more
    return rows


def object_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is; None if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def is_at_an_iteration(row: Mapping[str, Any]) -> bool:
    """Whether it says of which iteration it is."""
    iteration = row.get("iteration")
    return type(iteration) is int and 0 <= iteration <= MOST_STEPS


def has_numbers(row: Mapping[str, Any]) -> bool:
    """Whether it has nothing but numbers, of which None is one that is not finite, at an iteration."""
    return is_at_an_iteration(row) and all(value is None or is_number(value) for value in row.values())


def is_number(value: object) -> bool:
    """Whether it is a number of JSON that a float can be."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)
