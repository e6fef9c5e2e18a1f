"""Places that rows are written to: plain callables for `Loop(on_row=...)`, made on every rank, called on rank 0.

A sink is called with each row, a dict of numbers. If it has a `flush`, that is called before each checkpoint, and its
`close` when the loop ends. Nothing is opened before the first row, whose iteration says where a run begins or goes on:
what stood there from it on is made again.
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
        """Keep the rows of steps before the first one."""
        rows = [row for row in read_csv(self._path) if float(row["iteration"]) < first] if first > 1 else []
        self._rewrite(tuple(rows[0]) if rows else (), rows)

    def _other(self, row: Row) -> str:
        """The line of a row that has not all that the head names, or more; then the head gets these names too."""
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
        """Write what has come."""
        self._flushed = time.monotonic()
        if self._file is not None and self._lines:
            append_whole(self._file, ("\n".join(self._lines) + "\n").encode(), self._file.seek(0, os.SEEK_END))
            self._lines = []

    def close(self) -> None:
        """Write what is still to be written."""
        try:
            self.flush()
        finally:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def csv_sink(path: str | os.PathLike[str]) -> _Csv:
    """Write each row as a line of CSV, under a head of names; what a row lacks is empty.

    A run that goes on appends to its own file. One that begins replaces a file that is there.

    Args:
        path: of the file; its folder is made.
    """
    return _Csv(Path(path))


def read_csv(path: Path) -> list[dict[str, str]]:
    """The whole lines of such a file, by name; none if it is not there."""
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
        """Write what has come."""
        if self._writer is not None:
            self._write(self._writer)
            self._writer.flush()

    def close(self) -> None:
        """Write what is still to be written."""
        if self._writer is not None:
            self._write(self._writer)
            self._writer.close()
            self._writer = None


def tensorboard_sink(folder: str | os.PathLike[str], every_s: float = 1.0) -> _TensorBoard:
    """Write points for TensorBoard: each row where steps take longer than `every_s`, else the mean of the rows since.

    Args:
        folder: `tensorboard --logdir` is given it, or one above.
        every_s: the least number of seconds from one point to the next; 0 for a point for each row, some 0.2 ms each.

    Raises:
        ImportError: tensorboard is missing.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ImportError('points are written by tensorboard, which is missing: pip install "ddp_loop[tensorboard]"')
    return _TensorBoard(Path(folder), every_s)
