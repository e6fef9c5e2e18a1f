"""A run's rows for others: curves as PNG and SVG, a table as CSV; `python -m ddp_loop plot RUN`."""

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

_SMALL_MIB = 64  # of rows, some 400,000, which are read and drawn in 5 s
_NO_PANEL = {"epoch", "iteration", "samples", "weight", "skipped", "elapsed_s"}


def export_if_small(run: Path) -> None:
    """What `export` does, if matplotlib is there and the rows are not so many that others would wait for it."""
    rows = run / ROWS
    if importlib.util.find_spec("matplotlib") is not None and _has_few(rows):
        try:
            export(run)
        finally:
            plots.close_fonts()


def _has_few(rows: Path) -> bool:
    return rows.exists() and 0 < rows.stat().st_size < _SMALL_MIB * 2**20


def export(run: Path) -> list[Path]:
    """Draw the loss and the metrics of a run, each as PNG and SVG, and write its rows as CSV.

    Args:
        run: the folder of Loop(run_dir=...); the pictures go to `pictures` in it.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is missing.
        OSError: they cannot be written.
        ValueError: there are no rows.
    """
    found = {row["iteration"]: row for row in read_lines(run / ROWS)}
    rows = [found[iteration] for iteration in sorted(found)]
    if not rows:
        raise ValueError(f"curves are drawn of a run's {ROWS}; {run} has none: give the folder of Loop(run_dir=...)")
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
    """A panel for each value: the loss, the metrics, those that are only evaluated, the norm, rates that change."""
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
    """Iterations and values; what is null is not finite."""
    there = [(float(row["iteration"]), row[name]) for row in rows if name in row and "iteration" in row]
    return [at for at, _ in there], [math.nan if value is None else float(value) for _, value in there]


def _write_table(rows: list[dict[str, Any]], path: Path) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(
            ["nan" if name in row and row[name] is None else row.get(name) for name in names] for row in rows
        )
    return path
