"""The checkpoints of a run, a line each: which are as they were written, where a resumed run goes on, which is best."""

from __future__ import annotations

import time
from pathlib import Path

from ddp_loop.checkpoints import Checkpoints, Entry, best_of, run_id_of

HEAD = ("checkpoint", "MiB", "written", "score", "state")


def list_checkpoints(run: Path) -> tuple[bool, list[str]]:
    """Read every checkpoint of a run and check it; writes nothing.

    Returns:
        Whether there is one and all are as they were written; and the lines, the newest first.

    Raises:
        ValueError: `run` is no run folder.
    """
    run_id = run_id_of(run)
    if run_id is None:
        what = "has no run.json with an id" if run.is_dir() else "is no folder"
        raise ValueError(f"checkpoints are in the folder of a run; {run} {what}: give the folder of Loop(run=...)")
    entries = Checkpoints(run, run_id).entries(verify=True)
    if not entries:
        return False, [f"{run} has no checkpoint: a resumed run begins at the beginning"]
    newest = next((entry for entry in entries if entry.problem is None), None)
    best = best_of(entries)
    rows = [HEAD, *(_row(entry, entry is newest, entry is best) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(one.ljust(width) for one, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if newest is None:
        lines.append("None is as it was written: a resumed run has nothing to go on from")
    return all(entry.problem is None for entry in entries), lines


def _row(entry: Entry, is_newest: bool, is_best: bool) -> tuple[str, ...]:
    state = "valid" if entry.problem is None else f"NOT VALID: {entry.problem}"
    state += ", best" if is_best else ""
    state += ", a resumed run goes on from here" if is_newest else ""
    state = "".join(letter if letter.isprintable() else "?" for letter in state)  # names of files may be anything
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.written_s)) if entry.written_s else "-"
    score = "-" if entry.score is None else f"{entry.score:.6g}"
    return entry.path.name, f"{entry.bytes / 2**20:.1f}", written, score, state
