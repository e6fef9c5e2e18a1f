"""Rows, evaluations and logged values as CSV files."""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import ROWS
from ddp_loop.reporting import JsonlTail, RunStart, append_whole

Row = Mapping[str, Any]
_FLUSH_S = 1.0
_LOGGER = logging.getLogger("ddp_loop")


class _CsvFile:
    """A CSV file that grows by lines, under a header of names."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, None] = {}
        self._lines: list[str] = []
        self._flushed = -math.inf

    def begin(self, after: int, *, is_own: bool) -> None:
        """Keep the lines up to an iteration; another run's file is moved aside.

        A file that is not there comes with its first line.
        """
        self.flush()
        self._names = {}
        if not is_own and self._path.is_file() and self._path.stat().st_size:
            target = next(one for n in count(1) if not os.path.lexists(one := f"{self._path}.{n}"))
            self._path.rename(target)
            _LOGGER.info(
                f"{self._path} had the rows of another start. They are in {target} now. Give each run a file "
                "of its own, such as one in its run folder."
            )
        elif self._path.exists():
            rows = self.rows_up_to(after)
            self._rewrite(list(rows[0]) if rows else [], rows)

    def rows_up_to(self, iteration: int) -> list[dict[str, str]]:
        """The whole lines of the file, up to an iteration."""
        return [row for row in read_csv(self._path) if float(row["iteration"]) <= iteration]

    def add(self, row: Row) -> None:
        """Add a line; new names are added to the header."""
        if not self._names.keys() >= row.keys():
            self.flush()
            self._rewrite([*self._names | dict.fromkeys(row)], read_csv(self._path))
        self._lines.append(",".join([_cell(row[name]) if name in row else "" for name in self._names]))
        if time.monotonic() - self._flushed > _FLUSH_S:
            self.flush()

    def _rewrite(self, names: list[str], rows: list[dict[str, str]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            if names:
                writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self._path)
        self._names = dict.fromkeys(names)

    def flush(self) -> None:
        """Write the rows so far."""
        self._flushed = time.monotonic()
        if self._lines:
            with self._path.open("ab", buffering=0) as file:
                append_whole(file, ("\n".join(self._lines) + "\n").encode(), file.tell())
            self._lines = []


def _cell(value: object) -> str:
    """A number as CSV; null, a value that is not finite, is nan."""
    return "nan" if value is None else repr(value)


class _Csv:
    """See `csv_sink`."""

    def __init__(self, path: Path) -> None:
        self._rows = _CsvFile(path)
        self._evaluations = _CsvFile(path.with_suffix(f".evaluations{path.suffix}"))
        logged = _CsvFile(path.with_suffix(f".logged{path.suffix}"))
        self.logged = logged.add
        self._files = (self._rows, self._evaluations, logged)

    def begin(self, run: RunStart) -> None:
        rows = self._rows.rows_up_to(run.iteration)
        is_own = run.folder is not None and bool(rows) and _are_in(rows, run.folder / ROWS)
        for file in self._files:
            file.begin(run.iteration, is_own=is_own)

    def __call__(self, row: Row) -> None:
        self._rows.add(row)

    def evaluated(self, line: Row) -> None:
        self._evaluations.add(line)
        self._evaluations.flush()

    def flush(self) -> None:
        """Write the lines so far."""
        with ExitStack() as ending:
            for file in self._files:
                ending.callback(file.flush)

    def close(self) -> None:
        """Write the lines so far."""
        self.flush()


def _are_in(rows: list[dict[str, str]], path: Path) -> bool:
    """Whether the first and the last of some lines are rows of this rows.jsonl, by their times."""
    missing = {float(row["iteration"]): float(row.get("elapsed_s") or "nan") for row in (rows[0], rows[-1])}
    for update in JsonlTail(path).updates():
        for row in update.rows:
            if missing.get(row.get("iteration", 0), "none") == row.get("elapsed_s"):
                del missing[row["iteration"]]
    return not missing


def csv_sink(path: str | os.PathLike[str]) -> _Csv:
    """Write each row as a line of CSV under a header of names; missing values are empty.

    Evaluations and the values of `Loop.log` get files beside it: for rows.csv these are rows.evaluations.csv and
    rows.logged.csv. A resumed run continues its own files. Files of another start are moved to rows.csv.1, or the next
    free number.

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
