"""Sinks write rows elsewhere: callables for `Loop(on_row=...)`, created on every rank, called on rank 0.

A sink is called with each row, a dict of numbers. Its `flush`, if it has one, is called before each checkpoint, and its
`close` when the loop ends. A sink opens its files at the first row. That row's iteration is where the run starts or
resumes; later rows in the files are replaced.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_loop.reporting import WeightedMeans, append_whole, is_averaged

if TYPE_CHECKING:
    from io import FileIO

    from torch.utils.tensorboard import SummaryWriter

Row = Mapping[str, float]
_FLUSH_S = 1.0


class _Csv:
    """See `csv_sink`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._names: tuple[str, ...] = ()
        self._lines: list[str] = []
        self._flushed = -math.inf

    def __call__(self, row: Row) -> None:
        if self._file is None:
            self._open(int(row["iteration"]))
        line = ",".join(map(repr, row.values())) if tuple(row) == self._names else self._other(row)
        self._lines.append(line)
        if time.monotonic() - self._flushed > _FLUSH_S:
            self.flush()

    def _open(self, first: int) -> None:
        """Keep the rows of earlier steps."""
        rows = [row for row in read_csv(self._path) if float(row["iteration"]) < first] if first > 1 else []
        self._rewrite(tuple(rows[0]) if rows else (), rows)

    def _other(self, row: Row) -> str:
        """Format a row whose names differ from the header's; new names are added to the header."""
        new = [name for name in row if name not in self._names]
        if new:
            self.flush()
            self._rewrite((*self._names, *new), read_csv(self._path))
        return ",".join([repr(row[name]) if name in row else "" for name in self._names])

    def _rewrite(self, names: tuple[str, ...], rows: list[dict[str, str]]) -> None:
        self._close_file()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = io.StringIO()
        writer = csv.DictWriter(whole, names, restval="", lineterminator="\n")
        if names:
            writer.writeheader()
        writer.writerows(rows)
        temporary = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        temporary.write_text(whole.getvalue(), encoding="utf-8")
        temporary.replace(self._path)
        self._file, self._names = self._path.open("ab", buffering=0), names

    def flush(self) -> None:
        """Write the rows so far."""
        self._flushed = time.monotonic()
        if self._file is not None and self._lines:
            append_whole(self._file, ("\n".join(self._lines) + "\n").encode(), self._file.seek(0, os.SEEK_END))
            self._lines = []

    def close(self) -> None:
        """Write the rows so far, and close the file."""
        try:
            self.flush()
        finally:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def csv_sink(path: str | os.PathLike[str]) -> _Csv:
    """Write each row as a line of CSV under a header of names; missing values are empty.

    A resumed run appends to its own file. A new run replaces an existing file.

    Args:
        path: of the file; its folder is created.
    """
    return _Csv(Path(path))


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the whole lines of such a file, by name; none if it is missing.

    Args:
        path: of a file that `csv_sink` wrote.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
    return [row for row in rows if row.get("iteration") and None not in row.values()]


class _TensorBoard:
    """See `tensorboard_sink`."""

    def __init__(self, folder: Path, every_s: float) -> None:
        self._folder, self._every_s = folder, every_s
        self._writer: SummaryWriter | None = None
        self._means, self._last = WeightedMeans(), dict[str, float]()
        self._written = -math.inf  # the clock counts from the machine's start, which may be a moment ago

    def __call__(self, row: Row) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=int(row["iteration"]))
        self._means.add(int(row["samples"]), row)
        self._last = dict(row)
        if time.monotonic() - self._written >= self._every_s:
            self._write(self._writer)

    def _write(self, writer: SummaryWriter) -> None:
        if not self._means.rows:
            return
        values = {name: value for name, value in self._last.items() if not is_averaged(name)} | self._means.means()
        for name in ("epoch", "iteration", "samples", "weight", "skipped", "elapsed_s"):
            values.pop(name, None)
        for name, value in values.items():
            writer.add_scalar(name, value, int(self._last["iteration"]))
        self._means, self._written = WeightedMeans(), time.monotonic()

    def flush(self) -> None:
        """Write the rows so far."""
        if self._writer is not None:
            self._write(self._writer)
            self._writer.flush()

    def close(self) -> None:
        """Write the rows so far, and close the file."""
        if self._writer is not None:
            self._write(self._writer)
            self._writer.close()
            self._writer = None


def tensorboard_sink(folder: str | os.PathLike[str], every_s: float = 1.0) -> _TensorBoard:
    """Write points for TensorBoard, each the mean of the rows since the last point.

    Args:
        folder: the `--logdir` of tensorboard, or a folder in it.
        every_s: seconds between two points, at least; 0 writes a point for each row, which takes some 0.2 ms.

    Raises:
        ImportError: tensorboard is missing.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ImportError('tensorboard_sink needs tensorboard. Run pip install "ddp_loop[tensorboard]"')
    return _TensorBoard(Path(folder), every_s)
