"""Ranks: joining them, their devices, sums over them, and one failure that becomes everybody's."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

# The default group is a default argument there. Imported later (the first optimizer does, by way of
# torch._dynamo), it would hold the group for ever: then the connections of a rank that failed stay open, and
# its peers wait for the timeout instead of 0.1 s.
import torch.distributed.nn.functional
from torch.distributed.rendezvous import rendezvous

from ddp_loop.connections import cut, free_kept, keep_while_busy, open_sockets
from ddp_loop.determinism import seed_everything
from ddp_loop.devices import Place
from ddp_loop.switches import demand_pinned
from ddp_loop.words import PeerFailed, Words, own_keys, said

Value = TypeVar("Value")
_LEFT = "a world is used inside its `with`, until it is left; this one was left: join_world() again"
_SLICE = timedelta(seconds=0.5)
_FIRST = "inside `with world.first()` the ranks are not at the same place, so no collective can be made: put it behind"


class World:
    """The ranks together, as one of them sees them; made by `join_world`, left at the end of its `with`.

    Attributes:
        rank: this process's number, 0 .. size-1.
        size: the number of ranks.
        device: where this rank computes.
        seed: what all random streams start from; the same on every rank.
        timeout_s: how long a collective waits for the slowest rank, in seconds.
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
        self._owns_group = False
        self._connections: dict[int, str] = {}
        self._sums: set[dist.Work] = set()  # those under way
        # A world of one has no group and a store of its own: every line above `start_sum` is the same for it.
        self._group: dist.ProcessGroup | None = None
        self._words = Words(dist.HashStore(), self.rank, self.size)
        try:
            if place.size > 1 or dist.is_initialized():
                self._join(place)
            self.check_same("seed, threads and timeout_s", (seed, threads, timeout_s))
            torch.set_num_threads(threads)
            seed_everything(seed)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _join(self, place: Place) -> None:
        if not dist.is_initialized():
            self._start_group(place)
        elif (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
            raise ValueError(
                f"the process group must be that of the launcher; it has rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, the environment says {place.rank} of {place.size}"
            )
        self._group = dist.distributed_c10d._get_default_group()
        self._demand_cpu_sums(self._group)
        store = own_keys(dist.distributed_c10d._get_default_store(), place.rank)
        self._words = Words(store, self.rank, self.size)
        demand_pinned(str(dist.get_backend_config(self._group)))

    @staticmethod
    def _demand_cpu_sums(group: dist.ProcessGroup) -> None:
        try:
            group._get_backend(torch.device("cpu"))
        except RuntimeError as error:
            raise ValueError(
                "the process group must have a backend for the CPU too, over which the ranks agree; this one has "
                f'{dist.get_backend_config(group)}: init_process_group("cpu:gloo,cuda:nccl"), or leave it out: '
                "join_world makes a group"
            ) from error

    def _start_group(self, place: Place) -> None:
        timeout = timedelta(seconds=self.timeout_s)
        own_gpu = self.device.type == "cuda" and place.local_size <= torch.cuda.device_count()
        try:
            store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
            store.set_timeout(timeout)
            free_kept()
            before = open_sockets()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
                timeout=timeout,
                store=own_keys(store, place.rank),
                rank=place.rank,
                world_size=place.size,
            )
        except RuntimeError as error:
            raise PeerFailed(
                f"all {place.size} ranks must join within timeout_s={self.timeout_s:g}; rank {place.rank} did not "
                f"meet them all: look at what the others printed, and at MASTER_ADDR and MASTER_PORT: {error}"
            ) from error
        self._owns_group = True
        self._connections = {number: name for number, name in open_sockets().items() if before.get(number) != name}

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
        if self._group is None:
            return None
        try:  # written out here and in `finish`: a context manager takes 2 microseconds
            work = collective(self._group)
        except RuntimeError as error:
            raise self._words.peer_failure(error, self.timeout_s) from error
        self._sums.add(work)
        return work

    def finish(self, work: dist.Work | None) -> None:
        """Wait for a sum that `start_sum` began.

        On a GPU with NCCL only the device waits, not the host.

        Raises:
            PeerFailed: a rank failed, or did not come within the world's timeout.
        """
        if work is not None:
            try:
                self._wait(work)
            except RuntimeError as error:
                raise self._words.peer_failure(error, self.timeout_s) from error
            self._sums.discard(work)

    def _wait(self, work: dist.Work) -> None:
        """Wait for a sum; on the CPU look now and then whether a rank failed, since gloo does not always say so.

        With several sums under way a peer's closed connection ended them all in 9 of 10 failures, else one was not
        woken before its timeout.
        """
        if self.device.type != "cpu":
            work.wait()
            return
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():  # perhaps since the slice ran out, and then it only seems to have failed
                    work.wait()  # at once; raises what ended it, if something did
                    return
                if self._words.has_failure() or time.monotonic() > deadline:
                    raise

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` up over all ranks, in place, and return it. Every rank must call this."""
        self.demand_free()
        self.finish(self.start_sum(tensor))
        return tensor

    def gather(self, value: Value) -> list[Value]:
        """Every rank's `value`, in rank order. Every rank must call this.

        For a few words at the start of things: it pickles, and takes two collectives on the CPU.
        """
        self.demand_free()
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with self._naming_the_culprit(), torch.device("cpu"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make `tensor` on every rank what it is on rank 0, in place. Every rank must call this."""
        self.demand_free()
        if self._group is not None:
            with self._naming_the_culprit():
                dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank if one of them has a problem: there its own, elsewhere `PeerFailed`.

        Every rank must call this.
        """
        told = self.gather(None if problem is None else said(problem))
        if problem is not None:
            raise problem
        for rank, text in enumerate(told):
            if text is not None:
                raise PeerFailed(f"rank {rank} failed: {text}", rank)

    def check_same(self, what: str, value: Value) -> None:
        """Raise ValueError on every rank unless `value` is the same on all. Every rank must call this."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"{what} must be the same on every rank; rank 0 has {values[0]}, rank {rank} has {other}"
                )

    # -- one rank, or one after the other ------------------------------------------------------------------

    def print(self, *values: object) -> None:
        """Print from rank 0 alone, at once."""
        if self.rank == 0:
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
        if error is not None and not isinstance(error, PeerFailed):
            self._words.tell_failure(error)
        try:
            if error is None:
                self._pay()
        finally:
            self.leave(failed=error is not None)

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
            ending.callback(torch.set_num_threads, self._threads_before)
            ending.callback(self._leave_group, failed)
            for close in self._closers:
                ending.callback(close)
            if failed and self._owns_group and dist.is_initialized():
                ending.callback(dist.distributed_c10d._get_default_group().abort)
                ending.callback(cut, self._connections)
        self._closers = []

    def _leave_group(self, failed: bool) -> None:
        if self._group is not None and not failed:
            with suppress(RuntimeError):  # the store is gone with the launcher
                self._words.tell_end()
        if self._group is not None and failed and self._owns_group:
            keep_while_busy(self._group, self._sums)
        self._group, self._sums = None, set()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

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

    # -- failures ------------------------------------------------------------------------------------------

    @contextmanager
    def _naming_the_culprit(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._words.peer_failure(error, self.timeout_s) from error
