"""Reports on rank 0 while a loop runs: rows, evaluations, the ranks' timings; pictures when the world is left.

[Note: Again] A run that resumes from an epoch's end repeats what the script does after that epoch. An evaluation with
the results of an earlier one of its iteration is therefore not written again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from math import isclose, isfinite
from pathlib import Path
from typing import Any

import torch

from ddp_loop.checkpoint import EVALUATIONS, RANKS, ROWS, Checkpointer, is_running
from ddp_loop.data import LoopPosition, MiniBatch
from ddp_loop.distributed import World
from ddp_loop.reporting.exports import export_if_small
from ddp_loop.reporting.jsonl import JsonlWriter, OnFull
from ddp_loop.reporting.jsonl_tail import read_lines
from ddp_loop.reporting.notebook_display import open_notebook
from ddp_loop.reporting.rows import EpochMeans, OnRow, RowDispatcher
from ddp_loop.reporting.terminal import Terminal, open_display
from ddp_loop.reporting.throughput import RankTimings, TrainingLength

_REDONE = 1e-6  # the rounding of float32, by which sums on different numbers of ranks differ


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace values that are not finite by None, for JSON."""
    return {name: value if isfinite(value) else None for name, value in values.items()}


class EvaluationLog:
    """The evaluations of a run: {epoch, iteration, <metrics>, samples, elapsed_s} each; see [Note: Again].

    Args:
        path: of the file.
        after: the iteration that the run resumes from.
        warn: called with a message when the file cannot be written.

    Attributes:
        file: the writer.
    """

    def __init__(self, path: Path, after: int, warn: Callable[[str], None]) -> None:
        self.file = JsonlWriter(path, after, warn, "drop")
        self._known = [line for line in read_lines(path) if line["iteration"] == after]  # of the last iteration

    def record(self, epoch: int, iteration: int, result: Mapping[str, float], elapsed_s: float) -> None:
        """Record an evaluation that was made after this iteration."""
        place = {"epoch": epoch, "iteration": iteration}
        line = place | finite(result) | place | {"elapsed_s": round(elapsed_s, 4)}  # metrics cannot replace the place
        self._known = [one for one in self._known if one["iteration"] == iteration]
        if not any(_is_same(one, line) for one in self._known):
            self._known.append(line)
            self.file.add(json.dumps(line) + "\n")
            self.file.flush()


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two evaluations have the same results, up to the rounding on different numbers of ranks."""
    return tuple(one) == tuple(other) and all(
        name == "elapsed_s" or one[name] == other[name] or _is_close(one[name], other[name]) for name in one
    )


def _is_close(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and isclose(one, other, rel_tol=_REDONE, abs_tol=_REDONE**2)


class EvaluationRecorder:
    """Records the evaluations of a loop, also after its end; it keeps the loop's position alive, and not its state.

    Args:
        log: to write to; None without a run folder, and on other ranks than 0.
        folder: of the run.
        where: the loop's position.
        began: when the run began, by the monotonic clock.
    """

    def __init__(self, log: EvaluationLog | None, folder: Path | None, where: LoopPosition, began: float) -> None:
        self._log, self._folder, self._where, self._began = log, folder, where, began
        self.has_ended = False

    def __call__(self, result: Mapping[str, float]) -> None:
        """Record an evaluation; after the loop's end only if no other process runs in the folder."""
        if self._log is None or self._folder is None or (self.has_ended and is_running(self._folder)):
            return
        self._log.record(self._where.epoch, self._where.iteration, result, time.monotonic() - self._began)


Receivers = OnRow | Sequence[OnRow] | None


def all_of(receivers: Receivers) -> list[OnRow]:
    """Return receivers as a list.

    Raises:
        TypeError: one cannot be called.
    """
    given = [] if receivers is None else list(receivers) if isinstance(receivers, Sequence) else [receivers]
    for one in given:
        if not callable(one):
            raise TypeError(
                f"on_row must be a callable that takes a row, or a list of callables. Got {type(one).__name__}. Pass "
                "on_row=print, or on_row=[csv_sink(path), tensorboard_sink(folder)]."
            )
    return given


class FinalPictures:
    """Draws a run's curves when the world is left, with the evaluations after the loop; keeps nothing of the loop.

    Args:
        world: from `join_world`.

    Attributes:
        folder: of the run; None for no pictures.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.folder: Path | None = None
        world.on_leaving(self.draw)

    def draw(self) -> None:
        """Draw them, unless the world is left by an exception."""
        folder, self.folder = self.folder, None
        if folder is None or self._world.ended_by is not None:
            return
        try:
            export_if_small(folder)
        except Exception as error:  # a picture is not worth a run
            self._world.print(f"ddp_loop: {folder} was not drawn. {error!r}")


class Reporter:
    """Reports a loop: opens its files and its terminal, and decides what a row, a timing, an evaluation become.

    Args:
        world: from `join_world`.
        where: the loop's position.
        checkpointer: of the run folder; None without one.

    Attributes:
        rows: takes and hands on the rows, on rank 0; None where there are none.
    """

    def __init__(self, world: World, where: LoopPosition, checkpointer: Checkpointer | None) -> None:
        self._world, self._where, self._checkpointer = world, where, checkpointer
        self._began = time.monotonic()
        self.rows: RowDispatcher | None = None
        self._terminal: Terminal | None = None
        self._timings: RankTimings | None = None
        self._evaluations: EvaluationLog | None = None
        self._evaluated: EvaluationRecorder | None = None
        self._ranks: JsonlWriter | None = None
        self._pictures = FinalPictures(world)
        self._draws = self._must_gather = False

    def begin(self, receivers: list[OnRow], *, progress: bool) -> str | None:
        """Open the files and the terminal on rank 0; new rows are appended to those already there.

        Returns:
            The key that `open` needs on every rank; None where there are no rows.

        Raises:
            ImportError, OSError, ValueError: a file cannot be written.
        """
        after, world = self._where.iteration, self._world
        if self._checkpointer is None and not receivers and not progress:
            return None
        epoch = EpochMeans()
        file = None if self._checkpointer is None else self._open_files(self._checkpointer, after, epoch)
        if progress:
            if world.size > 1:
                world.print(world)
            extent = TrainingLength(**self._where.extent, after=after, ranks=world.size, device=str(world.device))
            self._terminal = Terminal(world.print, extent, self._began, open_notebook() or open_display(), epoch)
        self.rows = RowDispatcher(file, receivers, self._terminal, self._began)
        self._draws = progress and file is not None
        return secrets.token_hex(4)

    def open(self, key: str | None) -> None:
        """Start to report on this rank, with the key that `begin` returned on rank 0."""
        world = self._world
        if key is not None:
            self._timings = RankTimings(world.store, key, world.rank, world.size, world.device)
        folder = None if self._checkpointer is None else self._checkpointer.folder
        world.on_evaluated = self._evaluated = EvaluationRecorder(self._evaluations, folder, self._where, self._began)

    def _open_files(self, checkpointer: Checkpointer, after: int, epoch: EpochMeans) -> JsonlWriter:
        folder, say = checkpointer.folder, checkpointer.say
        self._evaluations = EvaluationLog(folder / EVALUATIONS, after, say)
        self._ranks = JsonlWriter(folder / RANKS, after, say, "drop")
        on_full: OnFull = "keep" if checkpointer.continues else "raise"
        rows = JsonlWriter(folder / ROWS, after, say, on_full, epoch.begin, once=True)
        for file in (self._evaluations.file, self._ranks, rows):
            if file.notice:
                continues = file is rows and not self._where.has_no_step_left
                say(f"{folder}: {file.notice}" + (f"; training continues at step {after + 1}" if continues else ""))
        self._began -= rows.elapsed_s
        return rows

    # -- a step --------------------------------------------------------------------------------------------

    def record_wait(self, waited_s: float) -> bool:
        """Record the timing of a folded step; returns whether this rank makes a row of the step.

        Args:
            waited_s: the time that this rank has waited in all folds so far.
        """
        if self._timings is not None and self._timings.record(self._where.iteration, waited_s):
            self._must_gather = True
        return self.rows is not None

    def add(self, mini_batch: MiniBatch, names: tuple[str, ...], values: torch.Tensor, known: dict[str, float]) -> None:
        """Add the row of a folded step.

        Args:
            mini_batch: of the step.
            names: of the values.
            values: on any device, shape (len(names),).
            known: values that the host has already.
        """
        if self.rows is None:
            return
        where = self._where
        ends = where.is_last_of_epoch(mini_batch) or where.has_made_all
        self.rows.add(mini_batch.epoch, where.iteration, mini_batch.samples, ends, names, values, known)
        if self._must_gather:
            self._must_gather = False
            self._gather()

    def _gather(self) -> None:
        """Write and show the ranks' newest timings."""
        ranks = [] if self._timings is None else self._timings.gather()
        if not ranks:
            return
        if self._ranks is not None:
            elapsed_s = round(time.monotonic() - self._began, 4)
            line = {"iteration": self._where.iteration, "elapsed_s": elapsed_s, "ranks": ranks}
            self._ranks.add(json.dumps(line) + "\n")
            self._ranks.flush()
        if self._terminal is not None:
            self._terminal.take_ranks(ranks)

    # -- the end -------------------------------------------------------------------------------------------

    def close(self, last_words: str | None) -> None:
        """Hand on the last rows, and close everything that takes rows."""
        rows, self.rows = self.rows, None
        if rows is None:
            return
        checkpointer, has_new = self._checkpointer, self._where.iteration > self._where.resumed_at
        if checkpointer is not None and self._draws and has_new and checkpointer.has_folder:
            self._pictures.folder = checkpointer.folder
        if self._world.ended_by is None:
            self._gather()
        rows.close(last_words)

    def end(self) -> None:
        """Note that the loop has ended; others may run in its folder."""
        if self._evaluated is not None:
            self._evaluated.has_ended = True
