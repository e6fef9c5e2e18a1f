"""Reports on rank 0 while a loop runs: rows, evaluations, the ranks' timings; pictures when the world is left."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_loop.accelerators import HostCopy
from ddp_loop.checkpoint import (
    PICTURES,
    RANKS,
    ROWS,
    RUN,
    TABLE,
    Checkpointer,
    best_of,
    is_running,
    read_json,
)
from ddp_loop.data import LoopPosition, MiniBatch
from ddp_loop.distributed import World
from ddp_loop.reporting.console import ConsoleLog
from ddp_loop.reporting.exports import export_if_small
from ddp_loop.reporting.jsonl import JsonlWriter, RunFiles, line_of
from ddp_loop.reporting.logged_values import LoggedValues
from ddp_loop.reporting.notebook_display import open_notebook
from ddp_loop.reporting.rows import EpochMeans, RowMeta
from ddp_loop.reporting.run_records import checkpoints_of
from ddp_loop.reporting.sink_calls import OnRow, RunStart, SinkCalls
from ddp_loop.reporting.terminal import Terminal, open_display
from ddp_loop.reporting.throughput import RankTimings, Throughput, TrainingLength
from ddp_loop.reporting.usage import UsageLog

FLUSH_S = 0.5  # between two flushes of rows.jsonl
BATCH_S = 0.05  # between two dispatches: several rows at once cost less each


def _draw_pictures(folders: list[Path], world: World) -> None:
    """Draw runs' curves when the world is left, but not by an exception, with the evaluations after the loop."""
    for folder in folders if world.ended_by is None else ():
        try:
            export_if_small(folder)
        except Exception as error:  # a picture is not worth a run
            world.say(f"{folder} was not drawn. {error!r}")
        if sys.stdout.isatty() and (there := results_in(folder)):
            world.print(f"{folder}: {', '.join(there)}")


def results_in(folder: Path) -> list[str]:
    """What a run leaves for its reader: pictures, the table of rows, the best checkpoint."""
    found = [f"curves in {PICTURES}/"] if (folder / PICTURES).is_dir() else []
    found += [f"rows in {TABLE}"] if (folder / TABLE).is_file() else []
    with suppress(OSError, ValueError):
        if (best := best_of(checkpoints_of(folder))) is not None:
            found.append(f"best checkpoint {best.path.name} (score {best.score:.6g})")
    return found


def _start_of(folder: Path | None, config: Mapping[str, Any], after: int) -> RunStart:
    """What sinks learn before the first row; a resumed run without a config has the one before."""
    if folder is not None:
        kept = read_json(folder / RUN).get("config")
        config = kept if isinstance(kept, dict) else config
        return RunStart(folder, config, after, folder.name)
    script = getattr(sys.modules.get("__main__"), "__file__", None) or "run"
    return RunStart(None, config, after, Path(script).stem)


def _record_evaluation(
    logged: LoggedValues | None, where: LoopPosition, console: ConsoleLog, result: Mapping[str, float]
) -> None:
    """Record an evaluation of a loop; after the loop's end only if no other process runs in the folder.

    It needs the loop's position, and not its state, which is free after the loop's end.
    """
    if logged is None or (console.has_ended and logged.run.folder is not None and is_running(logged.run.folder)):
        return
    logged.add_evaluation(where.epoch, where.iteration, result)


class _Sent(NamedTuple):
    """A row whose values are on their way from the device."""

    moment: RowMeta
    names: tuple[str, ...]
    values: HostCopy
    known: dict[str, float]

    def row(self) -> tuple[RowMeta, dict[str, float]]:
        """Wait for the values."""
        return self.moment, dict(zip(self.names, self.values.wait().tolist(), strict=True)) | self.known


class RowDispatcher:
    """Hands the rows of a run on, in order, on rank 0.

    Args:
        lines: the writer of rows.jsonl.
        sinks: get each row, a dict, soon after its update; see `sinks`.
        logged: what the script logs beside the rows.
        terminal: shows the rows; None shows nothing.
        began: when the run began, on the monotonic clock, less the time of earlier processes.

    Raises:
        OSError: the file cannot be written; the lines in it are intact.
    """

    def __init__(
        self,
        lines: JsonlWriter,
        sinks: SinkCalls,
        logged: LoggedValues,
        terminal: Terminal | None,
        began: float,
    ) -> None:
        self._lines = lines
        self._sinks = sinks
        self._logged = logged
        self._terminal = terminal
        self._sent: deque[_Sent] = deque()
        self._flushed = self._due = time.monotonic()
        self._rate = Throughput(self._flushed - began)
        if terminal is not None:
            terminal.watch(self._show_arrived)

    def _show_arrived(self) -> None:
        """Show the values that have arrived, up to an epoch's last row, and leave them here; for another thread."""
        for sent in list(self._sent):
            if self._terminal is None or sent.moment.is_last_of_epoch or not sent.values.ready():
                return
            self._terminal.take(*sent.row())

    @property
    def is_due(self) -> bool:
        """Whether it is time to hand rows on."""
        return time.monotonic() >= self._due

    def add(self, moment: RowMeta, names: tuple[str, ...], values: torch.Tensor, known: dict[str, float]) -> None:
        """Add the row of an update: `values`, shape (len(names),), on any device, and `known` values of the host."""
        self._sent.append(_Sent(moment, names, HostCopy(values), known))
        self._logged.end_line(moment.iteration)
        if moment.is_last_of_epoch:
            self._logged.end_line()
            self.flush_ready()

    def flush_ready(self) -> None:
        """Hand on the rows that have arrived."""
        self._due = time.monotonic() + BATCH_S
        self._logged.flush_ready()
        self._dispatch(wait=False)
        if self._terminal is not None:
            self._terminal.refresh()
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def flush_all(self) -> None:
        """Wait for all rows, hand them on and write them, as a checkpoint requires."""
        self._logged.flush_all()
        self._dispatch(wait=True)
        self._flush()
        self._sinks.flush()

    def close(self, last_words: str | None = None) -> None:
        """Wait for all rows, hand them on, and close the file, the receivers and the terminal."""
        with ExitStack() as ending:
            if self._terminal is not None:
                ending.callback(self._terminal.close, last_words)
            ending.callback(self._sinks.end_loop)
            ending.callback(self._lines.close)
            self._logged.flush_all()
            self._dispatch(wait=True)

    def _dispatch(self, *, wait: bool) -> None:
        """Hand on the rows that have arrived; first all to the file, so that a receiver that raises loses none."""
        rows = []
        while self._sent and (wait or self._sent[0].values.ready()):
            rows.append(self._sent.popleft().row())
        for moment, values in rows:
            self._lines.add(line_of(moment.place, values, moment.elapsed_s))
        for moment, values in rows:
            if self._sinks:
                rate = round(self._rate.take(moment.elapsed_s, moment.samples), 1)
                self._sinks.row({**moment.place, **values, "samples_per_s": rate, "elapsed_s": moment.elapsed_s})
            if self._terminal is not None:
                self._terminal.take(moment, values)

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        self._logged.write()
        self._lines.flush()


class Reporter:
    """Reports a loop: opens its files and its terminal, and decides what a row, a timing, an evaluation become.

    Args:
        world: from `join_world`.
        where: the loop's position.
        checkpointer: of the run folder; None without one.

    Attributes:
        rows: takes and hands on the rows, on rank 0; None where there are none.
        logged: takes what the script logs, on rank 0, also after the loop; None where nothing takes it.
        epoch: the rows of the current epoch.
    """

    def __init__(self, world: World, where: LoopPosition, checkpointer: Checkpointer | None) -> None:
        self._world = world
        self._where = where
        self._checkpointer = checkpointer
        self._began = time.monotonic()
        self.rows: RowDispatcher | None = None
        self.logged: LoggedValues | None = None
        self.epoch = EpochMeans()
        self._terminal: Terminal | None = None
        self._timings: RankTimings | None = None
        self._files: dict[str, JsonlWriter] = {}
        self._usage: UsageLog | None = None
        self._must_gather = False
        # What is called when the world is left keeps nothing of the loop until then.
        console = self._console = ConsoleLog(world.print)
        world.on_leaving(lambda: console.close(world.ended_by))  # as the last one, with what others print
        self._drawn: list[Path] = []  # the run folder, if it gets pictures
        world.on_leaving(partial(_draw_pictures, self._drawn, world))  # after a loop that the script left has closed

    def open_console(self, folder: Path) -> None:
        """Keep what this process prints in the run folder from now on, until the world is left."""
        self._console.open(folder, self._world.rank)

    def begin(self, receivers: list[OnRow], config: Mapping[str, Any], *, progress: bool) -> str | None:
        """Open the files, the sinks and the terminal on rank 0; new rows are appended to those already there.

        Args:
            receivers: of the rows.
            config: the script's hyper-parameters, flat.
            progress: whether the terminal shows the run.

        Returns:
            The key that `open` needs on every rank; None where there are no rows.

        Raises:
            ImportError, OSError, ValueError: a file cannot be written.
        """
        where = self._where
        world = self._world
        checkpointer = self._checkpointer
        if checkpointer is None and not receivers and not progress:
            return None
        run = RunFiles(None, where.iteration, world.print)
        if checkpointer is not None:
            run = RunFiles(checkpointer.folder, where.iteration, checkpointer.say, checkpointer.sums)
        ranks = run.open(RANKS, "drop")
        continues = checkpointer is not None and checkpointer.continues
        fate = "" if where.has_no_step_left else f"; training continues at step {where.iteration + 1}"
        rows = run.open(ROWS, "keep" if continues else "raise", self.epoch.begin, once=True, fate=fate)
        self._began -= rows.elapsed_s
        if progress:
            if world.size > 1:
                world.print(world)
            extent = TrainingLength(**where.extent, after=run.after, ranks=world.size, device=str(world.device))
            self._terminal = Terminal(world.print, extent, self._began, open_notebook() or open_display(), self.epoch)
        sinks = SinkCalls(receivers, world.print)
        show = None if self._terminal is None else self._terminal.take_logged
        self.logged = LoggedValues(run, sinks, self._began, show)
        world.on_leaving(lambda: sinks.close(world.ended_by))
        world.on_leaving(self.logged.close)
        sinks.call("begin", _start_of(run.folder, config, run.after))
        files = self._files = {ROWS: rows, RANKS: ranks, **self.logged.files}
        if checkpointer is not None:
            checkpointer.sum_files = lambda: {name: file.sum for name, file in files.items()}
        self.rows = RowDispatcher(rows, sinks, self.logged, self._terminal, self._began)
        return secrets.token_hex(4)

    @property
    def on_evaluated(self) -> Callable[[Mapping[str, float]], None]:
        """Records an evaluation of this loop; it keeps neither this object nor the job's state alive."""
        return partial(_record_evaluation, self.logged, self._where, self._console)

    def open(self, key: str | None) -> None:
        """Start to report on this rank, with the key that `begin` returned on rank 0."""
        world = self._world
        if key is not None:
            self._timings = RankTimings(world.store, key, world.rank, world.size, world.device)
        checkpointer = self._checkpointer
        world.offer(self.on_evaluated, None if checkpointer is None else checkpointer.advice)
        if checkpointer is not None:
            folder = checkpointer.folder
            began = time.monotonic() - world.gather(time.monotonic() - self._began, "the run's time so far")[0]
            where = self._where
            self._usage = UsageLog(folder, world.rank, world.device, lambda: where.iteration, began, world.print)

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
        elapsed_s = round(time.monotonic() - self._began, 4)
        moment = RowMeta(mini_batch.epoch, where.iteration, mini_batch.samples, elapsed_s, ends)
        self.rows.add(moment, names, values, known)
        if self._must_gather:
            self._must_gather = False
            self._gather()

    def _gather(self) -> None:
        """Write and show the ranks' newest timings."""
        ranks = [] if self._timings is None else self._timings.gather()
        if not ranks:
            return
        place = {"iteration": self._where.iteration, "elapsed_s": round(time.monotonic() - self._began, 4)}
        self._files[RANKS].add(json.dumps({**place, "ranks": ranks}) + "\n")
        self._files[RANKS].flush()
        if self._terminal is not None:
            self._terminal.take_ranks(ranks)

    # -- the end -------------------------------------------------------------------------------------------

    def close(self, last_words: str | None) -> None:
        """Hand on the last rows, and close everything that takes rows."""
        if self._usage is not None:
            self._usage.close()
        rows = self.rows
        self.rows = None
        if rows is None:
            return
        checkpointer = self._checkpointer
        has_new = self._where.iteration > self._where.resumed_at
        draws = self._terminal is not None
        if checkpointer is not None and draws and has_new and checkpointer.has_folder:
            self._drawn.append(checkpointer.folder)
        if self._world.ended_by is None:
            self._gather()
        rows.close(last_words)

    @property
    def lost_rows(self) -> int:
        """How many rows could not be written, on rank 0."""
        return self._files[ROWS].lost if self._files else 0

    def end(self) -> None:
        """Note that the loop has ended; others may run in its folder."""
        self._console.has_ended = True
