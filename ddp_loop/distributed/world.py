"""The world: all ranks as one of them sees them, their collectives, and how one rank's failure ends all of them.

[Note: The package's own lines] What the package says in a run goes to the logger "ddp_loop" of Python's `logging`, on
rank 0. Its handler prints to the standard output, unless the script gave the logger one before it imported the package.
What must be read although logging is off goes to the standard error: failures, and what the launcher says.

[Note: Forked] A process that the script forked has a copy of the world and its connections. If an exception or
`sys.exit` ends it, that is no failure of the rank, and it leaves neither the world nor the loop: both go on in its
parent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Self, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from ddp_loop.accelerators import accelerator_of, check_in_waits
from ddp_loop.determinism import EVALUATION, LOOP, seed_everything, seeded_block, stream_key
from ddp_loop.distributed.backend import STEP, FlatSum, PieceOrder, Work
from ddp_loop.distributed.collectives import Collectives, Operation
from ddp_loop.distributed.devices import RankEnv
from ddp_loop.distributed.encoding import check_plain
from ddp_loop.distributed.failures import (
    LeftLoop,
    PeerFailed,
    RankStatus,
    Stopped,
    format_error,
    line_that_leaves,
    listed,
    running_lines,
    shorten,
)
from ddp_loop.distributed.process_group import ProcessGroups
from ddp_loop.distributed.processes import report_to_launcher
from ddp_loop.distributed.stops import Stops
from ddp_loop.distributed.store import RankStore
from ddp_loop.distributed.watchdog import Watchdog
from ddp_loop.elastic import leave_advice, shorten_refusal

Value = TypeVar("Value")
_LEFT = "A world cannot be used after it was left. Work inside its `with`, or call join_world() again."
_FIRST = (
    "No collective can run inside `with world.rank_zero_first()`, where the ranks are at different places. "
    "Call it after the block."
)


class _PrintingHandler(logging.Handler):
    """Prints records with the name of the package, to the standard output of the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the disk may be full
            print(f"{record.name}: {record.getMessage()}\n", end="", flush=True)  # one write: other threads print too


_LOGGER = logging.getLogger("ddp_loop")
if _LOGGER.level == logging.NOTSET:
    _LOGGER.setLevel(logging.INFO)
if not _LOGGER.handlers:  # else the script has its own
    _LOGGER.addHandler(_PrintingHandler())
    _LOGGER.propagate = False


def scale_batch_size(batch_size: int, world: World) -> int:
    """The mini-batch for all ranks from one rank's: times the number of ranks on GPUs, unchanged on CPUs.

    128 on 2 GPUs is 256 and 64 on 4 is 256: each GPU stays as full as one alone. On CPUs the ranks share the
    machine's cores, so the mini-batch that suits one process suits all together.

    Args:
        batch_size: of one rank, in samples.
        world: from `join_world`.

    Returns:
        The number of samples in a mini-batch over all ranks.
    """
    return batch_size if accelerator_of(world.device).is_host else batch_size * world.size


_OUTSIDE = 0, 0, 0  # the place of evaluations before the first step


class World:
    """All ranks, as one of them sees them; made by `join_world`, left at the end of its `with`.

    Attributes:
        rank: this process's number, 0 .. size-1.
        size: the number of ranks.
        device: the device of this rank.
        accelerator: that device's kind and abilities.
        seed: of all random streams; the same on every rank.
        timeout_s: how long a collective waits for the slowest rank, in seconds.
        store: the messages between the ranks through the launcher's key-value store.
        stops: requests to stop, and the ranks' common answer.
        exchange: how ranks exchange values of the CPU: "memory", "gloo", or "" in a world of one.
        why_gloo: why not in memory, in words; empty where nothing prevents it.
        ended_by: the exception by which the world is being left.
        stage, step: where this rank is: data, forward, backward, fold, optimizer (all that follows the fold), ...; and
            the iteration. A Loop sets them, and messages about a failed rank contain them.
    """

    def __init__(
        self, place: RankEnv, device: torch.device, *, seed: int, threads: int, timeout_s: float, exchange: str
    ) -> None:
        self.rank = place.rank
        self.size = place.size
        self.device = device
        self.accelerator = accelerator_of(device)
        self.seed = seed
        self.timeout_s = timeout_s
        self._closers: list[Callable[[], None]] = [partial(torch.set_num_threads, torch.get_num_threads())]
        self._process = os.getpid()
        self._refusal: str | None = None  # why no collective can run now
        self.blocked_because: str | None = None  # why only the current step's can run; set by its fold
        self._deferred: list[Callable[[], None]] = []  # to run before the next collective
        self._groups: ProcessGroups | None = None
        # A world of one has no groups and a store of its own.
        self.store = RankStore(dist.HashStore(), self.rank, self.size)
        self._collectives = Collectives(None, self.store, timeout_s)
        self._watchdog: Watchdog | None = None
        self.stage = ""
        self.step = 0
        self.exchange = ""
        self.why_gloo = ""
        self.ended_by: BaseException | None = None
        self.on_evaluated: Callable[[dict[str, float]], None] = lambda result: None  # of the loop in which this rank is
        self.advice: Callable[[], str] = str  # on how to go on with that loop's run after a failure; "" without one
        self._loops: list[object] = []  # that are being iterated, the innermost last
        self._left: list[LeftLoop] = []  # since the last collective, the innermost first
        self.explain: Callable[[BaseException], None] = lambda error: None  # adds a remedy; set by a loop that was left
        # Set by loops: the class and name of buffers that differ between ranks, and modules that are not compared.
        self.own_buffers: set[tuple[type, str]] = set()
        self.uncompared: WeakSet[object] = WeakSet()
        self._evaluations: dict[tuple[int, int, int], int] = {}  # how many outside of steps, and in the current one
        # How many outside of loops, by the seeded block; inside, by the place.
        self._loops_made: tuple[dict[int, int], dict[tuple[int, int], int]] = {}, {}
        self._loop = 0  # the number of the loop that is iterated, or was last
        try:
            if place.size > 1 or dist.is_initialized():
                self._join(place, exchange)
            # Through another connection, since a wait blocks the one on which it is made.
            store = self.store if self._groups is None else self._groups.rank_store(aside=True)
            self.stops = Stops(place, store, lambda: self.gather(self.stops.asked, "requests to stop"))
            self._watchdog = Watchdog(store, self.stops, lambda: self.where)
            self._watchdog.start()
            if self._groups is not None and self._groups.memory is not None:
                self._groups.memory.watch(self._watchdog.noticed)
            self.require_equal("join_world", {"seed": seed, "threads": threads, "timeout_s": timeout_s})
            torch.set_num_threads(threads)
            seed_everything(seed)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _join(self, place: RankEnv, exchange: str) -> None:
        groups = self._groups = ProcessGroups(
            place,
            self.device,
            self.timeout_s,
            exchange,
            where=lambda: self.where,
            in_vain=lambda: self._collectives.is_in_vain(),
        )
        self.store = groups.rank_store()
        self._collectives = Collectives(groups.backends, self.store, self.timeout_s)
        self.exchange = "gloo" if groups.memory is None else "memory"
        self.why_gloo = groups.why_gloo
        self.on_leaving(check_in_waits(lambda: self._collectives.check_peers(groups.has_lost_a_peer)))

    @property
    def where(self) -> RankStatus:
        """Where this rank is; part of its message when it fails."""
        return RankStatus(self.stage, self.step, self._collectives.waits)

    def __str__(self) -> str:
        """The ranks, their devices, and how they exchange values."""
        over = "shared memory" if self.exchange == "memory" else "gloo"
        groups = self._groups
        if groups is not None and not self.accelerator.is_host:
            over = groups.description
        elif groups is not None and groups.memory is not None and groups.memory.size < self.size:
            over += ", and gloo between machines"
        over += f" ({self.why_gloo})" if self.why_gloo else ""
        return f"{self.size} ranks on {self.accelerator.kind}, sums over {over}"

    @property
    def adds_in_order(self) -> bool:
        """Whether a step's sums cost the same in any order, so that they always take the order of the shards' tree."""
        return self.exchange == "memory" and self.accelerator.is_host

    # -- collectives ---------------------------------------------------------------------------------------

    def start_sum(self, tensor: torch.Tensor) -> Work | None:
        """Start to add `tensor` up over all ranks, in place; `finish` waits. Every rank must call this."""
        return self.start(lambda backend: backend.start_sum(tensor, STEP), tensor.device)

    def flat_sum(self, order: PieceOrder, length: int, dtype: torch.dtype, device: torch.device) -> FlatSum | None:
        """The sum of a flat tensor of `length` values, to be made in many steps; None in a world of one.

        Args:
            order: of the ranks' pieces.
            length: `padded`.
            dtype, device: of the values, which are real.
        """
        backend = self._collectives.backend_of(device)
        return None if backend is None else backend.flat_sum(order, length, dtype, device)

    def start(self, operation: Operation, device: torch.device) -> Work | None:
        """Start a step's own operation on tensors of a device; `finish` waits. Every rank must call this.

        Returns:
            None in a world of one, and if there is nothing to wait for.
        """
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        return self._collectives.start(operation, device)

    def finish(self, work: Work | None) -> None:
        """Wait for the operation of `start`; on a GPU with NCCL only the device waits, not the host.

        Raises:
            PeerFailed: a rank failed, or did not come within the world's timeout.
        """
        if work is not None:
            self._collectives.finish(work)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` up over all ranks, in place, and return it. Every rank must call this.

        Args:
            tensor: dense, of one shape and dtype on all ranks, outside of any graph.

        Raises:
            TypeError, ValueError: a number, an array, or a tensor that is sparse or needs a gradient.
        """
        self.require_collectives_allowed()
        check_plain(tensor, "world.sum")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "world.sum has no gradient: it would lack the other ranks' parts. Got a tensor that needs one. Pass "
                "tensor.detach(), or use step.hold and step.gather for a loss of the whole mini-batch."
            )
        self._collectives.sum(tensor, self.where)
        return tensor

    def mean(self, value: float | torch.Tensor, weight: float) -> float:
        """sum_r(weight_r value_r) / sum_r(weight_r) over the ranks, in float64. Every rank must call this.

        Args:
            value, weight: such as the mean over this rank's samples, and their number. Weight 0 adds exactly 0.
        """
        part = torch.tensor([float(value) * weight if weight else 0.0, weight], dtype=torch.float64, device=self.device)
        return float(torch.div(*self.sum(part)))

    def gather(self, value: Value, what: str = "a value", *, in_step: bool = False) -> list[Value]:
        """Every rank's `value`, in rank order. Every rank must call this.

        For small values outside of steps: they travel as JSON, in two collectives on the CPU.

        Args:
            value: None, a boolean, number, string, bytes, path, torch dtype, or a list, tuple, set or dict of these.
                Also a dense tensor, which arrives on the CPU; for tensors that need a gradient, use `step.gather`.
            what: the value in words, for the error where ranks gather different things.
            in_step: allow it inside a step too.

        Raises:
            TypeError: it is, or contains, something else.
        """
        self.require_collectives_allowed(in_step=in_step)
        return self._collectives.gather(value, what, self.where)

    def numbers(self, number: int, what: str, *, in_step: bool = False) -> list[int]:
        """Every rank's whole `number` of 64 bits, in rank order, in one small collective. Every rank must call this.

        Args:
            number, what, in_step: as in `gather`.
        """
        self.require_collectives_allowed(in_step=in_step)
        return self._collectives.numbers(number, what, self.where)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's `tensor` to every rank, in place, and return it. Every rank must call this.

        Args:
            tensor: dense, of one shape and dtype on all ranks.
        """
        check_plain(tensor, "world.broadcast")
        self.broadcast_all([tensor])
        return tensor

    def broadcast_all(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy rank 0's values of these contiguous tensors to every rank. Every rank must call this."""
        self.require_collectives_allowed()
        self._collectives.broadcast(tensors, self.where)

    def raise_if_any_failed(self, problem: Exception | None) -> None:
        """Raise on every rank if one has a problem: that rank its own exception, the others `PeerFailed`.

        Every rank must call this.

        Args:
            problem: of this rank; None without one.
        """
        told = self.gather(None if problem is None else (format_error(problem), self.where), "problems")
        if problem is not None:
            raise problem
        for rank, one in enumerate(told):
            if one is not None:
                text, where = one
                raise PeerFailed(f"{self.store.names[rank]} failed{where}: {text}", rank, where.stage, where.step)

    @contextmanager
    def failing_together(self, *kinds: type[Exception]) -> Iterator[None]:
        """Raise on every rank if the block raises an exception of these kinds on one; see `raise_if_any_failed`.

        Every rank must call this. The block makes no collective.
        """
        problem: Exception | None = None
        try:
            yield
        except kinds as error:
            problem = error
        self.raise_if_any_failed(problem)

    def require_equal(self, what: str, value: Value) -> None:
        """Raise ValueError on every rank unless `value` is the same on all. Every rank must call this.

        Args:
            what: the value in words, for the error.
            value: this rank's. Of a dict the error has the entries that differ.
        """
        values = self.gather(value, what)
        first = values[0]
        for rank, other in enumerate(values):
            if other == first:
                continue
            texts = [str(first), str(other)]
            if isinstance(first, Mapping) and isinstance(other, Mapping) and first.keys() == other.keys():
                names = [name for name in first if first[name] != other[name]]
                what = f"{listed(names)} of {what}"
                texts = [", ".join(f"{name}={one[name]!r}" for name in names) for one in (first, other)]
            raise ValueError(
                f"{what} must be the same on every rank. Rank 0 has {texts[0]}, rank {rank} has {texts[1]}. Pass the "
                "same, in the same order, on all ranks."
            )

    def begin_evaluation(self, stage: str) -> int:
        """The key of an evaluation's random streams, new for each. Every rank must call this.

        It follows from the current step, whether that is over (no `stage`, as after an epoch), the number of
        evaluations before it there, and the loop's number, so a resumed run has the same keys.
        """
        place = self._loop, self.step, int(self.step > 0 and stage != "")
        before = self._evaluations.get(place, 0)
        self._evaluations = {_OUTSIDE: self._evaluations.get(_OUTSIDE, 0), place: before + 1}
        return stream_key(self.seed, EVALUATION, *place[1:], before, *filter(None, place[:1]))

    def number_loop(self, stage: str) -> int:
        """Return the number of a new loop, for random streams of its own. Every rank must call this.

        Loops outside of others are counted, from 0. Each `deterministic(seed)` block counts from 0 again, so two runs
        of a block give the same bits. A loop inside another one has a number made of that one's number and step, so a
        resumed run has the same.

        Args:
            stage: in which the loop is made.
        """
        outside, inside = self._loops_made
        if not self._loops:
            before = outside.get(seeded_block(), 0)
            self._loops_made = {**outside, seeded_block(): before + 1}, {}
            return stream_key(LOOP, before) if before else 0
        place = self.step, int(stage != "")
        before = inside.get(place, 0)
        self._loops_made = outside, {place: before + 1}
        return stream_key(LOOP, self._loop, *place, before)

    def offer(self, on_evaluated: Callable[[dict[str, float]], None], advice: Callable[..., str] | None) -> None:
        """Give evaluations and advice to a new loop, unless another one is being iterated; see `in_loop`."""
        if not self._loops:
            self.on_evaluated = on_evaluated
            self.advice = advice or self.advice
            self.advise()

    @contextmanager
    def in_loop(
        self, number: int, on_evaluated: Callable[[dict[str, float]], None], advice: Callable[..., str] | None
    ) -> Iterator[None]:
        """Give evaluations and advice to the loop that is iterated in the block, and afterwards to the loop around it.

        Stage and step are that one's again, too. Without one, later evaluations are still this loop's.

        Args:
            number: of the loop, from `number_loop` or its checkpoint.
            on_evaluated: records an evaluation.
            advice: returns how to go on with the loop's run after a failure, given the advice of the loop around it;
                None without a run folder.
        """
        around = self._loops[-1:]
        before = self.on_evaluated, self.advice, self.stage, self.step, self._loop
        lines = running_lines()
        self._loop = number
        self._loops.append(on_evaluated)
        self.on_evaluated = on_evaluated
        if advice is not None:
            self.advice = partial(advice, self.advice) if around else advice
        self.advise()
        try:
            yield
        except BaseException:
            code, last = line_that_leaves()
            if around and code is not None:
                block = range(lines.get(code, last), last + 1)
                self._left.append(LeftLoop(code, block, (self.stage, self.step), self.advice))
            raise
        finally:
            self._loops.remove(on_evaluated)
            if around and around[0] in self._loops:  # else it was left before
                self.on_evaluated, self.advice, self.stage, self.step, self._loop = before
                self.advise()

    def advise(self) -> bool:
        """Leave the launcher the advice on how to go on, on rank 0; False where no launcher prints it."""
        return self.rank == 0 and leave_advice(lambda: self.advice())

    # -- one rank, or one after the other ------------------------------------------------------------------

    def print(self, *values: object, sep: str = " ", end: str = "\n", flush: bool = True) -> None:
        """Print on rank 0 alone, at once; an OSError, as from a full disk, is ignored.

        Args:
            values, sep, end, flush: as for Python's `print`.
        """
        if self.rank == 0:
            with suppress(OSError):
                print(sep.join(map(str, values)) + end, end="", flush=flush)  # one write: other threads print too

    def say(self, line: str) -> None:
        """Log a line of the package's own, on rank 0. See [Note: The package's own lines]."""
        if self.rank == 0:
            _LOGGER.info(line)

    @contextmanager
    def rank_zero_first(self, timeout_s: float = 1800.0) -> Iterator[None]:
        """Run the block on rank 0 first; the others wait, then run it too. Every rank must call this.

        For work that the others find done: a download, a folder. If rank 0 fails, all fail. There is one rank 0, even
        on several machines. The block makes no collective.

            with world.rank_zero_first():
                data = download_unless_there(folder)

        Args:
            timeout_s: how long the others wait for rank 0, in seconds.

        Raises:
            PeerFailed: rank 0 failed in the block, a rank failed while this one waited, or rank 0 took longer.
        """
        self.require_collectives_allowed()
        key = f"first/{self.store.number()}"
        told = ""
        if self.rank != 0:
            self.store.await_first(key, timeout_s, self.stage, self.step)
        self._refusal = _FIRST
        try:
            yield
        except BaseException as error:
            told = format_error(error)
            raise
        finally:
            if self._refusal is _FIRST:
                self._refusal = None
            if self.rank == 0:
                self.store.put(key, told)

    def on_rank_zero(self, function: Callable[[], Value], *, timeout_s: float = 1800.0) -> Value:
        """Call `function` on rank 0 alone; every rank gets its result, or fails with it. Every rank must call this.

            folder = world.on_rank_zero(lambda: make_folder("runs"))

        Args:
            function: makes no collective; its result is one that `gather` can send.
            timeout_s: how long the others wait for rank 0, in seconds.

        Raises:
            Exception: on rank 0, the function's exception.
            PeerFailed: on the others.
        """
        result: list[Value] = []
        with self.rank_zero_first(timeout_s):
            if self.rank == 0:
                result = [function()]
        return self.gather(result, "what rank 0 found")[0][0]

    # -- leaving -------------------------------------------------------------------------------------------

    def on_leaving(self, close: Callable[[], None]) -> None:
        """Call `close` when the world is left, also after an exception; the last one given is called first."""
        self._closers.append(close)

    def forget(self, close: Callable[[], None]) -> None:
        """Do not call `close` when the world is left: its object has ended, and can be freed."""
        with suppress(ValueError):
            self._closers.remove(close)

    def __enter__(self) -> Self:
        self.require_collectives_allowed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_forked:
            return
        if isinstance(error, Stopped):
            error = None  # it is raised on all ranks, and is no failure
        self.ended_by = error
        for left in self._left:
            if error is not None and left.raised(error):
                self.stage, self.step = left.where
                self.advice = left.advice
                self.advise()
                break
        if self._watchdog is not None:
            self._watchdog.leaving(failed=error is not None)
        if isinstance(error, PeerFailed):
            report_to_launcher(shorten(error), self.where)
            self.store.pass_on(error)
        elif error is not None:
            self.explain(error)
            shorten_refusal(error)
            report_to_launcher(error, self.where)
            self.store.set_failure(error, self.where)
        try:
            if error is None:
                self._run_deferred()
        finally:
            self.leave(failed=error is not None)
            self.ended_by = None  # its traceback keeps all local variables alive

    def leave(self, *, failed: bool = False) -> None:
        """Close everything that was opened, leave the groups, and restore the thread count.

        After a failure the connections are cut at once, so that no peer waits for the timeout.

        Args:
            failed: whether this rank failed.
        """
        if self._refusal is _LEFT or self.is_forked:
            return
        self._refusal = _LEFT
        with ExitStack() as ending:  # the last one first, and each even if another one raises
            if self._watchdog is not None:
                ending.callback(self._watchdog.end)
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
                    self.store.set_ended()
            under_way = self._collectives.under_way
            self._collectives = Collectives(None, self.store, self.timeout_s)
            self._groups.leave(under_way, failed=failed)  # their last references
        self._groups = None

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the rank. See [Note: Forked]."""
        return os.getpid() != self._process

    @property
    def is_left(self) -> bool:
        """Whether the world was left."""
        return self._refusal is _LEFT

    def count_raw_collectives(self) -> int:
        """The collectives so far that the script made by torch.distributed itself; over NCCL the world's as well."""
        return 0 if self._groups is None else self._groups.count_on_default()

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[str]:
        """Be in a stage inside the block, and stay in it where the block raises: a failed rank's error names it.

        The block gets the stage before it.
        """
        before = self.stage
        self.stage = stage
        yield before
        self.stage = before

    def defer(self, collective: Callable[[], None]) -> None:
        """Make this collective before the next one, or on leaving without a failure; several in their order."""
        self._deferred.append(collective)

    def _run_deferred(self) -> None:
        owed = self._deferred
        self._deferred = []
        for one in owed:
            one()

    def require_collectives_allowed(self, *, in_step: bool = False) -> None:
        """Make the deferred collectives, and check that another one may follow.

        Args:
            in_step: it may follow inside a step too, where none is deferred.

        Raises:
            RuntimeError: it may not: after leaving, in `rank_zero_first`, or inside a step.
        """
        self._left = []  # the script went on
        if self._deferred and not in_step:
            self._run_deferred()
        why = self._refusal or (None if in_step else self.blocked_because)
        if why is not None:
            raise RuntimeError(why)
