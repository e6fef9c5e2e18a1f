"""What a trial of a sweep costs beyond its job: 300 trials that compute nothing, on warm workers of 2 slots.

    python -m benchmarks sweep [PART ...]

A slot's time for a trial is from the first trial's begin to the last one's end, times the slots, by the trials. It
contains the claim in the storage, the folder's files, the call on the rank, and the ending; not the start of the
processes, which is in a column of its own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ddp_loop as dl
from benchmarks.measuring import print_table
from ddp_loop.checkpoint import read_json

TRIALS, SLOTS, GOAL_S = 300, 2, 0.3
PARTS = ("grid", "tpe")


def nothing(x: float, run_dir: str) -> float:
    """The job."""
    return x


def measure(sampler: str) -> tuple[float, float]:
    """The seconds of a slot for a trial, and the seconds from the call to the first trial."""
    space: dict[str, Any] = {"x": [float(number) for number in range(TRIALS)]}
    keywords: dict[str, Any] = {}
    if sampler != "grid":
        space, keywords = {"x": {"low": 0.0, "high": 1.0}}, {"sampler": sampler, "trials": TRIALS}
    with tempfile.TemporaryDirectory() as place:
        called = time.time()
        results = dl.sweep(nothing, space, Path(place, "sweep"), slots=SLOTS, progress=False, **keywords)
        attempts = [one for trial in results for one in read_json(trial.folder / "trial.json")["attempts"]]
    if [one.status for one in results] != ["done"] * TRIALS or len(attempts) != TRIALS:
        raise RuntimeError("every trial must end at its first attempt; not all did")
    began, ended = min(one["began"] for one in attempts), max(one["ended"] for one in attempts)
    return (ended - began) * SLOTS / TRIALS, began - called


def report(parts: Iterable[str]) -> None:
    """Print the table."""
    rows = ((name, *(f"{seconds:.3f}" for seconds in measure(name)), GOAL_S) for name in parts or PARTS)
    print_table(f"{TRIALS} trials on {SLOTS} slots | s for a trial | s until the first one | goal", rows)
