"""Runs as a table: which columns there are, which rows are shown, and how they fit a terminal."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_loop.reporting.run_records import RunRecord
from ddp_loop.reporting.throughput import as_clock

_CONDITION = re.compile(r"\s*(.+?)\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*")
_MOST_NAME = 40
_FAILED = ("failed", "killed", "not finite", "timed out", "lost")  # states whose reason matters more than values
_MOST_TEXT = 24
_MOST_WHY = 60
_GAP = 2  # letters of a run's name, of other texts, between two columns
_OWN = ("name", "state", "objective", "steps", "of steps", "epoch", "time", "ranks", "note", "why", "folder")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunTable:
    """Runs by rows, and what is known of them by columns.

    Attributes:
        columns: the names of those that have something to show, in order.
        common: the parameters that all runs have alike.
        rows: each run's values by column; missing ones are left out. They have the common parameters too.
        ranking: for each column how soon it is left out where the terminal is narrow; the highest first.
    """

    columns: list[str]
    common: dict[str, Any]
    rows: list[dict[str, Any]]
    ranking: dict[str, int]


def table_of_runs(records: Sequence[RunRecord]) -> RunTable:
    """Make the table of some runs, in their order. Parameters that do not differ between them are `common`.

    The columns of a value are "loss" and "best loss", and "eval loss" and "best eval loss" from evaluations. A metric
    whose name is taken is "metric.NAME", and such a parameter "config.NAME".
    """
    taken = set(_OWN)
    evaluated = _labels((name for one in records for name in one.evaluations), "metric.", taken, "eval ", "best ")
    measured = _labels((name for one in records for name in ("loss", *one.rows)), "metric.", taken, "", "best ")
    values: dict[str, int] = {}
    for name, label in measured.items():
        values |= {label: 3 if name == "loss" else 6, f"best {label}": 4 if name == "loss" else 7}
    for label in evaluated.values():
        values |= {label: 3, f"best {label}": 5}
    labels = _labels((name for one in records for name in one.parameters), "config.", taken)
    rows = [_row_of(one, labels, measured, evaluated) for one in records]
    parameters = list(labels)
    common = {
        name: records[0].parameters[name]
        for name in parameters
        if all(
            name in one.parameters and _is_same(one.parameters[name], records[0].parameters[name]) for one in records
        )
    }
    varying = [labels[name] for name in parameters if name not in common]
    ranking = {"name": 0, "state": 1, **dict.fromkeys(varying, 2), "objective": 1, **values}
    failed = any(row.get("state") in _FAILED for row in rows)
    ranking |= {"steps": 4, "time": 6, "ranks": 9, "note": 8, "why": 2 if failed else 8}
    has = {name for row in rows for name, value in row.items() if value is not None}
    shown = [name for name in ranking if name in has]
    if len({row.get("ranks") for row in rows}) < 2:
        shown = [name for name in shown if name != "ranks"]
    return RunTable(shown, {labels[name]: one for name, one in common.items()}, rows, ranking)


def _is_same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _labels(names: Iterable[str], other: str, taken: set[str], prefix: str = "", best: str = "") -> dict[str, str]:
    """Return the columns of values by their names, each another one, and count these and their best as taken."""
    labels: dict[str, str] = {}
    for name in dict.fromkeys(names):
        label = f"{prefix}{short_name(name)}"
        while taken & {label, f"{best}{label}"}:
            label = f"{other}{label}"
        taken |= {label, f"{best}{label}"}
        labels[name] = label
    return labels


def _row_of(
    one: RunRecord, labels: Mapping[str, str], measured: Mapping[str, str], evaluated: Mapping[str, str]
) -> dict[str, Any]:
    row: dict[str, Any] = {labels[name]: value for name, value in one.parameters.items()}
    for columns, summaries in ((measured, one.rows), (evaluated, one.evaluations)):
        for name, summary in summaries.items():
            row |= {columns[name]: summary.last, f"best {columns[name]}": summary.best}
    row |= {"name": one.name, "state": one.state, "objective": one.value}
    row |= {"steps": one.steps if one.steps else None, "of steps": one.of_steps, "epoch": one.epoch}
    row |= {"time": one.elapsed_s, "ranks": one.ranks, "note": one.note or None, "why": one.why, "folder": one.folder}
    return {name: value for name, value in row.items() if value is not None}


def column_named(given: str, table: RunTable) -> str:
    """Return the column that the user names; case, "-" and "_" do not count.

    Raises:
        ValueError: there is none; the message has the nearest one.
    """
    names = list(dict.fromkeys([*table.columns, *table.common, *(name for row in table.rows for name in row)]))
    plain = {_plain(name): name for name in reversed(names)}
    if given in names or _plain(given) in plain:
        return given if given in names else plain[_plain(given)]
    near = difflib.get_close_matches(_plain(given), plain, n=1, cutoff=0.6)
    hint = f"Did you mean {plain[near[0]]!r}?" if near else f"There are {', '.join(table.columns)}."
    raise ValueError(f"No run has a column {given!r}. {hint}")


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]+", " ", name).strip().lower()


def filtered(table: RunTable, conditions: Iterable[str]) -> list[dict[str, Any]]:
    """Return the rows that meet all conditions, such as "rate=0.1", "state!=failed", "best loss < 0.2".

    Raises:
        ValueError: a condition of another form, or a column that no run has.
    """
    rows = table.rows
    for condition in conditions:
        if (found := _CONDITION.fullmatch(condition)) is None:
            raise ValueError(
                f'A condition compares a column: "rate=0.1", "state!=failed", "best loss<0.2". Got {condition!r}.'
            )
        name = column_named(found[1], table)
        meets = _comparison(found[2], found[3])
        rows = [row for row in rows if meets(row.get(name))]
    return rows


def _comparison(sign: str, given: str) -> Callable[[Any], bool]:
    number = _number(given)

    def meets(value: Any) -> bool:
        mine = _number(value)
        if sign in ("=", "!="):
            is_equal = mine == number if None not in (mine, number) else str(value).lower() == given.lower()
            return is_equal == (sign == "=")
        if mine is None or number is None:
            return False
        return {"<": mine < number, ">": mine > number, "<=": mine <= number, ">=": mine >= number}[sign]

    return meets


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def ordered(rows: list[dict[str, Any]], column: str, *, descending: bool) -> list[dict[str, Any]]:
    """Return rows in the order of a column: numbers, then texts; what is missing or NaN comes last."""

    def key(row: Row) -> tuple[int, float, str]:
        number = _number(row[column])
        return (1, 0.0, str(row[column])) if number is None else (0, -number if descending else number, "")

    there = [row for row in rows if column in row and not _is_nan(row[column])]
    numbers = sorted((row for row in there if _number(row[column]) is not None), key=key)
    texts = sorted((row for row in there if _number(row[column]) is None), key=key, reverse=descending)
    return [*numbers, *texts, *(row for row in rows if column not in row or _is_nan(row[column]))]


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def write_csv(table: RunTable, rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows as CSV, with all columns and all digits.

    Raises:
        OSError: the file cannot be written.
    """
    more = ("of steps", "epoch", "ranks", "folder")
    names = list(dict.fromkeys([*table.columns, *table.common, *more]))
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# -- texts -------------------------------------------------------------------------------------------------


def short(value: Any) -> str:
    """Return a value as a short text: 0.1235, 8.29e+26, true."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        text = f"{value:.4g}"
        return f"{value:.3g}" if "e" in text else text
    text = "".join(letter if letter.isprintable() else "?" for letter in str(value))
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}\u2026"


def cell(row: Row, column: str) -> str:
    """Return the text of a cell; "-" if there is nothing."""
    value = row.get(column)
    if value is None:
        return "-"
    if column == "why":
        first = short_name(value.partition("\n")[0])
        return first if len(first) <= _MOST_WHY else f"{first[: _MOST_WHY - 1]}\u2026"
    if column == "name" and len(value) > _MOST_NAME:
        return "\u2026" + short_name(value[-_MOST_NAME + 1 :])
    if column == "name":
        return short_name(value)
    if column == "time":
        return as_clock(value)
    if column == "steps":
        whole = row.get("of steps")
        return f"{value}/{whole}" if whole and whole != value else str(value)
    return short(value)


def short_name(name: str) -> str:
    """Return a run's name without letters that would change the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def is_text(table: RunTable, column: str) -> bool:
    """Whether a column is set to the left: it has texts, and not numbers."""
    return column in ("name", "state", "note", "why") or any(
        isinstance(row.get(column), str | bool) for row in table.rows if row.get(column) is not None
    )


def fitting(table: RunTable, rows: list[dict[str, Any]], width: int | None) -> tuple[list[str], list[str]]:
    """Return the columns that fit a width, and those that are left out.

    Args:
        table: the table.
        rows: those that are shown.
        width: of the terminal, in letters; None for no limit.
    """
    widths = {name: max([len(name), *(len(cell(row, name)) for row in rows)]) for name in table.columns}
    shown = list(table.columns)
    while width is not None and len(shown) > 1 and sum(widths[name] + _GAP for name in shown) - _GAP > width:
        place = max(range(len(shown)), key=lambda place: (table.ranking[shown[place]], place))
        del shown[place]
    return shown, [name for name in table.columns if name not in shown]
