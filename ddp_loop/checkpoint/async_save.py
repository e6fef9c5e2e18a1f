"""Checkpoints written beside training: copied first, then hashed, written and made durable by a thread of rank 0.

[Note: A save] Every rank takes checksums of its replica and leaves them in the store; rank 0 copies the state, and
training goes on. Its thread waits for the others' checksums, compares them with those of the copy, and only then
writes: a checkpoint is of replicas that are equal. Rows are brought to the disk before the checkpoint that counts them,
so that no loss of power leaves a gap between them. What goes wrong there is everybody's at the next step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from ddp_loop.checkpoint.serialization import SerializedState, StagingBuffers, from_tree, to_tree
from ddp_loop.checkpoint.state import random_state, restore, restore_random_state, state_of
from ddp_loop.checkpoint.storage import Checkpoint, CheckpointStore
from ddp_loop.determinism import checksum_all
from ddp_loop.distributed import ReplicaMismatch, World, describe_difference, ends_of_copies, format_error, own_names

OnSaveError = Literal["raise", "warn"]
ON_SAVE_ERROR = ("raise", "warn")
_JOB, _GENERATORS, _PARTS = "job", "generators", "parts"
_LOOK_S = 0.005
_READ_S = 1800.0  # for rank 0 to read and verify a checkpoint


@dataclass(frozen=True)
class _StateCopy:
    """The state at a moment: on rank 0 a copy of it, elsewhere its checksums as a word; why it is not to be kept."""

    position: dict[str, int]
    copied: SerializedState | None
    word: str
    problem: Exception | None


class Stateful(Protocol):
    """What a loop keeps beside the job."""

    def state_dict(self) -> dict[str, Any]:
        """As plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be as it was."""


class AsyncSaver:
    """Saves the job's state, and puts it back.

    Args:
        state: of the job, by name.
        world: from `join_world`.
        checkpoints: where, on rank 0; None on the others.
        without: names of the buffers that each rank has its own of; rank 0's are kept.
        on_error: what a save that fails does to training: "raise" on every rank, or "warn".
        parts: of the loop itself, by name, kept beside the job.
        sync: brings to the disk, on rank 0's thread, what a checkpoint counts that lies beside it: rows.
        refuses: says, given the iteration, why the state as it is now is not to be saved; None where it is.

    Attributes:
        last: the newest durable checkpoint's name, on rank 0; empty before there is one.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        world: World,
        checkpoints: CheckpointStore | None,
        *,
        without: Collection[str] = (),
        on_error: OnSaveError = "raise",
        parts: Mapping[str, Stateful] | None = None,
        sync: Callable[[], None] = lambda: None,
        refuses: Callable[[int], Exception | None] | None = None,
    ) -> None:
        self._refuses = refuses
        self._state, self._world, self._checkpoints, self._sync = state, world, checkpoints, sync
        self._parts = dict(parts or {})
        self._without, self._on_error = own_names(state, without), on_error
        self._copies_end = ends_of_copies(state, without)
        self._copies, self._held_copies = StagingBuffers(), StagingBuffers()
        self._held: _StateCopy | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._found: Checkpoint | None = None  # of rank 0, while it restores
        self._number = world.store.number()  # another AsyncSaver of this world saves at the same iterations
        self.last = ""

    def _pack(self) -> SerializedState:
        job = {name: state_of(value) for name, value in self._state.items()}
        parts = {name: one.state_dict() for name, one in self._parts.items()}
        return to_tree({_JOB: job, _GENERATORS: random_state(self._world.device), _PARTS: parts})

    def _compared(self, packed: SerializedState) -> tuple[list[str], torch.Tensor]:
        """The names and the checksums of what must be the same on every rank."""
        names = [name for name in packed.tensors if name.startswith(f"{_JOB}.") and not self._is_own(name)]
        return names, checksum_all([packed.tensors[name] for name in names]).cpu()

    def _is_own(self, name: str) -> bool:
        """Whether it is a buffer that each rank has its own of, or a copy of one."""
        name = name.removeprefix(f"{_JOB}.")
        owner = self._state.get(name.partition(".")[0])
        return name in self._without or (not isinstance(owner, nn.Module) and name.endswith(self._copies_end))

    # -- saving --------------------------------------------------------------------------------------------

    def save(self, position: Mapping[str, int], score: float | None = None) -> None:
        """Save the state as it is now; returns when it is copied. Every rank must call this.

        Args:
            position: what the loop goes on from.
            score: the lower the better; the best one is kept beyond the last ones.
        """
        self.wait()
        self._held = None
        self._begin(self._take(position, self._copies), score)

    def hold(self, position: Mapping[str, int]) -> None:
        """Copy the state as it is now, for `save_held` to save if it comes to that. Every rank must call this."""
        self._held = self._take(position, self._held_copies)

    def save_held(self, score: float | None = None) -> None:
        """Save what was held; returns at once. Every rank must call this."""
        held, self._held = self._held, None
        if held is not None:
            self.wait()
            self._copies, self._held_copies = self._held_copies, self._copies  # the next one held is in other memory
            self._begin(held, score)

    def give_score(self, score: float) -> None:
        """Give the newest checkpoint its score, on rank 0; an error is everybody's at the next step."""
        self.wait()
        if self._checkpoints is not None and self.last:
            try:
                self._checkpoints.give_score(self._checkpoints.folder / self.last, score)
            except (OSError, ValueError) as error:
                self._take_error(error, "a checkpoint's score was not written")

    def _take(self, position: Mapping[str, int], copies: StagingBuffers) -> _StateCopy:
        packed = self._pack()
        problem = None if self._refuses is None else self._refuses(position["iteration"])
        if self._checkpoints is None:
            names, sums = self._compared(packed)
            return _StateCopy(dict(position), None, json.dumps([names, sums.tolist()]), problem)
        return _StateCopy(dict(position), copies.copy(packed), "", problem)

    def _key(self, taken: _StateCopy) -> str:
        return f"ddp_loop/save/{self._number}/{taken.position['iteration']}"

    def _begin(self, taken: _StateCopy, score: float | None) -> None:
        checkpoints, copied, go = self._checkpoints, taken.copied, threading.Event()
        if taken.problem is not None:
            self._take_error(taken.problem, "no checkpoint was written")
        if checkpoints is None or copied is None:
            self._world.store.put(f"{self._key(taken)}/{self._world.rank}", taken.word)
            return
        if taken.problem is not None:
            return

        def work() -> None:
            go.wait()  # else it would have the interpreter while this thread waits for its start
            self._write(checkpoints, taken, copied, score)

        self._thread = threading.Thread(target=work, name="ddp_loop save")
        self._thread.start()
        go.set()

    def _write(
        self, checkpoints: CheckpointStore, taken: _StateCopy, copied: SerializedState, score: float | None
    ) -> None:
        facts: dict[str, Any] = {"position": taken.position, "ranks": self._world.size}
        try:
            names, sums = self._compared(copied)
            self._compare(self._key(taken), names, sums)
            facts["checksums"] = dict(zip(names, sums.tolist(), strict=True))
            self._sync()
            path = checkpoints.write(copied, iteration=taken.position["iteration"], facts=facts, score=score)
            self.last = path.name
            if checkpoints.last_warning:
                self._world.print(f"ddp_loop: {checkpoints.last_warning}")
        except Exception as error:
            self._take_error(error, "no checkpoint was written")

    def _take_error(self, error: Exception, what: str) -> None:
        if isinstance(error, OSError) and self._on_error == "warn":
            self._world.print(f"ddp_loop: {what}, training goes on: {format_error(error)}")
        elif self._error is None:  # the first one is the cause
            self._error = error

    def _compare(self, key: str, names: list[str], sums: torch.Tensor) -> None:
        """Wait for the others' checksums, and compare them.

        Raises:
            ReplicaMismatch: a rank has another value somewhere.
            RuntimeError: a rank said nothing.
        """
        deadline = time.monotonic() + self._world.timeout_s
        rows = [sums]
        for rank in range(1, self._world.size):
            while (word := self._world.store.take(f"{key}/{rank}")) is None:
                if time.monotonic() > deadline or self._world.is_left:
                    raise RuntimeError(
                        f"a checkpoint is of equal replicas; rank {rank} did not say what its own is: call loop.save() "
                        "on every rank, not in an `if world.rank == 0`"
                    )
                time.sleep(_LOOK_S)
            theirs, values = json.loads(word)
            if theirs != names:
                odd = sorted(set(theirs) ^ set(names))
                raise ReplicaMismatch(
                    f"the state must hold the same tensors on every rank; rank {rank} and rank 0 differ in {odd[:3]}: "
                    "make state= alike on all ranks"
                )
            rows.append(torch.tensor(values, dtype=sums.dtype))
        different = describe_difference(rows, names)
        if different is not None:
            raise ReplicaMismatch(different)

    def wait(self) -> None:
        """Wait until the save under way has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def problem(self) -> Exception | None:
        """What went wrong in an earlier save and is every rank's to know; on rank 0."""
        error, self._error = self._error, None
        return error

    def finish(self) -> None:
        """Wait for the save under way, and raise on every rank what went wrong. Every rank must call this."""
        self.wait()
        self._world.raise_if_any_failed(self.problem())

    # -- going on ------------------------------------------------------------------------------------------

    def restore(self) -> dict[str, int] | None:
        """Put the newest valid checkpoint's state back on every rank. Every rank must call this.

        Returns:
            The position in it; None if there is no checkpoint.

        Raises:
            ValueError: it does not fit the state.
            ReplicaMismatch: what was put back is not what was saved.
        """
        found = self._world.on_rank_zero(self._read, timeout_s=_READ_S)
        if found is None:
            return None
        name, structure, facts, forms = found
        if self._found is not None:
            tensors = self._found.packed.tensors
        else:
            tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in forms.items()}
        self._found = None
        self._world.broadcast_all(list(tensors.values()))
        problem: Exception | None = None
        try:
            kept = from_tree(SerializedState(structure, tensors))
            restore(self._state, kept[_JOB])
            for part, own in self._parts.items():
                own.load_state_dict(kept[_PARTS][part])
            self._check(facts["checksums"], name)
            restore_random_state(kept[_GENERATORS], self._world.device)
        except (ValueError, RuntimeError) as error:
            problem = error
        self._world.raise_if_any_failed(problem)
        self.last = name
        position: dict[str, int] = facts["position"]
        return position

    def _read(self) -> tuple[str, Any, Mapping[str, Any], dict[str, tuple[tuple[int, ...], torch.dtype]]] | None:
        """The newest valid checkpoint without its tensors, on rank 0."""
        if self._checkpoints is None:
            return None
        self._found = self._checkpoints.newest()
        for refused in self._checkpoints.refused:
            self._world.print(f"ddp_loop: {refused}")
        if self._found is None and self._checkpoints.refused:
            raise ValueError(
                f"a run goes on from a checkpoint that is as it was written; none of the "
                f"{len(self._checkpoints.refused)} in {self._checkpoints.folder} is: bring a copy back, or begin anew "
                "(resume=False), which moves them away"
            )
        if self._found is None:
            return None
        packed = self._found.packed
        forms = {key: (tuple(one.shape), one.dtype) for key, one in packed.tensors.items()}
        return self._found.path.name, packed.structure, self._found.facts, forms

    def check(self) -> None:
        """Raise on every rank if the state cannot be kept. Every rank must call this.

        Raises:
            TypeError, ValueError: something in it is of no type that can be packed.
        """
        problem: Exception | None = None
        try:
            self._pack()
        except (TypeError, ValueError) as error:
            problem = error
        self._world.raise_if_any_failed(problem)

    def _check(self, kept: Mapping[str, int], name: str) -> None:
        names, sums = self._compared(self._pack())
        for key, value in zip(names, sums.tolist(), strict=True):
            if kept.get(key, value) != value:
                raise ReplicaMismatch(
                    f"what is put back must be what was saved; {key} of {name} is not, on rank {self._world.rank}: "
                    "does its load_state_dict change values?"
                )
