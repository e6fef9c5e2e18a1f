"""What a loop records: rows, a trace, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_loop.accelerators import is_asynchronous
from ddp_loop.checkpoint import REPAIR, Checkpointer, Config, Snapshot, lacks_secret, start_command, warm_start, way_on
from ddp_loop.data import Batches, LoopPosition, MiniBatch, Unused
from ddp_loop.distributed import World, end_unsaved
from ddp_loop.reporting import (
    NORM,
    RATE,
    UNUSED,
    UNUSED_AT_LEAST,
    Receivers,
    Reporter,
    all_of,
)
from ddp_loop.tracing import TRACE as FOLDER
from ddp_loop.tracing import Tracer, TraceRequest
from ddp_loop.training.fold import Fold
from ddp_loop.training.payload import StepResult
from ddp_loop.training.run_log import RunLog


def _nothing() -> None:
    """Nothing waits for the world's end."""


def _end(
    world: World, where: LoopPosition, checkpointer: Checkpointer | None, report: Reporter, stopped: str | None
) -> None:
    if checkpointer is not None:
        status = "stopped" if stopped is not None else "done" if where.is_done else "left"
        checkpointer.end(status, world.ended_by, where.state_dict()["iteration"], stopped)
    report.end()
    if checkpointer is None or not checkpointer.continues or world.ended_by is not None:
        return
    rows = {"rows": f"{report.lost_rows} of the rows"} if report.lost_rows else {}
    if missing := {**rows, **checkpointer.missing}:
        kept = f"its checkpoint {checkpointer.newest}" if checkpointer.newest else "no checkpoint of this start"
        end_unsaved(
            f"ddp_loop: {checkpointer.folder} was not saved whole. It lacks {', '.join(missing.values())}, "
            f"and has {kept}. {REPAIR} Then start the script again."
        )


def _end_early(world: World, ending: Callable[[], None]) -> None:
    world.forget(ending)
    ending()


def open_trace(
    run: Path | None,
    batches: Batches,
    state: Mapping[str, object],
    watch: TraceRequest | None,
    *,
    trace: bool,
    ordered: bool,
) -> Tracer | None:
    """The trace that the user or a trace request asks for; None without one.

    Raises:
        ValueError: there is no folder for it.
    """
    if trace and run is None:
        raise ValueError("A trace is written into the run folder. Got trace=True without one. Pass run_dir=.")
    if watch is not None and watch.profile is not None:
        return None
    if watch is not None:
        watch.loops += 1
        folder = watch.folder / f"loop-{watch.loops:03}"
    elif trace and run is not None:
        folder = run / FOLDER
    else:
        return None
    return Tracer(folder, batches, state, ordered=ordered, values=watch is not None)


def _is_optimizer(value: object) -> bool:
    """Whether a part of the state may be an optimizer, torch's or another one."""
    return isinstance(value, Optimizer) or (hasattr(value, "step") and not isinstance(value, nn.Module | LRScheduler))


@dataclass(frozen=True, slots=True)
class Reporting:
    """Where rows go: receivers, the terminal, the page."""

    receivers: Receivers
    progress: bool
    monitor: bool
    config: Config | None = None


class RunRecorder:
    """Writes a loop's rows, trace and checkpoints.

    Args:
        world: from `join_world`.
        where: the loop's position.
        checkpointer: of the run folder; None without one.
        state: of the job.

    Attributes:
        tracer: of the trace; None without one.
        stopped: why the loop stopped on request.
        holds: whether the script may do something between two epochs, which a stop can cut off.
        keeps: whether there is a run folder.
        has_rows: whether rows are made.
        run_log: what the script logs.
    """

    def __init__(
        self, world: World, where: LoopPosition, checkpointer: Checkpointer | None, state: Mapping[str, object]
    ) -> None:
        self._world = world
        self._where = where
        self.checkpointer = checkpointer
        self._report = Reporter(world, where, checkpointer)
        self._optimizer = next((one for one in state.values() if isinstance(one, Optimizer)), None)
        self._has_optimizer = any(map(_is_optimizer, state.values()))
        self._extent: dict[str, object] = {}  # in status.json
        self._row: tuple[MiniBatch, tuple[str, ...], torch.Tensor, dict[str, float]] | None = None
        self.tracer: Tracer | None = None
        self.stopped: str | None = None
        self.holds = True
        self.keeps = checkpointer is not None
        self.has_rows = False
        self.run_log = RunLog(world, where, checkpointer, self._report)
        self._saved = -1  # the iteration of the last checkpoint
        self._held: Snapshot | None = None  # a copy of the last step's state, which could become one
        self._ending: Callable[[], None] = _nothing  # called when the world is left

    def open(
        self,
        facts: Mapping[str, object],
        resume: bool | None,
        config: Config | None,
        shares: Sequence[float] | None = None,
        origin: str | None = None,
    ) -> dict[str, int] | None:
        """Take the run folder, and restore the newest checkpoint's state. Every rank must call this.

        Args:
            facts, resume, config: as `Checkpointer.open`.
            shares: of the ranks.
            origin: the checkpoint of another run whose values it begins with.

        Returns:
            The position to resume from; None for a new run.
        """
        there = None
        if self.checkpointer is not None:
            self._extent = {**self._where.extent, **({} if shares is None else {"shares": list(shares)})}
            self._extent |= {} if origin is None else {"resumed_from": origin}
            there = self.checkpointer.open(facts, resume, self._extent, config)
            self._report.open_console(self.checkpointer.folder)
        if self.checkpointer is not None and not self._has_optimizer:
            self.checkpointer.say(
                "state has no optimizer, so checkpoints keep none and a resumed run begins with a new one. Pass "
                "state=dict(model=model, optimizer=optimizer)."
            )
        if there is not None:
            self._saved = there["iteration"]
        return there

    def warm_start(self, source: str | Path | None, state: Mapping[str, object], resume: bool | None) -> str | None:
        """Begin with another run's weights, unless this one resumes; returns their place. Every rank must call this."""
        folder = None if self.checkpointer is None else self.checkpointer.folder
        return None if source is None else warm_start(source, self._world, state, folder, resume=resume)

    def record_shares(self, shares: Sequence[float]) -> None:
        """Write the ranks' shares into status.json."""
        if self.checkpointer is not None:
            self._extent["shares"] = list(shares)
            self.checkpointer.write_status("running", iteration=self._where.iteration)

    def open_rows(self, reporting: Reporting) -> None:
        """Start to take and show rows, appended to those already in the file. Every rank must call this.

        Raises:
            ImportError, OSError, TypeError, ValueError: on rank 0, where a file cannot be written, a receiver not be
                called, or no page be shown.
            PeerFailed: then on the others.
        """
        where = self._where
        if self.checkpointer is not None and where.iteration and where.has_no_step_left:
            bound = "steps" if where.has_made_all else "epochs"
            made = f"the {where.iteration} steps of {bound}={where.extent[bound]}"
            if where.length is not None and where.iteration > where.length:
                made = f"{where.iteration} steps, and {bound}={where.extent[bound]} asks for {where.length}"
            self.checkpointer.say(
                f"{self.checkpointer.folder} is finished: it has made {made}. Raise {bound}= to go on, or pass "
                "resume=False to start over (its files move to before/)."
            )
        elif self.checkpointer is not None and where.iteration and reporting.progress:
            self._world.print(f"{self.checkpointer.folder}: resumes after step {where.iteration}")
        key = self._world.on_rank_zero(lambda: self._begin_rows(reporting))
        self._report.open(key)
        self.has_rows = key is not None

    def _begin_rows(self, reporting: Reporting) -> str | None:
        """On rank 0."""
        receivers = all_of(reporting.receivers)
        if reporting.monitor:
            if self.checkpointer is None:
                raise ValueError("A page shows a run folder. Got monitor=True without one. Pass run_dir=.")
            from ddp_loop.monitor import start_page  # 20 ms that others need not spend

            start_page(self.checkpointer.folder, self._world.print)
        return self._report.begin(receivers, reporting.config or {}, progress=reporting.progress)

    # -- a step --------------------------------------------------------------------------------------------

    def install_stop_handlers(self) -> None:
        """Let signals and the run folder ask for a stop from now on."""
        self._world.stops.install_handlers(self)

    def save_requests(self, problem: Exception | None) -> tuple[bool, Exception | None]:
        """Whether a checkpoint is due by the clock, and `problem`, or else what went wrong in an earlier save."""
        if self.checkpointer is None:
            return False, problem
        return self.checkpointer.is_due, problem or self.checkpointer.problem()

    def flush_ready(self) -> None:
        """Hand on the rows that have arrived, while the ranks wait for each other."""
        rows = self._report.rows
        if rows is not None and rows.is_due:
            with self._world.in_stage("rows"):
                rows.flush_ready()

    def begin_row(
        self, mini_batch: MiniBatch, result: StepResult, fold: Fold, *, skips: bool, unused: Unused | None = None
    ) -> None:
        """Begin the row of a step whose first pass was folded; at the end of an epoch perhaps with `unused` samples."""
        if self._report.record_wait(fold.waited_s):
            names, values, known = self._values_of(result, fold, skips=skips)
            if unused is not None:
                known[UNUSED if unused.is_exact else UNUSED_AT_LEAST] = unused.samples
            self._row = mini_batch, names, values, known

    def extend_row(self, result: StepResult, number: int) -> None:
        """Add the loss and the metrics of the step's pass `number`, counted from 1: as `loss_2` if `loss` is there."""
        if self._row is not None:
            mini_batch, names, values, known = self._row
            new = tuple(f"{name}_{number}" if name in names else name for name in ("loss", *result.names))
            self._row = mini_batch, (*names, *new), torch.cat([values, result.values]), known

    def end_row(self) -> None:
        """Hand on the row of a step that is over."""
        if self._row is not None:
            row = self._row
            self._row = None
            with self._world.in_stage("rows"):
                self._report.add(*row)

    def _values_of(
        self, result: StepResult, fold: Fold, *, skips: bool
    ) -> tuple[tuple[str, ...], torch.Tensor, dict[str, float]]:
        """A row's names and values on the device, and those that the host knows."""
        names = ("loss", *result.names)
        values = result.values
        if result.total is not None:
            names = ("weight", *names)
            values = torch.cat([result.total.reshape(1), values])
        beside = self._learning_rates()
        if (norm := fold.gradient_norm(self._where.iteration)) is not None:
            beside[NORM] = norm
        if skips:
            beside["skipped"] = result.is_bad
        if self._world.accelerator.is_asynchronous:  # reading them would hold up the host
            away = [name for name, one in beside.items() if isinstance(one, torch.Tensor) and is_asynchronous(one)]
            there = [torch.as_tensor(beside.pop(name), device=values.device).to(values) for name in away]
            values = torch.cat([values, *(one.reshape(1) for one in there)])
            names = (*names, *away)
        return names, values, {name: float(one) for name, one in beside.items()}

    def _learning_rates(self) -> dict[str, float | torch.Tensor]:
        """Of each group of the first optimizer."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {f"{RATE}_{n}" if n else RATE: group["lr"] for n, group in enumerate(groups) if "lr" in group}

    def open_trace_files(self) -> None:
        """Open the files of the trace, where there is one. Every rank must call this.

        Raises:
            OSError: one cannot be written.
            PeerFailed: then on the other ranks.
        """
        if self.tracer is None:
            return
        problem: Exception | None = None
        try:
            self.tracer.open(self._where.iteration)
        except OSError as error:
            problem = error
        self._world.raise_if_any_failed(problem)

    def end_trace(self, iteration: int) -> None:
        """Write the trace of a step."""
        if self.tracer is not None:
            self.tracer.end(iteration)

    def end_step(self, *, stops: bool, ends: bool, saves: bool, is_last_of_epoch: bool) -> None:
        """Write a checkpoint where one is due, and stop where all ranks do. Every rank must call this.

        Args:
            stops, saves: what all ranks decided in the step's fold.
            ends: whether the loop ends with the step.
            is_last_of_epoch: whether its epoch does.
        """
        where = self._where
        if self.checkpointer is not None:
            if self._held is not None and not self._holds_last_step:
                self._held = None
                self.checkpointer.drop_held()
            is_due = self.checkpointer.is_due_after(where.iteration, is_last_of_epoch=is_last_of_epoch)
            if stops or ends or saves or is_due:
                self._save()
            elif is_last_of_epoch and self.holds:
                self._world.require_collectives_allowed()
                # A resumed run repeats what the script does before the next step.
                with self._world.in_stage("save"):
                    self._held = self.checkpointer.hold(where.state_dict())
            if stops or ends:
                with self._world.in_stage("save"):
                    self.checkpointer.finish()
        if stops:
            self.stopped = self._world.stops.follow(self)

    def save(self, score: float | None) -> None:
        """Ask for a checkpoint after the current step, or of the epoch's end. Every rank must call this."""
        if self.checkpointer is None:
            return
        if self._holds_last_step:
            self._save_held(score)
        elif self._saved == self._where.iteration:
            if score is not None:
                self.checkpointer.give_score(score, is_last=self._where.is_done)
        else:
            self.checkpointer.asked = True
            self.checkpointer.score = self.checkpointer.score if score is None else score

    @property
    def _holds_last_step(self) -> bool:
        return self._held is not None and self._held.position["iteration"] == self._where.iteration

    def _save_held(self, score: float | None = None) -> None:
        held = self._held
        self._held = None
        if self.checkpointer is not None and held is not None:
            self._saved = self._where.iteration
            self._flush_all()
            self.checkpointer.save_held(held, score)

    def _save(self) -> None:
        position = self._where.state_dict()
        if self.checkpointer is None or position["iteration"] == self._saved:
            return
        self._world.require_collectives_allowed()  # a word that was not read yet may end the step with an error
        with self._world.in_stage("save"):
            self._saved = position["iteration"]
            self._flush_all()
            self.checkpointer.save(position)

    def _flush_all(self) -> None:
        self.end_row()
        if self._report.rows is not None:
            with self._world.in_stage("rows"):
                self._report.rows.flush_all()

    # -- a stop that is not decided in a fold of this loop: `Stoppable` ----------------------------------------

    def asked_to_stop(self) -> str | None:
        """Why a file in the run folder asks for a stop; None without one."""
        return None if self.checkpointer is None else self.checkpointer.asked_to_stop()

    def is_inside_step(self) -> bool:
        """Whether a resumed run would not repeat what the script does now: it has no checkpoint of this moment."""
        return self.keeps and self._where.iteration != self._saved and not self._holds_last_step

    def stop_here(self, why: str) -> None:
        """Save where a resumed run can begin, and make no further step. Every rank must call this."""
        self.stopped = why
        if self.checkpointer is not None:
            if self._holds_last_step:
                self._save_held()
            self.checkpointer.finish()

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Hand on the last rows, close the files, restore the signal handlers."""
        self._world.stops.restore_handlers(self)
        tracer = self.tracer
        self.tracer = None
        with ExitStack() as ending:  # each one even if the other raises
            if tracer is not None:
                ending.callback(tracer.close)
            ending.callback(self._report.close, self._last_words())
            self.end_row()

    def end(self, *, later: bool = False) -> None:
        """Write how the run ended, and release its folder; if `later`, when the world is left, which gives the reason.

        A newer Loop in the folder does not wait for that. What waits keeps neither the state nor a copy of it alive.
        """
        self.run_log.has_ended = True
        self._world.forget(self._ending)
        self._ending = partial(_end, self._world, self._where, self.checkpointer, self._report, self.stopped)
        if later and self.checkpointer is not None:
            self.checkpointer.release_state()
            self._world.on_leaving(self._ending)
            self.checkpointer.give_up = partial(_end_early, self._world, self._ending)
        else:
            self._held = None
            self._ending()

    def _last_words(self) -> str | None:
        """The terminal's line about a loop that stopped on request."""
        if self.stopped is None:
            return None
        newest = "" if self.checkpointer is None else self.checkpointer.newest
        kept = f"checkpoint {newest}" if newest else "no checkpoint"
        words = f"stopped after step {self._where.iteration}, {kept}: {self.stopped}"
        start = start_command(directory=os.getcwd())
        status = {"start": [*start.words], "directory": start.directory}
        command = way_on(status, here=os.getcwd())
        secret = lacks_secret(status)
        more = f"\n{secret}" if secret else ""
        return f"{words}\nto go on: {command}{more}" if newest else words
