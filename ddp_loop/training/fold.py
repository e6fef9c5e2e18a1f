"""The fold: gradients, losses, metrics and statistics of a step's shards, reduced to those of the whole mini-batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import attrgetter, not_
from typing import Protocol

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
from ddp_loop.distributed import IDENTITY, World, each_module, listed
from ddp_loop.training.buckets import Bucketing, bucket_sizes
from ddp_loop.training.buffers import BufferReduction, Buffers, find_buffers
from ddp_loop.training.checks import NonFiniteGuard
from ddp_loop.training.control import (
    NO_REQUEST,
    ControlDecision,
    ControlRequest,
    ControlWord,
    act_on,
    came_late,
)
from ddp_loop.training.gradients import Gradients
from ddp_loop.training.ordered_sum import rank_order, tree_order
from ddp_loop.training.rows import (
    Modes,
    RowLayout,
    Rows,
    ShardRecord,
    StepResult,
    agreed,
    layout_of,
    now_evaluated,
    use_moments,
)
from ddp_loop.training.validation import Weight, find_scale, refuse_wrapped

_OPEN = (
    "Between a step's first shard and its fold the ranks are not at the same place. Run this collective after "
    "step.fold()."
)
EVALUATED = (
    "Steps should train a model in training mode. From step {step} on {names} is in evaluation mode, after steps in "
    "training mode: dropout is off, and batch norm uses its running statistics. Call train() after an evaluation."
)
_DONE = attrgetter("done")
_TRAINING = attrgetter("training")
_NUMBER = attrgetter("number")
_SHARD_NUMBER = attrgetter("shard.number")


class FoldEvents(Protocol):
    """What a fold asks of the loop, and calls while it waits."""

    def take_requests(self) -> ControlRequest:
        """What this rank asks of all, at a fold; once."""

    def while_reducing(self) -> None:
        """The sums over the ranks have started. Do other work: rows, the next data, the seeds of what follows."""


class _NoEvents:
    """A fold without a loop."""

    def take_requests(self) -> ControlRequest:
        return NO_REQUEST

    def while_reducing(self) -> None:
        pass


@dataclass(slots=True)
class FoldPass:
    """One pass over a mini-batch's shards, but for its gradients; a new object for each.

    Attributes:
        opened_by: its step, between its first shard and its fold.
        gathers: whether an earlier pass had held outputs.
        decision: of all ranks at its fold.
        had_gradients: whether its fold left any.
        records, empty: what its shards left, and a rank without a shard, under synced batch norm.
        loss_scale: of a GradScaler.
        raw: the collectives of the script as the first shard began.
        request: of this rank, where its flag was sent.
    """

    opened_by: object = None
    gathers: bool = False
    decision: ControlDecision | None = None
    had_gradients: bool = False
    records: list[ShardRecord] = field(default_factory=list)
    empty: ShardRecord | None = None
    loss_scale: torch.Tensor | None = None
    raw: int = 0
    request: ControlRequest | None = None


class Fold:
    """Reduces the results of a step's shards over shards and ranks, in the same order on every rank.

    A pass is `open`; `begin_shard`, `backward` and `end_shard` for each shard; then `close`.

    Args:
        modules: by name, with the job's batch-norm layers and buffers.
        parameters: by name, of the modules and of the optimizers.
        world: from `join_world`.
        announced: the number of values that a rank announces in the control word; see `Announcement`.
        shards: S, of each mini-batch. With one, torch's own running statistics already cover the whole mini-batch, and
            travel as ordinary buffers.
        carried: the number of shards of each rank; by default `split_sizes(S, ranks)`.
        ordered: add gradients up in an order that follows from S alone, for the same bits on any number of ranks.
        bucket_cap_mib: the size of the gradient buckets; None as in `Loop`.
        buffer_reduction: rules for single buffers, by name.
        guard: judges steps that are not finite; None allows them.
        scalers: by which losses may be multiplied; results and rows are without their factor.
        events: called around each fold.
        former: the fold that this one replaces, released; its control word is taken over.
        averaged: parameters of averaged copies, which never need a gradient.
        watch: called with each shard's number on this rank and its gradients by name.
        reduce_dtype: the dtype in which gradients of a lower precision are added up, over shards and ranks; then they
            are rounded to the parameters' dtype. None for the parameters' dtype.

    Raises:
        ValueError: a model that torch shares between ranks, a hook on a parameter, or a rule for an unknown buffer.

    Attributes:
        current: the pass that is open, or the last one.
        control: on whose sum all ranks decide.
    """

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
        custom = custom_norms(self.modules.values())
        others = [*other_norm_layers(modules, layers), *(norm.module for norm in custom if shards == 1)]
        order = (tree_order if ordered or world.adds_in_order else rank_order)(shards, world.size, world.rank, carried)
        self._world = world
        self._events = _NoEvents() if events is None else events
        self._guard = guard
        self.scalers = scalers
        self.sync_channels = [channel for channel in find_sync_channels(modules.values()) if channel.size > 1]
        synced = {layer for layer in self.modules.values() if is_synced(layer)}  # these move their statistics
        doubles = any(parameter.dtype == torch.float64 for parameter in parameters.values())
        dtype = torch.float64 if doubles else torch.float32  # of statistics, losses and metrics
        sizes = bucket_sizes(bucket_cap_mib, world.device)
        self.gradients = Gradients(
            parameters,
            Bucketing(world, order, sizes, dtype, reduce_dtype),
            averaged=averaged,
            synced=bool(self.sync_channels),
            takes_hooks=shards == 1,
            watch=watch,
        )
        self._statistics = BatchNormStatistics(layers, custom if shards > 1 else [], others)
        self._snapshot = RunningStatsSnapshot(synced if guard is not None and guard.skips else [])
        found = find_buffers(modules, {*layers.values(), *synced}, buffer_reduction or {})
        self._buffers = Buffers(found, is_whole=shards == world.size == 1)
        as_moments = use_moments(self._statistics, shards, set(parameters.values()).difference(averaged), dtype)
        self._make_rows = partial(Rows, self._statistics, self._buffers, world, order, dtype, as_moments)
        self._rows: Rows | None = None  # of the layout that the ranks have agreed on
        self.current = FoldPass()
        self.control: ControlWord = ControlWord(world, announced) if former is None else former.control

    def check_pending(self) -> None:
        """Raise the error in the last step's buffers that a GPU reports late; the same on every rank.

        Raises:
            ValueError: shards changed a buffer of the rule "same" differently.
        """
        self._buffers.settle()

    def release(self) -> None:
        """Remove all hooks."""
        self.gradients.release()
        self._statistics.release()
        self._events = _NoEvents()  # the loop's job, which holds this fold: both would wait for the garbage collector

    # -- a pass over the shards ----------------------------------------------------------------------------

    def open(self, step: object = None, *, gathers: bool = False) -> None:
        """Begin a pass over the shards of a mini-batch.

        Args:
            step: whose pass it is; None without a `Step`.
            gathers: whether an earlier pass had held outputs.
        """
        has_flags = self._rows is not None and not gathers and not self.sync_channels  # as all ranks know alike
        self.control.open(has_flags=has_flags)
        self._world.blocked_because = _OPEN
        self.current = FoldPass(step or self, gathers)
        self.gradients.open()
        if self._buffers.found:
            self._buffers.open()
        self._statistics.open()
        if self._snapshot.layers:
            self._snapshot.record()

    def begin_shard(self, shard: Shard | None) -> ShardRecord:
        """Begin a shard's forward, with the buffers of the pass's start; its backward comes before `end_shard`.

        Args:
            shard: None on a rank without one, which takes part in synced batch norm.

        Raises:
            RuntimeError: an earlier shard of this rank called torch.distributed itself.
        """
        current = self.current
        if self._world.size > 1 and len(self.gradients.bucketing.order.mine) > 1:
            # The package's own sums begin in the last backward.
            made = self._world.count_raw_collectives()
            if not current.records:
                current.raw = made
            elif made != current.raw:
                raise RuntimeError(
                    "A shard must not call torch.distributed where a rank has several shards. Such a collective "
                    "combines one shard of each rank, not the whole mini-batch, and waits for ranks with fewer shards. "
                    f"This step's earlier shards made {made - current.raw}. Use step.hold and step.gather, or a rule "
                    "for the buffer (docs/buffers.md), or one shard per rank."
                )
        record = ShardRecord(shard or Shard(0, 0, 0), self._statistics.recording())
        if shard is None:
            current.empty = record
        else:
            current.records.append(record)
        return record

    def end_shard(self, record: ShardRecord) -> None:
        """End a shard, even if it raised: take the buffers that it changed. Held outputs have their backward later.

        Args:
            record: of the shard.
        """
        self._statistics.stop()
        if self._buffers.found:
            is_done = record.done or record.held
            record.changed_buffers = self._buffers.take(graph_goes_on=record.held, is_done=is_done)

    def modes(self) -> Modes:
        """The modules in evaluation mode now, by name."""
        return tuple(compress(self.modules, map(not_, map(_TRAINING, self.modules.values()))))

    def unscaled(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss's value without a GradScaler's factor, as a new tensor, shape ()."""
        value = loss.detach()
        if (scale := find_scale(loss, self.scalers)) is not None:
            self.current.loss_scale = scale = scale.clone()  # the scaler writes it in place
            return value.to(torch.promote_types(value.dtype, torch.float32)) / scale
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
        if self.current.gathers:
            last = False  # no sum begins before the ranks' word: [Note: One word a pass] in `gather`
        if last and self.control.owes_flag:
            self._send_flag(None)
        if self.sync_channels and not isinstance(factor, torch.Tensor) and factor == 0:
            factor = torch.zeros((), device=loss.device)  # the ranks communicate in this backward
        if self.sync_channels and isinstance(factor, torch.Tensor):
            with ExitStack() as ending:
                for channel in self.sync_channels:
                    ending.enter_context(channel.masking(factor == 0))
                self.gradients.backward(loss, factor, last=last, more=more)
        elif isinstance(factor, torch.Tensor) or factor != 0:
            self.gradients.backward(loss, factor, last=last, more=more)
        elif not more:
            self.gradients.finish_shard(skipped=True)
        record.done = not more
        record.failed = False
        self._statistics.go_on(record.captures)

    def backward_empty(self, record: ShardRecord, loss: torch.Tensor, *, more: bool) -> None:
        """Backpropagate on a rank without samples, only to join the collectives in it; its gradients are discarded."""
        self._statistics.discard()
        self.gradients.backward_empty(loss, more=more)
        record.done = not more
        self._statistics.go_on(record.captures)

    def backward_held(self, loss: torch.Tensor, *, last: bool, more: bool = False, is_empty: bool = False) -> None:
        """Backpropagate into a shard's held outputs; of an empty one as in `backward_empty`."""
        self._statistics.recording()
        self._statistics.discard()
        if last and self.control.owes_flag:
            self.control.flag()
        try:
            with self._buffers.untouched():
                if is_empty:
                    self.gradients.backward_empty(loss, more=more)
                else:
                    self.gradients.backward(loss, 1.0, last=last, more=more)
        finally:
            self._statistics.stop()

    def finish_held(self, value: torch.Tensor, metrics: dict[str, torch.Tensor]) -> None:
        """Give all shards the values of the loss of the whole mini-batch, after its last backward."""
        for record in filter(None, (*self.current.records, self.current.empty)):
            record.losses = [value]
            record.metrics = metrics
            record.done = True

    def unfinished(self, shards: Sequence[Shard]) -> list[int]:
        """The numbers of the shards without a last backward in this pass, or of the empty one."""
        if (empty := self.current.empty) is not None and not empty.done:
            return [empty.shard.number]
        done = map(_SHARD_NUMBER, filter(_DONE, self.current.records))
        return sorted(set(map(_NUMBER, shards)).difference(done))

    @contextmanager
    def between_shards(self) -> Iterator[None]:
        """Allow collectives after the last shard's forward; all ranks run them. Every rank must call this."""
        for channel in self.sync_channels:
            channel.send_control()
        self._world.blocked_because = None
        self.control.read_last()
        try:
            yield
        finally:
            self._world.blocked_because = _OPEN

    # -- the fold ------------------------------------------------------------------------------------------

    def end_pass(self) -> None:
        """Allow collectives again; raises where synced layers ran in different orders. Every rank must call this."""
        self.current.opened_by = None
        self._world.blocked_because = None
        for channel in self.sync_channels:
            channel.send_control()

    def close(self, mini_batch: MiniBatch, iteration: int, problem: Exception | None = None) -> StepResult:
        """Make `.grad`, statistics and buffers the whole mini-batch's. Every rank must call this.

        Args:
            mini_batch, iteration: of the step.
            problem: raised here, where the other ranks raise PeerFailed.

        Raises:
            ValueError: shards that differ in metrics or in the change of a buffer; a sparse gradient.
            PeerFailed: another rank has a problem.
        """
        shards = len(mini_batch.sizes)
        gradients = self.gradients
        control = self.control
        rows, table, local_layout, problem = self._pack(mini_batch, problem)

        # Sum.
        if self._world.size > 1:
            gradients.start_sums()
            if rows.moments is not None:
                rows.moments.start()
        if control.is_late:
            control.send((mini_batch, local_layout))
        self._events.while_reducing()
        since = control.waited.clock()
        if self._world.size > 1:
            gradients.finish_sums(rows.extra_sums)
        decision, has_gradient = control.read(mini_batch.announcement)
        control.waited.seconds += control.waited.clock() - since

        # Decide.
        self.current.decision = decision
        if decision.is_unusual:
            act_on(decision, mini_batch, problem, local_layout, self._world)
        if decision.new:
            rows = self._extend(rows.layout, local_layout, iteration)
            table = rows.sum_now(self.current.records, shards)

        # Finish the gradients, and merge.
        self.current.had_gradients = any(has_gradient)
        replans = gradients.assign(has_gradient, rows.layout.unplanned if decision.new else None)
        total, fractions, losses, values = rows.merge(table, mini_batch.sizes)
        if total is not None and shards > 1 and "loss" not in rows.layout.summed:
            gradients.scale(torch.where(total == 0, 0.0, mini_batch.samples / total))  # backward used w / R
        if gradients.rounds:
            gradients.round()
        is_bad = self._check(values[0])
        rows.apply(table, mini_batch.sizes, self.current.records, is_bad)
        if replans:  # as each new layout does; now, since by the next pass one rank may have unfrozen something
            self._rows = rows
            gradients.release()
            gradients.plan(control.room + shards * rows.width, control.room_each)
        place = mini_batch.epoch, iteration, mini_batch.samples
        return StepResult(*place, rows.layout.metrics, values, total, losses, fractions, is_bad, gradients)

    def _pack(
        self, mini_batch: MiniBatch, problem: Exception | None
    ) -> tuple[Rows, torch.Tensor, RowLayout, Exception | None]:
        """Collect what the shards left, and pack it beside the gradients.

        Returns:
            The `Rows` of the layout that the ranks agreed on; the table of all shards' rows, (S, width), in which this
            rank's own stay empty with a problem or something new; the layout that this rank's shards need; and what is
            wrong.
        """
        if self.current.opened_by is not None:
            self.end_pass()
        control = self.control
        if control.owes_flag:
            self._send_flag(problem)
        request = self.current.request or self._events.take_requests()
        gradients = self.gradients
        local_layout, differing = layout_of(
            self.current.records, len(self._statistics.layers), gradients.trainable, gradients.unplanned.names
        )
        problem = problem or request.problem or differing or self._statistics.problem
        if problem is None and (name := gradients.changed_since_opened()) is not None:
            problem = RuntimeError(
                f"Parameters must stay as they are from a step's first shard to its fold. {name} was written in "
                "between, perhaps by an Embedding with max_norm or an optimizer's step. Write it after step.fold()."
            )
        if self._rows is None:
            self._world.raise_if_any_failed(problem)
            self._rows = self._make_rows(agreed(self._world.gather(local_layout), None))
        rows = self._rows
        shards = len(mini_batch.sizes)
        has_gradient, extras, lost = gradients.collect(control.room + shards * rows.width, control.room_each)
        problem = problem or lost
        is_new = problem is None and not rows.layout.covers(local_layout)
        if is_new and not control.waits:
            problem = came_late(rows.layout, local_layout)
            is_new = False
        is_usual = problem is None and not is_new
        table = extras.fill_(IDENTITY)[control.room + control.room_each * len(has_gradient) :].view(shards, -1)
        rows.fill(table, self.current.records if is_usual else ())
        modes = rows.layout.modes.index(local_layout.modes[0]) if is_usual and local_layout.modes else None
        control.write(
            extras, mini_batch, has_gradient, request, has_problem=problem is not None, is_new=is_new, modes=modes
        )
        return rows, table, local_layout, problem

    def _send_flag(self, problem: Exception | None) -> None:
        """Tell all ranks whether they must read this pass's word in its fold. See [Note: Late words] in `control`."""
        if problem is None:
            self.current.request = self._events.take_requests()
        self.control.flag(waits=problem is not None or self._has_news())

    def _has_news(self) -> bool:
        """Whether this rank has a request or a problem, or something that the rows have no room for."""
        records = self.current.records
        local_layout, differing = layout_of(records, len(self._statistics.layers), self.gradients.trainable)
        return (
            self.current.request is not NO_REQUEST
            or self._rows is None
            or bool(self.gradients.unplanned.awaited)
            or (differing or self._statistics.problem or self.gradients.changed_since_opened()) is not None
            or not (all(map(_DONE, records[:-1])) and self._rows.layout.covers(local_layout))
            or not self._buffers.changed() <= self._rows.layout.buffers
        )

    def _extend(self, former: RowLayout, local_layout: RowLayout, iteration: int) -> Rows:
        """The `Rows` with room for what is new on any rank. Every rank must call this."""
        rows = self._make_rows(agreed(self._world.gather(local_layout), former))
        names = now_evaluated(rows.layout, former)
        if names and iteration > 1 and self._world.rank == 0:
            warnings.warn(EVALUATED.format(names=listed(names), step=iteration), stacklevel=2)
        return rows

    def _check(self, loss: torch.Tensor) -> torch.Tensor | bool:
        """Whether the step is not finite and moves nothing; a tensor of shape () where only the device knows."""
        if (guard := self._guard) is None:
            return False
        is_quick = not self._world.accelerator.is_asynchronous  # to read a value
        if is_quick and math.isfinite(loss.item()) and (guard.is_scaled or self.gradients.are_finite()):
            return False
        is_bad = guard.check(loss, self.gradients)
        if is_bad is not False:
            self._snapshot.restore(is_bad)
            self.current.had_gradients = False
        return is_bad

    # -- after the fold ------------------------------------------------------------------------------------

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients as they are now, by parameter name, without those that are None."""
        return self.gradients.named()

    def gradient_norm(self, iteration: int) -> torch.Tensor | None:
        """The norm of the whole mini-batch's gradients, shape (), without a GradScaler's factor; None if left out.

        Args:
            iteration: of the step.
        """
        norm = self.gradients.norm_if_due(iteration, thinned=not self._world.accelerator.is_asynchronous)
        scale = self.current.loss_scale
        return norm if norm is None or scale is None else norm / scale

    def leaving(self, shards: int, *, gathers: bool) -> Callable[[], None]:
        """The part of a pass that has not begun, as a collective that adds only a problem; even after `release`.

        Args:
            shards: of the mini-batch.
            gathers: as in `open`, for the next pass.
        """
        has_flags = False
        send = None
        if self._rows is not None:
            has_flags = self.current.opened_by is None and not gathers and not self.sync_channels
            room = self.control.room + shards * self._rows.width
            send = self.gradients.leaving(room, self.control.room_each, self._rows.extra_sums)
        return self.control.leaving(self.gradients.planned, send, has_flags=has_flags)
