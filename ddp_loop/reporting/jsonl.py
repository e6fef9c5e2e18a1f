"""JSON Lines files that grow by whole lines, also on a disk that is full for a while. See [Note: Damage]."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ddp_loop.checkpoint import REPAIR, FileSum, explained, identity, sync_folder
from ddp_loop.distributed import listed
from ddp_loop.reporting.jsonl_tail import CHUNK, has_numbers, is_at_an_iteration, is_number, object_of

# [Note: Damage] A resumed run cuts its files back to its checkpoint, and loses no row before it. If a line is not a row
# (after a flipped bit, a crash that left NULs, an edit), the rows stay, in order, and the other lines are moved to a
# file beside it. Of two rows of one iteration the later one stays: a resumed process wrote it. What follows a row of a
# later iteration, or the checkpoint's own row, is cut off silently.

# [Note: Sums] A flipped digit leaves a row that looks like any other. A checkpoint therefore has the length and the
# SHA-256 of each file. If a resumed run finds another sum, and no damaged line explains it, a message names the file.
# Its rows stay: no sum tells which of them is wrong, and the others are right.

MOST_LINES = 100_000  # that wait in memory, some 20 MB; beyond that the oldest are dropped
_MOST_GAPS = 4  # that a message lists

Row = dict[str, Any]
Each = Callable[[Row], None]
Spans = Iterable[tuple[int, int]]


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


def _copy(source: int, spans: Spans, path: Path) -> None:
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


class _ScannedRows:
    """The rows of a file that stay, and its damaged lines; see [Note: Damage].

    Args:
        file: open for reading.
        after: rows of later iterations do not stay.
        once: whether the file has one row for each iteration.
        each: called with each row that stays, up to the first one that is out of order.

    Attributes:
        damaged: the spans of lines that are not rows and are not cut off.
        is_sound: whether the rows that stay are the beginning of the file, in order.
        is_in_order: whether the rows that stay are in order.
        size: of that beginning, in bytes.
        elapsed_s: of its last row.
    """

    def __init__(self, file: Any, after: int, once: bool, each: Each | None) -> None:
        self._after = after
        self._once = once
        self._each = each
        self._iterations = array("q")
        self._starts = array("q")
        self._ends = array("q")
        self.damaged: list[tuple[int, int]] = []
        self.is_sound = self.is_in_order = True
        self.size = 0
        self.elapsed_s = 0.0
        last = b"\n"
        is_behind = False  # after a row that does not stay
        for start, end, line in _lines_of(file):
            text = line.lstrip(b"\0")  # a crash can leave NULs before the next line
            row = object_of(text)
            if row is None or not self._is_whole(row):
                self.damaged += [] if is_behind else [(start, end)]
                continue
            is_behind = row["iteration"] > after
            if not is_behind:
                self.damaged += [(start, end - len(text))] if len(text) < len(line) else []
                self._take(row, end - len(text), end)
                last = line
        if not self.is_in_order:
            self._put_in_order()
        if once and len(self._iterations) == after:
            whole = max(self._ends, default=0)
            self.damaged = [span for span in self.damaged if span[0] < whole]
        self.is_sound = self.is_sound and not self.damaged and last.endswith(b"\n")

    def _is_whole(self, row: Row) -> bool:
        if not is_at_an_iteration(row) or not is_number(row.get("elapsed_s")):
            return False
        counts = (row.get("epoch"), row.get("samples"))
        return not self._once or (row["iteration"] > 0 and has_numbers(row) and {int} == set(map(type, counts)))

    def _take(self, row: Row, start: int, end: int) -> None:
        """Take a row that stays."""
        iteration = row["iteration"]
        before = self._iterations[-1] if self._iterations else -1
        self.is_in_order = self.is_in_order and (iteration > before or (iteration == before and not self._once))
        self.is_sound = self.is_sound and self.is_in_order and start == self.size
        for column, value in ((self._iterations, iteration), (self._starts, start), (self._ends, end)):
            column.append(value)
        if self.is_sound:
            self.size = end
            self.elapsed_s = float(row["elapsed_s"])
            if self._each is not None:
                self._each(row)

    def _put_in_order(self) -> None:
        order = sorted(range(len(self._iterations)), key=self._iterations.__getitem__)
        if self._once:
            last = {self._iterations[number]: number for number in order}
            self.damaged += [(self._starts[n], self._ends[n]) for n in order if last[self._iterations[n]] != n]
            self.damaged.sort()
            order = list(last.values())
        for column in (self._iterations, self._starts, self._ends):
            column[:] = array("q", [column[number] for number in order])

    @property
    def rows(self) -> Spans:
        """The spans of the rows that stay, in order."""
        return zip(self._starts, self._ends, strict=True)

    def gaps(self) -> list[tuple[int, int]]:
        """The first and the last iteration of each gap between the rows."""
        if not self._once or len(self._iterations) == self._after:
            return []
        found = [0, *self._iterations, self._after + 1]
        return [(one + 1, next_one - 1) for one, next_one in pairwise(found) if next_one > one + 1]


def _message(gaps: list[tuple[int, int]]) -> str:
    shown = gaps if len(gaps) <= _MOST_GAPS else gaps[: _MOST_GAPS - 1]
    parts = [str(first) if first == last else f"{first} to {last}" for first, last in shown]
    more = sum(last - first + 1 for first, last in gaps[len(shown) :])
    parts += [f"{more} more"] if more else []
    one = len(gaps) == 1 and gaps[0][0] == gaps[0][1]
    return f"row{'' if one else 's'} {listed(parts)} {'is' if one else 'are'} missing"


OnFull = Literal["raise", "keep", "drop"]


class JsonlWriter:
    """A JSON Lines file that grows by whole lines; a line that was written in part is cut off.

    Args:
        path: the file, created if it is missing; with "drop" only by its first line.
        after: rows of later iterations are cut off; see [Note: Damage] for what is damaged.
        warn: called with a message when lines cannot be written, and when they can again.
        on_full: what happens to lines that cannot be written: "raise" raises OSError, "keep" keeps the newest
            MOST_LINES for the next flush, "drop" drops them. With "drop" the file is open during a flush only.
        begin: called each time the file is read; returns a function that is called with each row that stays.
        once: whether the file has one row for each iteration from 1 on.
        sum_before: the `sum` of the file in the checkpoint; None if that has none. See [Note: Sums].

    Attributes:
        elapsed_s: of the last row that stays.
        notice: describes damage and gaps; empty if there are none.
        lost: how many lines were not written.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(
        self,
        path: Path,
        after: int,
        warn: Callable[[str], None],
        on_full: OnFull,
        begin: Callable[[], Each] | None = None,
        *,
        once: bool = False,
        sum_before: FileSum | None = None,
    ) -> None:
        self._path = path
        self._warn = warn
        self._on_full = on_full
        self._folder = identity(path.parent)
        self._file: FileIO | None = None
        self._size = 0  # of the whole lines in the open file
        self._sum = hashlib.sha256()
        self._summed = 0  # of these lines, and how many bytes they have
        self._lines: list[str] = []
        self.lost = 0
        self._problem: OSError | None = None  # while the file cannot be written
        self._is_over = False
        self.elapsed_s = 0.0
        self.notice = ""
        had_lines = sum_before is not None and sum_before[0] > 0
        if on_full != "drop" or had_lines or path.exists():
            with self._explaining():
                try:
                    self._recover(after, begin, once)
                    self._check_sum(sum_before)
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
                self._is_over = True
                self._close_file()
                raise
            if self._problem is None:
                fate = "wait in memory" if self._on_full == "keep" else "are dropped"
                self._warn(f"{error} Until then new lines {fate}; training continues.")
            self._problem = error
            self.lost += max(0, len(self._lines) - MOST_LINES)
            del self._lines[: -MOST_LINES if self._on_full == "keep" else None]
        if self._on_full == "drop":
            self._close_file()

    def close(self) -> None:
        """Write the added lines, and close the file; `warn` is called with an error."""
        try:
            self._write()
        except OSError as error:
            self._warn(f"The last {len(self._lines)} lines were not written. {error}")
            self.lost += len(self._lines)
        finally:
            self._is_over = True
            self._close_file()

    def _write(self) -> None:
        if not self._lines or self._is_over:
            return
        data = "".join(self._lines).encode()
        with self._explaining():
            file = self._open()
            if os.fstat(file.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "it was removed")
            self._cut(file)
            append_whole(file, data, self._size)
        self._size += len(data)
        self._take_into_sum(data)
        if self._problem is not None:
            self._warn(f"{self._path} can be written again. Lines added: {len(self._lines)}.")
        self._lines = []
        self._problem = None

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

    def _recover(self, after: int, begin: Callable[[], Each] | None, once: bool) -> None:
        """Cut the file back to the rows that stay, and describe what was damaged."""

        def scan() -> _ScannedRows:
            file = self._open()
            file.seek(0)
            with open(file.fileno(), "rb", closefd=False) as reader:
                return _ScannedRows(reader, after, once, None if begin is None else begin())

        found = scan()
        notices = [] if found.is_sound else self._mend(found)
        if gaps := found.gaps():
            notices.append(f"{_message(gaps)} from {self._path.name}")
        self.notice = "; ".join(notices)
        found = found if found.is_sound else scan()
        self.elapsed_s = found.elapsed_s
        self._size = found.size
        self._cut(self._open())

    def _check_sum(self, before: FileSum | None) -> None:
        """FileSum up the file, and say that its beginning differs from the checkpoint's."""
        size, expected = before or (0, self._sum.hexdigest())
        file = self._open().fileno()
        found = ""
        while self._summed < self._size:
            wanted = min(CHUNK, (size if self._summed < size else self._size) - self._summed)
            self._take_into_sum(os.pread(file, min(wanted, self._size - self._summed), self._summed))
            found = self._sum.hexdigest() if self._summed == size else found
        if found == expected or not size or self.notice:
            return
        self.notice = f"{self._path.name} is not as the checkpoint left it"
        if self._size < size:
            self.notice += f": it has lost lines, or was removed ({self._size} of {size} bytes are there)"
        else:
            self.notice += ", though each line can be read: a value was changed, perhaps by a bad disk or an editor"

    def _take_into_sum(self, data: bytes) -> None:
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
        _copy(source, found.rows, temporary)
        temporary.replace(self._path)
        sync_folder(self._path.parent)
        self._close_file()
        return notices

    def _explaining(self) -> AbstractContextManager[None]:
        return explained(f"{self._path} cannot be written", REPAIR)
