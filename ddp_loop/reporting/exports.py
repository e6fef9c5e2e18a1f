"""Exports of a run: curves as PNG and SVG, rows as CSV; `python -m ddp_loop plot RUN`."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddp_loop import plots
from ddp_loop.checkpoint import EVALUATIONS, PICTURES, ROWS, TABLE
from ddp_loop.plots import Panel
from ddp_loop.reporting.jsonl_tail import read_lines
from ddp_loop.reporting.rows import NORM, RATE, is_metric

_SMALL_MIB = 64  # some 400,000 rows, which are read and drawn in 5 s
_NO_PANEL = {"epoch", "iteration", "samples", "weight", "skipped", "elapsed_s"}


def export_if_small(run: Path) -> None:
    """Call `export` if matplotlib is installed, and if the rows are few enough not to delay the end of the run."""
    rows = run / ROWS
    is_small = rows.exists() and 0 < rows.stat().st_size < _SMALL_MIB * 2**20
    if is_small and importlib.util.find_spec("matplotlib") is not None:
        export(run)


def export(run: Path) -> list[Path]:
    """Draw the loss and the metrics of a run, each as PNG and SVG, and write its rows as CSV.

    Args:
        run: the folder of Loop(run_dir=...); pictures are written to its folder `pictures`.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is missing.
        OSError: a file cannot be written.
        ValueError: there are no rows.
    """
    found = {row["iteration"]: row for row in read_lines(run / ROWS)}
    rows = [found[iteration] for iteration in sorted(found)]
    if not rows:
        raise ValueError(f"{run} has no {ROWS} with rows to draw. Pass the folder of Loop(run_dir=...).")
    table = _write_table(rows, run / TABLE)
    panels = _panels(rows, read_lines(run / EVALUATIONS))
    loss = {name: panel for name, panel in panels.items() if name == "loss"}
    others = {name: panel for name, panel in panels.items() if name != "loss"}
    files = [
        plots.curves(part, run / PICTURES / f"{name}.{kind}", title=run.absolute().name)
        for name, part in (("loss", loss), ("metrics", others))
        for kind in ("png", "svg")
        if part
    ]
    return [*files, table]


def _panels(rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, Panel]:
    """Return a panel for each value: loss, metrics, metrics of evaluations alone, gradient norm, rates that change."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _NO_PANEL]
    names += [name for name in dict.fromkeys(name for row in evaluations for name in row) if name not in _NO_PANEL]
    metrics = [name for name in names if is_metric(name)]
    rates = [name for name in names if name.startswith(RATE) and len({row.get(name) for row in rows}) > 1]
    beside = [*([NORM] if NORM in names else []), *rates]
    return {
        name: Panel(*_column(rows, name), *_column(evaluations, name))
        for name in dict.fromkeys(["loss", *metrics, *beside])
    }


def _column(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return iterations and values; null is NaN."""
    found = [(float(row["iteration"]), row[name]) for row in rows if name in row and "iteration" in row]
    return [at for at, _ in found], [math.nan if value is None else float(value) for _, value in found]


def _write_table(rows: list[dict[str, Any]], path: Path) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(
            ["nan" if name in row and row[name] is None else row.get(name) for name in names] for row in rows
        )
    return path
