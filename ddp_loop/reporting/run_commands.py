"""`python -m ddp_loop runs FOLDER` and `best FOLDER`: the runs below a folder as a table, and the best of them."""

from __future__ import annotations

import importlib.util
import io
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import EVALUATIONS, ROWS, CheckpointStore, best_of, read_json, run_id_of
from ddp_loop.reporting.jsonl_tail import read_lines
from ddp_loop.reporting.run_records import RunRecord, find_runs, is_lower_better, read_run
from ddp_loop.reporting.run_table import (
    RunTable,
    cell,
    column_named,
    filtered,
    fitting,
    is_text,
    ordered,
    short,
    short_name,
    table_of_runs,
    write_csv,
)
from ddp_loop.reporting.sweep_files import SWEEP, is_sweep

_WATCH_S = 1.0
_EVALUATED = re.compile(r"^eval(?:uated)?\s+", re.IGNORECASE)
_COLORS = {"running": "green", "done": "cyan", "waiting": "dim", "starting": "dim", "pruned": "dim"} | dict.fromkeys(
    ("stopping", "stopped", "left", "interrupted"), "yellow"
)
_BAD = "red"  # of any other state: failed, killed, lost
_SHOWN = 12  # common parameters in a line


@dataclass(frozen=True)
class RunQuery:
    """Which runs are listed, and how.

    Attributes:
        folder: to search.
        sort: the column to sort by; None keeps the order of the paths, or that of a sweep's trials.
        descending: whether the largest come first.
        where: conditions that all must meet.
    """

    folder: Path
    sort: str | None = None
    descending: bool = False
    where: Sequence[str] = ()


def records_below(folder: Path) -> list[RunRecord]:
    """Read all runs below a folder, those of a sweep in the order of its trials.

    Raises:
        ValueError: the folder does not exist.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"FOLDER must be a folder with runs below it. {folder} {what}. Check its path.")
    records = [read_run(one, folder) for one in find_runs(folder)]
    if is_sweep(folder):
        records.sort(key=lambda one: math.inf if one.trial is None else one.trial)
    return records


def list_runs(query: RunQuery, say: Callable[[str], None], *, file: Path | None = None, watch: bool = False) -> None:
    """Print the table of the runs below a folder.

    Args:
        query: which ones, and in which order.
        say: prints lines.
        file: for a table with all columns as CSV; None for none.
        watch: whether to show it anew each second, until Ctrl-C.

    Raises:
        OSError: the file cannot be written.
        ValueError: no folder, no run in it, or a column that no run has.
    """
    while watch:
        text = _text_of(query, is_first=False)
        say(f"\x1b[H\x1b[2J{text}" if sys.stdout.isatty() else f"{text}\n")
        time.sleep(_WATCH_S)
    if file is not None:
        table, rows = _selected(query)
        write_csv(table, rows, file)
    say(_text_of(query, is_first=True))
    if file is not None:
        say(f"All columns: {file}")


def _selected(query: RunQuery) -> tuple[RunTable, list[dict[str, Any]]]:
    if not (records := records_below(query.folder)):
        raise ValueError(
            f"There is no run below {query.folder}: no folder with a run.json or a trial.json. Pass the folder that "
            "has the folders of Loop(run_dir=...)."
        )
    table = table_of_runs(records)
    rows = filtered(table, query.where)
    if query.sort is not None:
        rows = ordered(rows, column_named(query.sort, table), descending=query.descending)
    return table, rows


def _text_of(query: RunQuery, *, is_first: bool) -> str:
    if not is_first and not records_below(query.folder):
        return f"{query.folder}: no run has begun yet"
    table, rows = _selected(query)
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    heading = f"{len(table.rows)} run{'' if len(table.rows) == 1 else 's'} in {query.folder}"
    if query.where:
        heading += f", {len(rows)} of them with {' and '.join(query.where)}"
    lines = [heading, *_about_sweep(query.folder), *_common_line(table, width), ""]
    shown, left_out = fitting(table, rows, width)
    if rows:
        lines += _drawn(table, rows, shown, colored=is_terminal and importlib.util.find_spec("rich") is not None)
    else:
        lines.append("No run meets the conditions.")
    if left_out:
        lines += ["", *_wrapped(f"Left out for want of width: {', '.join(left_out)}. --csv has all.", width)]
    return "\n".join(lines)


def _about_sweep(folder: Path) -> list[str]:
    sweep = read_json(folder / SWEEP)
    if sweep is None:
        return []
    name = short_name(str(sweep.get("name", folder.name)))
    objective = sweep.get("objective") or "evaluated loss or loss"
    return [f"Sweep {name}: objective {short(objective)}, {short(sweep.get('direction'))}"]


def _common_line(table: RunTable, width: int | None) -> list[str]:
    if not table.common:
        return []
    parts = [f"{name}={short(value)}" for name, value in list(table.common.items())[:_SHOWN]]
    more = [f"{len(table.common) - _SHOWN} more"] if len(table.common) > _SHOWN else []
    return _wrapped(f"{'All with' if len(table.rows) > 1 else 'With'} {', '.join([*parts, *more])}", width)


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    import textwrap  # for a terminal alone

    return textwrap.wrap(text, max(20, width), subsequent_indent="  ", break_on_hyphens=False)


def _drawn(table: RunTable, rows: list[dict[str, Any]], shown: list[str], *, colored: bool) -> list[str]:
    cells = [[cell(row, name) for name in shown] for row in rows]
    widths = [max(len(name), *(len(line[place]) for line in cells)) for place, name in enumerate(shown)]
    is_left = [is_text(table, name) for name in shown]

    def line_of(texts: Sequence[str]) -> list[str]:
        return [
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(texts, widths, is_left, strict=True)
        ]

    head = line_of(shown)
    body = [line_of(line) for line in cells]
    if not colored:
        return ["  ".join(line).rstrip() for line in (head, *body)]
    from rich.console import Console
    from rich.text import Text

    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=sum(widths) + 2 * len(widths) + 1)
    console.print(Text("  ".join(head).rstrip(), style="bold"))
    for row, line in zip(rows, body, strict=True):
        style = _COLORS.get(str(row["state"]), _BAD)
        parts = [(text, style if name == "state" else "") for name, text in zip(shown, line, strict=True)]
        console.print(Text("  ").join(Text(text, style=style) for text, style in parts))
    return [one.rstrip() for one in written.getvalue().splitlines()]


# -- the best one ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Best:
    record: RunRecord
    name: str
    value: float
    iteration: int | None
    lower: bool
    among: int


def best_run(folder: Path, say: Callable[[str], None], *, by: str | None = None, highest: bool = False) -> bool:
    """Print the best run below a folder: of a sweep the trial with the best objective, else that with the best loss.

    Args:
        folder: to search.
        say: prints lines.
        by: the value that decides, from evaluations, or from updates where it was never evaluated; by default the
            objective of a sweep, and the evaluated loss of other runs. The lowest is the best for losses and errors
            (see `is_lower_better`), the highest for other values.
        highest: whether the highest value is the best one in any case.

    Returns:
        Whether there is one.

    Raises:
        ValueError: no folder, no run in it, or a value that no run has.
    """
    records = records_below(folder)
    if not records:
        raise ValueError(f"There is no run below {folder}: no folder with a run.json or a trial.json. Check its path.")
    sweep = read_json(folder / SWEEP)
    if sweep is not None and by is None:
        best = _best_trial(records, lower=sweep.get("direction") != "maximize")
        missing = "No trial is done with a value."
    else:
        best = _best_by(records, by, highest=highest)
        missing = f"No run has a finite evaluated {by or 'loss'}. Pass --by NAME, such as {_names(records)}."
    if best is None:
        say(f"{folder}: {missing}")
        return False
    say("\n".join(_description(best)))
    return True


def _best_trial(records: Sequence[RunRecord], *, lower: bool) -> _Best | None:
    found = [(one.value, one) for one in records if one.value is not None and one.state == "done"]
    if not found:
        return None
    value, record = min(found, key=lambda pair: pair[0] if lower else -pair[0])
    return _Best(record, record.objective or "value", value, None, lower, len(found))


def _best_by(records: Sequence[RunRecord], by: str | None, *, highest: bool) -> _Best | None:
    known = sorted({name for one in records for name in (*one.rows, *one.evaluations)})
    plain = None if by is None else _EVALUATED.sub("", by)  # `runs` and the page have a prefix
    name = "loss" if plain is None else column_named(plain, RunTable(known, {}, [], {}))
    lower = not highest and is_lower_better(name)
    is_evaluated = any(name in one.evaluations for one in records)
    if not is_evaluated and by is None:
        return None
    found = []
    for record in records:
        lines = read_lines(record.folder / (EVALUATIONS if is_evaluated else ROWS))
        values = [(line[name], line["iteration"]) for line in lines if line.get(name) is not None]
        finite = [pair for pair in values if math.isfinite(pair[0])]
        if finite:
            value, at = min(finite, key=lambda pair: pair[0] if lower else -pair[0])
            found.append(_Best(record, f"evaluated {name}" if is_evaluated else name, float(value), at, lower, 0))
    if not found:
        return None
    best = min(found, key=lambda one: one.value if lower else -one.value)
    return _Best(best.record, best.name, best.value, best.iteration, lower, len(found))


def _names(records: Sequence[RunRecord]) -> str:
    names = dict.fromkeys(name for one in records for name in (*one.evaluations, *one.rows))
    return ", ".join(map(short_name, list(names)[:5])) or "loss"


def _description(best: _Best) -> list[str]:
    record = best.record
    at = "" if best.iteration is None else f" at step {best.iteration}"
    which = "lowest" if best.lower else "highest"
    facts = {
        "run": short_name(record.name),
        short_name(best.name): f"{best.value:.6g}{at}, the {which} of {best.among}",
        "state": record.state,
        **{f"  {short_name(name)}": short(value) for name, value in record.parameters.items()},
        "folder": str(record.folder),
        "checkpoint": _checkpoint_of(record.folder),
    }
    width = max(map(len, facts))
    return [f"{name.ljust(width)}  {value}" for name, value in facts.items()]


def _checkpoint_of(folder: Path) -> str:
    """The best checkpoint by its score, else the newest one."""
    if (run_id := run_id_of(folder)) is None:
        return "none"
    entries = [one for one in CheckpointStore(folder, run_id).entries() if one.problem is None]
    if not entries:
        return "none"
    best = best_of(entries)
    return f"{entries[0].path} (the newest)" if best is None else f"{best.path} (score {short(best.score)})"
