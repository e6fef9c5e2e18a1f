"""What the tab Results reads and writes: notes, tables, and what sweeps are asked to do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import NOTE, STOP, TABLES, TITLE, bytes_of, opened, read_json, write_text_atomic
from ddp_loop.monitor.run_list import key_of
from ddp_loop.monitor.run_state import finite
from ddp_loop.reporting import (
    FAILED_TRIAL,
    SWEEP,
    TRIAL,
    TRIALS,
    ask_for,
    count,
    has_workers,
    is_sweep,
    object_of,
    text_of,
    trial_folder,
)

TEXTS_OF_USER = {"note": (NOTE, 500), "name": (TITLE, 100)}  # what is written: its file, and its letters at most
MOST_SIDE = 100
MOST_LABEL = 60
MOST_BYTES = 1 << 20  # of a table: rows and columns, letters, of its file
MOST_ASKED = 150  # trials in one request
TABLE_NAME = re.compile(r"[\w-][\w.,=+@ -]{0,99}")

Answer = tuple[int, dict[str, Any] | str | bytes]  # status and body; the body of a refusal is a text


class Refused(Exception):
    """A request that is refused.

    Args:
        status: of the answer.
        why: its text.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.answer: Answer = (status, why)


# -- notes and tables --------------------------------------------------------------------------------------


def write_text(folder: Path, what: str, body: bytes) -> Answer:
    """Write a run's "note" or "name", or remove it if the text is empty. Control characters become spaces."""
    file, most = TEXTS_OF_USER[what]
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return 400, f"A {what} must be UTF-8 text."
    text = "".join(letter if letter.isprintable() or letter == "\u200d" else " " for letter in text).strip()
    if len(text) > most:
        return 400, f"A {what} has at most {most} letters. This one has {len(text)}."
    try:
        if text:
            write_text_atomic(folder / file, text)
        else:
            (folder / file).unlink(missing_ok=True)
    except OSError as error:
        return 500, f"The run folder cannot be written ({error.strerror})."
    return 200, {what: text or None}


def read_table(folder: Path, name: str) -> Answer:
    """Return a table with the labels of its rows and columns, and its values: numbers, or None."""
    if not TABLE_NAME.fullmatch(name):
        return 404, "There is no such table."
    try:
        with opened(folder / TABLES) as descriptor:
            found = json.loads(bytes_of(descriptor, f"{name}.json", MOST_BYTES))
    except OSError:
        return 404, "There is no such table."
    except (ValueError, RecursionError) as error:
        return 422, f"The table {name} cannot be read ({str(error)[:200]})."
    table = found if isinstance(found, dict) else {}
    rows, columns, values = (table.get(part) for part in ("rows", "columns", "values"))
    if not (isinstance(rows, list) and isinstance(columns, list) and isinstance(values, list)):
        return 422, f"The table {name} has no rows, columns and values."
    if max(len(rows), len(columns)) > MOST_SIDE:
        size = f"{len(rows)} x {len(columns)}"
        return 422, f"The table {name} has {size} values. The page shows at most {MOST_SIDE} x {MOST_SIDE}."
    if len(values) != len(rows) or any(not isinstance(one, list) or len(one) != len(columns) for one in values):
        return 422, f"The values of the table {name} do not fit its {len(rows)} rows and {len(columns)} columns."
    return 200, {
        "name": name,
        "rows": [str(label)[:MOST_LABEL] for label in rows],
        "columns": [str(label)[:MOST_LABEL] for label in columns],
        "values": [[finite(value) for value in one] for one in values],
        "iteration": count(table.get("iteration")),
    }


# -- sweeps ------------------------------------------------------------------------------------------------


class Sweeps:
    """The sweeps that known runs are trials of. A sweep keeps its key.

    Args:
        given: the folders of the page. A sweep that lies outside of them, but for some of its trials, is none.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        self._given = [Path(os.path.abspath(path)) for path in given]
        self._keys: dict[str, str] = {}  # by folder

    def look(self, runs: Mapping[str, Path]) -> list[dict[str, Any]]:
        """Return what the page shows of each sweep.

        Args:
            runs: folders, by the runs' keys.
        """
        return [self._about(folder, keys) for folder, keys in self._found(runs).items()]

    def folder_of(self, key: str, runs: Mapping[str, Path]) -> Path | None:
        """Return the folder of the sweep that has a key."""
        return next((folder for folder in self._found(runs) if self._key_of(folder) == key), None)

    def _found(self, runs: Mapping[str, Path]) -> dict[Path, list[str]]:
        found: dict[Path, list[str]] = {}
        for key, folder in runs.items():
            if folder.parent.name == TRIALS and any(map(folder.parent.parent.is_relative_to, self._given)):
                found.setdefault(folder.parent.parent, []).append(key)
        return {folder: keys for folder, keys in found.items() if is_sweep(folder)}

    def _key_of(self, folder: Path) -> str:
        return key_of(self._keys, str(folder), folder.name or "sweep")

    def _about(self, folder: Path, keys: list[str]) -> dict[str, Any]:
        facts = read_json(folder / SWEEP)
        return {
            "key": self._key_of(folder),
            "name": text_of(facts.get("name")) or folder.name,
            "folder": str(folder),
            "trials": count(facts.get("trials")),
            "ranks": count(facts.get("ranks")),
            **{name: text_of(facts.get(name)) for name in ("objective", "direction", "sampler", "pruner")},
            "is_active": has_workers(folder) is not False,
            "is_stopping": (folder / STOP).exists(),
            "runs": keys,
        }


def stop_from_page(ask: Callable[[Path, str], None], folder: Path, what: str) -> Answer:
    """Ask a run, or a sweep for all its trials, to stop.

    Args:
        ask: writes the request, and raises ValueError where nothing runs.
        folder: of the run or the sweep.
        what: the folder in words.
    """
    try:
        ask(folder, "the page")
    except ValueError as error:
        return 409, str(error)
    except OSError as error:
        return 500, f"{what} cannot be written ({error.strerror})."
    return 202, {"said": "stopping"}


def ask_again(folder: Path, body: bytes) -> Answer:
    """Ask the workers of a sweep, now or later, to run trials again that failed.

    Args:
        folder: of the sweep.
        body: {"trials": [numbers]} as JSON.
    """
    trials = (object_of(body) or {}).get("trials")
    trials = trials if isinstance(trials, list) and all(count(one) is not None for one in trials) else []
    if not 0 < len(trials) <= MOST_ASKED:
        return 400, f'The body must be {{"trials": [...]}}, with the numbers of 1 to {MOST_ASKED} trials.'
    for number in trials:
        trial = read_json(trial_folder(folder, number) / TRIAL)
        if not trial:
            return 404, f"There is no trial {number}."
        if trial.get("status") not in FAILED_TRIAL:
            return 409, f"Trial {number} did not fail (status: {text_of(trial.get('status'))})."
    try:
        ask_for(folder, trials)
    except OSError as error:
        return 500, f"The sweep's folder cannot be written ({error.strerror})."
    return 202, {"asked": len(set(trials)), "is_active": has_workers(folder) is not False}
