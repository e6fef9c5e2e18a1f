"""Exports of runs: curves as PNG and SVG, rows as CSV; `python -m ddp_loop plot RUN ...`."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ddp_loop import plots
from ddp_loop.checkpoint import EVALUATIONS, LOGGED, PICTURES, ROWS, TABLE, no_run
from ddp_loop.plots import Panel
from ddp_loop.reporting.jsonl import read_lines
from ddp_loop.reporting.rows import NORM, PLACE, RATE, is_metric, weighing_columns

_SMALL_MIB = 64  # some 400,000 rows, which are read and drawn in 5 s
_MOST_PANELS = 64  # of a picture, as on the page; hundreds would delay the end of a run by minutes


def export_if_small(run: Path) -> None:
    """Call `export` if matplotlib is installed, and if the rows are few enough not to delay the end of the run."""
    rows = run / ROWS
    is_small = rows.exists() and 0 < rows.stat().st_size < _SMALL_MIB * 2**20
    if is_small and importlib.util.find_spec("matplotlib") is not None:
        export(run)


@dataclass(frozen=True)
class PictureStyle:
    """How curves are drawn.

    Attributes:
        title: of the pictures; None for the run's name, and for none above several runs.
        smoothing: in steps; see `plots.curves`.
        log: whether values are on a logarithmic scale; None decides by the values.
    """

    title: str | None = None
    smoothing: float = 0.0
    log: bool | None = None


def export(run: Path, style: PictureStyle = PictureStyle()) -> list[Path]:
    """Draw the loss and the metrics of a run, each as PNG and SVG, and write its rows as CSV.

    Args:
        run: the folder of Loop(run_dir=...); pictures are written to its folder `pictures`.
        style: of the pictures.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is missing.
        OSError: a file cannot be written.
        ValueError: there are no rows.
    """
    rows = _rows_of(run)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = run / TABLE
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: "nan" if value is None else value for name, value in row.items()} for row in rows)
    title = run.absolute().name if style.title is None else style.title
    return [*_draw(_panels(run, rows), run / PICTURES, title, style), table]


def compare(runs: Sequence[Path], folder: Path, style: PictureStyle = PictureStyle()) -> list[Path]:
    """Draw the loss and the metrics of several runs over each other, each as PNG and SVG.

    Args:
        runs: their folders.
        folder: for the pictures.
        style: of the pictures.

    Returns:
        The files.

    Raises:
        ImportError, OSError: as `export`.
        ValueError: a run has no rows; nothing is drawn.
    """
    found = {name: _panels(run, _rows_of(run)) for name, run in _named(runs).items()}
    names = dict.fromkeys(name for panels in found.values() for name in panels)
    panels = {name: {run: one[name] for run, one in found.items() if name in one} for name in names}
    return _draw(panels, folder, style.title or "", style)


def _named(runs: Sequence[Path]) -> dict[str, Path]:
    """The runs by as much of their paths as tells them apart."""
    whole = list(dict.fromkeys(run.absolute() for run in runs))
    depth = 1
    while len({run.parts[-depth:] for run in whole}) < len(whole):
        depth += 1
    return {"/".join(run.parts[-depth:]): run for run in whole}


def _rows_of(run: Path) -> list[dict[str, Any]]:
    found = {row["iteration"]: row for row in read_lines(run / ROWS)}
    if not found:
        raise no_run(run, f"has no {ROWS} with rows to draw")
    return [found[iteration] for iteration in sorted(found)]


def _draw(panels: Mapping[str, Any], folder: Path, title: str, style: PictureStyle) -> list[Path]:
    if len(panels) > _MOST_PANELS:
        title = f"{title} (the first {_MOST_PANELS} of {len(panels)} values)".strip()
        panels = dict(islice(panels.items(), _MOST_PANELS))
    return [
        plots.curves(part, folder / f"{file}.{kind}", title=title, smoothing=style.smoothing, log=style.log)
        for file in ("loss", "metrics")
        if (part := {name: panel for name, panel in panels.items() if (name == "loss") == (file == "loss")})
        for kind in ("png", "svg")
    ]


def _panels(run: Path, rows: list[dict[str, Any]]) -> dict[str, Panel]:
    """Return a panel for each value: loss, metrics, metrics of evaluations, logged values, norm, changing rates."""
    evaluations = read_lines(run / EVALUATIONS)
    logged = read_lines(run / LOGGED)
    names, of_evaluations, of_script = (
        [name for name in dict.fromkeys(name for row in lines for name in row) if name not in PLACE]
        for lines in (rows, evaluations, logged)
    )
    averaged = {name for columns in set(map(tuple, rows)) for name in weighing_columns(columns)}
    metrics = [*(name for name in names if name in averaged), *filter(is_metric, of_evaluations)]
    rates = [name for name in names if name.startswith(RATE) and len({row.get(name) for row in rows}) > 1]
    beside = [*([NORM] if NORM in names else []), *rates]
    panels = {
        name: Panel(*_column(rows, name), *_column(evaluations, name))
        for name in dict.fromkeys(["loss", *metrics, *beside])
    }
    for name in of_script:  # beside a curve of the same name as points
        there = panels.get(name)
        points = _column(logged, name)
        panels[name] = Panel(*points) if there is None else Panel(there.iterations, there.values, *points)
    return panels


def _column(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return iterations and values; null is NaN."""
    found = [(float(row["iteration"]), row[name]) for row in rows if name in row]
    return [at for at, _ in found], [math.nan if value is None else float(value) for _, value in found]
