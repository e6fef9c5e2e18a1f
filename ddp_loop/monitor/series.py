"""Rows of numbers stored as columns, cut back and thinned out for a picture, and their places on its axis."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_loop.reporting import Columns, columns_of, is_at_an_iteration

MOST_COLUMNS = 64
_KEYS = ("iteration", "epoch")
AXES = ("step", "epoch", "time")
DIGITS = {"epoch": 5, "time": 3}  # after the point
MOST_SECONDS = 1e9
PARTS = {"step": 1, "epoch": 1000, "time": 1000}  # of a unit, in which a request names the ends of a zoom

Values = npt.NDArray[np.float64]


class MetricSeries:
    """Rows with rising iterations, as columns by name. A value that is not a finite number is NaN.

    Attributes:
        names: of the columns, in order of appearance.
        refused: the number of rows without an iteration.
        left_out: names beyond MOST_COLUMNS.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all rows."""
        self._columns = {key: array("d") for key in _KEYS}
        self.refused = 0
        self.left_out: set[str] = set()

    def __len__(self) -> int:
        return len(self._columns["iteration"])

    @property
    def names(self) -> list[str]:
        return [name for name in self._columns if name not in _KEYS]

    def extend(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows. Rows of later iterations are removed; a row of the same iteration is extended."""
        found = [row for row in rows if is_at_an_iteration(row)]
        self.refused += len(rows) - len(found)
        for columns in columns_of(found):
            falls = np.flatnonzero(np.diff(columns.column("iteration")) <= 0) + 1
            for values in np.split(columns.values, falls):
                self._add(Columns(columns.names, values))

    def _add(self, columns: Columns) -> None:
        """Add rows whose iterations rise."""
        steps = columns.column("iteration")
        before = self._columns["iteration"][-1] if len(self) else -1
        if steps[0] < before:
            keep = int(np.searchsorted(self.iterations, steps[0]))
            for column in self._columns.values():
                del column[keep:]
        for column in self._columns.values():
            column.extend(array("d", [nan]) * (len(steps) - int(steps[0] == before)))
        for name in columns.names:
            if name not in self._columns and len(self.names) < MOST_COLUMNS:
                self._columns[name] = array("d", [nan]) * len(self)
            if name in self._columns:
                self._columns[name][-len(steps) :] = array("d", columns.column(name).tobytes())
            else:
                self.left_out.add(name)
        self._columns["epoch"][-len(steps) :] = array("d", columns.epochs.tobytes())

    @property
    def iterations(self) -> npt.NDArray[np.int64]:
        """The iterations, shape (rows,)."""
        return np.array(self._columns["iteration"], dtype=np.int64)

    @property
    def epochs(self) -> npt.NDArray[np.int64]:
        """The epochs, shape (rows,); 0 for a row without one."""
        return np.array(self._columns["epoch"], dtype=np.int64)

    def values(self, name: str) -> Values:
        """Return a column, shape (rows,); NaN for a row without a finite value, and for all if there is no column."""
        return np.array(self._columns.get(name, [nan] * len(self)), dtype=np.float64)

    def last(self) -> dict[str, float | int | None]:
        """Return the last row; values that are not finite are None."""
        if not len(self):
            return {}
        keys = {key: int(self._columns[key][-1]) for key in _KEYS}
        return keys | {name: nothing_for_nan(self._columns[name][-1]) for name in self.names}


def nothing_for_nan(value: float) -> float | None:
    """Replace NaN by None, for JSON."""
    return None if value != value else value


def end_of(values: Values) -> int | None:
    """Return the row from which a column has no finite value; None for one that goes on.

    A column may have values in every k-th row only, so that fewer rows without one are no end.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return 0 if len(values) else None
    gaps = np.diff(finite, prepend=-1)
    return int(finite[-1]) + 1 if len(values) - finite[-1] > gaps.max() else None


def thin_out(count: int, points: int) -> npt.NDArray[np.int64]:
    """Return the starts of buckets of `count` rows, so that two points of each and the last row are at most `points`.

    Empty if all rows fit.
    """
    if count <= points:
        return np.zeros(0, dtype=np.int64)
    size = max(2, -(-(count - 1) // ((points - 1) // 2)))
    while (count - 1) % size == 1:  # a bucket of one row would have both points at one place
        size += 1
    return np.arange(0, count - 1, size, dtype=np.int64)


def places_of(starts: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return the rows of a thinned curve's points: the first and last row of each bucket, and the last row."""
    if not len(starts):
        return np.arange(count, dtype=np.int64)
    ends = np.append(starts[1:], count - 1) - 1
    places: npt.NDArray[np.int64] = np.append(np.stack([starts, ends], axis=1), count - 1)
    return places


def extremes(values: Values, starts: npt.NDArray[np.int64]) -> Values:
    """Return a thinned curve: the smallest and largest value of each bucket, in their order, and the last row."""
    if not len(starts):
        return values
    body = values[:-1]
    size = int(starts[1]) if len(starts) > 1 else len(values) - 1
    padded = np.full(len(starts) * size, nan)
    padded[: len(body)] = body
    table = padded.reshape(len(starts), size)
    missing = np.isnan(table)
    low = np.where(missing, np.inf, table)
    high = np.where(missing, -np.inf, table)
    places = np.sort(np.stack([low.argmin(axis=1), high.argmax(axis=1)], axis=1), axis=1)
    curve: Values = np.append(np.take_along_axis(table, places, axis=1), values[-1])
    return curve


# -- the horizontal axis: steps, their epoch, or the seconds since the run began ---------------------------


def places_on(axis: str, series: MetricSeries, rows: MetricSeries, steps_per_epoch: int | None) -> Values:
    """Return where the lines of a series lie on an axis, shape (lines,), never falling.

    Epoch e ends at e, and its steps lie at equal distances before. A line lies at the time when it was written.

    Args:
        axis: "step", "epoch" or "time".
        series: rows, evaluations or logged values of a run.
        rows: of the same run. They give the epochs' ends exactly; a run without rows takes them from the series.
        steps_per_epoch: of the run; None if unknown.
    """
    if axis == "epoch":
        ends, epochs = ends_of_epochs(rows if len(rows) else series, steps_per_epoch)
        return np.round(np.interp(series.iterations, ends, epochs), DIGITS[axis])
    if axis == "time":
        return np.round(seconds_of(series), DIGITS[axis])
    return series.iterations.astype(np.float64)


def ends_of_epochs(rows: MetricSeries, steps_per_epoch: int | None) -> tuple[Values, Values]:
    """Return the last steps of the epochs and these epochs, after the step before the first one.

    Where rows are seldom, an epoch ends after as many steps as the run says, if the rows allow it. The last epoch may
    be under way; it ends as many steps after its begin as an epoch has, or else the one before it.
    """
    if not len(rows):
        return np.zeros(1), np.zeros(1)
    steps = rows.iterations
    epochs = np.maximum.accumulate(rows.epochs)
    each = steps_per_epoch or 0
    changes = np.flatnonzero(np.diff(epochs))
    planned = epochs[changes].astype(np.float64) * each
    fits = (steps[changes] <= planned) & (planned < steps[changes + 1])
    begin = max(0, int(epochs[0]) - 1) * each
    begin = begin if 0 < int(steps[0]) - begin <= each else max(0, int(steps[0]) - 1)
    ends = [begin, *np.where(fits, planned, steps[changes]).tolist()]
    usual = each or (ends[-1] - ends[-2] if len(ends) > 1 else 0)
    ends.append(max(int(steps[-1]), ends[-1] + usual))
    names = [max(0, int(epochs[0]) - 1), *epochs[changes].tolist(), max(1, int(epochs[-1]))]
    return np.array(ends, dtype=np.float64), np.array(names, dtype=np.float64)


def seconds_of(series: MetricSeries) -> Values:
    """Return the elapsed seconds of each line; between two known ones for a line without, and never falling."""
    seconds = series.values("elapsed_s")
    steps = series.iterations
    known = np.isfinite(seconds)
    if not known.any():
        return np.zeros(len(series))
    seconds = np.clip(seconds[known], 0, MOST_SECONDS)  # whatever a damaged file says
    filled: Values = np.maximum.accumulate(np.interp(steps, steps[known], seconds))
    return filled
