"""The evaluations of a run, in its folder and in the sinks.

[Note: Again] A run that resumes from an epoch's end repeats what the script does after that epoch. An evaluation with
the results of an earlier one of its iteration is therefore not written again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from ddp_loop.checkpoint import FileSum, is_running
from ddp_loop.data import LoopPosition
from ddp_loop.reporting.jsonl import JsonlWriter
from ddp_loop.reporting.jsonl_tail import read_lines
from ddp_loop.reporting.logged_values import is_same
from ddp_loop.reporting.sink_calls import SinkCalls


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace values that are not finite by None, for JSON."""
    return {name: value if isfinite(value) else None for name, value in values.items()}


class EvaluationLog:
    """The evaluations of a run: {epoch, iteration, <metrics>, samples, elapsed_s} each; see [Note: Again].

    Args:
        path: of the file; None without a run folder.
        after: the iteration that the run resumes from.
        warn: called with a message when the file cannot be written.
        sum_before: the file's sum in the checkpoint; None if that has none.

    Attributes:
        file: the writer; None without a run folder.
    """

    def __init__(
        self, path: Path | None, after: int, warn: Callable[[str], None], sum_before: FileSum | None = None
    ) -> None:
        self.file = None if path is None else JsonlWriter(path, after, warn, "drop", sum_before=sum_before)
        lines = [] if path is None else read_lines(path)
        self._known = [line for line in lines if line["iteration"] == after]  # of the last iteration

    def record(
        self, epoch: int, iteration: int, result: Mapping[str, float], elapsed_s: float
    ) -> dict[str, Any] | None:
        """Record an evaluation that was made after this iteration; returns its line, or None if it was there."""
        place = {"epoch": epoch, "iteration": iteration}
        line = place | finite(result) | place | {"elapsed_s": round(elapsed_s, 4)}  # metrics cannot replace the place
        self._known = [one for one in self._known if one["iteration"] == iteration]
        if any(_is_repeated(one, line) for one in self._known):
            return None
        self._known.append(line)
        if self.file is not None:
            self.file.add(json.dumps(line) + "\n")
            self.file.flush()
        return line


def _is_repeated(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two evaluations have the same results, up to the rounding on different numbers of ranks."""
    return tuple(one) == tuple(other) and all(name == "elapsed_s" or is_same(one[name], other[name]) for name in one)


class EvaluationRecorder:
    """Records the evaluations of a loop, also after its end; it keeps the loop's position alive, and not its state.

    Args:
        log: to write to; None on other ranks than 0.
        sinks: get each evaluation, too.
        folder: of the run; None without one.
        where: the loop's position.
        began: when the run began, by the monotonic clock.
    """

    def __init__(
        self, log: EvaluationLog | None, sinks: SinkCalls, folder: Path | None, where: LoopPosition, began: float
    ) -> None:
        self._log = log
        self._sinks = sinks
        self._folder = folder
        self._where = where
        self._began = began
        self.has_ended = False

    def __call__(self, result: Mapping[str, float]) -> None:
        """Record an evaluation; after the loop's end only if no other process runs in the folder."""
        if self._log is None or (self.has_ended and self._folder is not None and is_running(self._folder)):
            return
        elapsed_s = time.monotonic() - self._began
        line = self._log.record(self._where.epoch, self._where.iteration, result, elapsed_s)
        if line is not None:
            self._sinks.call("evaluated", line)
