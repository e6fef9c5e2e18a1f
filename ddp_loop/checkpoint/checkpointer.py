"""Checkpoints of a run: when they are saved, how a background thread saves them, and how a run resumes from one.

[Note: A left loop] A loop that was left by a break or an error keeps its folder until the world is left: only then is
it known whether the run failed, and until then the script may still ask for a checkpoint. A newer Loop of the process,
as in a notebook's cell that is run again, takes the folder over. It also takes it from a loop that was never iterated,
but not from one that is being iterated. Each rank decides this by itself, and all alike: they leave a loop and create
the next one together.

[Note: A save] Rank 0 copies the state, the other ranks put checksums of theirs into the store, and training continues.
Rank 0's thread waits for these checksums, compares them with its copy's, and only then writes: a checkpoint
proves that the replicas were equal. Rows are flushed to the disk before the checkpoint that counts them, so that a loss
of power leaves no gap between them. An error of the thread is raised on all ranks in the next step.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary

import torch

from ddp_loop.checkpoint.atomic_files import explained, identity, sync_folder
from ddp_loop.checkpoint.config import Config
from ddp_loop.checkpoint.run_folder import (
    EVALUATIONS,
    RANKS,
    ROWS,
    RunFolder,
    asked_to_stop,
    forget_stop,
    set_failed,
    write_error,
)
from ddp_loop.checkpoint.serialization import SerializedState
from ddp_loop.checkpoint.staging import copy_to_host
from ddp_loop.checkpoint.starting import words_to_go_on
from ddp_loop.checkpoint.state import JobState, Stateful, read_on_rank_zero
from ddp_loop.checkpoint.storage import CheckpointStore
from ddp_loop.determinism import check_count
from ddp_loop.distributed import PeerFailed, ReplicaMismatch, World, describe_difference, format_error, listed
from ddp_loop.elastic import leave_advice

OnSaveError = Literal["raise", "warn"]

KEPT_BYTES = 64 << 20  # of a copy whose memory waits for the next one
_SHOWN = 4  # settings in a line
_LOOK_S = 0.005
_GRACE_S = 0.5  # for other ranks' checksums after this rank left; a rank whose peer failed is ended after 1.6
_WHY_LETTERS = 2000  # of the error in status.json
_OF_STATE = (TypeError, ValueError, RuntimeError)  # raised by parts of a state on their way to a file, and back
_newest: WeakValueDictionary[tuple[int, str], Checkpointer] = WeakValueDictionary()  # by process and folder
FileSum = tuple[int, str]  # a number of bytes at the beginning of a file, and their SHA-256


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are saved, and which ones are kept.

    Attributes:
        every: save after this many steps; None saves after each epoch.
        every_s: save also when this many seconds have passed since the last save began.
        keep_last: how many of the newest checkpoints are kept, beside the best one.
        on_error: whether a failed save raises or warns.

    Raises:
        ValueError: a value is out of range.
    """

    every: int | None = None
    every_s: float = 600.0
    keep_last: int = 3
    on_error: OnSaveError = "raise"

    def __post_init__(self) -> None:
        for name, value in (("save_every", self.every), ("keep_last", self.keep_last)):
            if value is not None:
                check_count(name, value)
        if not (isinstance(self.every_s, Real) and self.every_s > 0):
            raise ValueError(f"save_every_s must be a positive number of seconds. Got {self.every_s!r}.")
        if self.on_error not in get_args(OnSaveError):
            raise ValueError(f"on_save_error must be one of {get_args(OnSaveError)}. Got {self.on_error!r}.")


@dataclass(frozen=True)
class Snapshot:
    """The state at one moment: rank 0 has a copy, the others have its checksums as JSON.

    Attributes:
        problem: why this state must not be saved.
    """

    position: dict[str, int]
    copied: SerializedState | None
    checksums: str
    problem: Exception | None


def _advice_of(folder: Path, kept: Sequence[str], around: Callable[[], str] | None = None) -> str:
    """How to go on after a failure: from a run's newest checkpoint, or without one from the run around it."""
    if kept:
        return f"The checkpoint {kept[0]} is in {folder}.\n{words_to_go_on()}"
    return "" if around is None else f"{folder} has no checkpoint yet. {around()}".rstrip()


class Checkpointer:
    """Saves and restores a run, on all ranks; rank 0 owns the files.

    Args:
        folder: of the run.
        world: from `join_world`.
        state: the job's objects by name.
        policy: when to save, and which checkpoints to keep.
        local: names of buffers that differ between ranks.
        parts: the loop's own parts by name, saved beside the job.
        refuses: given the iteration, returns why the current state must not be saved, or None.

    Attributes:
        newest: the name of the newest durable checkpoint, on rank 0; empty without one.
        asked: whether a checkpoint was asked for after the current step; equal on all ranks.
        score: of the next checkpoint.
        give_up: ends the loop, unless it is being iterated, since a newer one wants the folder; makes no collective.
        missing: the checkpoint and the status that could not be written and have no later replacement, on rank 0.
        say: prints a line about the run, on rank 0; it does not keep the state alive.
        sums: of the files of rows, by name, when the restored checkpoint was made; empty without one.
        sum_files: returns these sums as they are now, on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        state: Mapping[str, object],
        policy: CheckpointPolicy,
        local: Collection[str] = (),
        parts: Mapping[str, Stateful] | None = None,
        refuses: Callable[[int], Exception | None] = lambda iteration: None,
    ) -> None:
        self.folder = folder
        self._world = world
        self._policy = policy
        self._refuses = refuses
        self.say = world.say
        self._job = JobState(state, parts or {}, local, world.device)
        self._run: RunFolder | None = None
        self._store: CheckpointStore | None = None  # on rank 0
        self._identity: tuple[int, int] | None = None
        self._extent: Mapping[str, object] = {}
        self._spare: list[Mapping[str, torch.Tensor]] = []  # copies that are not needed any more
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._has_said_unlike = False
        self._began = time.monotonic()
        self._ended = False
        self._turn = threading.RLock()  # of one status after the other
        self._is_refused = True  # until it is restored; its status then stays as it was
        self._kept: list[str] = []  # the newest durable checkpoint, if there is one
        self.advice = partial(_advice_of, self.folder, self._kept)  # keeps no state alive
        self._advice = ""  # on how to go on from there, on rank 0, unless the launcher says it
        self.asked = False
        self.sums: Mapping[str, FileSum] = {}
        self.sum_files: Callable[[], Mapping[str, FileSum]] = dict
        self.missing: dict[str, str] = {}
        self.score: float | None = None
        self.give_up: Callable[[], None] = lambda: None
        self._place = os.getpid(), os.path.realpath(folder)

    def open(
        self,
        facts: Mapping[str, object],
        resume: bool | None,
        extent: Mapping[str, object],
        config: Config | None,
        is_finished: Callable[[Mapping[str, int]], bool],
    ) -> dict[str, int] | None:
        """Lock the run folder, and restore the newest valid checkpoint. Every rank must call this.

        Args:
            facts: they make a run another one if they differ.
            resume: of `Loop`.
            extent: the run's length, for status.json.
            config: of `Loop`, flat; None for none.
            is_finished: whether no step is left at a position.

        Returns:
            The position in the checkpoint; None if there is no checkpoint.

        Raises:
            OSError, RuntimeError, ValueError: the folder cannot be used, or is in use, or its checkpoint does not fit.
            TypeError, ValueError: the state cannot be saved.
            ReplicaMismatch: restored values differ from those saved.
            PeerFailed: another rank raised one of these.
        """
        self._extent = extent
        self._divided_by_ranks = None if facts.get("shards") else "SequenceBatches" if "lanes" in facts else "Batches"
        settings: dict[str, object] = {}

        def take() -> None:
            self._job.check_restorable()
            settings.update({name: one for name, one in extent.items() if name != "steps_per_epoch"})
            settings.update(self._job.settings())
            self._run = RunFolder(self.folder, facts, resume, settings, config)
            for line in self._run.news:
                self.say(line)
            self._store = CheckpointStore(self.folder, self._run.id, self._policy.keep_last, self.say)
            self._store.clean()

        former = _newest.get(self._place)
        if former is not None and not former._ended:
            former.give_up()  # see [Note: A left loop]
        self._world.on_rank_zero(take)
        _newest[self._place] = self
        with suppress(OSError):  # the folder may not exist on another machine
            self._identity = identity(self.folder)
        self._number = self._world.store.number()  # two Checkpointers of a world can save at the same iteration
        self._job.begin()
        with self._world.failing_together(*_OF_STATE):
            self._job.serialize()
        position = self._restore()
        self._is_refused = False
        if self._run is not None:
            if position is not None and is_finished(position):
                self._run.keep_record()
                settings.clear()
            self._begin_run(self._run, position, settings.keys() - extent.keys())
        return position

    def _begin_run(self, run: RunFolder, position: Mapping[str, int] | None, settings: Collection[str]) -> None:
        """List the changes since the last start, and record this one, on rank 0."""
        if position is not None and run.notice:
            kept = [name for name in settings if any(one.startswith(f"{name}: ") for one in run.changed)]
            used = ""
            if kept:
                some = listed(kept) if len(kept) <= _SHOWN else f"{', '.join(kept[:_SHOWN])} and others"
                used = f" The checkpoint's values stay for {some}. To use the script's, assign them after the Loop."
            self.say(f"{run.notice}{used}")
        iteration = position["iteration"] if position else 0
        try:
            run.record_start(iteration=iteration, ranks=self._world.size, device=str(self._world.device))
        except OSError as error:
            self.say(format_error(error))
        self.write_status("running", iteration=iteration)

    def asked_to_stop(self) -> str | None:
        """Why a file in the run folder asks the run to stop, on rank 0; None if there is no such file."""
        return None if self._run is None else asked_to_stop(self._run.folder)

    @property
    def continues(self) -> bool:
        """Whether training continues when a file cannot be written."""
        return self._policy.on_error == "warn"

    @property
    def has_folder(self) -> bool:
        """Whether this rank sees the folder that was opened at its path."""
        with suppress(OSError):
            return identity(self.folder) == self._identity
        return False

    # -- saving --------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether `every_s` seconds have passed on rank 0's clock."""
        return self._run is not None and time.monotonic() - self._began > self._policy.every_s

    def is_due_after(self, iteration: int, *, is_last_of_epoch: bool) -> bool:
        """Whether a checkpoint is saved after this step; equal on all ranks."""
        every = self._policy.every
        return self.asked or (is_last_of_epoch if every is None else iteration % every == 0)

    def save(self, position: Mapping[str, int]) -> None:
        """Start to save the current state; returns once it is copied. Every rank must call this.

        Args:
            position: where a resumed run continues.
        """
        self.wait()
        self._begin(self.hold(position), self.score)
        self.asked = False
        self.score = None

    def hold(self, position: Mapping[str, int]) -> Snapshot:
        """Copy the current state, to be saved or dropped. Every rank must call this."""
        iteration = position["iteration"]
        try:
            serialized = self._job.serialize()
            problem = self._refuses(iteration)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"The checkpoint of step {iteration} could not be made. {error}") from error
        if self._store is not None:
            memory = self._spare.pop() if self._spare else {}
            return Snapshot(dict(position), copy_to_host(serialized, memory), "", problem)
        checksums = json.dumps([self._job.checksums(serialized), self._job.checksums_of_values(serialized)])
        return Snapshot(dict(position), None, checksums, problem)

    def save_held(self, held: Snapshot, score: float | None = None) -> None:
        """Start to save a copied state. Every rank must call this.

        Raises:
            RuntimeError: a newer Loop has the folder.
        """
        self._require_folder()
        self.wait()
        self._begin(held, score)

    def drop(self, snapshot: Snapshot) -> None:
        """Keep the memory of a copy that is not needed any more for the next one, or free it if it is large."""
        if snapshot.copied is not None and sum(one.nbytes for one in snapshot.copied.tensors.values()) <= KEPT_BYTES:
            self._spare.append(snapshot.copied.tensors)

    def release_state(self) -> None:
        """Let the job's state be freed; copies made before can still be saved."""
        self._refuses = lambda iteration: None
        self._spare = []
        self._job.release()

    def give_score(self, score: float, *, is_last: bool) -> None:
        """Write the score of the newest checkpoint, on rank 0. An error is raised on all ranks in the next step.

        Args:
            score: as in `Loop.save`.
            is_last: whether there is no next step; an error is then raised here.

        Raises:
            RuntimeError: a newer Loop has the folder.
        """
        self._require_folder()
        self.wait()
        if self._store is not None and self.newest:
            try:
                self._store.give_score(self._store.folder / self.newest, score)
            except (OSError, ValueError) as error:
                self._take_error(error, "A checkpoint's score was not written")
        if is_last and (problem := self.problem()) is not None:
            raise problem

    def _require_folder(self) -> None:
        if _newest.get(self._place, self) is not self:
            raise RuntimeError(
                f"A Loop saves into its run folder as long as it has it. A newer Loop has taken over {self.folder}. "
                "Call save of that one, or call it before the new Loop is created."
            )

    @property
    def newest(self) -> str:
        """The name of the newest durable checkpoint; "" without one."""
        return "".join(self._kept)

    def wait(self) -> None:
        """Wait until the current save has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def problem(self) -> Exception | None:
        """Return and clear the error of an earlier save, on rank 0."""
        error = self._error
        self._error = None
        return error

    def finish(self) -> None:
        """Wait for the current save, and raise its error on all ranks. Every rank must call this."""
        self.wait()
        self._world.raise_if_any_failed(self.problem())

    def _begin(self, snapshot: Snapshot, score: float | None) -> None:
        self._began = time.monotonic()
        store = self._store
        copied = snapshot.copied
        if snapshot.problem is not None:
            self._take_error(snapshot.problem, "No checkpoint was written")
        if copied is None:
            self._world.store.put(f"{self._key(snapshot)}/{self._world.rank}", snapshot.checksums)
        if store is None or copied is None or snapshot.problem is not None:
            self.drop(snapshot)
            return

        started = threading.Event()
        files = self.sum_files()  # now: they grow

        def write() -> None:
            started.wait()  # otherwise this thread would hold the interpreter while the caller waits for its start
            iteration = snapshot.position["iteration"]
            try:
                sums = self._job.checksums(copied)
                self._compare(snapshot, sums, self._job.checksums_of_values(copied))
                facts = {
                    "position": snapshot.position,
                    "ranks": self._world.size,
                    "checksums": sums,
                    "files": dict(files),
                }
                what = f"The rows in {self.folder} could not be flushed before the checkpoint of step {iteration}"
                with explained(what):
                    sync_folder(self.folder, ROWS, EVALUATIONS, RANKS)
                self._keep(store.write(copied, iteration=iteration, facts=facts, score=score).name)
                self.missing.pop("checkpoint", None)
                self.write_status("running", iteration=iteration)
            except Exception as error:
                self._take_error(error, "No checkpoint was written")
                self.missing["checkpoint"] = f"the checkpoint of step {iteration}"
            self.drop(snapshot)

        self._thread = threading.Thread(target=write, name="ddp_loop save")
        self._thread.start()
        started.set()

    def _key(self, snapshot: Snapshot) -> str:
        return f"ddp_loop/save/{self._number}/{snapshot.position['iteration']}"

    def _take_error(self, error: Exception, what: str) -> None:
        if isinstance(error, OSError) and self.continues:
            self.say(f"{what}; training continues. {format_error(error)}")
        elif self._error is None:  # the first error is the cause
            self._error = error

    def _compare(self, snapshot: Snapshot, sums: dict[str, int], of_values: dict[str, int]) -> None:
        """Wait for the other ranks' checksums, and compare them; other values than tensors may differ.

        Raises:
            ReplicaMismatch: a tensor differs between ranks.
            RuntimeError: a rank sent no checksums.
        """
        key = self._key(snapshot)
        which = f"the checkpoint of step {snapshot.position['iteration']}"
        deadline = time.monotonic() + self._world.timeout_s
        is_left = False
        names = list(sums)
        rows = [list(sums.values())]
        for rank in range(1, self._world.size):
            while (word := self._world.store.take(f"{key}/{rank}")) is None:
                if self._world.is_left and not is_left:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                    is_left = True
                if time.monotonic() > deadline:
                    if isinstance(self._world.ended_by, PeerFailed):
                        raise RuntimeError(f"A rank failed before rank {rank} sent its checksums for {which}.")
                    raise RuntimeError(
                        f"Rank {rank} did not take part in {which}. Call loop.save() on every rank, not in an "
                        "`if world.rank == 0`."
                    )
                time.sleep(_LOOK_S)
            theirs, their_values = json.loads(word)
            if list(theirs) != names:
                odd = sorted(set(theirs) ^ set(names))
                raise ReplicaMismatch(
                    f"At {which}, the state of rank {rank} and that of rank 0 have different tensors: {odd[:3]}. Pass "
                    "a state= with the same tensors on all ranks."
                )
            rows.append(list(theirs.values()))
            unlike = [name for name, value in of_values.items() if their_values.get(name) != value]
            if unlike and not self._has_said_unlike:
                self._has_said_unlike = True
                self.say(
                    f"{listed([f'state[{name!r}]' for name in unlike])} of rank {rank} and of rank 0 have different "
                    f"numbers or words at {which}. A resumed run has rank 0's on all ranks. Make them equal, or "
                    "collect them by world.gather."
                )
        different = describe_difference(rows, names)
        if different is not None:
            raise ReplicaMismatch(f"At {which}, {different}")

    # -- resuming ------------------------------------------------------------------------------------------

    def _restore(self) -> dict[str, int] | None:
        """Restore the newest valid checkpoint on every rank; returns its position."""
        found = read_on_rank_zero(self._world, self._read)
        if found is None:
            return None
        (name, facts), packed = found
        if (ranks := facts.get("ranks")) not in (None, now := self._world.size) and self._divided_by_ranks:
            self.say(
                f"{self.folder} ran on {ranks} rank{'s' * (ranks > 1)} and resumes on {now}. Without shards= each rank "
                "computes one shard, so the numbers are equal but for rounding, and the bits differ. Begin runs with "
                f"{self._divided_by_ranks}(shards={max(ranks, now)}) for the same bits on any number of ranks."
            )
        with self._world.failing_together(*_OF_STATE):
            self._job.restore(packed, facts["checksums"])
        self._keep(name)
        self.sums = {file: (size, digest) for file, (size, digest) in facts.get("files", {}).items()}
        position: dict[str, int] = facts["position"]
        return position

    def _keep(self, name: str) -> None:
        """Note the newest durable checkpoint, also for the launcher, which names it if a rank fails."""
        self._kept[:] = [name]
        if self._run is not None:
            self._advice = "" if self._world.advise() else self.advice()

    def _read(self) -> tuple[tuple[str, Mapping[str, Any]], SerializedState] | None:
        """Read the newest valid checkpoint, on rank 0: its name, its facts, and its state."""
        if self._store is None:
            return None
        found = self._store.newest()
        for refused in self._store.refused:
            self.say(f"{refused}")
        if found is None and self._store.refused:
            raise ValueError(
                f"None of the {len(self._store.refused)} checkpoints in {self._store.folder} is intact. Restore a "
                "copy of one, or pass resume=False to start over, which moves them away."
            )
        for renamed in self._store.set_aside():
            self.say(f"The corrupt checkpoint is kept as {renamed}")
        return None if found is None else ((found.path.name, found.facts), found.packed)

    # -- the run's status ----------------------------------------------------------------------------------

    def write_status(self, status: str, **facts: object) -> None:
        """Write status.json, on rank 0; prints a line if that fails. A save that ends after the loop says nothing."""
        with self._turn:
            if self._run is None or (self._ended and status == "running"):
                return
            facts = {"device": str(self._world.device), "checkpoint": self.newest or None, **self._extent, **facts}
            try:
                self._run.write_status(status, ranks=self._world.size, **facts)
                self.missing.pop("status", None)
            except OSError as error:
                self.say(f"The run's status, {status}, could not be written to {self.folder}. {format_error(error)}")
                self.missing["status"] = f"the status {status!r}"

    def end(self, status: str, error: BaseException | None, iteration: int, why: str | None) -> None:
        """Write how the loop ended, and unlock the run folder."""
        if self._ended:
            return
        self._ended = True
        facts: dict[str, object] = {"iteration": iteration} | ({"why": why} if why else {})
        if error is not None:
            status = "failed"
            facts |= self._failure(error)
            # Before the wait for the writer: a launcher ends the ranks soon after a failure.
            if not self._is_refused:
                self.write_status(status, **facts)
        self.wait()
        self._spare = []
        if (problem := self.problem()) is not None:  # of a save before the loop's next step
            self.say(f"No checkpoint was written. {format_error(problem)}")
        if self.asked and status == "left":
            self.say(
                "A checkpoint of loop.save() is written as the next step begins. The loop was left in step "
                f"{iteration}, so there is none of this step. Call loop.stop() instead of break to end with a "
                "checkpoint."
            )
        if error is not None and self._advice and self.has_folder:
            error.add_note(self._advice)
        if not self._is_refused:
            self.write_status(status, **facts)
        if self._run is not None:
            self._unlock(self._run, status)

    def _failure(self, error: BaseException) -> dict[str, object]:
        """The rank that failed, its place and why; written into the run folder too where rank 0 cannot."""
        rank = self._world.rank
        place = error if isinstance(error, PeerFailed) else self._world.where
        if isinstance(error, PeerFailed):
            rank = -1 if error.rank is None else error.rank
        elif self.has_folder:
            write_error(self.folder, rank, error)
        facts = {"rank": rank, "stage": place.stage, "step": place.step, "why": format_error(error)[:_WHY_LETTERS]}
        if rank == 0 and self._world.rank == 1 and self.has_folder:  # rank 0 may have been killed
            set_failed(self.folder, facts)
        return facts

    def _unlock(self, run: RunFolder, status: str) -> None:
        """Unlock the run folder, on rank 0."""
        if self._identity is not None and not self.has_folder:
            gone = f"The run folder {self.folder} was removed or replaced while the run was in it."
            leave_advice(lambda: gone)
        elif status == "stopped":
            leave_advice(str)  # the run's last line says how to go on
        if status != "failed":
            forget_stop(run.folder)
        run.close()
