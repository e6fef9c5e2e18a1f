"""What a run keeps: its folder, its checkpoints and when they are written, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_loop.checkpoint.async_save import ON_SAVE_ERROR, AsyncSaver, OnSaveError, Stateful
from ddp_loop.checkpoint.atomic_files import explained, identity, sync_files, write_atomic
from ddp_loop.checkpoint.run_folder import EVALUATIONS, RANKS, ROWS, STATUS, RunFolder, read_json
from ddp_loop.checkpoint.state import check_restorable
from ddp_loop.checkpoint.storage import CheckpointStore
from ddp_loop.distributed import PeerFailed, World, format_error

_WORDS = 2000  # of why a run failed, in status.json


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are written, and which stay.

    Attributes:
        every: after so many steps; None for each epoch's end.
        every_s: and when so many seconds have passed since the last one began.
        keep_last: how many of the last ones stay, beside the best.
        on_error: what a save that fails does.
    """

    every: int | None = None
    every_s: float = 600.0
    keep_last: int = 3
    on_error: OnSaveError = "raise"

    def check(self) -> None:
        """Raise ValueError unless these make sense."""
        for name, value in (("save_every", self.every), ("keep_last", self.keep_last)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number, 1 or more; got {value!r}")
        if not self.every_s > 0:
            raise ValueError(f"save_every_s must be a number of seconds, more than 0; got {self.every_s!r}")
        if self.on_error not in ON_SAVE_ERROR:
            raise ValueError(f"on_save_error must be one of {ON_SAVE_ERROR}; got {self.on_error!r}")


class Checkpointer:
    """Keeps a run, from all ranks; the files are rank 0's.

    Args:
        folder: of the run.
        world: from `join_world`.
        state: of the job.
        keeping: when and what.
        without: names of the buffers that each rank has its own of.
        parts: of the loop itself, kept beside the job.
        refuses: says, given the iteration, why the state as it is now is not to be saved; None where it is.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        state: Mapping[str, object],
        keeping: CheckpointPolicy,
        without: Collection[str] = (),
        parts: Mapping[str, Stateful] | None = None,
        refuses: Callable[[int], Exception | None] | None = None,
    ) -> None:
        self._parts, self._refuses = parts, refuses
        self.folder, self._world, self._keeping = folder, world, keeping
        self._state, self._without = state, without
        self._run: RunFolder | None = None
        self._saver: AsyncSaver | None = None
        self._ended = False
        self._is: tuple[int, int] | None = None
        self._extent: Mapping[str, object] = {}
        self._began = time.monotonic()
        self.score: float | None = None
        self.asked = False  # for a checkpoint after the step at hand, on every rank

    def open(
        self, facts: Mapping[str, object], resume: bool | None, extent: Mapping[str, object]
    ) -> dict[str, int] | None:
        """Take the folder, and put the newest checkpoint's state back. Every rank must call this.

        Args:
            facts: what the run is a run of.
            resume: as `Loop` is given it.
            extent: how far the run goes, for status.json.

        Returns:
            Where the run goes on; None if it begins.

        Raises:
            OSError, RuntimeError, ValueError: the folder cannot be had, or what is in it does not fit.
            PeerFailed: so on another rank.
        """
        checkpoints: CheckpointStore | None = None
        self._extent = extent

        def take() -> None:
            nonlocal checkpoints
            self._keeping.check()
            check_restorable(self._state)
            self._run = RunFolder(self.folder, facts, resume)
            checkpoints = CheckpointStore(self.folder, self._run.id, self._keeping.keep_last)
            checkpoints.clean()
            for line in (*self._run.news, *([checkpoints.last_warning] if checkpoints.last_warning else [])):
                self.say(line)

        self._world.on_rank_zero(take)
        with suppress(OSError):  # another machine may not have it
            self._is = identity(self.folder)
        self._saver = AsyncSaver(
            self._state,
            self._world,
            checkpoints,
            without=self._without,
            on_error=self._keeping.on_error,
            parts=self._parts,
            sync=self._sync,
            refuses=self._refuses,
        )
        self._saver.check()
        position = self._saver.restore()
        self.write_status("running", iteration=position["iteration"] if position else 0)
        return position

    def _sync(self) -> None:
        """Bring the rows to the disk, and what lies beside them."""
        rule = f"the rows that a checkpoint counts are brought to the disk before it; in {self.folder} they cannot be"
        with explained(rule, "make room there, make it writable, or put it back; those before are as they were"):
            sync_files(self.folder, (ROWS, EVALUATIONS, RANKS))

    @property
    def newest(self) -> str:
        """The name of the newest durable checkpoint, on rank 0; empty without one."""
        return "" if self._saver is None else self._saver.last

    def asked_to_stop(self) -> str | None:
        """Why the run is asked to stop by a file in its folder; on rank 0."""
        return None if self._run is None else self._run.asked_to_stop()

    @property
    def goes_on(self) -> bool:
        """Whether training goes on where something cannot be written."""
        return self._keeping.on_error == "warn"

    def say(self, line: str) -> None:
        """Print a line about the run."""
        self._world.print(f"ddp_loop: {line}")

    # -- checkpoints ---------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint, on rank 0's clock."""
        return self._run is not None and time.monotonic() - self._began > self._keeping.every_s

    def is_due_after(self, iteration: int, *, is_last_of_epoch: bool) -> bool:
        """Whether a checkpoint is written after this step; the same on every rank."""
        every = self._keeping.every
        return self.asked or (is_last_of_epoch if every is None else iteration % every == 0)

    def save(self, position: Mapping[str, int]) -> None:
        """Begin a checkpoint. Every rank must call this."""
        if self._saver is not None:
            self._began, self.asked = time.monotonic(), False
            self._saver.save(position, self.score)
            self.score = None

    def hold(self, position: Mapping[str, int]) -> None:
        """Copy the state, for `save_held` to save if it comes to that. Every rank must call this."""
        if self._saver is not None:
            self._saver.hold(position)

    def save_held(self, score: float | None = None) -> None:
        """Begin a checkpoint of what was held. Every rank must call this."""
        if self._saver is not None:
            self._began = time.monotonic()
            self._saver.save_held(score)

    def give_score(self, score: float) -> None:
        """Give the newest checkpoint its score."""
        if self._saver is not None:
            self._saver.give_score(score)
            if self._ended and (problem := self._saver.problem()) is not None:
                raise problem  # no next step will tell

    def problem(self) -> Exception | None:
        """What went wrong in an earlier save."""
        return None if self._saver is None else self._saver.problem()

    def finish(self) -> None:
        """Wait until what was saved is durable. Every rank must call this."""
        if self._saver is not None:
            self._saver.finish()

    @property
    def is_there(self) -> bool:
        """Whether the folder is the one that was opened, as this rank sees it."""
        with suppress(OSError):
            return identity(self.folder) == self._is
        return False

    # -- how it ended --------------------------------------------------------------------------------------

    def write_status(self, status: str, **facts: object) -> None:
        """Say what becomes of the run; it is no error if that cannot be written, but for a line."""
        if self._run is not None:
            kept = None if self._saver is None else self._saver.last or None
            facts = {"device": str(self._world.device), "checkpoint": kept, **self._extent, **facts}
            try:
                self._run.write_status(status, ranks=self._world.size, **facts)
            except OSError as error:
                self.say(
                    f"the run is {status}, and {self.folder / STATUS} could not be made to say so: "
                    f"{format_error(error)}"
                )

    def end(self, status: str, error: BaseException | None, iteration: int, why: str | None) -> None:
        """The loop ends: say how, and let others into the folder."""
        if self._ended:
            return
        self._ended = True
        if self._saver is not None:
            self._saver.wait()
            if (problem := self._saver.problem()) is not None:  # the loop was left before all could be told
                self.say(f"no checkpoint was written: {format_error(problem)}")
        facts: dict[str, object] = {"iteration": iteration} | ({"why": why} if why else {})
        if error is not None:
            where = self._world.where
            rank, stage, step = self._world.rank, where.stage, where.step
            if isinstance(error, PeerFailed):
                rank, stage, step = (-1 if error.rank is None else error.rank), error.stage, error.step
            status = "failed"
            facts |= {"rank": rank, "stage": stage, "step": step, "why": format_error(error)[:_WORDS]}
            if rank == 0 and self._world.rank == 1 and self.is_there:  # rank 0 may be gone without a word
                with suppress(OSError):
                    before = read_json(self.folder / STATUS) or {}
                    write_atomic(self.folder / STATUS, {**before, "status": status, "at": time.time(), **facts})
        self.write_status(status, **facts)
        if self._run is not None:
            if status != "failed":
                self._run.forget_stop()
            self._run.close()
