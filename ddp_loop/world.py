"""Ranks: joining them, their devices, sums over them, and one failure that becomes everybody's."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from ddp_loop.collectives import Collectives
from ddp_loop.determinism import seed_everything
from ddp_loop.devices import Place
from ddp_loop.groups import Groups
from ddp_loop.switches import demand_pinned
from ddp_loop.watcher import Watcher
from ddp_loop.words import PeerFailed, Stopped, Where, Words, said

Value = TypeVar("Value")
_LEFT = "a world is used inside its `with`, until it is left; this one was left: join_world() again"
_FIRST = "inside `with world.first()` the ranks are not at the same place, so no collective can be made: put it behind"


class World:
    """The ranks together, as one of them sees them; made by `join_world`, left at the end of its `with`.

    Attributes:
        rank: this process's number, 0 .. size-1.
        size: the number of ranks.
        device: where this rank computes.
        seed: what all random streams start from; the same on every rank.
        timeout_s: how long a collective waits for the slowest rank, in seconds.
        ended_by: the exception by which it is being left.
        stage, step: where this rank is, as a Loop keeps it: data, forward, backward, fold, optimizer (what follows the
            fold), ...; and the iteration. A rank that fails tells it.
    """

    def __init__(self, place: Place, device: torch.device, *, seed: int, threads: int, timeout_s: float) -> None:
        self.rank, self.size = place.rank, place.size
        self.device, self.seed, self.timeout_s = device, seed, timeout_s
        self._closers: list[Callable[[], None]] = []
        self._firsts = 0
        self._refusal: str | None = None  # why no collective can be made now
        self._busy: str | None = None  # why none but the step's own can
        self._owed: Callable[[], None] | None = None  # what comes before the next collective
        self._threads_before = torch.get_num_threads()
        self._groups: Groups | None = None
        # A world of one has no groups and a store of its own: every line above these is the same for it.
        self._words = Words(dist.HashStore(), self.rank, self.size)
        self._collectives = Collectives(None, None, self._words, device, timeout_s)
        self._watcher: Watcher | None = None
        self.stage, self.step = "", 0
        self._stop_here: Callable[[str], None] | None = None
        self.ended_by: BaseException | None = None
        self.on_evaluated: Callable[[dict[str, float]], None] = lambda result: None  # a loop notes what is evaluated
        try:
            if place.size > 1 or dist.is_initialized():
                self._join(place)
            self._watcher = Watcher(self._words_aside(), self.rank, lambda: self.where)
            self._watcher.start()
            self.check_same("seed, threads and timeout_s", (seed, threads, timeout_s))
            torch.set_num_threads(threads)
            seed_everything(seed)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _join(self, place: Place) -> None:
        self._groups = Groups(place, self.device, self.timeout_s)
        self._words = Words(self._groups.store, self.rank, self.size)
        self._collectives = Collectives(
            self._groups.steps, self._groups.others, self._words, self.device, self.timeout_s
        )
        demand_pinned(self._groups.backends)

    def _words_aside(self) -> Words:
        """The same words through a connection of its own: whoever waits at the store in the main one blocks that."""
        return self._words if self._groups is None else Words(self._groups.store_aside(), self.rank, self.size)

    @property
    def words(self) -> Words:
        """What the ranks tell each other through the launcher's store."""
        return self._words

    @property
    def where(self) -> Where:
        """Where this rank is: what it tells the others when it fails, or is asked."""
        return Where(self.stage, self.step, self._collectives.waits)

    # -- sums and words between the ranks ------------------------------------------------------------------

    def start_sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start to add `tensor` up over all ranks, in place; `finish` waits. Every rank must call this."""
        return self._start(lambda group: group.allreduce([tensor]))

    def start_exchange(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> dist.Work | None:
        """Start to send each rank its rows of `sent`, and to receive what all send here. Every rank must call this.

        Args:
            received, sent: (rows, K) each, contiguous, in the order of the ranks.
            from_each, to_each: how many rows, for each rank.
        """
        return self._start(lambda group: group.alltoall_base(received, sent, from_each, to_each))

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor) -> dist.Work | None:
        """Start to put every rank's `part`, (K,), side by side into `whole`, (size * K,). Every rank must call this."""
        return self._start(lambda group: group._allgather_base(whole, part))

    def _start(self, collective: Callable[[dist.ProcessGroup], dist.Work]) -> dist.Work | None:
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        return self._collectives.start(collective)

    def finish(self, work: dist.Work | None) -> None:
        """Wait for a sum that `start_sum` began.

        On a GPU with NCCL only the device waits, not the host.

        Raises:
            PeerFailed: a rank failed, or did not come within the world's timeout.
        """
        if work is not None:
            self._collectives.finish(work)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` up over all ranks, in place, and return it. Every rank must call this."""
        self.demand_free()
        self._collectives.sum(tensor, self.where)
        return tensor

    def gather(self, value: Value, what: str = "a value") -> list[Value]:
        """Every rank's `value`, in rank order. Every rank must call this.

        For a few words at the start of things: it pickles, and takes two collectives on the CPU.

        Args:
            value: this rank's.
            what: it is; ranks that gather something else at the same time are told so.
        """
        self.demand_free()
        return self._collectives.gather(value, what, self.where)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make `tensor` on every rank what it is on rank 0, in place. Every rank must call this."""
        self.broadcast_all([tensor])
        return tensor

    def broadcast_all(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make these contiguous tensors on every rank what they are on rank 0. Every rank must call this."""
        self.demand_free()
        self._collectives.broadcast(tensors, self.where)

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank if one of them has a problem: there its own, elsewhere `PeerFailed`.

        Every rank must call this.
        """
        told = self.gather(None if problem is None else (said(problem), self.where), "problems")
        if problem is not None:
            raise problem
        for rank, one in enumerate(told):
            if one is not None:
                text, where = one
                raise PeerFailed(f"rank {rank} failed{where}: {text}", rank, where.stage, where.step)

    def check_same(self, what: str, value: Value) -> None:
        """Raise ValueError on every rank unless `value` is the same on all. Every rank must call this."""
        values = self.gather(value, what)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"{what} must be the same on every rank; rank 0 has {values[0]}, rank {rank} has {other}"
                )

    # -- one rank, or one after the other ------------------------------------------------------------------

    def print(self, *values: object) -> None:
        """Print from rank 0 alone, at once; where nothing can be printed, as to a file on a full disk, it is not."""
        if self.rank == 0:
            with suppress(OSError):
                print(*values, flush=True)

    @contextmanager
    def first(self, timeout_s: float = 1800.0) -> Iterator[None]:
        """Run the block on rank 0 first; the others wait, then run it too. Every rank must call this.

        For work that one rank must do before the others find it done: a download, a folder. If rank 0 fails,
        all fail. On several machines rank 0 is first among all of them. No collective inside.

            with world.first():
                data = download_unless_there(folder)

        Args:
            timeout_s: how long the others wait for rank 0, in seconds.

        Raises:
            PeerFailed: rank 0 failed in the block, a rank failed while this one waited, or rank 0 took longer.
        """
        self.demand_free()
        self._firsts += 1
        key = f"first/{self._firsts}"
        told = ""
        if self.rank != 0:
            self._words.await_first(key, timeout_s)
        self._refusal = _FIRST
        try:
            yield
        except BaseException as error:
            told = said(error)
            raise
        finally:
            if self._refusal is _FIRST:
                self._refusal = None
            if self.rank == 0:
                self._words.tell(key, told)

    def once(self, function: Callable[[], Value], *, timeout_s: float = 1800.0) -> Value:
        """Call `function` on rank 0 alone; every rank gets its result, or fails with it. Every rank must call this.

            folder = world.once(lambda: make_folder("runs"))

        Args:
            function: makes no collective; what it returns is pickled for the others.
            timeout_s: how long the others wait for rank 0, in seconds.

        Raises:
            Exception: on rank 0, whatever the function raises.
            PeerFailed: on the others.
        """
        self.demand_free()
        self._firsts += 1
        result, problem, key = [], None, f"first/{self._firsts}"
        if self.rank == 0:
            self._refusal = _FIRST
            try:
                result = [function()]
            except Exception as error:
                problem = error
            finally:
                self._refusal = None
            self._words.tell(key, "")
        else:
            self._words.await_first(key, timeout_s)
        self.agree(problem)
        found: Value = self.gather(result, "what rank 0 found")[0][0]
        return found

    # -- stopping ------------------------------------------------------------------------------------------

    @property
    def stop_asked(self) -> str | None:
        """Why the ranks are asked to stop, as far as this one knows; None if they are not, or no loop could follow."""
        return None if self._watcher is None or self._stop_here is None else self._watcher.stop

    def take_requests(self, elsewhere: Callable[[], str | None], stop_here: Callable[[str], None]) -> None:
        """Take SIGINT and SIGTERM as requests to stop, and what `elsewhere` finds; `stop_here` keeps what was made."""
        if self._watcher is not None:
            self._watcher.look_for_stop, self._watcher.say = elsewhere, self._say
            self._watcher.take_requests()
            self._stop_here = stop_here

    def give_requests_back(self) -> None:
        """Put the handlers back that were there; after a stop they stay, for the same request's echo, until leaving."""
        if self._watcher is not None:
            self._watcher.look_for_stop = lambda: None
            if not self._watcher.has_followed:
                self._watcher.signals.put_back()
            self._stop_here = None

    def stop_followed(self) -> str | None:
        """The request was followed, on every rank at the same step; why it was made, if anybody said so."""
        return None if self._watcher is None else self._watcher.stop_followed()

    def agree_to_stop(self) -> None:
        """Leave on every rank if one was asked to stop, outside of a step. Every rank must call this.

        Raises:
            Stopped: what was made is kept.
        """
        if self._stop_here is not None and any(asked := self.gather(self.stop_asked, "requests to stop")):
            self._stop_here(next(why for why in asked if why))
            self.stop_followed()
            raise Stopped

    def _say(self, line: str) -> None:
        if self.rank == 0:
            sys.stderr.write(f"ddp_loop: {line}\n")

    # -- leaving -------------------------------------------------------------------------------------------

    def on_leaving(self, close: Callable[[], None]) -> None:
        """Call `close` when the world is left, also after an exception; the last one given, first."""
        self._closers.append(close)

    def __enter__(self) -> Self:
        self.demand_free()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Stopped):
            error = None  # on all ranks, in good order
        self.ended_by = error
        if self._watcher is not None:
            self._watcher.leaving(failed=error is not None)
        if error is not None and not isinstance(error, PeerFailed):
            self._words.tell_failure(error, self.where)
        try:
            if error is None:
                self._pay()
        finally:
            self.leave(failed=error is not None)
            self.ended_by = None  # its traceback holds all that was at hand

    def leave_at_exit(self) -> None:
        """Leave when the interpreter ends, unless that was done before; an uncaught exception is told the peers."""
        usual = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not self.is_left:
                self.__exit__(kind, error, trace)
            usual(kind, error, trace)

        def end() -> None:
            if not self.is_left:
                self.__exit__(None, None, None)

        def forget() -> None:
            atexit.unregister(end)
            if sys.excepthook is tell:
                sys.excepthook = usual

        sys.excepthook = tell
        atexit.register(end)
        self.on_leaving(forget)

    def leave(self, *, failed: bool = False) -> None:
        """Leave the ranks: close what was opened, the group and the connections, put the thread count back.

        After a failure the connections are cut at once, so that no peer waits for the timeout.
        """
        if self._refusal is _LEFT:
            return
        self._refusal = _LEFT
        with ExitStack() as ending:  # the last one first, and each also if one before it raises
            if self._watcher is not None:
                ending.callback(self._watcher.end)
            ending.callback(torch.set_num_threads, self._threads_before)
            ending.callback(self._leave_groups, failed)
            for close in self._closers:
                ending.callback(close)
            if failed and self._groups is not None:
                ending.callback(self._groups.cut_off)
        self._closers = []

    def _leave_groups(self, failed: bool) -> None:
        if self._groups is not None:
            if not failed:
                with suppress(RuntimeError):  # the store is gone with the launcher
                    self._words.tell_end()
            under_way = self._collectives.under_way
            self._collectives = Collectives(None, None, self._words, self.device, self.timeout_s)
            self._groups.leave(under_way, failed=failed)  # their last references
        self._groups = None

    @property
    def is_left(self) -> bool:
        """Whether the world was left."""
        return self._refusal is _LEFT

    def set_busy(self, why: str | None) -> None:
        """Refuse all collectives but sums that are started, with this reason; None takes them again."""
        self._busy = why

    def owe(self, collective: Callable[[], None]) -> None:
        """Make this collective before the next one, or when the world is left in good order; not after a failure."""
        self._owed = collective

    def _pay(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            owed()

    def demand_free(self) -> None:
        """Be ready for a collective.

        Raises:
            RuntimeError: none can be made here: after leaving, in `first`, inside a step.
        """
        self._pay()
        why = self._refusal or self._busy
        if why is not None:
            raise RuntimeError(why)
