"""The control word: a few integers of each rank, on whose sum all ranks decide together in each fold.

On the CPU it rides in the sum of the gradients, and is read with it.

[Note: Late words] On a GPU the word travels beside the gradients, over the CPU, and a host that read it in its own fold
would wait until every other host has come there. So before the backward of its last shard, a rank sends a flag: whether
all ranks must read the word of this pass in its fold. It is set where the rank has a problem, a request or something
that the layout has no room for, since then the update depends on it. Otherwise the word can only contain an error, and
is read before the next pass sends anything, or before any other collective. So the fold waits only for ranks whose last
backward has not begun, and a rank is never more than one fold ahead of another one. Two ranks read the word in the fold
without the others: one with an error, and one whose shards left a parameter without a gradient, which does not know
whether other ranks gave it one.

No rank starts anything between a pass's word and its reading. So the ranks stay in one order of collectives, whichever
of them reads early.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from ddp_loop.data import Announcement, MiniBatch, check_end, check_first
from ddp_loop.distributed import Work, World
from ddp_loop.training.payload import PayloadLayout, require_same_modes

PROBLEM, _NEW, _ENDS, _STOP, _SAVE, _PLACE, _SQUARE, _RAN, _MODES, _MODES_SQUARE, CONTROL_LENGTH = range(11)


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """What a rank asks of all in a fold.

    Attributes:
        stop: to end the loop after this step.
        save: to write a checkpoint after it.
        problem: an error to raise; the other ranks raise PeerFailed.
    """

    stop: bool = False
    save: bool = False
    problem: Exception | None = None


NO_REQUEST = ControlRequest()


def control_word(
    mini_batch: MiniBatch, given: Sequence[bool], *, problem: bool, new: bool, asked: ControlRequest, modes: int | None
) -> tuple[int, ...]:
    """This rank's part of the control word.

    Args:
        mini_batch: of this step; 8 bits of its checksum tell one from the next, and 256 squares add up in float32.
        given: for each parameter whether one of the rank's shards gave it a gradient.
        problem: whether the rank has one.
        new: whether the rank has something that the layout has no room for.
        asked: its requests.
        modes: the number of its shards' modes among those agreed on; None without a shard, with a problem and with
            something new.
    """
    said = mini_batch.epoch, mini_batch.position, mini_batch.samples, mini_batch.digest
    place = zlib.crc32(b"%d %d %d %d" % said) & 0xFF
    news = () if mini_batch.announcement is None else mini_batch.announcement.values
    ran = (0, 0, 0) if modes is None else (1, modes, modes * modes)
    return problem, new, mini_batch.ends_stream, asked.stop, asked.save, place, place * place, *ran, *news, *given


@lru_cache(maxsize=1024)  # most words are one of 256
def word_tensor(word: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The word as a tensor, which must not be written."""
    return torch.tensor(word, dtype=dtype, device="cpu")


class FoldEvents(Protocol):
    """What a fold asks of the loop, and calls while it waits."""

    def requests(self) -> ControlRequest:
        """What this rank asks of all, at a fold."""

    def while_reducing(self) -> None:
        """The sums over the ranks have started. Do other work: rows, the next data, the seeds of what follows."""


def nothing() -> None:
    """What a rank sends that leaves before the first fold."""


@dataclass(frozen=True, slots=True)
class ControlDecision:
    """The sum of all ranks' control words.

    Attributes:
        problem, new, stop, save: whether any rank says so.
        ends: the number of ranks whose stream ends.
        parted: whether ranks are at different mini-batches: n sum(p^2) = sum(p)^2 exactly if all p are the same.
        mixed: whether the modules of ranks with shards were in different modes.
    """

    problem: bool
    new: bool
    ends: int
    stop: bool
    save: bool
    parted: bool
    mixed: bool

    @property
    def is_error(self) -> bool:
        """Whether `act_on` may raise."""
        return self.problem or self.parted or self.mixed or self.ends > 0


def read_word(
    sums: Sequence[float], ranks: int, announcement: Announcement | None = None
) -> tuple[ControlDecision, list[bool]]:
    """The decision that a sum of words is, and for each parameter whether a shard gave it a gradient.

    An announcement learns the values that were announced.
    """
    problem, new, ends, stop, save, place, square, ran, modes, modes_square = sums[:CONTROL_LENGTH]
    given = CONTROL_LENGTH
    if announcement is not None:
        given += len(announcement.values)
        announcement.learn(sums[CONTROL_LENGTH:given])
    parted = ranks * square != place**2
    mixed = ran * modes_square != modes**2
    decision = ControlDecision(problem > 0, new > 0, int(ends), stop > 0, save > 0, parted, mixed)
    return decision, list(map(bool, sums[given:]))


def act_on(
    said: ControlDecision, mini_batch: MiniBatch, problem: Exception | None, seen: PayloadLayout, world: World
) -> None:
    """Raise on every rank what the word of a pass says. Every rank must call this.

    Args:
        said: of that pass.
        mini_batch, problem, seen: this rank's, in that pass.
        world: the ranks.
    """
    if said.problem:
        world.raise_if_any_failed(problem)
    if said.parted:
        world.require_equal("epoch and position of a step's mini-batch", (mini_batch.epoch, mini_batch.position))
        check_first(mini_batch, world)
    if said.mixed:
        require_same_modes(world.gather(seen, "the modes of the modules"))
    if said.ends:
        check_end(said.ends, mini_batch, world)


def came_late(layout: PayloadLayout, seen: PayloadLayout) -> RuntimeError:
    """The error of a rank that finds something new when the other ranks no longer wait for it."""
    found = sorted({*seen.buffers} - layout.buffers) or ["a call of a batch-norm layer, a metric or a weight"]
    return RuntimeError(
        "On a GPU all that a step reduces must be known when the last shard's backward begins. After it came, for the "
        f"first time: {', '.join(found)}. Change buffers and call layers before step.backward(loss)."
    )


class ControlExchange:
    """The control words of ranks on asynchronous devices; see [Note: Late words].

    A pass is `open`, `flag`, `send`, `read`.

    Args:
        world: from `join_world`.

    Attributes:
        owes_flag: whether this rank has yet to send the flag of this pass.
        waits: whether its flag is set, or the pass has none, so that all read the word in the fold.
        has_raised: whether a word was read late that raised.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.owes_flag = self.has_raised = False
        self.waits = True
        self._flag: tuple[torch.Tensor, Work | None] | None = None
        self._word: tuple[torch.Tensor, Work | None] | None = None
        self._pass: tuple[MiniBatch, PayloadLayout] | None = None  # of the word; None of a rank that left
        self._is_kept = self._is_deferred = False  # whether deferred collectives leave the word; whether it is one

    def open(self, *, has_flags: bool) -> None:
        """Begin a pass; without flags the last word is read first. Every rank must call this."""
        self._is_kept = has_flags
        try:
            self._world.require_collectives_allowed()
        finally:
            self._is_kept = False
        self.begin(has_flags=has_flags)

    def begin(self, *, has_flags: bool) -> None:
        """Owe a flag, if ranks send one in the pass that begins."""
        self.owes_flag = has_flags and self._world.size > 1
        self.waits = not self.owes_flag

    def flag(self, has_news: Callable[[], bool] | None = None, clock: Callable[[], float] = time.perf_counter) -> float:
        """Send the flag, where this rank still owes it; returns the seconds of a wait. Every rank must call this.

        Args:
            has_news: whether all ranks must read the word of this pass in its fold; None if they must.
            clock: read as a wait begins and as it ends.
        """
        if not self.owes_flag:
            return 0.0
        waited_s = 0.0
        if self._word is not None:
            since = clock()
            self.read_last()
            waited_s = clock() - since
        self.owes_flag = False
        self.waits = has_news is None or has_news()
        flag = torch.tensor([self.waits], dtype=torch.int32, device="cpu")
        self._flag = flag, self._world.start_sum(flag)
        return waited_s

    def send(self, word: torch.Tensor, of: tuple[MiniBatch, PayloadLayout] | None) -> None:
        """Start the sum of all ranks' words. Every rank must call this.

        Args:
            word: of this rank, which stays as it is.
            of: the mini-batch of the pass, and what this rank's shards have; None where the rank leaves.
        """
        sums = word.clone()
        self._word = (sums, self._world.start_sum(sums))
        self._pass = of

    def read(self, *, waits: bool) -> list[int]:
        """The sum of all words; where it is read in the next pass, that of words without a request or an error.

        Every rank must call this.

        Args:
            waits: whether this rank needs it now: otherwise it gives every parameter a gradient, and has no error.
        """
        flag = self._flag
        self._flag = None
        if flag is not None:
            sums, work = flag
            self._world.finish(work)
            if not waits and sums.tolist() == [0] and self._word is not None:
                self._defer()
                return [0] * CONTROL_LENGTH + [1] * (len(self._word[0]) - CONTROL_LENGTH)
        return self._finish()

    def end(self, length: int, send_nothing: Callable[[AbstractContextManager[None]], None] | None) -> None:
        """Send the flag and the word of a pass that this rank leaves. Every rank must call this, or fold.

        Args:
            length: of the word.
            send_nothing: sends sums that add nothing, inside of a block; None without sums.
        """
        self.flag()
        if send_nothing is not None:
            send_nothing(self._beside(length))

    @contextmanager
    def _beside(self, length: int) -> Iterator[None]:
        self.send(word_tensor((True, *(0,) * (length - 1)), torch.int32), None)
        yield
        self.read(waits=True)

    def read_last(self) -> None:
        """Read the last pass's word, if it was not read, and raise what it says. Every rank must call this."""
        if self._word is not None:
            said, _ = read_word(self._finish(), self._world.size)
            if self._pass is not None and said.is_error:
                mini_batch, seen = self._pass
                self.has_raised = True
                self._world.block_collectives(None)
                act_on(said, mini_batch, None, seen, self._world)
                self.has_raised = False

    def _finish(self) -> list[int]:
        if self._word is None:
            return []
        sums, work = self._word
        self._world.finish(work)
        self._word = None
        found: list[int] = sums.tolist()
        return found

    def _defer(self) -> None:
        if not self._is_deferred:
            self._is_deferred = True
            self._world.defer(self._read_deferred)

    def _read_deferred(self) -> None:
        self._is_deferred = False
        if self._word is not None and self._is_kept:
            self._defer()
        else:
            self.read_last()
