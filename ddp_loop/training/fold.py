"""The fold: gradients, losses, metrics and statistics of a step's shards made those of the whole mini-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_loop.batch_norm import (
    ENDS_LOOP,
    BatchNormStatistics,
    CallMismatch,
    RunningStatsSnapshot,
    batch_norm_layers,
    custom_norms,
    find_sync_channels,
    is_synced,
    other_norm_layers,
)
from ddp_loop.data import MiniBatch, Shard, check_end, check_first
from ddp_loop.distributed import World, each_module
from ddp_loop.training.buffers import BufferReduction, Buffers, find_buffers
from ddp_loop.training.gradients import Gradients
from ddp_loop.training.nonfinite import NonFiniteGuard
from ddp_loop.training.optimizer_check import UnmovedParametersCheck, find_scale
from ddp_loop.training.ordered_sum import IDENTITY, finish_all, nothing, rank_order, tree_order
from ddp_loop.training.payload import (
    LENGTH,
    PROBLEM,
    ControlDecision,
    Folded,
    PayloadLayout,
    ShardRecord,
    ValueSlots,
    agreed,
    columns_of,
    control_word,
    no_requests,
    shares,
)
from ddp_loop.training.validation import Weight, refuse_wrapped

_OPEN = "between a step's first shard and its fold the ranks are not at the same place: call this after step.fold()"
_NORM_EACH = 2**20
_WORDS = 1024  # control words that are kept as tensors; most are one of 256


class Fold:
    """Folds what the shards of a step leave behind, over shards and ranks, in one order on every rank.

    Args:
        modules: by name; their parameters, batch-norm layers and buffers are those of the job.
        parameters: by name, those of the modules and the optimizers' other ones.
        world: from `join_world`.
        shards: S, of each mini-batch. With one, torch's own running statistics are already those of the whole
            mini-batch, and travel as ordinary buffers.
        ordered: whether gradients are added up in an order that follows from S alone, the same bits on any number of
            ranks; else in the one that costs least.
        bucket_bytes: the size of a gradient bucket.
        buffer_reduction: rules for single buffers, by name.
        guard: says whether a mini-batch's values are finite; by default nobody asks.
        scalers: by which losses may be multiplied; the rows tell them as they were.
        optimizers: their state shows whether they made a step; the warning of left accumulation asks it.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, Parameter],
        world: World,
        *,
        shards: int,
        ordered: bool = False,
        bucket_bytes: int = 8 * 2**20,
        buffer_reduction: Mapping[str, BufferReduction] | None = None,
        guard: NonFiniteGuard | None = None,
        scalers: Sequence[GradScaler] = (),
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        refuse_wrapped(modules)
        layers = batch_norm_layers(modules) if shards > 1 else {}
        own = custom_norms(each_module(modules))
        others = [*other_norm_layers(modules, layers), *(norm.module for norm in own.values() if shards == 1)]
        self.is_ordered = ordered
        order = (tree_order if ordered else rank_order)(shards, world.size, world.rank)
        self.gradients = Gradients(parameters, world, bucket_bytes, order)
        self.statistics = BatchNormStatistics(layers, own if shards > 1 else {}, others)
        # Synced layers move their running statistics themselves, alike on all ranks.
        self.sync_channels = [channel for channel in find_sync_channels(modules.values()) if channel.size > 1]
        synced = {layer for layer in each_module(modules).values() if is_synced(layer)}
        self._guard = guard
        self._scalers, self._unmoved = scalers, UnmovedParametersCheck(scalers, optimizers)
        self._scale: torch.Tensor | None = None  # that the pass's losses were multiplied by
        self._kept = RunningStatsSnapshot(synced if guard is not None and guard.skips else [])
        self.buffers = Buffers(
            find_buffers(modules, {*layers.values(), *synced}, buffer_reduction or {}), shards=shards
        )
        self.gradients.ranks_talk, self.gradients.overlaps = bool(self.sync_channels), not self.sync_channels
        self._world = world
        # On the CPU a few integers ride in the step's own sum (a group of their own took a small step from
        # 2.65 to 4.34 times local); on a GPU reading them there would hold the host up, so they go over gloo.
        self._rides = not world.accelerator.is_asynchronous
        self._layout: PayloadLayout | None = None
        self._values = ValueSlots(world.device)
        self._measured: tuple[PayloadLayout | None, list[int]] = None, []
        self._words: dict[tuple[int, ...], torch.Tensor] = {}
        self.requests = no_requests  # what this rank asks of all, at each fold
        self.decision: ControlDecision | None = None  # what all ranks said at the last one
        self.records: list[ShardRecord] = []
        self.waited_s = 0.0  # in all folds so far, for the sums of all ranks
        self._waits_since = 0.0

    def release(self) -> None:
        """Take all hooks away."""
        self.gradients.release()
        self.statistics.release()

    def follow(self, former: Fold) -> None:
        """Take the place of another one, for whoever asks and is asked."""
        self.requests, self.decision, self.waited_s = former.requests, former.decision, former.waited_s
        self.gradients.watch = former.gradients.watch
        self.gradients.overlaps = self.gradients.overlaps and former.gradients.overlaps

    # -- a pass over the shards ----------------------------------------------------------------------------

    def open(self, first_of_step: int = 0) -> None:
        """Begin a pass over the shards of a mini-batch; of the step `first_of_step` it is the first one."""
        self._world.require_collectives_allowed()
        self._world.block_collectives(_OPEN)
        self.records, self._scale = [], None
        self.gradients.open()
        if first_of_step and self._world.rank == 0:
            self._unmoved.check(self.gradients.parameters, self.gradients.versions, first_of_step)
        if self.buffers.found:
            self.buffers.open()
        self.statistics.open()
        self._kept.record()

    def open_shard(self, shard: Shard) -> ShardRecord:
        """Begin a shard, from the buffers as they stood when the pass opened."""
        record = ShardRecord(shard, self.statistics.recording())
        self.records.append(record)
        return record

    def open_without_samples(self) -> ShardRecord:
        """Begin what stands for a shard on a rank that has none, so that it takes part in synced batch norm."""
        return ShardRecord(Shard(0, 0, 0), self.statistics.recording())

    def close_shard(self, record: ShardRecord, *, graph_goes_on: bool = False) -> None:
        """End a shard, and put the buffers back; its backward may come later."""
        self.statistics.stop()
        if self.buffers.found:
            record.taken = self.buffers.take(graph_goes_on=graph_goes_on)

    def unscaled(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss's value before a GradScaler multiplied it, in a tensor of its own, shape ()."""
        value = loss.detach()
        if self._scalers and (scale := find_scale(loss, self._scalers)) is not None:
            self._scale = scale.clone()  # the scaler writes it in place
            return value.to(torch.promote_types(value.dtype, torch.float32)) / self._scale
        return value.clone()  # the script may write the same tensor again for the next shard

    def check_alignment(self) -> None:
        """Be told if another rank called the layers of synced batch norm otherwise. Every rank must call this.

        Before each collective of another length that follows the layers': see [Note: One length]. Nor do the gradients'
        own sums begin before backward has ended, so that all ranks make their collectives in one order.
        """
        for channel in self.sync_channels:
            channel.send_control()

    def leave(self, why: Exception) -> None:
        """Say in such a word that this rank goes through the layers no more; raises `why` if others do.

        Raises:
            CallMismatch: nobody does, and the layers were called otherwise before.
        """
        self._world.block_collectives(None)
        try:
            for channel in self.sync_channels:
                channel.send_control(ENDS_LOOP)
        except CallMismatch:
            raise
        except RuntimeError:
            raise why from None  # the others have been told

    @contextmanager
    def masking(self, factor: Weight) -> Iterator[None]:
        """A backward inside, whose loss is multiplied by `factor`, adds nothing to others' sums where that is 0."""
        with ExitStack() as ending:
            for channel in self.sync_channels:
                ending.enter_context(channel.masking(torch.as_tensor(factor) == 0))
            yield

    @contextmanager
    def among_the_shards(self) -> Iterator[None]:
        """Collectives that all ranks make between their shards and the fold."""
        self._world.block_collectives(None)
        try:
            yield
        finally:
            self._world.block_collectives(_OPEN)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Backward outside of a shard: what it computes again leaves no trace in statistics and buffers."""
        self.statistics.recording()
        self.statistics.discard()
        try:
            with self.buffers.untouched():
                yield
        finally:
            self.statistics.stop()

    # -- the fold ------------------------------------------------------------------------------------------

    def close(
        self,
        mini_batch: MiniBatch,
        problem: Exception | None = None,
        meanwhile: Callable[[], None] = nothing,
        *,
        met: bool = False,
    ) -> Folded:
        """End the pass: `.grad`, statistics and buffers become the whole mini-batch's. Every rank must call this.

        Args:
            mini_batch: of which the records are.
            problem: what this rank found wrong; then it raises that here, and the others raise PeerFailed.
            met: whether `check_alignment` was called after the last backward.
            meanwhile: called while the sums are under way, for work that would otherwise come after them.

        Raises:
            ValueError: shards that differ in metrics or in the change of a buffer; a sparse gradient.
            PeerFailed: another rank has a problem.
        """
        self._world.block_collectives(None)
        if not met:
            self.check_alignment()
        asked = self.requests()
        seen, problem = self._see(problem or asked.problem)
        if self._layout is None:
            self._world.raise_if_any_failed(problem)
            self._layout = agreed(self._world.gather(seen), None)
        layout = self._layout
        new = problem is None and not layout.covers(seen)
        given, problem = self._collect(layout, len(mini_batch.sizes), problem)
        slots = self._slots(len(given), len(mini_batch.sizes))
        if problem is None and not new:
            self._pack(slots, layout)
        control = control_word(mini_batch, problem=problem is not None, new=new, asked=asked)
        sums = self._sum((*control, *given), meanwhile)
        said = self.decision = ControlDecision.of(sums, self._world.size)
        if said.problem:
            self._world.raise_if_any_failed(problem)
        if said.parted:
            place = mini_batch.epoch, mini_batch.position
            self._world.require_equal("epoch and position of a step's mini-batch", place)
            check_first(mini_batch, self._world)
        if said.ends:
            check_end(said.ends, mini_batch, self._world)
        if said.new:
            layout, slots = self._renegotiate(seen, layout, len(mini_batch.sizes))
        given_anywhere = [count > 0 for count in sums[LENGTH:]]
        self.gradients.close(given_anywhere)
        self._unmoved.had_gradients = any(given_anywhere)
        if said.new:
            self.gradients.sum_unplanned()
        folded = self._unpack(slots, layout, mini_batch)
        if said.new:
            self._layout = layout
            # Planned now, when all ranks agree: at the next pass something may be unfrozen.
            self.gradients.release()
            self.gradients.plan(self._tail(layout, len(mini_batch.sizes)))
        return folded

    def leaving(self, shards: int, problem: Exception) -> Callable[[], None]:
        """What tells the peers, who fold or leave too, that this rank will not fold.

        Returns:
            A collective, to be called once instead of `close`, also after `release`; it raises `problem`.
        """
        layout = self._layout
        tail = 0 if layout is None else self._tail(layout, shards)
        outline = [] if layout is None else self.gradients.outline(tail)
        begun = [] if layout is None else self.gradients.begun

        def tell() -> None:
            self._world.block_collectives(None)
            if layout is not None:
                word = torch.tensor([1, *[0] * (LENGTH - 1 + len(layout.parameters))], dtype=torch.int32)
                for summing, length in outline:
                    rows = summing.nothing()  # new ones: what was handed out stays as it is
                    if self._rides and summing is outline[-1][0]:
                        rows[0][length + PROBLEM] = 1
                    summing.start(rows)
                work = None if self._rides else self._world.start_sum(word)
                finish_all([*begun, *(summing for summing, _ in outline)])
                self._world.finish(work)
            self._world.raise_if_any_failed(problem)

        return tell

    def _see(self, problem: Exception | None) -> tuple[PayloadLayout, Exception | None]:
        """The layout that this rank's shards ask for, and what is wrong with them."""
        metrics, sums, differing = columns_of(self.records)
        problem = problem or differing or self.statistics.problem
        if problem is None and (name := self.gradients.changed_since_opened()) is not None:
            problem = RuntimeError(
                f"parameters stay as they are from a step's first shard to its fold; {name} was written in between (an "
                "Embedding with max_norm does this in its forward; an optimizer's step?): do it after step.fold()"
            )
        calls = [tuple(map(len, record.captures)) for record in self.records] or [(0,) * len(self.statistics.layers)]
        layout = PayloadLayout(
            metrics=metrics,
            sums=sums,
            weighted=any(record.weight is not None for record in self.records),
            calls=calls[0] if len(calls) == 1 else tuple(map(max, *calls)),
            buffers=frozenset().union(*(record.taken for record in self.records)),
            parameters=self.gradients.wanted,
        )
        return layout, problem

    def _tail(self, layout: PayloadLayout, shards: int) -> int:
        """How many values ride behind the gradients: the control word, and a row for each shard."""
        return (LENGTH + len(layout.parameters)) * self._rides + shards * sum(self._widths(layout))

    def _collect(
        self, layout: PayloadLayout, shards: int, problem: Exception | None
    ) -> tuple[list[bool], Exception | None]:
        try:
            return self.gradients.collect(self._tail(layout, shards)), problem
        except (ValueError, RuntimeError) as error:
            return [False] * self.gradients.planned, problem or error

    def _slots(self, flags: int, shards: int) -> torch.Tensor:
        """The rows of all shards, (S, width), in the tail of the step's sum; they add nothing yet."""
        tail = self.gradients.tail
        tail.fill_(IDENTITY)
        return tail[LENGTH + flags :].view(shards, -1) if self._rides else tail.view(shards, -1)

    def _sum(self, word: tuple[int, ...], meanwhile: Callable[[], None]) -> list[float]:
        """Sum everything up; returns the control word over all ranks, and a count per parameter."""
        control = self.gradients.tail[: len(word)] if self._rides else torch.tensor(word, dtype=torch.int32)
        works = []

        def wait() -> None:
            if not self._rides:  # only after all buckets: how many began during backward differs between ranks
                works.append(self._world.start_sum(control))
            meanwhile()
            self._waits_since = time.perf_counter()

        if self._rides:
            if (kept := self._words.get(word)) is None:
                if len(self._words) > _WORDS:
                    self._words.clear()
                kept = self._words[word] = torch.tensor(word, dtype=control.dtype)
            control.copy_(kept)
        self.gradients.sum_up(wait)
        for work in works:
            self._world.finish(work)
        self.waited_s += time.perf_counter() - self._waits_since
        said: list[float] = control.tolist()
        return said

    def gradient_norm(self, iteration: int) -> torch.Tensor | None:
        """The Euclidean norm of the whole mini-batch's gradients, shape (); None in steps that leave it out.

        Without the factor that a GradScaler put into them.
        Where the guard did not ask for it, it reads each gradient once more, 0.3 ms per million on a CPU: there k
        million are read in every k-th step.
        """
        norm = self._scaled_norm(iteration)
        return norm if norm is None or self._scale is None else norm / self._scale

    def _scaled_norm(self, iteration: int) -> torch.Tensor | None:
        if self.gradients.known_norm is not None:
            return self.gradients.known_norm
        elements = self.gradients.elements if self._rides else 0
        if (iteration - 1) % max(1, elements // _NORM_EACH):
            return None
        replanned = self.decision is not None and self.decision.new  # then the buckets are new ones
        return self.gradients.norm() if replanned else self.gradients.folded_norm()

    # -- rows ----------------------------------------------------------------------------------------------

    def _widths(self, layout: PayloadLayout) -> list[int]:
        """How many columns values, statistics and buffers take; counted once for each layout."""
        if layout is not self._measured[0]:
            buffers = self.buffers.width(layout.buffers, self.gradients.slot_dtype)
            self._measured = layout, [self._values.width(layout), self.statistics.width(layout.calls), buffers]
        return self._measured[1]

    def _pack(self, slots: torch.Tensor, layout: PayloadLayout) -> None:
        widths = self._widths(layout)
        for record in self.records:
            row = slots[record.shard.number]
            if not any(widths[1:]):
                self._values.pack(record, layout, row)
                continue
            values, statistics, buffers = row.split_with_sizes(widths)
            self._values.pack(record, layout, values)
            self.statistics.pack(record.captures, layout.calls, statistics)
            self.buffers.pack(record.taken, layout.buffers, buffers)

    def _renegotiate(
        self, seen: PayloadLayout, layout: PayloadLayout, shards: int
    ) -> tuple[PayloadLayout, torch.Tensor]:
        """A rank saw something that the layout has no room for: agree on a new one, and send the rows again."""
        layout = agreed(self._world.gather(seen), layout)
        shape, dtype = (shards, sum(self._widths(layout))), self.gradients.slot_dtype
        slots = torch.full(shape, IDENTITY, dtype=dtype, device=self._world.device)
        self._pack(slots, layout)
        return layout, self._world.sum(slots)

    def _unpack(self, slots: torch.Tensor, layout: PayloadLayout, mini_batch: MiniBatch) -> Folded:
        widths = self._widths(layout)
        values = slots[:, : widths[0]]
        total = values[:, 0].sum() if layout.weighted else None
        if total is not None:
            share = shares(values[:, 0])
            if len(share) > 1 and "loss" not in (layout.sums or ()):  # an only shard's weight is the sum already
                self.gradients.scale(torch.where(total == 0, 0.0, mini_batch.samples / total))
        else:
            share = self._values.share(mini_batch.sizes, slots.dtype)
        means = self._values.merge(values, layout, share)
        bad = False if self._guard is None else self._guard.check(means[0], self.gradients)
        folded = Folded(layout.metrics or (), means, total, values[:, 1], share, bad)
        if bad is not False:
            self._kept.restore(bad)
            self._unmoved.had_gradients = False
        if bad is True:
            self.buffers.restore(layout.buffers)
        elif any(widths[1:]):
            _, statistics, buffers = slots.split_with_sizes(widths, dim=1)
            keep = None if bad is False else bad
            self.statistics.apply(statistics, layout.calls, keep)
            full = [number for number, size in enumerate(mini_batch.sizes) if size]
            # By samples also where losses have weights of the user's own: forward saw them all.
            share = self._values.share(mini_batch.sizes, torch.float64)
            self.buffers.apply(buffers, layout.buffers, share, full, keep)
        return folded
