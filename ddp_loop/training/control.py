"""The control word: a few integers of each rank, on whose sum all ranks decide together in each fold.

On the CPU it rides in the sum of the gradients, and is read with it. The extras of the last bucket are, in this order:

    has a problem | has something new | its stream ends | stop | save | batch | batch^2 | ran | modes | modes^2 |
    announced values | for each planned parameter whether it got a gradient | the rows of all shards

On a GPU the extras are the rows alone, and the word, without them, is a sum of its own.

[Note: Late words] On a GPU the word travels beside the gradients, over the CPU, and a host that read it in its own fold
would wait until every other host has come there. So before the backward of its last shard, a rank sends a flag: whether
all ranks must read the word of this pass in its fold. It is set where the rank has a problem, a request or something
that the layout has no room for, since then the update depends on it. Otherwise the word can only contain an error, and
is read before the next pass sends anything, or before any other collective. So the fold waits only for ranks whose last
backward has not begun, and a rank is never more than one fold ahead of another one. Three ranks read the word in the
fold without the others: one with an error, one whose stream ends, and one whose shards left a parameter without a
gradient, which does not know whether other ranks gave it one.

The first pass of a `Fold` has no flag: all ranks read its word in the fold, and before its sums they ask each other for
problems. So a rank that folds there meets one that gathers in the same collective. Passes after a hold, and with synced
batch norm, have none either, since their ranks wait for each other anyway.

No rank starts anything between a pass's word and its reading. So the ranks stay in one order of collectives, whichever
of them reads early.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch

from ddp_loop.data import Announcement, MiniBatch, check_end, check_first
from ddp_loop.distributed import Work, World
from ddp_loop.training.rows import RowLayout, require_alike

SendNothing = Callable[[int | None, AbstractContextManager[object]], None]  # see `Gradients.leaving`
PROBLEM = 0  # its position in the word
CONTROL_LENGTH = 10  # without announced values and parameters


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


@lru_cache(maxsize=1024)  # most words are one of 256
def control_tensor(word: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The word as a tensor, which must not be written."""
    return torch.tensor(word, dtype=dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class ControlDecision:
    """The sum of all ranks' control words.

    Attributes:
        problem, new, stop, save: whether any rank says so.
        ends: the number of ranks whose stream ends.
        at_different_batches: whether ranks are; n sum(b^2) = sum(b)^2 exactly if all tags b are the same.
        mixed: whether the modules of ranks with shards were in different modes.
        is_unusual: whether there is a problem, an end, or a difference between ranks; see `act_on`.
    """

    problem: bool
    new: bool
    ends: int
    stop: bool
    save: bool
    at_different_batches: bool
    mixed: bool
    is_unusual: bool


def act_on(
    decision: ControlDecision, mini_batch: MiniBatch, problem: Exception | None, local_layout: RowLayout, world: World
) -> None:
    """Raise on every rank what the word of a pass says. Every rank must call this.

    Args:
        decision: of that pass.
        mini_batch, problem, local_layout: this rank's, in that pass.
        world: the ranks.
    """
    if decision.problem:
        world.raise_if_any_failed(problem)
    if decision.at_different_batches:
        world.require_equal("epoch and position of a step's mini-batch", (mini_batch.epoch, mini_batch.position))
        check_first(mini_batch, world)
    if decision.mixed:
        require_alike(world.gather(local_layout, "the modes of the modules"))
    if decision.ends:
        check_end(decision.ends, mini_batch, world)


def came_late(layout: RowLayout, local_layout: RowLayout) -> RuntimeError:
    """The error of a rank that finds something new when the other ranks no longer wait for it."""
    found = sorted({*local_layout.buffers} - layout.buffers) or ["a call of a batch-norm layer, a metric or a weight"]
    return RuntimeError(
        "On a GPU all that a step reduces must be known when the last shard's backward begins. After it came, for the "
        f"first time: {', '.join(found)}. Change buffers and call layers before step.backward(loss)."
    )


@dataclass(slots=True)
class WaitedTime:
    """For how long this rank has waited for others in its folds.

    Attributes:
        seconds: in all folds so far.
        clock: read as a wait begins and as it ends.
    """

    seconds: float = 0.0
    clock: Callable[[], float] = time.perf_counter


class ControlWord:
    """The control words of the ranks, pass after pass: `open`, `flag`, `write`, `send`, `read`.

    On the CPU each rides in the extras of the sum of the gradients, and is read with it. On asynchronous devices they
    are summed beside it, and read one pass late, see [Note: Late words].

    Args:
        world: from `join_world`.
        announced: the number of values that a rank announces; see `Announcement`.

    Attributes:
        is_late: whether they are summed beside the gradients.
        room: the extras that the word takes, and `room_each` more for each planned parameter.
        waited: the time of waits for other ranks.
        owes_flag: whether this rank has yet to send the flag of this pass.
        waits: whether this rank reads the word in the fold; where its flag says so, or the pass has none, all do.
        has_raised: whether a word was read late that raised.
    """

    def __init__(self, world: World, announced: int) -> None:
        self._world = world
        self._gradients_at = CONTROL_LENGTH + announced
        self.is_late = world.accelerator.is_asynchronous
        self.room = 0 if self.is_late else self._gradients_at
        self.room_each = 0 if self.is_late else 1
        self.waited = WaitedTime()
        self.owes_flag = False
        self.waits = True
        self.has_raised = False
        self._flag: tuple[torch.Tensor, Work | None] | None = None
        self._summed = torch.empty(0, device="cpu")  # of all words, once `_work` is done
        self._unsummed: list[int] = []  # the word of a rank that is alone
        self._work: Work | None = None
        self._unread: tuple[MiniBatch, RowLayout] | None = None  # of the pass whose word is still to be read

    def open(self, *, has_flags: bool) -> None:
        """Begin a pass; without flags the last word is read first. Every rank must call this."""
        unread = self._unread
        if has_flags:  # it is read before the flag is sent, not among the deferred collectives
            self._unread = None
        try:
            self._world.require_collectives_allowed()
        finally:
            if has_flags and unread is not None:
                self._unread = unread
                self._world.defer(self.read_last)
        self.owes_flag = has_flags and self.is_late and self._world.size > 1
        self.waits = not self.owes_flag

    def flag(self, *, waits: bool = True) -> None:
        """Send the flag that this rank owes. Every rank must call this.

        Args:
            waits: whether all ranks must read the word of this pass in its fold.
        """
        if self._unread is not None:
            since = self.waited.clock()
            self.read_last()
            self.waited.seconds += self.waited.clock() - since
        self.owes_flag = False
        self.waits = waits
        flag = torch.tensor([waits], dtype=torch.int32, device="cpu")
        self._flag = flag, self._world.start_sum(flag)

    def write(
        self,
        extras: torch.Tensor,
        mini_batch: MiniBatch,
        has_gradient: Sequence[bool],
        request: ControlRequest,
        *,
        has_problem: bool,
        is_new: bool,
        modes: int | None,
    ) -> None:
        """Write this rank's word, before the sums begin.

        Args:
            extras: of the last sum, where a word on the CPU rides.
            mini_batch: of this step; 8 bits of its checksum tell one from the next, and 256 squares add up in float32.
            has_gradient: for each parameter whether one of the rank's shards gave it a gradient.
            request: of this rank.
            has_problem, is_new: whether the rank has one, and something that the layout has no room for.
            modes: the number of its shards' modes among those agreed on; None without a shard, with a problem and with
                something new.
        """
        facts = mini_batch.epoch, mini_batch.position, mini_batch.samples, mini_batch.digest
        batch_tag = zlib.crc32(b"%d %d %d %d" % facts) & 0xFF
        ends = mini_batch.ends_stream
        news = () if mini_batch.announcement is None else mini_batch.announcement.values
        ran = (0, 0, 0) if modes is None else (1, modes, modes * modes)
        word = (
            has_problem,
            is_new,
            ends,
            request.stop,
            request.save,
            batch_tag,
            batch_tag**2,
            *ran,
            *news,
            *has_gradient,
        )
        if self.is_late:
            # It cannot be read late where this rank has an error, or does not know which parameters have gradients.
            self.waits = self.waits or has_problem or ends or not all(has_gradient)
            self._summed = control_tensor(word, torch.int32).clone()
        elif self._world.size == 1:
            self._unsummed = [*word]  # nothing is added to it
        else:
            self._summed = extras[: len(word)].copy_(control_tensor(word, extras.dtype))

    def send(self, of: tuple[MiniBatch, RowLayout] | None) -> None:
        """Start the sum of all late words, after all others: how many of these backward has begun differs by rank.

        Every rank whose word is late must call this.

        Args:
            of: the mini-batch of the pass, and what this rank's shards have; None where the rank leaves.
        """
        self._work = self._world.start_sum(self._summed)
        self._unread = of

    def read(self, announcement: Announcement | None = None) -> tuple[ControlDecision, list[bool]]:
        """The decision that the sum of all words is, and for each parameter whether a shard gave it a gradient.

        If they are read later, these are of words without request or error. Every rank must call this.

        Args:
            announcement: learns the values that were announced.
        """
        is_later = False
        if self._flag is not None:
            flags, work = self._flag
            self._flag = None
            self._world.finish(work)
            is_later = not self.waits and flags.tolist() == [0]
        if is_later:
            self._world.defer(self.read_last)
            # Nothing is asked, announced values add up to 1, and each parameter got a gradient.
            sums = [0] * CONTROL_LENGTH + [1] * (len(self._summed) - CONTROL_LENGTH)
        else:
            if self._work is not None:
                self._world.finish(self._work)
            self._unread = None
            sums = self._unsummed or self._summed.tolist()
        problem, new, ends, stop, save, batch_tag, square, ran, modes, modes_square = sums[:CONTROL_LENGTH]
        if announcement is not None:
            announcement.learn(sums[CONTROL_LENGTH : self._gradients_at])
        at_different_batches = self._world.size * square != batch_tag**2
        mixed = ran * modes_square != modes**2
        is_unusual = problem > 0 or ends > 0 or at_different_batches or mixed
        decision = ControlDecision(
            problem > 0, new > 0, int(ends), stop > 0, save > 0, at_different_batches, mixed, is_unusual
        )
        return decision, list(map(bool, sums[self._gradients_at :]))

    def read_last(self) -> None:
        """Read the last pass's word, if it was not read, and raise what it says. Every rank must call this."""
        if self._unread is None:
            return
        mini_batch, local_layout = self._unread
        self._flag = None  # of a pass that broke off
        decision, _ = self.read()
        if decision.is_unusual:
            self.has_raised = True
            self._world.blocked_because = None
            act_on(decision, mini_batch, None, local_layout, self._world)
            self.has_raised = False

    def leaving(
        self,
        parameters: int,
        send_nothing: SendNothing | None,
        *,
        has_flags: bool,
    ) -> Callable[[], None]:
        """The flag and the word of a pass that this rank leaves, as a collective.

        Args:
            parameters: the number of planned ones.
            send_nothing: sends sums that add nothing, but a problem at a place of the extras, inside of a block; None
                without sums. See `Gradients.leaving`.
            has_flags: as in `open`, of a pass that has yet to begin; False of one that has begun.
        """
        length = self._gradients_at + parameters
        self.owes_flag = self.owes_flag or (has_flags and self.is_late and self._world.size > 1)

        @contextmanager
        def beside() -> Iterator[None]:
            self._summed = torch.tensor([1] + [0] * (length - 1), dtype=torch.int32, device="cpu")
            self.send(None)
            yield
            self.waits = True
            self.read()

        def leave() -> None:
            if self.owes_flag:
                self.flag()
            if send_nothing is not None and self.is_late:
                send_nothing(None, beside())
            elif send_nothing is not None:
                send_nothing(PROBLEM, nullcontext())

        return leave
