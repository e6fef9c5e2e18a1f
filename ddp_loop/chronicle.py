"""What a loop leaves behind while it is gone through: rows, a trace, checkpoints; and the requests that come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ddp_loop.batches import Batches
from ddp_loop.control import NOTHING, Requests, Said
from ddp_loop.folding import Fold
from ddp_loop.keeping import Keeper
from ddp_loop.positions import Position
from ddp_loop.records import Folded
from ddp_loop.reporting import Receivers, Report
from ddp_loop.shards import MiniBatch
from ddp_loop.traces import FOLDER
from ddp_loop.tracing import Tracer, Watch
from ddp_loop.world import World


def open_trace(
    run: Path | None, batches: Batches, state: Mapping[str, object], watch: Watch | None, *, trace: bool, ordered: bool
) -> Tracer | None:
    """The trace that is asked for, by the user or by whoever watches this process; None without one.

    Raises:
        ValueError: there is no folder for it.
        OSError: it cannot be written.
    """
    if trace and run is None:
        raise ValueError("a trace is left in the run folder; got trace=True without one: give run=")
    if watch is not None:
        watch.loops += 1
        folder = watch.folder / f"loop-{watch.loops:03}"
    elif trace and run is not None:
        folder = run / FOLDER
    else:
        return None
    return Tracer(folder, batches, state, ordered=ordered, values=watch is not None)


class Chronicle:
    """Keeps what a loop leaves behind, and says what is asked of it.

    Args:
        world: from `join_world`.
        where: the loop's position.
        keeper: of the run folder; None without one.
        state: of the job.

    Attributes:
        tracer: of the trace; None without one.
        stopped: why the loop was asked to stop, and did.
        asks_stop: whether this rank's script asks for a stop.
        holds: whether the script may do something between two epochs, which a stop can leave undone.
    """

    def __init__(self, world: World, where: Position, keeper: Keeper | None, state: Mapping[str, object]) -> None:
        self._world, self._where, self.keeper = world, where, keeper
        self._report = Report(world, where, keeper, state)
        self.tracer: Tracer | None = None
        self.stopped: str | None = None
        self.asks_stop, self.holds = False, True
        self._saved = self._held = -1  # the iteration of the last checkpoint, and of the copy that could become one

    def open(self, facts: Mapping[str, object], resume: bool | None) -> dict[str, int] | None:
        """Take the run folder, and put the newest checkpoint's state back. Every rank must call this.

        Returns:
            Where the loop goes on; None if it begins.
        """
        there = None if self.keeper is None else self.keeper.open(facts, resume, self._where.extent)
        if there is not None:
            self._saved = there["iteration"]
        return there

    def open_rows(self, receivers: Receivers, *, progress: bool, page: bool) -> None:
        """Begin to take rows, behind those that are there, and to show them. Every rank must call this."""
        if progress and self.keeper is not None and self._where.iteration:
            what = "nothing is left to do" if self._where.has_no_step_left else "goes on"
            self._world.print(f"{self.keeper.folder}: {what} after step {self._where.iteration}")
        self._report.open(receivers, progress=progress, page=page)

    # -- a step --------------------------------------------------------------------------------------------

    def take_requests(self) -> None:
        """From now on signals and the run folder can ask for a stop."""
        asked = (lambda: None) if self.keeper is None else self.keeper.asked_to_stop
        self._world.take_requests(asked, self._stop_here)

    def requests(self) -> Requests:
        """What this rank asks of all in a fold."""
        stop = self.asks_stop or self._world.stop_asked is not None
        if self.keeper is None:
            return Requests(stop) if stop else NOTHING
        due, problem = self.keeper.is_due, self.keeper.problem()
        return Requests(stop, due, problem) if stop or due or problem is not None else NOTHING

    def hand_on(self) -> None:
        """Hand on the rows that have arrived, while the ranks wait for each other."""
        if self._report.is_due:
            with self._as_rows():
                self._report.hand_on()

    @contextmanager
    def _as_rows(self) -> Iterator[None]:
        """In the stage "rows", which stays the one where something goes wrong."""
        stage, self._world.stage = self._world.stage, "rows"
        yield
        self._world.stage = stage

    def add_row(self, mini_batch: MiniBatch, folded: Folded, fold: Fold, *, skips: bool) -> None:
        """A step was folded."""
        if self._report.note(fold.waited_s):
            with self._as_rows():
                self._report.add(mini_batch, folded, fold, skips=skips)

    def end_trace(self, iteration: int) -> None:
        """A step is over."""
        if self.tracer is not None:
            self.tracer.end(iteration)

    def end_step(self, mini_batch: MiniBatch, said: Said | None) -> None:
        """A step is over: a checkpoint where one is due, the end where a stop was asked for. Every rank must call this.

        Args:
            mini_batch: of the step.
            said: what all ranks said in its fold.
        """
        stop, due = said is not None and said.stop, said is not None and said.save
        ends = self._where.ends_all(mini_batch)
        if self.keeper is not None:
            ends_epoch = self._where.ends_epoch(mini_batch)
            if stop or due or ends or self.keeper.is_due_after(self._where.iteration, ends_epoch=ends_epoch):
                self._save()
            elif ends_epoch and self.holds:  # a run that goes on does again what the script does before the next step
                self._world.stage, self._held = "save", self._where.iteration
                self.keeper.hold(self._where.state_dict())
            if stop or ends:
                self.keeper.finish()
        if stop:
            self.stopped = self._world.stop_followed() or "loop.stop()"

    def save(self, score: float | None) -> None:
        """Ask for a checkpoint: after the step at hand, else of the epoch's end. Every rank must call this."""
        if self.keeper is None:
            return
        if self._held == self._where.iteration:
            self._save_held(score)
        elif self._saved == self._where.iteration:
            if score is not None:
                self.keeper.give_score(score)
        else:
            self.keeper.asked = True
            self.keeper.score = self.keeper.score if score is None else score

    def _save_held(self, score: float | None = None) -> None:
        if self.keeper is not None:
            self._saved, self._held = self._held, -1
            self._hand_on_all()
            self.keeper.save_held(score)

    def _save(self) -> None:
        position = self._where.state_dict()
        if self.keeper is None or position["iteration"] == self._saved:
            return
        self._world.stage = "save"
        self._saved = position["iteration"]
        self._hand_on_all()
        self.keeper.save(position)

    def _hand_on_all(self) -> None:
        with self._as_rows():
            self._report.hand_on_all()

    def _stop_here(self, why: str) -> None:
        """Keep what was made: all ranks stop between two steps, or behind a fold. Every rank must call this."""
        self.stopped = why
        if self.keeper is not None:
            if self._held == self._where.iteration:
                self._save_held()
            else:
                self._save()
            self.keeper.finish()

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Hand the last rows on, close the files, give the signals back."""
        self._world.give_requests_back()
        tracer, self.tracer = self.tracer, None
        with ExitStack() as ending:  # each also if the other raises
            if tracer is not None:
                ending.callback(tracer.close)
            ending.callback(self._report.close, self._last_words())

    def end(self) -> None:
        """Say how the run ended, and let others into its folder."""
        if self.keeper is not None:
            status = "stopped" if self.stopped is not None else "done" if self._where.is_done else "left"
            made = self._where.state_dict()["iteration"]
            self.keeper.end(status, self._world.ended_by, made, self.stopped)
        self._report.end()

    def _last_words(self) -> str | None:
        """What is said of a loop that was stopped."""
        if self.stopped is None:
            return None
        newest = "" if self.keeper is None else self.keeper.newest
        kept = f"checkpoint {newest}" if newest else "no checkpoint"
        return f"stopped after step {self._where.iteration}, {kept}: {self.stopped}"
