"""The evaluations of a run, in its folder and in the sinks.

[Note: Again] A run that resumes from an epoch's end repeats what the script does after that epoch. An evaluation with
the results of an earlier one of its iteration is therefore not written again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from math import isclose, isfinite
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import is_running
from ddp_loop.data import LoopPosition
from ddp_loop.reporting.console import ConsoleLog
from ddp_loop.reporting.jsonl import JsonlWriter
from ddp_loop.reporting.jsonl_tail import is_number
from ddp_loop.reporting.sink_calls import SinkCalls

_REDONE = 1e-6  # the rounding of float32, by which sums on different numbers of ranks differ


def is_same(one: object, other: object) -> bool:
    """Whether two values are the same, up to the rounding on different numbers of ranks; null is not finite."""
    if is_number(one) and is_number(other):
        return isclose(one, other, rel_tol=_REDONE, abs_tol=_REDONE**2)
    return one == other


class EvaluationLog:
    """The evaluations of a run: {epoch, iteration, <metrics>, samples, elapsed_s} each; see [Note: Again].

    Args:
        file: of the run.
    """

    def __init__(self, file: JsonlWriter) -> None:
        self._file = file
        self._known = file.known  # of the last iteration

    def record(
        self, epoch: int, iteration: int, result: Mapping[str, float], elapsed_s: float
    ) -> dict[str, Any] | None:
        """Record an evaluation that was made after this iteration; returns its line, or None if it was there."""
        place = {"epoch": epoch, "iteration": iteration}
        values = {name: value if isfinite(value) else None for name, value in result.items()}
        line = place | values | place | {"elapsed_s": round(elapsed_s, 4)}  # metrics cannot replace the place
        self._known = [one for one in self._known if one["iteration"] == iteration]
        if any(_is_repeated(one, line) for one in self._known):
            return None
        self._known.append(line)
        self._file.add(json.dumps(line) + "\n")
        self._file.flush()
        return line


def _is_repeated(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two evaluations have the same results, up to the rounding on different numbers of ranks."""
    return tuple(one) == tuple(other) and all(name == "elapsed_s" or is_same(one[name], other[name]) for name in one)


def record_evaluation(
    log: EvaluationLog | None,
    sinks: SinkCalls,
    folder: Path | None,
    where: LoopPosition,
    began: float,
    console: ConsoleLog,
    result: Mapping[str, float],
) -> None:
    """Record an evaluation of a loop; after the loop's end only if no other process runs in the folder.

    It needs the loop's position, and not its state, which is free after the loop's end.

    Args:
        log: to write to; None on other ranks than 0.
        sinks: get the evaluation, too.
        folder: of the run; None without one.
        where: the loop's position.
        began: when the run began, by the monotonic clock.
        console: which says whether the loop has ended.
        result: of the evaluation.
    """
    if log is None or (console.has_ended and folder is not None and is_running(folder)):
        return
    elapsed_s = time.monotonic() - began
    line = log.record(where.epoch, where.iteration, result, elapsed_s)
    if line is not None:
        sinks.call("evaluated", line)
