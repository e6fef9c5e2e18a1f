"""The runs below a folder as a table, and the best of them: `python -m ddp_loop runs FOLDER` and `best FOLDER`."""

from __future__ import annotations

import csv
import difflib
import math
import operator
import os
import re
import shutil
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import best_of, check_output, read_json
from ddp_loop.distributed import aligned
from ddp_loop.reporting.run_records import RunRecord, checkpoints_of, find_runs, is_lower_better, read_run, shown_name
from ddp_loop.reporting.sweep_files import SWEEP, is_sweep
from ddp_loop.reporting.throughput import as_clock

_EVALUATED = re.compile(r"(?i)^\s*(best )?(?:evaluation\.|evaluated )")  # other names of "eval loss"
_CONDITION = re.compile(r"\s*(.+?)\s*(!=|<=|>=|==?|<|>)\s*(.*?\S)\s*")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_MOST_NAME = 40
_FAILED = ("failed", "killed", "not finite", "timed out", "lost")  # states whose reason matters more than values
_MOST_TEXT = 24
_MOST_WHY = 60
_GAP = 2  # letters of a run's name, of other texts, between two columns
_OWN = ("name", "state", "objective", "steps", "of steps", "epoch", "time", "ranks", "note", "why", "folder")
Row = Mapping[str, Any]
_Value = tuple[str, str]  # the attribute of a RunRecord that has it, its name there
_KINDS = {  # of values that can decide, and what these are called; the first is what they are called in a message
    "evaluations": ("eval {}", "{}"),
    "epoch_means": ("epoch {}", "{}"),
    "logged": ("{}", "logged.{}"),
    "scores": ("{}",),
}
_Found = tuple[float, int | None, RunRecord]  # a value, its step, its run
_WATCH_S = 1.0
_SCORE = ("score", "best score")
_FORMS = ("{}", "best {}", "epoch {}", "best epoch {}")
_PARAMETER = 8  # in the ranking: results, times and reasons are shown before any
_DULL = 20  # of a column that is the first to be left out
_LEAST_WHY = 24
_BOLD = 1
_RED = 31  # of any other state: failed, killed
_COLORS = {"running": 32, "done": 36, "waiting": 2, "starting": 2, "pruned": 2, "lost": 35}
_COLORS |= dict.fromkeys(("stopping", "stopped", "left", "interrupted"), 33)
_SHOWN = 12  # common parameters in a line


@dataclass(frozen=True)
class RunTable:
    """Runs by rows, and what is known of them by columns.

    Attributes:
        columns: the names of those that have something to show, in order.
        common: the parameters that all runs with parameters have alike.
        rows: each run's values by column; missing ones are left out. They have the common parameters too.
        ranking: for each column how soon it is left out where the terminal is narrow; the highest first.
    """

    columns: list[str]
    common: dict[str, Any]
    rows: list[dict[str, Any]]
    ranking: dict[str, int]

    @property
    def others(self) -> list[str]:
        """The names of the columns that are not shown, and more."""
        return list(dict.fromkeys([*self.common, *(name for row in self.rows for name in row)]))


def table_of_runs(records: Sequence[RunRecord]) -> RunTable:
    """Make the table of some runs, in their order. Parameters that do not differ between them are `common`.

    The columns of a value are "epoch loss" and "best epoch loss", the means over an epoch, "eval loss" and "best eval
    loss" from evaluations, "NAME" and "best NAME" of `Loop.log`, and "score" and "best score" of `Loop.save`. Not shown
    are "loss" and "best loss", of single mini-batches. A metric whose name is taken is "metric.NAME", such a parameter
    "config.NAME", and such a logged value "logged.NAME".
    """
    taken = {*_OWN, *(_SCORE if any(one.scores for one in records) else ())}
    evaluated = _labels((name for one in records for name in one.evaluations), "metric.", taken, "eval ", _FORMS[:2])
    measured = _labels((name for one in records for name in ("loss", *one.rows)), "metric.", taken, "", _FORMS)
    labels = _labels((name for one in records for name in one.parameters), "config.", taken)
    logged = _labels((name for one in records for name in one.logged), "logged.", taken, "", _FORMS[:2])
    values: dict[str, int] = {}
    for name, label in measured.items():
        values |= {f"epoch {label}": 3 if name == "loss" else 9, f"best epoch {label}": 10}
    for label in evaluated.values():
        values |= {label: 5, f"best {label}": 10}
    for name, label in logged.items():
        values |= {label: 5 if is_lower_better(name) else 9, f"best {label}": 10}
    result = next(iter(evaluated.values()), f"epoch {measured['loss']}")
    values[f"best {result}"] = 4
    averaged = {name: f"epoch {label}" for name, label in measured.items()}
    columns = {"rows": measured, "epoch_means": averaged, "evaluations": evaluated, "logged": logged}
    columns["scores"] = {"score": "score"}
    rows = [_row_of(one, labels, columns) for one in records]
    configured = [one.parameters for one in records if one.parameters]
    common = {
        labels[name]: value
        for name, value in (configured or [{}])[0].items()
        if all(name in one and type(one[name]) is type(value) and one[name] == value for one in configured)
    }
    varying = [label for label in labels.values() if label not in common]
    ranking = {"name": 0, "state": 1, **dict.fromkeys(varying, _PARAMETER), "objective": 1, **values}
    failed = any(row.get("state") in _FAILED for row in rows)
    ranking |= {"score": 5, "best score": 4, "steps": 2, "time": 6, "ranks": 12, "note": 11, "why": 7 if failed else 11}
    has = {name for row in rows for name, value in row.items() if value is not None}
    shown = [name for name in ranking if name in has]
    if len({row.get("ranks") for row in rows}) < 2:
        shown = [name for name in shown if name != "ranks"]
    return RunTable(shown, common, rows, ranking)


def _labels(
    names: Iterable[str], other: str, taken: set[str], prefix: str = "", forms: Sequence[str] = ("{}",)
) -> dict[str, str]:
    """Return the columns of values by their names, each another one, and count these in all forms as taken."""
    labels: dict[str, str] = {}
    for name in dict.fromkeys(names):
        label = f"{prefix}{short_name(name)}"
        while taken & (columns := {form.format(label) for form in forms}):
            label = f"{other}{label}"
        taken |= columns
        labels[name] = label
    return labels


def _row_of(one: RunRecord, labels: Mapping[str, str], columns: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The row of a run.

    Args:
        one: its record.
        labels: the columns of parameters, by their names.
        columns: the columns of values, by the attribute of the record that has them and by their names.
    """
    row: dict[str, Any] = {labels[name]: value for name, value in one.parameters.items()}
    for kind, names in columns.items():
        for name, summary in getattr(one, kind).items():
            row |= {names[name]: summary.last, f"best {names[name]}": summary.best}
    row |= {"name": one.name, "state": one.state, "objective": one.value}
    row |= {"steps": one.steps or None, "of steps": one.of_steps, "epoch": one.epoch}
    row |= {"time": one.elapsed_s, "ranks": one.ranks, "note": one.note or None, "why": one.why, "folder": one.folder}
    return {name: value for name, value in row.items() if value is not None}


def column_named(given: str, columns: Sequence[str], others: Iterable[str] = ()) -> str:
    """Return the column that the user names; case, "-" and "_" do not count. "evaluation.loss" is "eval loss".

    Raises:
        ValueError: there is none; the message has the nearest one, or `columns`.
    """
    names = [*columns, *others]
    plain = {_plain(name): name for name in reversed(names)}
    if given in names:
        return given
    if _plain(given) in plain:
        return plain[_plain(given)]
    near = difflib.get_close_matches(_plain(given), plain, n=1, cutoff=0.6)
    hint = f"Did you mean {plain[near[0]]!r}?" if near else f"There are {', '.join(columns)}."
    raise ValueError(f"No run has a column {given!r}. {hint}")


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]+", " ", _EVALUATED.sub(r"\1eval ", name)).strip().lower()


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
        if found[2] not in ("=", "==", "!=") and _number(found[3]) is None:
            raise ValueError(f"{found[2]} compares numbers. Got {condition!r}. Give a number, or use = or !=.")
        name = column_named(found[1], table.columns, table.others)
        rows = [row for row in rows if _meets(row.get(name), found[2], found[3])]
    return rows


def _meets(value: Any, sign: str, given: str) -> bool:
    mine = _number(value)
    number = _number(given)
    if mine is not None and number is not None:
        return _COMPARISONS[sign](mine, number)
    return sign in ("=", "==", "!=") and _COMPARISONS[sign](str(value).lower(), given.lower())


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def ordered(rows: list[dict[str, Any]], column: str, *, descending: bool) -> list[dict[str, Any]]:
    """Return rows in the order of a column: numbers, then texts; what is missing or NaN comes last."""
    numbers = []
    texts = []
    missing = []
    for row in rows:
        number = _number(row.get(column))
        if column not in row or (number is not None and math.isnan(number)):
            missing.append(row)
        elif number is not None:
            numbers.append(row)
        else:
            texts.append(row)
    numbers.sort(key=lambda row: float(row[column]), reverse=descending)
    texts.sort(key=lambda row: str(row[column]), reverse=descending)
    return numbers + texts + missing


def write_csv(table: RunTable, rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows as CSV, with all columns and all digits.

    Raises:
        OSError: the file cannot be written.
    """
    more = ("of steps", "epoch", "ranks", "folder")
    names = list(dict.fromkeys([*table.columns, *table.others, *more]))
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
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
    return _cut(str(value), _MOST_TEXT)


def _cut(text: str, most: int) -> str:
    text = short_name(text)
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def cell(row: Row, column: str) -> str:
    """Return the text of a cell; "-" if there is nothing."""
    value = row.get(column)
    if value is None:
        return "-"
    if column == "why":
        return _cut(value.partition("\n")[0], _MOST_WHY)
    if column == "name":
        return short_name(value) if len(value) <= _MOST_NAME else "\u2026" + short_name(value[-_MOST_NAME + 1 :])
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
        isinstance(row.get(column), str | bool) for row in table.rows
    )


def fitting(table: RunTable, rows: list[dict[str, Any]], width: int | None) -> tuple[list[str], list[str]]:
    """Return the columns that fit a width, and those that are left out.

    Args:
        table: the table.
        rows: those that are shown.
        width: of the terminal, in letters; None for no limit.
    """
    widths = {name: max([len(name), *(len(cell(row, name)) for row in rows)]) for name in table.columns}
    if table.ranking.get("why", _DULL) < _PARAMETER:
        widths["why"] = min(widths.get("why", 0), _LEAST_WHY)  # it is cut
    ranking = table.ranking | {name: _DULL for name in table.columns if _is_dull(name, table, rows)}
    shown = list(table.columns)
    while width is not None and len(shown) > 1 and sum(widths[name] + _GAP for name in shown) - _GAP > width:
        shown.remove(max(reversed(shown), key=ranking.__getitem__))  # of equal ones the last
    return shown, [name for name in table.columns if name not in shown]


def _is_dull(name: str, table: RunTable, rows: list[dict[str, Any]]) -> bool:
    """Whether a column says nothing of the runs: a number of steps or a parameter that all that have it have alike, or
    best values that are all the last ones.
    """
    if len(rows) < 2:
        return False
    if name.startswith("best "):
        return all(row.get(name) == row.get(name.removeprefix("best ")) for row in rows)
    if name != "steps" and table.ranking[name] != _PARAMETER:
        return False
    return len({(type(row[name]), str(row[name])) for row in rows if name in row}) < 2


# -- the commands ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunQuery:
    """Which runs are listed, and how.

    Attributes:
        folder: to search.
        sort: the column to sort by; None keeps the order of the paths, or of a sweep's trials.
        descending: whether the largest come first.
        where: conditions that all must meet.
    """

    folder: Path
    sort: str | None = None
    descending: bool = False
    where: Sequence[str] = ()


def records_below(folder: Path, *, highest: bool | None = None) -> list[RunRecord]:
    """Read all runs below a folder, a sweep's runs in the order of its trials; `highest` as in `read_run`.

    Raises:
        ValueError: the folder does not exist.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"FOLDER must be a folder with runs below it. {folder} {what}. Check its path.")
    records = [read_run(one, folder, for_table=True, highest=highest) for one in find_runs(folder)]
    if is_sweep(folder):
        records.sort(key=lambda one: math.inf if one.trial is None else one.trial)
    return records


def list_runs(query: RunQuery, say: Callable[[str], None], *, file: Path | None = None, watch: bool = False) -> None:
    """Print the table of the runs below a folder.

    Args:
        query: which ones, and in which order.
        say: prints lines.
        file: for a table with all columns as CSV; None for none.
        watch: whether to show it again each second, until Ctrl-C.

    Raises:
        OSError: the file cannot be written.
        ValueError: no folder, no run in it, a column that no run has, or `file` with `watch` or of a run.
    """
    if watch and file is not None:
        raise ValueError("--watch shows the table until Ctrl-C, and writes no file. Leave out --watch or --csv.")
    while watch:
        text = _text_of(query) if records_below(query.folder) else f"{query.folder}: no run has begun yet"
        say(f"\x1b[H\x1b[2J{text}" if sys.stdout.isatty() else f"{text}\n")
        time.sleep(_WATCH_S)
    if file is not None:
        check_output(file, ".csv")
        table, rows = _selected(query)
        write_csv(table, rows, file)
    say(_text_of(query))
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
        rows = ordered(rows, column_named(query.sort, table.columns, table.others), descending=query.descending)
    return table, rows


def _text_of(query: RunQuery) -> str:
    table, rows = _selected(query)
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    states = Counter(row["state"] for row in table.rows)
    heading = f"{len(table.rows)} run{'' if len(table.rows) == 1 else 's'} in {query.folder}: "
    heading += ", ".join(f"{number} {state}" for state, number in states.most_common())
    if query.where:
        heading += f"; {len(rows)} of them with {' and '.join(query.where)}"
    lines = [heading, *_about_sweep(query.folder), *_common_line(table, width), ""]
    shown, left_out = fitting(table, rows, width)
    if rows:
        lines += _drawn(table, rows, shown, width, colored=is_terminal and not os.environ.get("NO_COLOR"))
    else:
        lines.append("No run meets the conditions.")
    if left_out:
        lines += ["", *_wrapped(f"Left out for want of width: {', '.join(left_out)}. --csv has all.", width)]
    return "\n".join(lines)


def _about_sweep(folder: Path) -> list[str]:
    sweep = read_json(folder / SWEEP)
    if not sweep:
        return []
    name = short_name(str(sweep.get("name", folder.name)))
    objective = shown_name(str(sweep.get("objective") or "eval loss or loss"))
    return [f"Sweep {name}: objective {short(objective)}, {short(sweep.get('direction'))}"]


def _common_line(table: RunTable, width: int | None) -> list[str]:
    if not table.common:
        return []
    without = sum(not any(name in row for name in table.common) for row in table.rows)
    parts = [f"{name}={short(value)}" for name, value in list(table.common.items())[:_SHOWN]]
    more = [f"{len(table.common) - _SHOWN} more"] if len(table.common) > _SHOWN else []
    which = "With" if len(table.rows) == 1 else "All with" if not without else f"{len(table.rows) - without} with"
    return _wrapped(f"{which} {', '.join([*parts, *more])}", width)


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, max(20, width), subsequent_indent="  ", break_on_hyphens=False)


def _drawn(
    table: RunTable, rows: list[dict[str, Any]], shown: list[str], most: int | None, *, colored: bool
) -> list[str]:
    lines = [shown, *([cell(row, name) for name in shown] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if most is not None and shown[-1] == "why":
        room = max(_LEAST_WHY, most - sum(widths[:-1]) - _GAP * (len(shown) - 1))
        lines = [[*line[:-1], _cut(line[-1], room)] for line in lines]
    drawn = []
    for number, line in enumerate(lines):
        texts = []
        for name, text, width in zip(shown, line, widths, strict=True):
            padded = text.ljust(width) if is_text(table, name) else text.rjust(width)
            if colored and (not number or name == "state"):
                color = _COLORS.get(text, _RED) if number else _BOLD
                padded = f"\x1b[{color}m{padded}\x1b[0m"
            texts.append(padded)
        drawn.append("  ".join(texts).rstrip())
    return drawn


# -- the best one ------------------------------------------------------------------------------------------


def best_run(folder: Path, say: Callable[[str], None], *, by: str | None = None, highest: bool = False) -> bool:
    """Print the best run below a folder: of a sweep the trial with the best objective, else that with the best loss.

    Args:
        folder: to search.
        say: prints lines.
        by: the value that decides, from evaluations, else the means over epochs, else `Loop.log`; by default a sweep's
            objective, and of other runs the eval loss, else the score of `Loop.save`. The lowest is the best for
            losses, errors (see `is_lower_better`) and scores, the highest for other values.
        highest: whether the highest value is the best one in any case.

    Returns:
        Whether there is one.

    Raises:
        ValueError: no folder, no run in it, or a value that no run has.
    """
    records = records_below(folder, highest=highest)
    if not records:
        raise ValueError(f"There is no run below {folder}: no folder with a run.json or a trial.json. Check its path.")
    sweep = read_json(folder / SWEEP)
    if sweep and by is None:
        name = ""  # the trial knows what it took
        lower = not highest and sweep.get("direction") != "maximize"
        done = [one for one in records if one.state == "done"]
        found: list[_Found] = [(one.value, None, one) for one in done if one.value is not None]
        missing = "No trial is done with a value."
    else:
        name, lower, found, missing = _decided(records, by, highest=highest)
    if not found:
        say(f"{folder}: {missing}")
        return False
    value, at, record = (min if lower else max)(found, key=itemgetter(0))
    name = name or shown_name(record.objective or "value")
    facts = {
        "run": short_name(record.name),
        short_name(name): f"{value:.6g}{'' if at is None else f' at step {at}'}, "
        f"the {'lowest' if lower else 'highest'} of {len(found)}",
        "state": record.state,
        **{f"  {short_name(name)}": short(one) for name, one in record.parameters.items()},
        "folder": str(record.folder),
        "checkpoint": _checkpoint_of(record.folder, at),
    }
    say("\n".join(aligned([*facts.items()])))
    return True


def _decided(records: Sequence[RunRecord], by: str | None, *, highest: bool) -> tuple[str, bool, list[_Found], str]:
    """Return the name of the value that decides, whether the lowest is best, each run's best, and what to say of none.

    Args:
        records: of the runs, read for `highest`.
        by, highest: as in `best_run`.
    """
    values, others = _values_of(records)
    decides = ("evaluations", "loss") if by is None else (others | values)[column_named(by, sorted(values), others)]
    found = _best_of_each(records, decides)
    if by is None and not found and "score" in values:
        decides = values["score"]
        found = _best_of_each(records, decides)
    kind, value = decides
    name = _KINDS[kind][0].format(value)
    what = "eval loss or a score" if by is None else name
    names = ", ".join(map(short_name, list(values)[:5])) or "loss"
    missing = f"No run has a finite {what}. Pass --by NAME, such as {names}."
    return name, not highest and (kind == "scores" or is_lower_better(value)), found, missing


def _values_of(records: Sequence[RunRecord]) -> tuple[dict[str, _Value], dict[str, _Value]]:
    """Return the values that can decide, by their names, and by the columns of `runs` and of the page."""
    values: dict[str, _Value] = {}
    others: dict[str, _Value] = {}
    for kind, forms in _KINDS.items():
        for name in dict.fromkeys(name for one in records for name in getattr(one, kind)):
            values.setdefault(name, (kind, name))
            for form in forms:
                others.setdefault(form.format(name), (kind, name))
                others.setdefault(f"best {form.format(name)}", (kind, name))
    return values, others


def _best_of_each(records: Sequence[RunRecord], value: _Value) -> list[_Found]:
    """Return the best finite value of each run that has one."""
    kind, name = value
    summaries = [(getattr(one, kind).get(name), one) for one in records]
    return [(one.best, one.best_at, record) for one, record in summaries if one is not None and one.best is not None]


def _checkpoint_of(folder: Path, at: int | None) -> str:
    """The checkpoint of a step; else the best one by its score, else the newest one, and that none is of the step."""
    entries = checkpoints_of(folder)
    if not entries:
        return "none"
    best = best_of(entries)
    of_step = next((one for one in entries if one.iteration == at), None)
    found = of_step or best or entries[0]
    facts = ["the newest"] if found is entries[0] and found.score is None else []
    facts += [] if found.score is None else [f"{'the best ' if found is best else ''}score {short(found.score)}"]
    facts += [] if at is None or of_step is not None else [f"there is none of step {at}"]
    return f"{found.path} ({', '.join(facts)})" if facts else str(found.path)
