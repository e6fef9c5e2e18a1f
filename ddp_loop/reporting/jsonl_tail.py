"""A JSON Lines file that another process writes, read as it grows, by rows or by columns. See [Note: Cut back]."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

# [Note: Cut back] A resumed run cuts its files back to its checkpoint and appends again, so a file can have the same
# size and other content. Each poll therefore compares the bytes just before its position: lines have the elapsed time,
# so a line that was written again differs. If it does, or if the file was replaced, all of it is read again.

CHUNK = 1 << 20  # bytes that are read at once, and the longest line
SEEN = 256  # bytes before the position that are compared
MOST_STEPS = 10**12
_FEW = 8  # rows, for which columns do not pay
_NUMBERS = frozenset({float, int, type(None)})
_WHOLE = float(1 << 63)  # whole numbers below it fit a float well
Row = Mapping[str, Any]


@dataclass(frozen=True)
class TailUpdate:
    """The result of a poll.

    Attributes:
        anew: whether earlier rows are void, and `rows` start at the beginning of the file.
        rows: the new whole lines that are JSON objects, in order.
        more: whether there is more to read now.
    """

    anew: bool
    rows: list[dict[str, Any]]
    more: bool


class JsonlTail:
    """Reads a growing JSON Lines file; each poll continues where the last one ended.

    Args:
        path: of the file.
        follow: whether it may be a link.

    Attributes:
        lines: the number of whole lines so far.
        unreadable: how many of them are not JSON objects.
        first_unreadable: the number of the first of these, counted from 1; 0 if there is none.
        half: the number of bytes after the last whole line, which is being written, or whose writer was killed.
    """

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        self.path = path
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        self._forget()

    def _forget(self) -> None:
        self.lines = self.unreadable = self.first_unreadable = self.half = 0
        self._at = 0  # the start of the first line that was not yet read
        self._before = b""
        self._file: tuple[int, int] | None = None
        self._skips = False  # inside a line that is too long

    def updates(self, deadline: float = inf) -> Iterator[TailUpdate]:
        """Yield all that is new; one update at least, and none after the deadline, by time.monotonic()."""
        while True:
            update = self.poll()
            yield update
            if not update.more or time.monotonic() > deadline:
                return

    def poll(self) -> TailUpdate:
        """Read new lines, up to CHUNK bytes; a missing file has no lines."""
        try:
            file = os.open(self.path, self._flags)
            try:
                return self._poll(file)
            finally:
                os.close(file)
        except OSError:  # the file is missing, or a folder, or the disk fails
            anew = self._at > 0
            self._forget()
            return TailUpdate(anew, [], False)

    def _poll(self, file: int) -> TailUpdate:
        form = os.fstat(file)
        identity = (form.st_dev, form.st_ino)
        anew = False
        before = os.pread(file, len(self._before), self._at - len(self._before))
        if self._file not in (None, identity) or before != self._before:
            self._forget()
            anew = True
        self._file = identity
        data = os.pread(file, CHUNK, self._at)
        whole = data.rfind(b"\n") + 1
        rows = self._parse(data[:whole])
        if not whole and len(data) == CHUNK:  # this line is too long
            self._skips = True
            whole = CHUNK
        if whole:
            self._before = (self._before + data[:whole])[-SEEN:]
            self._at += whole
        size = os.fstat(file).st_size
        more = size > self._at and len(data) == CHUNK
        self.half = max(0, size - self._at) if not more else 0
        return TailUpdate(anew, rows, more)

    def _parse(self, data: bytes) -> list[dict[str, Any]]:
        if not data:
            return []
        lines = data.count(b"\n")
        if not self._skips and (rows := _all_objects(data[:-1], lines)) is not None:
            self.lines += lines
            return rows
        rows = []
        for line in data[:-1].split(b"\n"):
            self.lines += 1
            row = None if self._skips else object_of(line)
            self._skips = False
            if row is None:
                self.unreadable += 1
                self.first_unreadable = self.first_unreadable or self.lines
            else:
                rows.append(row)
        return rows


def _all_objects(data: bytes, lines: int) -> list[dict[str, Any]] | None:
    """Parse so many lines at once, in half the time; None if one of them is not a JSON object."""
    try:
        rows = json.loads(b"[" + data.replace(b"\n", b",") + b"]")
    except (ValueError, RecursionError):
        return None
    return rows if len(rows) == lines and all(type(row) is dict for row in rows) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a file that have an iteration and otherwise numbers; none if it is missing."""
    rows: list[dict[str, Any]] = []
    for update in JsonlTail(path).updates():
        rows = [] if update.anew else rows
        rows += filter(has_numbers, update.rows)
    return rows


def object_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def is_at_an_iteration(row: Row) -> bool:
    """Whether a row has an iteration."""
    iteration = row.get("iteration")
    return type(iteration) is int and 0 <= iteration <= MOST_STEPS


def has_numbers(row: Row) -> bool:
    """Whether a row has an iteration, and otherwise numbers only; None is one that is not finite."""
    return is_at_an_iteration(row) and all(value is None or is_number(value) for value in row.values())


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of JSON is a number that fits a float."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


# -- columns ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Columns:
    """Successive rows with the same names and nothing but numbers.

    Attributes:
        names: of the columns, in order; "iteration" and "epoch" among them.
        values: shape (rows, columns); NaN for what is not finite.
    """

    names: tuple[str, ...]
    values: npt.NDArray[np.float64]

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """A column, shape (rows,)."""
        return self.values[:, self.names.index(name)]


def columns_of(rows: Sequence[Row]) -> Iterator[tuple[list[Row], Columns | None]]:
    """Split rows, in their order, into parts with the same names, each with its columns, several times as fast to use.

    A part with anything but numbers has None in their place. The iterations of columns rise, and are whole numbers, as
    the epochs are.

    Args:
        rows: parsed lines of a file.
    """
    for _, same in groupby(rows, tuple):
        part = list(same)
        yield part, _columns(part)


def _columns(rows: list[Row]) -> Columns | None:
    names = tuple(rows[0])
    if len(rows) < _FEW or "iteration" not in names or "epoch" not in names:
        return None
    for key in ("iteration", "epoch"):
        if set(map(type, (row[key] for row in rows))) != {int}:
            return None
    cells = list(chain.from_iterable(row.values() for row in rows))
    if not _NUMBERS.issuperset(map(type, cells)):
        return None
    try:
        values = np.array(cells, dtype=np.float64).reshape(len(rows), len(names))  # None becomes NaN
    except OverflowError:
        return None
    found = Columns(names, values)
    steps = found.column("iteration")
    epochs = found.column("epoch")
    is_good = steps[0] >= 0 and steps[-1] <= MOST_STEPS and (np.diff(steps) > 0).all()
    is_good = is_good and epochs.min() >= 0 and epochs.max() <= MOST_STEPS
    return found if is_good and not (np.abs(values) >= _WHOLE).any() else None
