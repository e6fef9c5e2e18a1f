"""JSON Lines files: written by whole lines, and read as they grow, by rows or by columns.

Lines can be written on a disk that is full for a while. See [Note: Damage] and [Note: Cut back].
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from io import FileIO
from itertools import chain, groupby, pairwise
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from ddp_loop.checkpoint import FileSum, explained, identity, sync_folder
from ddp_loop.distributed import listed

# [Note: Cut back] A resumed run cuts its files back to its checkpoint and appends again, so a file can have the same
# size and other content. Each poll therefore compares the bytes just before its position: lines have the elapsed time,
# so a line that was written again differs. If it does, or if the file was replaced, all of it is read again.

# [Note: Damage] A resumed run cuts its files back to its checkpoint, and loses no row before it. If a line is not a row
# (after a flipped bit, a crash that left NULs, an edit), the rows stay, in order, and the other lines are moved to a
# file beside it. Of two rows of one iteration the later one stays: a resumed process wrote it. What follows a row of a
# later iteration, or the checkpoint's own row, is cut off silently.

# [Note: Sums] A flipped digit leaves a row that looks like any other. A checkpoint therefore has the length and the
# SHA-256 of each file. If a resumed run finds another sum, and no damaged line explains it, a message names the file.
# Its rows stay: no sum tells which of them is wrong, and the others are right.

CHUNK = 1 << 20  # bytes that are read at once, and the longest line
SEEN = 256  # bytes before the position that are compared
MOST_STEPS = 10**12
_NUMBERS = frozenset({float, int, type(None)})
MOST_LINES = 100_000  # that wait in memory, some 20 MB; beyond that the oldest are dropped
_MOST_GAPS = 4  # that a message lists
Row = Mapping[str, Any]
Each = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TailUpdate:
    """The result of a poll.

    Attributes:
        restarted: whether the file began again, so that earlier rows do not count and `rows` are its first.
        rows: the new whole lines that are JSON objects, in order.
        more: whether there is more to read now.
    """

    restarted: bool
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
        self._flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
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
            restarted = self._at > 0
            self._forget()
            return TailUpdate(restarted, [], False)

    def _poll(self, file: int) -> TailUpdate:
        form = os.fstat(file)
        identity = (form.st_dev, form.st_ino)
        restarted = False
        before = os.pread(file, len(self._before), self._at - len(self._before))
        if self._file not in (None, identity) or before != self._before:
            self._forget()
            restarted = True
        self._file = identity
        data = os.pread(file, CHUNK, self._at)
        whole = data.rfind(b"\n") + 1
        rows = self._take(data[:whole]) if whole else []
        if not whole and len(data) == CHUNK:  # this line is too long
            self._skips = True
            whole = CHUNK
        if whole:
            self._before = (self._before + data[:whole])[-SEEN:]
            self._at += whole
        size = os.fstat(file).st_size
        more = size > self._at and len(data) == CHUNK
        self.half = max(0, size - self._at) if not more else 0
        return TailUpdate(restarted, rows, more)

    def _take(self, data: bytes) -> list[dict[str, Any]]:
        """Parse whole lines, the first of which starts at `_at`."""
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
        rows = [] if update.restarted else rows
        rows += filter(has_numbers, update.rows)
    return rows


def object_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def count(value: object) -> int | None:
    """Return a value that is a count, else None."""
    return value if type(value) is int and 0 <= value <= MOST_STEPS else None


def is_at_an_iteration(row: Row) -> bool:
    """Whether a row has an iteration."""
    return count(row.get("iteration")) is not None


def has_numbers(row: Row) -> bool:
    """Whether a row has an iteration, and otherwise numbers only; None is one that is not finite."""
    return is_at_an_iteration(row) and all(value is None or is_number(value) for value in row.values())


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of JSON is a number that fits a float."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


# -- columns ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Columns:
    """Successive rows with the same names.

    Attributes:
        names: of the columns, in order; "iteration" among them.
        values: shape (rows, columns); NaN for what is no finite number.
    """

    names: tuple[str, ...]
    values: npt.NDArray[np.float64]

    def column(self, name: str, missing: float = nan) -> npt.NDArray[np.float64]:
        """A column, shape (rows,); `missing` in each row if there is none."""
        return self.values[:, self.names.index(name)] if name in self.names else np.full(len(self.values), missing)

    @property
    def epochs(self) -> npt.NDArray[np.float64]:
        """The epochs, shape (rows,); 0 for a row without one."""
        found = self.column("epoch", missing=0.0)
        return np.where((found >= 0) & (found <= MOST_STEPS) & (found % 1 == 0), found, 0.0)


def columns_of(rows: Iterable[Row]) -> Iterator[Columns]:
    """Split rows with an iteration, in their order, into parts with the same names. Other values than numbers go."""
    for names, same in groupby(map(_numbers_in, rows), tuple):
        cells = list(chain.from_iterable(row.values() for row in same))
        try:
            values = np.array(cells, dtype=np.float64)  # None becomes NaN
        except OverflowError:  # a whole number may be larger than each float
            small = [nan if type(one) is int and not is_number(one) else one for one in cells]
            values = np.array(small, dtype=np.float64)
        values[np.isinf(values)] = nan
        yield Columns(names, values.reshape(-1, len(names)))


def _numbers_in(row: Row) -> Row:
    if _NUMBERS.issuperset(map(type, row.values())):
        return row
    return {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}


# -- writing ----------------------------------------------------------------------------------------------


def append_whole(file: FileIO, data: bytes, size: int) -> None:
    """Append `data` to a file of `size` bytes, all or nothing.

    Raises:
        OSError: it cannot be written; the file is cut back to `size`.
    """
    view = memoryview(data)
    written = 0
    try:
        while written < len(data):  # an almost full disk accepts a part
            written += file.write(view[written:]) or 0
    except OSError:
        with suppress(OSError):
            file.truncate(size)
        raise


def aside(path: Path) -> Path:
    """Return a free name for a file's damaged lines: rows.damaged.jsonl, rows.damaged-2.jsonl."""
    number = 1
    target = path.with_name(f"{path.stem}.damaged{path.suffix}")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")
    return target


def _lines_of(file: Any) -> Iterator[tuple[int, int, bytes]]:
    """Yield each line's start, end and content; the content is b"" if it is too long for a row."""
    start = end = 0
    while piece := file.readline(CHUNK):
        end += len(piece)
        if piece.endswith(b"\n") or len(piece) < CHUNK:
            yield start, end, piece if end - start <= CHUNK else b""
            start = end
    if end > start:
        yield start, end, b""


def _copy(source: int, spans: Iterable[tuple[int, int]], path: Path) -> None:
    """Write these spans of a file, a line each, to a new file, and flush it to the disk."""
    try:
        with path.open("xb") as file:
            for start, end in spans:
                data = b""
                while start < end and (data := os.pread(source, min(CHUNK, end - start), start)):
                    start += file.write(data)
                if not data.endswith(b"\n"):
                    file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


@dataclass(frozen=True)
class _ScannedRows:
    """The rows of a file that stay, and its damaged lines; see [Note: Damage].

    Attributes:
        places: iteration, start and end of the rows that stay, in order, shape (rows, 3).
        damaged: the spans of lines that are not rows and are not cut off.
        is_sound: whether the rows that stay are the beginning of the file, in order.
        is_in_order: whether the rows that stay are in order in the file.
    """

    places: npt.NDArray[np.int64]
    damaged: list[tuple[int, int]]
    is_sound: bool
    is_in_order: bool


def _scan(file: Any, after: int, each: Each, once: bool) -> _ScannedRows:
    """Read a file.

    Args:
        file: open for reading.
        after: rows of later iterations do not stay.
        each: called with each row that may stay, in the order of the file.
        once: whether the file has one row for each iteration.
    """
    places = array("q")
    damaged: list[tuple[int, int]] = []
    ends = True  # whether the last row that stays has the end of its line
    is_behind = False  # after a row that does not stay
    for start, end, line in _lines_of(file):
        text = line.lstrip(b"\0")  # a crash can leave NULs before the next line
        row = object_of(text)
        if row is None or not _is_whole(row, once):
            damaged += [] if is_behind else [(start, end)]
            continue
        is_behind = row["iteration"] > after
        if is_behind:
            continue
        damaged += [(start, end - len(text))] if len(text) < len(line) else []
        places.extend((row["iteration"], end - len(text), end))
        ends = line.endswith(b"\n")
        each(row)
    found = np.array(places, dtype=np.int64).reshape(-1, 3)
    is_in_order = bool((np.diff(found[:, 0]) >= once).all())
    if not is_in_order:
        found, replaced = _in_order(found, once)
        damaged = sorted(damaged + replaced)
    if once and len(found) == after:
        damaged = [span for span in damaged if span[0] < found[:, 2].max(initial=0)]
    is_unbroken = np.array_equal(found[:, 1], np.append(0, found[:, 2])[:-1])
    return _ScannedRows(found, damaged, is_unbroken and is_in_order and ends and not damaged, is_in_order)


def _is_whole(row: Row, once: bool) -> bool:
    if not is_at_an_iteration(row) or not is_number(row.get("elapsed_s")):
        return False
    counts = (row.get("epoch"), row.get("samples"))
    return not once or (row["iteration"] > 0 and has_numbers(row) and {int} == set(map(type, counts)))


def _in_order(places: npt.NDArray[np.int64], once: bool) -> tuple[npt.NDArray[np.int64], list[tuple[int, int]]]:
    """Return places by iteration, and the spans of rows that a later one replaces."""
    places = places[np.argsort(places[:, 0], kind="stable")]
    stays = np.append(np.diff(places[:, 0]) >= once, True)
    return places[stays], [(start, end) for _, start, end in places[~stays].tolist()]


def _missing(iterations: list[int], after: int) -> str:
    """Say which iterations from 1 to `after` have no row; empty if all have."""
    pairs = pairwise([0, *iterations, after + 1])
    gaps = [(one + 1, next_one - 1) for one, next_one in pairs if next_one > one + 1]
    shown = gaps if len(gaps) <= _MOST_GAPS else gaps[: _MOST_GAPS - 1]
    parts = [str(first) if first == last else f"{first} to {last}" for first, last in shown]
    more = sum(last - first + 1 for first, last in gaps[len(shown) :])
    parts += [f"{more} more"] if more else []
    if not parts:
        return ""
    one = len(gaps) == 1 and gaps[0][0] == gaps[0][1]
    return f"row{'' if one else 's'} {listed(parts)} {'is' if one else 'are'} missing"


OnFull = Literal["raise", "keep", "drop"]


def line_of(place: Mapping[str, int], values: Mapping[str, float], elapsed_s: float) -> str:
    """Format a line: its place, values, and `elapsed_s`; values that are not finite become null.

    A cached format string takes 3 microseconds for a row, `json.dumps` 30.
    """
    numbers = [repr(value) if isfinite(value) else "null" for value in values.values()]
    return _form((*place, *values)) % (*place.values(), *numbers, elapsed_s)


@lru_cache(maxsize=256)
def _form(names: tuple[str, ...]) -> str:
    """The format string of a line with these values."""
    fields = "".join(f"{json.dumps(name).replace('%', '%%')}: %s, " for name in names)
    return f'{{{fields}"elapsed_s": %.4f}}\n'


class JsonlWriter:
    """A JSON Lines file that grows by whole lines; a line that was written in part is cut off.

    Args:
        path: the file, created if it is missing: with `once` now, otherwise by its first line. None takes nothing.
        after: rows of later iterations are cut off; see [Note: Damage] for what is damaged.
        warn: called with a message when lines cannot be written, and when they can again.
        on_full: what happens to lines that cannot be written: "raise" raises OSError, "keep" keeps the newest
            MOST_LINES for the next flush, "drop" drops them. With "drop" the file is open during a flush only.
        begin: called each time the file is read; returns a function that is called with each row that stays.
        once: whether the file has one row for each iteration from 1 on.
        sum_before: the `sum` of the file in the checkpoint; None if that has none. See [Note: Sums].

    Attributes:
        elapsed_s: of the last row that stays.
        known: the rows of the iteration `after`.
        notice: describes damage and gaps; empty if there are none.
        lost: how many lines were not written.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(
        self,
        path: Path | None,
        after: int,
        warn: Callable[[str], None],
        on_full: OnFull,
        begin: Callable[[], Each] | None = None,
        *,
        once: bool = False,
        sum_before: FileSum | None = None,
    ) -> None:
        self._path = path or Path()
        self._warn = warn
        self._on_full = on_full
        self._folder = identity(self._path.parent)
        self._file: FileIO | None = None
        self._size = 0  # of the whole lines in the open file
        self._sum = hashlib.sha256()
        self._summed = 0  # of these lines, and how many bytes they have
        self._lines: list[str] = []
        self.lost = 0
        self._state: Literal["writes", "fails", "over"] = "over" if path is None else "writes"
        self.elapsed_s = 0.0
        self.known: list[dict[str, Any]] = []
        self.notice = ""
        before, digest = sum_before or (0, "")
        if path is not None and (once or before or path.exists()):
            try:
                with self._explaining():
                    self._recover(after, begin or (lambda: lambda row: None), once)
                    self._check_sum(before, digest)
            except BaseException:
                self._close_file()
                raise
            if on_full == "drop":
                self._close_file()

    @property
    def sum(self) -> FileSum:
        """The number of bytes of the lines in the file, and their SHA-256."""
        return self._summed, self._sum.hexdigest()

    def add(self, line: str) -> None:
        """Add a line, which the next `flush` writes."""
        if self._state != "over":
            self._lines.append(line)

    def flush(self) -> None:
        """Write the added lines.

        Raises:
            OSError: that fails, and `on_full` is "raise". No further lines are written.
        """
        try:
            self._write()
        except OSError as error:
            if self._on_full == "raise":
                self._state = "over"
                self._close_file()
                raise
            if self._state == "writes":
                fate = "wait in memory" if self._on_full == "keep" else "are dropped"
                self._warn(f"{error} Until then new lines {fate}; training continues.")
            self._state = "fails"
            self.lost += max(0, len(self._lines) - MOST_LINES)
            del self._lines[: -MOST_LINES if self._on_full == "keep" else None]
        if self._on_full == "drop":
            self._close_file()

    def close(self) -> None:
        """Write the added lines, and close the file; `warn` is called with an error."""
        try:
            self._write()
        except OSError as error:
            count = len(self._lines)
            what = "The last line was" if count == 1 else f"The last {count} lines were"
            self._warn(f"{what} not written. {error}")
            self.lost += count
        finally:
            self._state = "over"
            self._close_file()

    def _write(self) -> None:
        if not self._lines or self._state == "over":
            return
        data = "".join(self._lines).encode()
        with self._explaining():
            file = self._open()
            if os.fstat(file.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "it was removed")
            self._cut(file)
            append_whole(file, data, self._size)
        self._size += len(data)
        self._sum.update(data)
        self._summed += len(data)
        if self._state == "fails":
            self._warn(f"{self._path} can be written again. Lines added: {len(self._lines)}.")
        self._lines = []
        self._state = "writes"

    def _open(self) -> FileIO:
        if self._file is None:
            if identity(self._path.parent) != self._folder:
                raise FileNotFoundError(errno.ENOENT, "another folder took the place of its folder")
            self._file = self._path.open("a+b", buffering=0)  # what cannot be written waits in `_lines` alone
            self._size = self._file.tell()
        return self._file

    def _cut(self, file: FileIO) -> None:
        """Cut off what follows the whole lines."""
        if os.fstat(file.fileno()).st_size > self._size:
            file.truncate(self._size)

    def _close_file(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            with suppress(OSError):  # some file systems write only now
                file.close()

    def _scan(self, after: int, begin: Callable[[], Each], once: bool) -> _ScannedRows:
        each = begin()
        self.known = []

        def take(row: dict[str, Any]) -> None:
            self.elapsed_s = float(row["elapsed_s"])
            self.known += [row] if row["iteration"] == after else []
            each(row)

        file = self._open()
        file.seek(0)
        with open(file.fileno(), "rb", closefd=False) as reader:
            return _scan(reader, after, take, once)

    def _recover(self, after: int, begin: Callable[[], Each], once: bool) -> None:
        """Cut the file back to the rows that stay, and describe what was damaged."""
        found = self._scan(after, begin, once)
        notices = []
        if not found.is_sound:
            notices = self._mend(found)
            found = self._scan(after, begin, once)
        if once and (missing := _missing(found.places[:, 0].tolist(), after)):
            notices.append(f"{missing} from {self._path.name}")
        self.notice = "; ".join(notices)
        self._size = int(found.places[:, 2].max(initial=0))
        self._cut(self._open())

    def _check_sum(self, size: int, digest: str) -> None:
        """Sum up the file, and say that its beginning differs from the checkpoint's, of so many bytes."""
        self._sum_up_to(min(size, self._size))
        found = self.sum
        self._sum_up_to(self._size)
        if found == (size, digest) or not size or self.notice:
            return
        self.notice = f"{self._path.name} is not as the checkpoint left it"
        if self._size < size:
            self.notice += f": it has lost lines, or was removed ({self._size} of {size} bytes are there)"
        else:
            self.notice += ", though each line can be read: a value was changed, perhaps by a bad disk or an editor"

    def _sum_up_to(self, end: int) -> None:
        while self._summed < end:
            data = os.pread(self._open().fileno(), min(CHUNK, end - self._summed), self._summed)
            self._sum.update(data)
            self._summed += len(data)

    def _mend(self, found: _ScannedRows) -> list[str]:
        """Replace the file by one with the rows that stay, and move damaged lines to a file of their own."""
        notices = []
        many = len(found.damaged)
        source = self._open().fileno()
        if many:
            target = aside(self._path)
            _copy(source, found.damaged, target)
            lines = "lines" if many > 1 else "line"
            verb = "are" if many > 1 else "is"
            notices.append(f"{many} damaged {lines} of {self._path.name} {verb} kept in {target.name}")
        elif not found.is_in_order:
            notices.append(f"the rows of {self._path.name} are put in order")
        temporary = self._path.with_name(f".{self._path.name}-{secrets.token_hex(4)}")
        _copy(source, found.places[:, 1:].tolist(), temporary)
        temporary.replace(self._path)
        sync_folder(self._path.parent)
        self._close_file()
        return notices

    def _explaining(self) -> AbstractContextManager[None]:
        return explained(f"{self._path} cannot be written")


@dataclass(frozen=True)
class RunFiles:
    """Opens the files of lines in a run folder.

    Attributes:
        folder: of the run; without one the files take nothing.
        after: the iteration that the run resumes from.
        warn: called with a message when a file is damaged, cannot be written, and can again.
        sums: of the files in the checkpoint, by name.
    """

    folder: Path | None
    after: int
    warn: Callable[[str], None]
    sums: Mapping[str, FileSum] = field(default_factory=dict)

    def open(
        self, name: str, on_full: OnFull, begin: Callable[[], Each] | None = None, *, once: bool = False, fate: str = ""
    ) -> JsonlWriter:
        """Open a file; `fate` ends the message about what is damaged. See `JsonlWriter`.

        Raises:
            OSError: the file cannot be read or written.
        """
        path = None if self.folder is None else self.folder / name
        before = self.sums.get(name)
        file = JsonlWriter(path, self.after, self.warn, on_full, begin, once=once, sum_before=before)
        if file.notice:
            self.warn(f"{self.folder}: {file.notice}{fate}")
        return file
