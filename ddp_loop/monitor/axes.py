"""The horizontal axis of the page's charts: for the steps of a run their epoch, or the seconds since it began."""

from __future__ import annotations

import numpy as np

from ddp_loop.monitor.series import MOST_STEPS, MetricSeries, Values

AXES = ("step", "epoch", "time")
DIGITS = {"epoch": 5, "time": 3}  # after the point
MOST_SECONDS = 1e9
PARTS = {"step": 1, "epoch": 1000, "time": 1000}  # of a unit, in which a request names the ends of a zoom


def places_on(axis: str, series: MetricSeries, rows: MetricSeries, steps_per_epoch: int | None) -> Values:
    """Return where the lines of a series lie on an axis, shape (lines,), never falling.

    The end of epoch e lies at e, and its steps at equal distances before that. Times are those of the lines.

    Args:
        axis: "step", "epoch" or "time".
        series: rows, evaluations or logged values of a run.
        rows: of the same run, whose epochs are exact; without rows those of the series count.
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
    each = min(steps_per_epoch or 0, MOST_STEPS)  # a damaged file may say anything
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
    if "elapsed_s" not in series.names:
        return np.zeros(len(series))
    seconds = series.values("elapsed_s")
    steps = series.iterations
    known = np.isfinite(seconds)
    if not known.any():
        return np.zeros(len(series))
    seconds = np.clip(seconds[known], 0, MOST_SECONDS)  # whatever a damaged file says
    filled: Values = np.maximum.accumulate(np.interp(steps, steps[known], seconds))
    return filled
