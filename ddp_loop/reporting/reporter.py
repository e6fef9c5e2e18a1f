"""Reporting on rank 0 while a loop runs: rows, evaluations, the ranks' timings, pictures at the end.

[Note: Again] What a script does behind an epoch's end is done again by a run that goes on from there. So an evaluation
that says what another one of the same iteration has said is not written a second time.
"""

from __future__ import annotations

import errno
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from math import isclose, isfinite
from pathlib import Path
from typing import Any

import torch

from ddp_loop.checkpoint import EVALUATIONS, RANKS, ROWS, Checkpointer, identity, is_running
from ddp_loop.data import LoopPosition, MiniBatch
from ddp_loop.distributed import World
from ddp_loop.reporting.exports import export_if_small
from ddp_loop.reporting.jsonl import BufferedJsonlWriter, JsonlWriter, append_whole
from ddp_loop.reporting.jsonl_tail import read_lines
from ddp_loop.reporting.rows import EpochMeans, OnRow, RowDispatcher
from ddp_loop.reporting.terminal import Terminal, open_display
from ddp_loop.reporting.throughput import RankTimings, TrainingLength

_REDONE = 1e-6  # float32's own rounding; sums on another number of ranks differ by that


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """A value that is not finite is None, since JSON has no word for it."""
    return {name: value if isfinite(value) else None for name, value in values.items()}


class JsonlLog:
    """A file of lines that a run appends to; while it cannot be written they are left out, and training goes on.

    Args:
        path: of the file.
        after: the iteration that the run goes on from; lines of later ones are taken out.
        warn: called with a line when the file cannot be written, or was damaged.
    """

    def __init__(self, path: Path, after: int, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._warned = path, warn, False
        self._folder = identity(path.parent)
        if path.exists():
            lines = JsonlWriter(path, after)  # takes them out
            lines.close()
            if lines.notice:
                warn(f"{path.parent}: {lines.notice}")

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, at once, unless another run's folder stands there by now."""
        try:
            if identity(self._path.parent) != self._folder:
                raise FileNotFoundError(errno.ENOENT, "another folder stands in its place")
            with self._path.open("ab", buffering=0) as file:
                append_whole(file, (json.dumps(line) + "\n").encode(), file.tell())
        except OSError as error:
            if not self._warned:
                self._warn(f"{self._path} cannot be written, training goes on without it: {error}")
            self._warned = True


class EvaluationLog:
    """The evaluations of a run: {epoch, iteration, <metrics>, samples, elapsed_s} each; see [Note: Again].

    Args:
        run: the run folder.
        after: the iteration that the run goes on from.
        warn: called with a line when the file cannot be written.
    """

    def __init__(self, run: Path, after: int, warn: Callable[[str], None]) -> None:
        path = run / EVALUATIONS
        self._journal = JsonlLog(path, after, warn)
        self._said = [line for line in read_lines(path) if line["iteration"] == after]  # of the last iteration

    def record(self, epoch: int, iteration: int, result: Mapping[str, float], elapsed_s: float) -> None:
        """An evaluation was made, after this iteration."""
        place = {"epoch": epoch, "iteration": iteration}
        line = place | finite(result) | place | {"elapsed_s": round(elapsed_s, 4)}  # whatever a metric is named
        self._said = [one for one in self._said if one["iteration"] == iteration]
        if not any(_says_the_same(one, line) for one in self._said):
            self._said.append(line)
            self._journal.append(line)


def _says_the_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether all but the time is the same, up to rounding on another number of ranks."""
    return tuple(one) == tuple(other) and all(
        name == "elapsed_s" or one[name] == other[name] or _is_close(one[name], other[name]) for name in one
    )


def _is_close(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and isclose(one, other, rel_tol=_REDONE, abs_tol=_REDONE**2)


Receivers = OnRow | Sequence[OnRow] | None


def all_of(receivers: Receivers) -> list[OnRow]:
    """Them as a list.

    Raises:
        TypeError: one cannot be called.
    """
    given = [] if receivers is None else list(receivers) if isinstance(receivers, Sequence) else [receivers]
    for one in given:
        if not callable(one):
            raise TypeError(
                f"on_row is a callable that takes a row, or a list of such; got {type(one).__name__}: give "
                "on_row=print, or on_row=[csv_sink(path), tensorboard_sink(folder)]"
            )
    return given


class Reporter:
    """Tells of a loop.

    Args:
        world: from `join_world`.
        where: the loop's position.
        checkpointer: of the run folder; None without one.
    """

    def __init__(self, world: World, where: LoopPosition, checkpointer: Checkpointer | None) -> None:
        self._world, self._where, self._checkpointer = world, where, checkpointer
        self._folder = None if checkpointer is None else checkpointer.folder
        self._began = time.monotonic()
        self._rows: RowDispatcher | None = None
        self._terminal: Terminal | None = None
        self._timings: RankTimings | None = None
        self._evaluations: EvaluationLog | None = None
        self._ranks: JsonlLog | None = None
        self._draws = self._has_ended = self._looks = False

    def begin(self, receivers: list[OnRow], *, progress: bool) -> str | None:
        """Open files, receivers and the terminal on rank 0; new rows are appended after those that are there.

        Returns:
            A key of this loop's own for words between the ranks, for `open`; None where nobody wants rows.

        Raises:
            ImportError, OSError, ValueError: a file cannot be written.
        """
        after, world = self._where.iteration, self._world
        if self._checkpointer is None and not receivers and not progress:
            return None
        epoch = EpochMeans()
        lines = None if self._checkpointer is None else self._open_files(self._checkpointer, after, epoch)
        if progress:
            extent = TrainingLength(**self._where.extent, after=after, ranks=world.size, device=str(world.device))
            self._terminal = Terminal(world.print, extent, self._began, open_display(), epoch)
        self._rows = RowDispatcher(lines, receivers, self._terminal, self._began)
        self._draws = progress and lines is not None
        return secrets.token_hex(4)

    def open(self, key: str | None) -> None:
        """Take part on every rank, with the key that `begin` gave on rank 0."""
        world = self._world
        if key is not None:
            self._timings = RankTimings(world.store, key, world.rank, world.size, world.device)
        world.on_evaluated = self._record_evaluation

    def _open_files(self, checkpointer: Checkpointer, after: int, epoch: EpochMeans) -> BufferedJsonlWriter:
        self._evaluations = EvaluationLog(checkpointer.folder, after, checkpointer.say)
        self._ranks = JsonlLog(checkpointer.folder / RANKS, after, checkpointer.say)
        file = JsonlWriter(checkpointer.folder / ROWS, after, epoch.begin, once=True)
        if file.notice:
            goes_on = "" if self._where.has_no_step_left else f"; training goes on at step {after + 1}"
            checkpointer.say(f"{checkpointer.folder}: {file.notice}{goes_on}")
        self._began -= file.elapsed_s
        return BufferedJsonlWriter(file, checkpointer.say, goes_on=checkpointer.goes_on)

    # -- a step --------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether there may be rows to hand on."""
        return self._rows is not None and self._rows.is_due

    def flush_ready(self) -> None:
        """Hand on the rows that have arrived."""
        if self._rows is not None:
            self._rows.flush_ready()

    def flush_all(self) -> None:
        """Hand on what is still on its way too, and have it written."""
        if self._rows is not None:
            self._rows.flush_all()

    def record_wait(self, waited_s: float) -> bool:
        """A step was folded; returns whether this rank makes a row of it.

        Args:
            waited_s: how long this rank has waited in all folds so far.
        """
        if self._timings is not None and self._timings.record(self._where.iteration, waited_s):
            self._looks = True
        return self._rows is not None

    def add(self, mini_batch: MiniBatch, names: tuple[str, ...], values: torch.Tensor, known: dict[str, float]) -> None:
        """A row of the step that was folded.

        Args:
            mini_batch: of the step.
            names: of the values.
            values: still on the device, (names,).
            known: what else the row has, known on the host.
        """
        if self._rows is None:
            return
        where = self._where
        ends = where.is_last_of_epoch(mini_batch) or where.has_made_all
        self._rows.add(mini_batch.epoch + 1, where.iteration, mini_batch.samples, ends, names, values, known)
        if self._looks:
            self._looks = False
            self._gather()

    def _gather(self) -> None:
        """Note what the ranks have said of their pace."""
        ranks = [] if self._timings is None else self._timings.gather()
        if not ranks:
            return
        if self._ranks is not None:
            elapsed_s = round(time.monotonic() - self._began, 4)
            self._ranks.append({"iteration": self._where.iteration, "elapsed_s": elapsed_s, "ranks": ranks})
        if self._terminal is not None:
            self._terminal.take_ranks(ranks)

    def _record_evaluation(self, result: Mapping[str, float]) -> None:
        """One was made: also behind the loop's last epoch, unless somebody else runs in the folder by then."""
        if self._evaluations is None or self._folder is None or (self._has_ended and is_running(self._folder)):
            return
        elapsed_s = time.monotonic() - self._began
        self._evaluations.record(self._where.epoch, self._where.iteration, result, elapsed_s)

    # -- the end -------------------------------------------------------------------------------------------

    def close(self, last_words: str | None) -> None:
        """Hand the last rows on, and close what they are written to."""
        rows, self._rows = self._rows, None
        if rows is None:
            return
        self._draws = self._draws and self._where.iteration > self._where.resumed_at
        if self._world.ended_by is None:
            self._gather()
        rows.close(last_words)

    def end(self) -> None:
        """The run has ended: draw it."""
        draws, self._draws, self._has_ended = self._draws, False, True
        checkpointer = self._checkpointer
        if draws and checkpointer is not None and checkpointer.is_there and self._world.ended_by is None:
            try:
                export_if_small(checkpointer.folder)
            except Exception as error:  # a picture is not worth a run
                self._world.print(f"ddp_loop: {self._folder} was not drawn: {error!r}")
