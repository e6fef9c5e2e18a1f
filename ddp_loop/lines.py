"""Files of JSON lines that grow by whole lines, also on a disk that is full for a while."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from ddp_loop.durable import explained

MOST_LINES = 100_000  # that wait for room, some 20 MB; then the oldest are left out


def append_whole(file: FileIO, data: bytes, size: int) -> None:
    """Add `data` at the file's end, all or nothing.

    Raises:
        OSError: that is not possible; the file is cut to `size` again.
    """
    view, written = memoryview(data), 0
    try:
        while written < len(data):  # a disk that is almost full takes a part
            written += file.write(view[written:]) or 0
    except OSError:
        with suppress(OSError):
            file.truncate(size)
        raise


class Lines:
    """A file of rows that grows by whole lines: one that could be written in part alone is taken out again.

    Args:
        path: the file, made unless it is there.
        after: rows of later iterations are taken out, as is what is no whole row.
        each: is given each row that stays, as it is read.

    Attributes:
        elapsed_s: of the last row that stays.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, after: int, each: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._path = path
        self.elapsed_s, self._size = 0.0, 0  # of what is whole
        with self._explaining():
            self._file = path.open("a+b", buffering=0)  # what could not be written waits nowhere else
            try:
                self._keep(after, each)
            except BaseException:
                self._file.close()
                raise

    def append(self, lines: str) -> None:
        """Add lines.

        Raises:
            OSError: that is not possible; the file is as it was.
        """
        data = lines.encode()
        with self._explaining():
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "it was removed")
            self._cut()
            append_whole(self._file, data, self._size)
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # some file systems write only now
            self._file.close()

    def _cut(self) -> None:
        """Leave the whole lines."""
        if os.fstat(self._file.fileno()).st_size > self._size:
            self._file.truncate(self._size)

    def _keep(self, after: int, each: Callable[[dict[str, Any]], None] | None) -> None:
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as file:
            for line in file:
                try:
                    row = json.loads(line)
                    if not line.endswith(b"\n") or row["iteration"] > after:
                        break
                    self.elapsed_s = float(row["elapsed_s"])
                    if each is not None:
                        each(row)
                except (ValueError, KeyError, TypeError):
                    break
                self._size += len(line)
        self._cut()

    def _explaining(self) -> AbstractContextManager[None]:
        rule = f"a row is written for each update; writing to {self._path} failed"
        return explained(rule, "make room there, make it writable, or put it back; what is in it stays")


class PatientLines:
    """Lines that wait for their file to be written, at once or when there is room again.

    Args:
        file: that they are added to, and that is closed with this.
        warn: called with a line when the file cannot be written, and when it can again.
        goes_on: whether lines then wait for that, instead of an error.
    """

    def __init__(self, file: Lines, warn: Callable[[str], None], *, goes_on: bool) -> None:
        self._file, self._warn, self._goes_on = file, warn, goes_on
        self._lines: list[str] = []
        self._problem: OSError | None = None  # while the file cannot be written
        self._is_open, self._closes = True, False

    def add(self, line: str) -> None:
        """Add a line, to be written by the next `flush`."""
        self._lines.append(line)

    def flush(self) -> None:
        """Write what was added.

        Raises:
            OSError: that is not possible; what is in the file stays, in whole lines.
        """
        if not self._lines or not self._is_open:
            return
        try:
            self._file.append("".join(self._lines))
        except OSError as error:
            self._take(error)
            return
        if self._problem is not None:
            self._warn(f"rows are written again, with the {len(self._lines)} that waited")
        self._lines, self._problem = [], None

    def close(self) -> None:
        """Write what was added, and close the file; what cannot be written is a line to `warn`, and no error."""
        self._closes = True
        try:
            self.flush()
            if self._problem is not None:
                self._warn(f"the last {len(self._lines)} rows were not written: {self._problem}")
        finally:
            self._close_file()

    def _close_file(self) -> None:
        self._is_open, self._lines = False, []
        self._file.close()

    def _take(self, error: OSError) -> None:
        """The file cannot be written now."""
        if not self._goes_on and not self._closes:
            self._close_file()  # whoever closes this is not told again
            raise error
        if self._problem is None and not self._closes:
            self._warn(f"no rows are written for now, training goes on: {error}")
        self._problem = error
        del self._lines[:-MOST_LINES]
