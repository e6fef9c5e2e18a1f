"""What a loop leaves behind while it is gone through: rows, a trace, checkpoints; and the requests that come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.optim import Optimizer

from ddp_loop.accelerators import is_asynchronous
from ddp_loop.checkpoint import Checkpointer
from ddp_loop.data import Batches, LoopPosition, MiniBatch
from ddp_loop.distributed import World
from ddp_loop.reporting import NORM, RATE, OnRow, Receivers, Reporter, all_of
from ddp_loop.tracing import TRACE as FOLDER
from ddp_loop.tracing import Tracer, TraceRequest
from ddp_loop.training.fold import Fold
from ddp_loop.training.payload import NOTHING, ControlDecision, ControlRequest, Folded
from ddp_loop.training.state_check import NonFiniteStateCheck


def open_trace(
    run: Path | None,
    batches: Batches,
    state: Mapping[str, object],
    watch: TraceRequest | None,
    *,
    trace: bool,
    ordered: bool,
) -> Tracer | None:
    """The trace that is asked for, by the user or by whoever watches this process; None without one.

    Raises:
        ValueError: there is no folder for it.
        OSError: it cannot be written.
    """
    if trace and run is None:
        raise ValueError("a trace is left in the run folder; got trace=True without one: give run_dir=")
    if watch is not None:
        watch.loops += 1
        folder = watch.folder / f"loop-{watch.loops:03}"
    elif trace and run is not None:
        folder = run / FOLDER
    else:
        return None
    return Tracer(folder, batches, state, ordered=ordered, values=watch is not None)


class RunRecorder:
    """Keeps what a loop leaves behind, and says what is asked of it.

    Args:
        world: from `join_world`.
        where: the loop's position.
        checkpointer: of the run folder; None without one.
        state: of the job.
        state_check: looks for NaN in it.

    Attributes:
        tracer: of the trace; None without one.
        stopped: why the loop was asked to stop, and did.
        asks_stop: whether this rank's script asks for a stop.
        holds: whether the script may do something between two epochs, which a stop can leave undone.
    """

    def __init__(
        self,
        world: World,
        where: LoopPosition,
        checkpointer: Checkpointer | None,
        state: Mapping[str, object],
        state_check: NonFiniteStateCheck,
    ) -> None:
        self._world, self._where, self.checkpointer, self._state_check = world, where, checkpointer, state_check
        self._report = Reporter(world, where, checkpointer)
        self._optimizer = next((one for one in state.values() if isinstance(one, Optimizer)), None)
        self.tracer: Tracer | None = None
        self.stopped: str | None = None
        self.asks_stop, self.holds = False, True
        self._saved = self._held = -1  # the iteration of the last checkpoint, and of the copy that could become one

    def open(self, facts: Mapping[str, object], resume: bool | None) -> dict[str, int] | None:
        """Take the run folder, and put the newest checkpoint's state back. Every rank must call this.

        Returns:
            Where the loop goes on; None if it begins.
        """
        there = None if self.checkpointer is None else self.checkpointer.open(facts, resume, self._where.extent)
        if there is not None:
            self._saved = there["iteration"]
        return there

    def open_rows(self, receivers: Receivers, *, progress: bool, monitor: bool) -> None:
        """Begin to take rows, behind those that are there, and to show them. Every rank must call this.

        Raises:
            ImportError, OSError, TypeError, ValueError: on rank 0, where a file cannot be written, a receiver not be
                called, or no page be shown.
            PeerFailed: then on the others.
        """
        if progress and self.checkpointer is not None and self._where.iteration:
            what = "nothing is left to do" if self._where.has_no_step_left else "goes on"
            self._world.print(f"{self.checkpointer.folder}: {what} after step {self._where.iteration}")
        self._report.open(
            self._world.on_rank_zero(lambda: self._begin_rows(all_of(receivers), progress=progress, monitor=monitor))
        )

    def _begin_rows(self, receivers: list[OnRow], *, progress: bool, monitor: bool) -> str | None:
        """On rank 0."""
        if monitor:
            if self.checkpointer is None:
                raise ValueError("a page shows a run folder; got monitor=True without one: give run_dir=")
            from ddp_loop.monitor import start_page  # 20 ms that others need not spend

            start_page(self.checkpointer.folder, self._world.print)
        return self._report.begin(receivers, progress=progress)

    # -- a step --------------------------------------------------------------------------------------------

    def install_stop_handlers(self) -> None:
        """From now on signals and the run folder can ask for a stop."""
        asked = (lambda: None) if self.checkpointer is None else self.checkpointer.asked_to_stop
        self._world.install_stop_handlers(asked, self._stop_here)

    def requests(self) -> ControlRequest:
        """What this rank asks of all in a fold."""
        stop, problem = self.asks_stop or self._world.stop_asked is not None, self._state_check.problem()
        if self.checkpointer is None:
            return ControlRequest(stop, problem=problem) if stop or problem is not None else NOTHING
        due, problem = self.checkpointer.is_due, problem or self.checkpointer.problem()
        return ControlRequest(stop, due, problem) if stop or due or problem is not None else NOTHING

    def flush_ready(self) -> None:
        """Hand on the rows that have arrived, while the ranks wait for each other."""
        rows = self._report.rows
        if rows is not None and rows.is_due:
            with self._as_rows():
                rows.flush_ready()

    @contextmanager
    def _as_rows(self) -> Iterator[None]:
        """In the stage "rows", which stays the one where something goes wrong."""
        stage, self._world.stage = self._world.stage, "rows"
        yield
        self._world.stage = stage

    def add_row(self, mini_batch: MiniBatch, folded: Folded, fold: Fold, *, skips: bool) -> None:
        """A step was folded."""
        if self._report.record_wait(fold.waited_s):
            with self._as_rows():
                self._report.add(mini_batch, *self._values_of(folded, fold, skips=skips))

    def _values_of(
        self, folded: Folded, fold: Fold, *, skips: bool
    ) -> tuple[tuple[str, ...], torch.Tensor, dict[str, float]]:
        """A row's names and values on the device, and what else the host knows."""
        names, values = ("loss", *folded.metrics), folded.values
        if folded.weight is not None:
            names, values = ("weight", *names), torch.cat([folded.weight.reshape(1), values])
        beside = self._learning_rates()
        if (norm := fold.gradient_norm(self._where.iteration)) is not None:
            beside[NORM] = norm
        if skips:
            beside["skipped"] = folded.bad
        if self._world.accelerator.is_asynchronous:  # asking would hold the host up
            away = [name for name, one in beside.items() if isinstance(one, torch.Tensor) and is_asynchronous(one)]
            values = torch.cat([values, *(torch.as_tensor(beside.pop(name)).to(values).reshape(1) for name in away)])
            names = (*names, *away)
        return names, values, {name: float(one) for name, one in beside.items()}

    def _learning_rates(self) -> dict[str, float | torch.Tensor]:
        """Of each group of the first optimizer."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {f"{RATE}_{n}" if n else RATE: group["lr"] for n, group in enumerate(groups) if "lr" in group}

    def end_trace(self, iteration: int) -> None:
        """A step is over."""
        if self.tracer is not None:
            self.tracer.end(iteration)

    def end_step(self, mini_batch: MiniBatch, decision: ControlDecision | None) -> None:
        """A step is over: a checkpoint where one is due, the end where a stop was asked for. Every rank must call this.

        Args:
            mini_batch: of the step.
            decision: what all ranks said in its fold.
        """
        stop, due = decision is not None and decision.stop, decision is not None and decision.save
        ends = self._where.ends_all(mini_batch)
        if self.checkpointer is not None:
            is_last_of_epoch = self._where.is_last_of_epoch(mini_batch)
            if (
                stop
                or due
                or ends
                or self.checkpointer.is_due_after(self._where.iteration, is_last_of_epoch=is_last_of_epoch)
            ):
                self._save()
            elif is_last_of_epoch and self.holds:
                # A run that goes on does again what the script does before the next step.
                self._world.stage, self._held = "save", self._where.iteration
                self.checkpointer.hold(self._where.state_dict())
            if stop or ends:
                self.checkpointer.finish()
        if stop:
            self.stopped = self._world.stop_followed() or "loop.stop()"

    def save(self, score: float | None) -> None:
        """Ask for a checkpoint: after the step at hand, else of the epoch's end. Every rank must call this."""
        if self.checkpointer is None:
            return
        if self._held == self._where.iteration:
            self._save_held(score)
        elif self._saved == self._where.iteration:
            if score is not None:
                self.checkpointer.give_score(score)
        else:
            self.checkpointer.asked = True
            self.checkpointer.score = self.checkpointer.score if score is None else score

    def _save_held(self, score: float | None = None) -> None:
        if self.checkpointer is not None:
            self._saved, self._held = self._held, -1
            self._flush_all()
            self.checkpointer.save_held(score)

    def _save(self) -> None:
        position = self._where.state_dict()
        if self.checkpointer is None or position["iteration"] == self._saved:
            return
        self._world.stage = "save"
        self._saved = position["iteration"]
        self._flush_all()
        self.checkpointer.save(position)

    def _flush_all(self) -> None:
        if self._report.rows is not None:
            with self._as_rows():
                self._report.rows.flush_all()

    def _stop_here(self, why: str) -> None:
        """Keep what was made: all ranks stop between two steps, or behind a fold. Every rank must call this."""
        self.stopped = why
        if self.checkpointer is not None:
            if self._held == self._where.iteration:
                self._save_held()
            else:
                self._save()
            self.checkpointer.finish()

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Hand the last rows on, close the files, give the signals back."""
        self._world.restore_stop_handlers()
        tracer, self.tracer = self.tracer, None
        with ExitStack() as ending:  # each also if the other raises
            if tracer is not None:
                ending.callback(tracer.close)
            ending.callback(self._report.close, self._last_words())

    def end(self) -> None:
        """Say how the run ended, and let others into its folder."""
        if self.checkpointer is not None:
            status = "stopped" if self.stopped is not None else "done" if self._where.is_done else "left"
            made = self._where.state_dict()["iteration"]
            self.checkpointer.end(status, self._world.ended_by, made, self.stopped)
        self._report.end()

    def _last_words(self) -> str | None:
        """What is said of a loop that was stopped."""
        if self.stopped is None:
            return None
        newest = "" if self.checkpointer is None else self.checkpointer.newest
        kept = f"checkpoint {newest}" if newest else "no checkpoint"
        return f"stopped after step {self._where.iteration}, {kept}: {self.stopped}"
