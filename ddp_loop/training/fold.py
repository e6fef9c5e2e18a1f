"""The fold: gradients, losses, metrics and statistics of a step's shards, reduced to those of the whole mini-batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import compress
from operator import attrgetter, not_

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter

from ddp_loop.batch_norm import (
    BatchNormStatistics,
    RunningStatsSnapshot,
    batch_norm_layers,
    custom_norms,
    find_sync_channels,
    is_synced,
    other_norm_layers,
)
from ddp_loop.data import MiniBatch, Shard
from ddp_loop.distributed import IDENTITY, World, each_module
from ddp_loop.training.buckets import bucket_sizes
from ddp_loop.training.buffers import BufferReduction, Buffers, find_buffers
from ddp_loop.training.control import (
    CONTROL_LENGTH,
    NO_REQUEST,
    PROBLEM,
    ControlDecision,
    ControlExchange,
    ControlRequest,
    FoldEvents,
    act_on,
    came_late,
    control_word,
    nothing,
    read_word,
    word_tensor,
)
from ddp_loop.training.gradients import Gradients
from ddp_loop.training.moments import moment_sums
from ddp_loop.training.nonfinite import NonFiniteGuard
from ddp_loop.training.ordered_sum import ReductionOrder, rank_order, tree_order
from ddp_loop.training.payload import Modes, PayloadLayout, ShardRecord, StepResult, agreed, layout_of
from ddp_loop.training.slots import Slots
from ddp_loop.training.validation import Weight, find_scale, refuse_wrapped

_OPEN = (
    "Between a step's first shard and its fold the ranks are not at the same place. Run this collective after "
    "step.fold()."
)
_RAW = (
    "A shard must not call torch.distributed where a rank has several shards. Such a collective combines one shard of "
    "each rank, not the whole mini-batch, and waits for ranks with fewer shards. This step's earlier shards made "
    "{collectives}. Use step.hold and step.gather, or a rule for the buffer (docs/buffers.md), or one shard per rank."
)
_DONE = attrgetter("done")
_TRAINING = attrgetter("training")


class Fold:
    """Reduces what the shards of a step leave, over shards and ranks, in the same order on every rank.

    A pass is `open`, for each shard `with shard(...)` and `backward`, then `close`.

    Args:
        modules: by name, with the job's batch-norm layers and buffers.
        parameters: by name, those of the modules and others of the optimizers.
        world: from `join_world`.
        announced: the number of values that a rank announces in the control word; see `Announcement`.
        shards: S, of each mini-batch. With one, torch's own running statistics are already those of the whole
            mini-batch, and travel as ordinary buffers.
        carried: the number of shards of each rank; by default `split_sizes(S, ranks)`.
        ordered: add gradients up in an order that follows from S alone, for the same bits on any number of ranks.
        bucket_cap_mib: the size of the gradient buckets; None as in `Loop`.
        buffer_reduction: rules for single buffers, by name.
        guard: judges steps that are not finite; None allows them.
        scalers: by which losses may be multiplied; results and rows are without their factor.
        events, former: called around each fold; the fold that this one replaces, released.
        averaged: parameters that never need a gradient, those of averaged copies.
        watch: called with each shard's number on this rank and its gradients by name.
        reduce_dtype: in which gradients of a lower precision are added up, over shards and ranks; then they are rounded
            to the parameters' dtype. None for the parameters' dtype.

    Raises:
        ValueError: a model that torch shares between ranks, a hook on a parameter, or a rule for an unknown buffer.
    """

    decision: ControlDecision | None = None  # of all ranks at the last fold

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, Parameter],
        world: World,
        *,
        shards: int,
        announced: int = 0,
        carried: tuple[int, ...] | None = None,
        ordered: bool = False,
        bucket_cap_mib: float | None = None,
        buffer_reduction: Mapping[str, BufferReduction] | None = None,
        guard: NonFiniteGuard | None = None,
        scalers: Sequence[GradScaler] = (),
        events: FoldEvents | None = None,
        averaged: Collection[Parameter] = (),
        watch: Callable[[int, dict[str, torch.Tensor]], None] | None = None,
        former: Fold | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_wrapped(modules)
        layers = batch_norm_layers(modules) if shards > 1 else {}
        self.modules = each_module(modules)  # whose modes must be the same in all shards
        own = custom_norms(self.modules)
        others = [*other_norm_layers(modules, layers), *(norm.module for norm in own.values() if shards == 1)]
        order = (tree_order if ordered or world.adds_in_order else rank_order)(shards, world.size, world.rank, carried)
        self._world, self._events, self._guard, self.scalers = world, events, guard, scalers
        self.sync_channels = [channel for channel in find_sync_channels(modules.values()) if channel.size > 1]
        synced = {layer for layer in self.modules.values() if is_synced(layer)}  # these move their statistics
        self.gradients = Gradients(
            parameters,
            world,
            bucket_sizes(bucket_cap_mib, world.device),
            order,
            averaged=averaged,
            synced=bool(self.sync_channels),
            takes_hooks=shards == 1,
            watch=watch,
            reduce_dtype=reduce_dtype,
        )
        self._statistics = BatchNormStatistics(layers, own if shards > 1 else {}, others)
        self._snapshot = RunningStatsSnapshot(synced if guard is not None and guard.skips else [])
        found = find_buffers(modules, {*layers.values(), *synced}, buffer_reduction or {})
        self._buffers = Buffers(found, is_whole=shards == world.size == 1)
        self._loss_scale: torch.Tensor | None = None  # of a GradScaler, in this pass
        self.control = ControlExchange(world) if world.accelerator.is_asynchronous else None  # see [Note: Late words]
        self._word_in_tail, self._given_at = self.control is None, CONTROL_LENGTH + announced
        self._requests: Callable[[], ControlRequest] = (lambda: NO_REQUEST) if events is None else events.requests
        self._asked: ControlRequest | None = None  # of this pass, where its flag was sent
        self._word_dtype = self.gradients.slot_dtype if self._word_in_tail else torch.int32
        self._slots = self._make_slots(set(parameters.values()).difference(averaged), order, shards)
        self._layout: PayloadLayout | None = None
        self._tails: dict[int, int] = {}  # of the layout, by shards
        self._records: list[ShardRecord] = []
        self._empty: ShardRecord | None = None  # of a rank without a shard, under synced batch norm
        self._counts_raw, self._raw = shards > world.size > 1, 0  # collectives of the script as the first shard began
        self.opened_by: object = None  # the step of the pass between its first shard and its fold
        self.had_gradients = False  # whether the last fold left any
        self.waited_s: float = 0.0 if former is None else former.waited_s  # for the sums, in all folds so far
        self.clock: Callable[[], float] = time.perf_counter  # read as a wait begins and as it ends

    def _make_slots(self, wanted: set[Parameter], order: ReductionOrder, shards: int) -> Slots:
        dtype = self.gradients.slot_dtype
        moments = moment_sums(self._statistics, self._world, order, shards, wanted, dtype)
        return Slots(self._statistics, self._buffers, dtype, self._world.device, moments)

    def check_pending(self) -> None:
        """Raise what a GPU had yet to find out about the last step's buffers; the same on every rank.

        Raises:
            ValueError: shards changed a buffer of the rule "same" differently.
        """
        self._buffers.settle()

    def release(self) -> None:
        """Remove all hooks."""
        self.gradients.release()
        self._statistics.release()

    # -- a pass over the shards ----------------------------------------------------------------------------

    def open(self, step: object = None, *, gathers: bool = False) -> None:
        """Begin a pass over the shards of a mini-batch.

        Args:
            step: whose pass it is; None without a `Step`.
            gathers: whether an earlier pass had held outputs.
        """
        if self.control is None:
            self._world.require_collectives_allowed()
        else:
            self.control.open(has_flags=not gathers and not self.sync_channels)
            self._asked = None
        self._world.block_collectives(_OPEN)
        self._records = []
        self._empty = None
        self._loss_scale = None
        self.opened_by = step or self
        self.gradients.open()
        if self._buffers.found:
            self._buffers.open()
        self._statistics.open()
        if self._snapshot.layers:
            self._snapshot.record()

    @contextmanager
    def shard(self, shard: Shard | None) -> Iterator[ShardRecord]:
        """A shard's forward, with the buffers of the pass's start; its backward comes inside, of held outputs later.

        Args:
            shard: None on a rank without one, which takes part in synced batch norm.

        Raises:
            RuntimeError: an earlier shard of this rank called torch.distributed itself.
        """
        if self._counts_raw:
            self._refuse_raw_collectives()
        record = ShardRecord(shard or Shard(0, 0, 0), self._statistics.recording())
        if shard is None:
            self._empty = record
        else:
            self._records.append(record)
        try:
            yield record
        finally:
            self._statistics.stop()
            if self._buffers.found:
                is_done = record.done or record.held
                record.taken = self._buffers.take(graph_goes_on=record.held, is_done=is_done)

    def _refuse_raw_collectives(self) -> None:
        """Raise if the shards so far called torch.distributed; the package's own sums begin in the last backward."""
        made = self._world.count_raw_collectives()
        if not self._records:
            self._raw = made
        elif made != self._raw:
            raise RuntimeError(_RAW.format(collectives=made - self._raw))

    def modes(self) -> Modes:
        """The modules in evaluation mode now, by name."""
        return tuple(compress(self.modules, map(not_, map(_TRAINING, self.modules.values()))))

    def unscaled(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss's value without a GradScaler's factor, as a new tensor, shape ()."""
        value = loss.detach()
        if (scale := find_scale(loss, self.scalers)) is not None:
            self._loss_scale = scale.clone()  # the scaler writes it in place
            return value.to(torch.promote_types(value.dtype, torch.float32)) / self._loss_scale
        return value.clone()  # the script may reuse the tensor for the next shard

    def backward(
        self, record: ShardRecord, loss: torch.Tensor, factor: Weight, *, last: bool, more: bool = False
    ) -> None:
        """Backpropagate `factor` times a shard's loss; a factor of 0 adds exactly 0.

        Args:
            record, loss, factor: of the shard; shape (); its share of the mini-batch.
            last, more: whether the rank has no further shard; whether the shard has another loss.

        Raises:
            RuntimeError: the gradients of an earlier shard are gone, or a second gradient came too late.
        """
        record.failed = True  # stays True if backward raises
        record.modes = () if all(map(_TRAINING, self.modules.values())) else self.modes()
        self._statistics.discard()
        if last and self.control is not None:
            self.waited_s += self.control.flag(self._has_news, self.clock)
        if self.sync_channels:  # also of a factor of 0: ranks communicate in this backward
            weight = factor if isinstance(factor, torch.Tensor) else torch.full((), factor, device=loss.device)
            factor = factor if isinstance(factor, torch.Tensor) or factor != 0 else weight
            with ExitStack() as ending:
                for channel in self.sync_channels:
                    ending.enter_context(channel.masking(weight == 0))
                self.gradients.backward(loss, factor, last=last, more=more)
        elif isinstance(factor, torch.Tensor) or factor != 0:
            self.gradients.backward(loss, factor, last=last, more=more)
        elif not more:
            self.gradients.finish_shard(skipped=True)
        record.done = not more
        record.failed = False
        self._statistics.go_on(record.captures)

    def backward_empty(self, loss: torch.Tensor, *, more: bool) -> None:
        """Backpropagate on a rank without samples, only to join the collectives in it; its gradients are discarded."""
        if self._empty is not None and not self._empty.held:
            self._statistics.discard()
        self.gradients.backward_empty(loss, more=more)
        if self._empty is not None:
            self._empty.done = not more

    def backward_held(self, loss: torch.Tensor | None, *, last: bool, more: bool = False) -> None:
        """Backpropagate into a shard's held outputs; without a `loss` the shard has no gradients."""
        if loss is None:
            self.gradients.finish_shard()
            return
        self._statistics.recording()
        self._statistics.discard()
        if last and self.control is not None:
            self.waited_s += self.control.flag(None, self.clock)
        try:
            with self._buffers.untouched():
                self.gradients.backward(loss, 1.0, last=last, more=more)
        finally:
            self._statistics.stop()

    def finish_held(self, value: torch.Tensor, metrics: dict[str, torch.Tensor]) -> None:
        """Give all shards the values of the loss of the whole mini-batch, after its last backward."""
        for record in filter(None, (*self._records, self._empty)):
            record.losses = [value]
            record.metrics = metrics
            record.done = True

    def unfinished(self, shards: Sequence[Shard]) -> list[int]:
        """The numbers of the shards without a last backward in this pass; [-1] for the backward of no samples."""
        if self._empty is not None and not self._empty.done:
            return [-1]
        if len(self._records) == len(shards) and all(map(_DONE, self._records)):
            return []
        done = {record.shard.number for record in self._records if record.done}
        return [shard.number for shard in shards if shard.number not in done]

    @contextmanager
    def between_shards(self) -> Iterator[None]:
        """Allow collectives after the last shard's forward; all ranks run them. Every rank must call this."""
        for channel in self.sync_channels:
            channel.send_control()
        self._world.block_collectives(None)
        if self.control is not None:
            self.control.read_last()
        try:
            yield
        finally:
            self._world.block_collectives(_OPEN)

    # -- the fold ------------------------------------------------------------------------------------------

    def end_pass(self) -> None:
        """Allow collectives again; raises where synced layers ran in different orders. Every rank must call this."""
        self.opened_by = None
        self._world.block_collectives(None)
        for channel in self.sync_channels:
            channel.send_control()

    def close(self, mini_batch: MiniBatch, iteration: int, problem: Exception | None = None) -> StepResult:
        """Make `.grad`, statistics and buffers those of the whole mini-batch. Every rank must call this.

        Args:
            mini_batch, iteration: of the step.
            problem: raised here, where the other ranks raise PeerFailed.

        Raises:
            ValueError: shards that differ in metrics or in the change of a buffer; a sparse gradient.
            PeerFailed: another rank has a problem.
        """
        if self.opened_by is not None:
            self.end_pass()
        if self.control is not None:
            self.waited_s += self.control.flag(self._has_news if problem is None else None, self.clock)
        shards = len(mini_batch.sizes)
        asked = self._asked or self._requests()
        layout, seen, given, problem = self._collect(shards, problem or asked.problem)
        is_new = problem is None and not layout.covers(seen)
        if is_new and self.control is not None and not self.control.waits:
            problem = came_late(layout, seen)
            is_new = False
        modes = layout.modes.index(seen.modes[0]) if problem is None and not is_new and seen.modes else None
        slots = self._pack(layout, len(given), shards, fill=problem is None and not is_new)
        has_problem = problem is not None
        word = control_word(mini_batch, given, problem=has_problem, new=is_new, asked=asked, modes=modes)
        waits = self.control is not None and (has_problem or not all(given) or mini_batch.ends_stream)
        said, given_anywhere = self._send(layout, word_tensor(word, self._word_dtype), (mini_batch, seen), waits=waits)
        if said.is_error:
            act_on(said, mini_batch, problem, seen, self._world)
        if said.new:
            layout, slots = self._exchange(layout, seen, shards)
        replans = self._assign(given_anywhere, layout)
        total, share, losses, values = self._slots.merge(slots, layout, mini_batch.sizes)
        if total is not None:
            self._scale(total, layout, mini_batch)
        if self.gradients.rounds:
            self.gradients.round()
        is_bad = self._check(values[0])
        self._slots.apply(slots, layout, mini_batch.sizes, is_bad)
        if replans:  # now, since by the next pass one rank may have unfrozen something
            self._layout = layout
            self._tails = {}
            self.gradients.release()
            self.gradients.plan(self._tail(layout, shards))
        place = mini_batch.epoch, iteration, mini_batch.samples
        return StepResult(*place, layout.metrics or (), values, total, losses, share, is_bad, self.gradients)

    def _collect(
        self, shards: int, problem: Exception | None
    ) -> tuple[PayloadLayout, PayloadLayout, list[bool], Exception | None]:
        """The agreed layout, that of this rank's shards, which parameters got gradients here, and what is wrong."""
        wanted = self.gradients.wanted, self.gradients.unplanned.names
        seen, differing = layout_of(self._records, len(self._statistics.layers), *wanted)
        problem = problem or differing or self._statistics.problem
        if problem is None and (name := self.gradients.changed_since_opened()) is not None:
            problem = RuntimeError(
                f"Parameters must stay as they are from a step's first shard to its fold. {name} was written in "
                "between, perhaps by an Embedding with max_norm or an optimizer's step. Write it after step.fold()."
            )
        if self._layout is None:
            self._world.raise_if_any_failed(problem)
            self._layout = agreed(self._world.gather(seen), None)
        if (tail := self._tails.get(shards)) is None:
            tail = self._tails[shards] = self._tail(self._layout, shards)
        try:
            return self._layout, seen, self.gradients.collect(tail), problem
        except (ValueError, RuntimeError) as error:
            return self._layout, seen, [False] * self.gradients.planned, problem or error

    def _tail(self, layout: PayloadLayout, shards: int) -> int:
        """The number of values after the gradients: the control word, and a row for each shard."""
        return (self._given_at + self.gradients.planned) * self._word_in_tail + shards * sum(self._slots.widths(layout))

    def _pack(self, layout: PayloadLayout, flags: int, shards: int, *, fill: bool) -> torch.Tensor:
        """The rows of all shards, (S, width), in the tail of the step's sum, with this rank's rows filled in."""
        tail = self.gradients.tail.fill_(IDENTITY)
        slots = (tail[self._given_at + flags :] if self._word_in_tail else tail).view(shards, -1)
        self._slots.fill(slots, self._records if fill else (), layout)
        return slots

    def _has_news(self) -> bool:
        """Whether all ranks must read the word of this pass in its fold; also asks for this rank's requests."""
        layout = self._layout
        self._asked = self._requests()
        if layout is None or self._asked is not NO_REQUEST or self.gradients.unplanned.is_awaited:
            return True
        seen, differing = layout_of(self._records, len(self._statistics.layers), self.gradients.wanted)
        problem = differing or self._statistics.problem or self.gradients.changed_since_opened()
        is_known = problem is None and all(map(_DONE, self._records[:-1])) and layout.covers(seen)
        return not (is_known and self._buffers.changed() <= layout.buffers)

    def _send(
        self, layout: PayloadLayout, word: torch.Tensor, of: tuple[MiniBatch, PayloadLayout], *, waits: bool
    ) -> tuple[ControlDecision, list[bool]]:
        """Sum gradients, slots and the word over all ranks; returns the decision and which parameters got a gradient.

        With `waits` this rank needs the sum of the words now.
        """
        if self.control is None:
            sums = self.gradients.tail[: len(word)].copy_(word)
        if self._world.size > 1:
            self.gradients.start_sums()
            self._slots.start_sums()
        if self.control is not None:  # after all buckets: the number that began during backward differs between ranks
            self.control.send(word, of)
        if self._events is not None:
            self._events.while_reducing()
        since = self.clock()
        if self._world.size > 1:
            self.gradients.finish_sums(self._slots.sums(layout))
        found = sums.tolist() if self.control is None else self.control.read(waits=waits)
        self.waited_s += self.clock() - since
        self.decision, given = read_word(found, self._world.size, of[0].announcement)
        return self.decision, given

    def _exchange(self, layout: PayloadLayout, seen: PayloadLayout, shards: int) -> tuple[PayloadLayout, torch.Tensor]:
        """Agree on a layout with room for what every rank has `seen`, and exchange its rows; returns both."""
        layout = agreed(self._world.gather(seen), layout)
        shape = (shards, sum(self._slots.widths(layout)))
        dtype = self.gradients.slot_dtype
        slots = torch.full(shape, IDENTITY, dtype=dtype, device=self._world.device)
        self._slots.fill(slots, self._records, layout)
        return layout, self._slots.sum_now(slots, self._world)

    def _assign(self, given: list[bool], layout: PayloadLayout) -> bool:
        """Make the sums `.grad` where a shard gave one; returns whether the next pass needs another plan."""
        self.gradients.close(given)
        self.had_gradients = any(given)
        is_new = layout is not self._layout
        if is_new:
            self.gradients.unplanned.sum(layout.unplanned, self._world)
        return (is_new or not self.gradients.is_chosen) and (self.gradients.leave_out() or is_new)

    def _scale(self, total: torch.Tensor, layout: PayloadLayout, mini_batch: MiniBatch) -> None:
        """Multiply all gradients by R / sum(w), since backward used w / R; a single shard was not scaled."""
        if len(mini_batch.sizes) > 1 and "loss" not in (layout.sums or ()):
            self.gradients.scale(torch.where(total == 0, 0.0, mini_batch.samples / total))

    def _check(self, loss: torch.Tensor) -> torch.Tensor | bool:
        """Whether the step is not finite and moves nothing; a tensor of shape () where only the device knows."""
        if (guard := self._guard) is None:
            return False
        if self._word_in_tail and math.isfinite(loss.item()) and (guard.is_scaled or self.gradients.are_finite()):
            return False
        bad = guard.check(loss, self.gradients)
        if bad is not False:
            self._snapshot.restore(bad)
            self.had_gradients = False
        return bad

    # -- after the fold ------------------------------------------------------------------------------------

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients as they are now, by parameter name, without those that are None."""
        return self.gradients.named()

    def gradient_norm(self, iteration: int) -> torch.Tensor | None:
        """The norm of the whole mini-batch's gradients, shape (), without a GradScaler's factor; None if left out.

        Args:
            iteration: of the step.
        """
        norm = self.gradients.norm_if_due(iteration, thinned=self._word_in_tail)
        return norm if norm is None or self._loss_scale is None else norm / self._loss_scale

    def leaving(self, shards: int, *, gathers: bool) -> Callable[[], None]:
        """What of a pass has not begun, as a collective that adds a problem alone, also after `release`.

        Args:
            shards: of the mini-batch.
            gathers: as in `open`, for the next pass.
        """
        layout = self._layout
        length = self._given_at + self.gradients.planned
        send = None if layout is None else self.gradients.leaving(self._tail(layout, shards), self._slots.sums(layout))
        if self.control is None:
            return nothing if send is None else partial(send, PROBLEM, nullcontext())
        if self.opened_by is None:
            self.control.begin(has_flags=not gathers and not self.sync_channels)
        return partial(self.control.end, length, None if send is None else partial(send, None))
