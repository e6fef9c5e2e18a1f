"""A run folder as the page shows it: state, progress, curves, and damage."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ddp_loop.checkpoint import (
    CHECKPOINTS,
    EVALUATIONS,
    LOGGED,
    NAME,
    PROFILE,
    PROFILE_FILE,
    RANKS,
    ROWS,
    read_json,
    way_on,
)
from ddp_loop.monitor.run_state import RunState, finite
from ddp_loop.monitor.series import (
    AXES,
    MetricSeries,
    Values,
    end_of,
    extremes,
    nothing_for_nan,
    places_of,
    places_on,
    thin_out,
)
from ddp_loop.reporting import JsonlTail, TailUpdate, count, text_of
from ddp_loop.smoothing import smooth

READ_S = 0.5  # for one poll; a long file takes several
TIME = "elapsed_s"
RECENT = 100  # rows over which speed is measured
MOST_MARKS = 60
MOST_RANKS = 64
MOST_COMMAND = 20_000
MOST_SHOWN = 200
MOST_PHASES = 16
MOST_HINTS = 3


class RunView:
    """Reads a run folder. Several threads may use it.

    Args:
        key: the run's name on the page.
        folder: of Loop(run_dir=...), which may not exist yet.
    """

    def __init__(self, key: str, folder: Path) -> None:
        self.key = key
        self.folder = folder.absolute()
        self._turn = threading.RLock()
        self._run = RunState(self.folder)
        self._generation = 0
        self._lines = 0  # that were read
        self._rows = MetricSeries()
        self._evaluations = MetricSeries()
        self._logged = MetricSeries()
        self._series = (self._rows, self._evaluations, self._logged)
        self._tails = [JsonlTail(self.folder / name) for name in (ROWS, EVALUATIONS, LOGGED, RANKS)]
        self._ranks: list[dict[str, float | int | None]] = []
        self._profile: dict[str, Any] | None = None
        self._is_behind = False

    # -- reading -------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        self._run.look()
        if self._run.state in ("missing", "gone"):
            return
        self._profile = _profile_of(read_json(self.folder / PROFILE / PROFILE_FILE))
        deadline = time.monotonic() + READ_S
        self._is_behind = False
        for tail, series in zip(self._tails, (*self._series, None), strict=True):
            for update in tail.updates(deadline):
                if series is None:
                    self._take_ranks(update)
                else:
                    if update.restarted:
                        series.clear()
                        self._generation += 1
                    series.extend(update.rows)
                    self._lines += len(update.rows)
            self._is_behind |= update.more

    def _take_ranks(self, update: TailUpdate) -> None:
        if update.restarted:
            self._ranks = []
        ranks = update.rows[-1].get("ranks") if update.rows else None
        if isinstance(ranks, list):
            found = [one for one in ranks if isinstance(one, dict) and count(one.get("rank")) is not None]
            names = ("rank", "step_s", "wait_s", "memory_mib")
            self._ranks = [{name: finite(one.get(name)) for name in names} for one in found[:MOST_RANKS]]

    # -- what the page shows -------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return all but the curves, as JSON values."""
        with self._turn:
            self._poll()
            run = self._run
            last = self._rows.last()
            about = run.about(int(last.get("iteration") or 0))
            elapsed_s, rest_s, speed = self._times(about["iteration"], about["steps"])
            return {
                "key": self.key,
                "folder": str(self.folder),
                "version": self._version(),
                **about,
                "why": run.why(),
                "rows": len(self._rows),
                "epoch": last.get("epoch") or None,
                "elapsed_s": elapsed_s,
                "remaining_s": rest_s,
                "samples_per_s": speed,
                "ranks": count(run.status.get("ranks")),
                "device": text_of(run.status.get("device")),
                "checkpoint": self._checkpoint(),
                "last": last,
                "by_rank": self._ranks,
                "profile": self._profile,
                "problems": self._problems(),
                "continue": self._continue(),
            }

    def _version(self) -> str:
        """Return a text that changes whenever the curves do."""
        last = self._rows.last().get("iteration", 0)
        return f"{self._generation}.{self._lines}.{last}"

    def _times(self, iteration: int, total: int | None) -> tuple[float | None, float | None, float | None]:
        """Return elapsed and remaining seconds and recent samples per second, each None if unknown."""
        seconds = self._rows.values(TIME)
        if not len(seconds) or np.isnan(seconds[-1]):
            return None, None, None
        since = 0.0
        goes_on = self._run.state in ("running", "stopping")
        if goes_on:
            began = self._run.status.get("at")
            with suppress(OSError):
                written = (self.folder / ROWS).stat().st_mtime
                began = max(written, began) if isinstance(began, int | float) else written
            since = max(0.0, time.time() - began) if isinstance(began, int | float) else 0.0
        elapsed = float(seconds[-1]) + since
        recent = min(len(seconds) - 1, RECENT)
        took = float(seconds[-1] - seconds[-1 - recent]) if recent else 0.0
        if not took > 0:
            return round(elapsed), None, None
        made = int(self._rows.iterations[-1] - self._rows.iterations[-1 - recent])
        samples = self._rows.values("samples")[-recent:]
        rest = None
        if total is not None and goes_on:
            rest = round(max(0.0, (total - iteration) * took / made - since))
        return round(elapsed), rest, nothing_for_nan(float(np.sum(samples)) / took)

    def _checkpoint(self) -> str | None:
        """Return the newest checkpoint's name, without reading it."""
        with suppress(OSError):
            names = [one.name for one in (self.folder / CHECKPOINTS).iterdir() if NAME.fullmatch(one.name)]
            return max(names, key=lambda name: (int(name.split("-")[1]), name), default=None)
        return None

    def _problems(self) -> list[str]:
        problems = ["the files are still being read"] if self._is_behind else []
        for tail in self._tails:
            if tail.unreadable:
                many = f"{tail.unreadable} lines" if tail.unreadable > 1 else "1 line"
                problems.append(f"{tail.path.name}: {many} cannot be read, the first is line {tail.first_unreadable}")
            if tail.half and self._run.state not in ("running", "stopping"):
                problems.append(f"{tail.path.name}: the last line is half-written and left out ({tail.half} bytes)")
        for name, columns in zip((ROWS, EVALUATIONS, LOGGED), self._series, strict=True):
            if columns.refused:
                problems.append(f"{name}: {columns.refused} rows have no iteration and are left out")
            if columns.left_out:
                problems.append(f"{name}: {len(columns.left_out)} more metrics are left out")
        if "loss" in self._rows.names and (bad := int(np.isnan(self._rows.values("loss")).sum())):
            problems.append(f"{bad} {'losses are' if bad > 1 else 'loss is'} not finite")
        return problems

    def _continue(self) -> str | None:
        """Return the command that resumes the run, from status.json; empty if that does not say it."""
        if self._run.state not in ("stopped", "failed", "left", "lost"):
            return None
        whole = way_on(self._run.status)
        return whole if len(whole) < MOST_COMMAND else f"{whole[:MOST_SHOWN]} ... (too long to be shown)"

    # -- curves --------------------------------------------------------------------------------------------

    def curves(
        self,
        points: int,
        smoothing: int,
        first: float,
        last: float,
        axis: str = AXES[0],
        metrics: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Return the curves of some metrics, thinned out to `points`, and the names of all, as JSON values.

        Args:
            points: per curve, at most; of each bucket of rows or evaluations the minimum and the maximum stay, and the
                last one.
            smoothing: steps of the exponential mean, which is computed before rows are thinned out; 0 for none.
            first, last: the part of the axis to return; one row more on either side is added.
            axis: "step", "epoch" or "time".
            metrics: their names; None for all.
        """
        with self._turn:
            self._poll()
            rows = self._rows
            points_of = self._evaluations
            found = dict.fromkeys(name for one in self._series for name in one.names if name != TIME)
            asked = found.keys() if metrics is None else found.keys() & metrics
            iterations = rows.iterations
            places = self._places(axis, rows)
            evaluated = self._places(axis, points_of)
            part = _Part.of(places, points, first, last)
            part_of_points = _Part.of(evaluated, points, first, last)
            curves = {}
            smoothed = {}
            ends = {}
            for name in rows.names:
                if name not in asked:
                    continue
                values = rows.values(name)
                curves[name] = part.curve(values)
                if (end := end_of(values)) is not None:
                    ends[name] = [*_places(axis, places[end : end + 1]), int(iterations[end])]
                if smoothing > 1:
                    smoothed[name] = part.curve(smooth(values, iterations, smoothing))
            return {
                "version": self._version(),
                "is_behind": self._is_behind,
                "axis": axis,
                "names": list(found),
                "x": _places(axis, places[part.kept]),
                "steps": iterations[part.kept].tolist(),
                "curves": curves,
                "smoothed": smoothed,
                "ends": ends,
                "evaluated_x": _places(axis, evaluated[part_of_points.kept]),
                "evaluated_steps": points_of.iterations[part_of_points.kept].tolist(),
                "evaluated": {
                    name: part_of_points.curve(points_of.values(name)) for name in points_of.names if name in asked
                },
                "logged": self._logged_curves(asked, axis, points, first, last),
                "epochs": self._marks(axis, places),
            }

    def _marks(self, axis: str, places: Values) -> list[list[float | int]]:
        """Return epochs and where they end, at most MOST_MARKS."""
        epochs = self._rows.epochs
        ends = np.flatnonzero(np.diff(epochs))
        every = max(1, -(-len(ends) // MOST_MARKS))
        ends = ends[every - 1 :: every]
        return [[int(epochs[end]), place] for end, place in zip(ends, _places(axis, places[ends]), strict=True)]

    def _places(self, axis: str, series: MetricSeries) -> Values:
        return places_on(axis, series, self._rows, count(self._run.status.get("steps_per_epoch")))

    def _logged_curves(
        self, asked: Collection[str], axis: str, points: int, first: float, last: float
    ) -> dict[str, list[list[Any]]]:
        """Return places, values and steps of what the script logged, by name, thinned out."""
        logged = self._logged
        found = {}
        places = self._places(axis, logged)
        for name in logged.names:
            if name not in asked:
                continue
            values = logged.values(name)
            there = np.flatnonzero(~np.isnan(values) & (places >= first) & (places <= last))
            starts = thin_out(len(there), points)
            kept = there[places_of(starts, len(there))]
            curve = _listed(extremes(values[there], starts))
            found[name] = [_places(axis, places[kept]), curve, logged.iterations[kept].tolist()]
        return found

    def values(self, name: str) -> dict[str, Any] | None:
        """Return all values of a metric with their steps, epochs and seconds, as JSON values; None without one."""
        with self._turn:
            self._poll()
            found: dict[str, Any] = {}
            for kind, series in zip(("row", "evaluation", "logged"), self._series, strict=True):
                if name not in series.names or name == TIME:
                    continue
                values = series.values(name)
                there = np.flatnonzero((kind == "row") | ~np.isnan(values))
                found[kind] = {
                    "steps": series.iterations[there].tolist(),
                    "epochs": series.epochs[there].tolist(),
                    "seconds": _listed(series.values(TIME)[there]),
                    "values": _listed(values[there]),
                }
            return {"is_behind": self._is_behind, "found": found} if found or self._is_behind else None


class _Part(NamedTuple):
    """The lines of a series in a part of the axis, with one more on either side, thinned out.

    Attributes:
        lines: all of them.
        starts: of their buckets.
        kept: the lines whose places stay.
    """

    lines: slice
    starts: npt.NDArray[np.int64]
    kept: npt.NDArray[np.int64]

    @classmethod
    def of(cls, places: Values, points: int, first: float, last: float) -> Self:
        """The part from `first` to `last`, in so many points at most."""
        low = max(0, int(np.searchsorted(places, first)) - 1)
        high = min(len(places), int(np.searchsorted(places, last, side="right")) + 1)
        starts = thin_out(high - low, points)
        kept = places_of(starts, high - low) + low
        return cls(slice(low, high), starts, kept)

    def curve(self, values: Values) -> list[float | None]:
        return _listed(extremes(values[self.lines], self.starts))


def _places(axis: str, places: Values) -> list[float] | list[int]:
    found: list[float] | list[int] = (places.astype(np.int64) if axis == "step" else places).tolist()
    return found


def _listed(values: Values) -> list[float | None]:
    return [nothing_for_nan(value) for value in values.tolist()]


def _profile_of(found: dict[str, Any]) -> dict[str, Any] | None:
    """A profile with what the page shows: the table's columns and rows, in seconds, and the hints; None without one."""
    phases, ranks, hints = (found.get(name) for name in ("phases", "ranks", "hints"))
    if not (isinstance(phases, list) and isinstance(ranks, list) and isinstance(hints, list)):
        return None
    names = [name for name in map(text_of, phases[:MOST_PHASES]) if name is not None]
    rows = [
        [finite(one.get("rank")), finite(one.get("step_s")), *(finite(one["phases"].get(name)) for name in names)]
        for one in ranks[:MOST_RANKS]
        if isinstance(one, dict) and isinstance(one.get("phases"), dict)
    ]
    texts = [text for text in map(text_of, hints[:MOST_HINTS]) if text is not None]
    return {"heading": text_of(found.get("heading")), "phases": names, "rows": rows, "hints": texts} if rows else None
