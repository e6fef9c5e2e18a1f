"""The fold: gradients, losses, metrics and statistics of a step's shards made those of the whole mini-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn import Parameter

from ddp_loop.batchnorm import BatchNormStatistics, batch_norm_layers, is_synced
from ddp_loop.buffers import Buffers, Policy, find_buffers
from ddp_loop.control import LENGTH, PROBLEM, Said, no_requests, word
from ddp_loop.finite import Guard
from ddp_loop.gradients import Gradients
from ddp_loop.layout import Layout, agreed, metrics_differ, shares, weighted_mean
from ddp_loop.order import open_order, tree_order
from ddp_loop.records import Folded, Record
from ddp_loop.running import Kept
from ddp_loop.shards import MiniBatch, Shard
from ddp_loop.summing import IDENTITY, finish_all, nothing
from ddp_loop.syncing import ENDS_LOOP, find_talks
from ddp_loop.values import Weight
from ddp_loop.world import World

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
        policies: rules for single buffers, by name.
        guard: says whether a mini-batch's values are finite; by default nobody asks.
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
        policies: Mapping[str, Policy] | None = None,
        guard: Guard | None = None,
    ) -> None:
        layers = batch_norm_layers(modules) if shards > 1 else {}
        self.is_ordered = ordered
        order = (tree_order if ordered else open_order)(shards, world.size, world.rank)
        self.gradients = Gradients(parameters, world, bucket_bytes, order)
        self.statistics = BatchNormStatistics(layers)
        # Synced layers move their running statistics themselves, alike on all ranks.
        self.talks = [talk for talk in find_talks(modules.values()) if talk.size > 1]
        synced = {layer for module in modules.values() for layer in module.modules() if is_synced(layer)}
        self._guard = guard
        self._kept = Kept(synced if guard is not None and guard.skips else [])
        self.buffers = Buffers(find_buffers(modules, {*layers.values(), *synced}, policies or {}))
        self.gradients.ranks_talk, self.gradients.overlaps = bool(self.talks), not self.talks
        self._world = world
        # On the CPU a few integers ride in the step's own sum (a group of their own took a small step from
        # 2.65 to 4.34 times local); on a GPU reading them there would hold the host up, so they go over gloo.
        self._rides = world.device.type == "cpu"
        self._layout: Layout | None = None
        self._shares: dict[tuple[int, ...], torch.Tensor] = {}
        self._words: dict[tuple[int, ...], torch.Tensor] = {}
        self.requests = no_requests  # what this rank asks of all, at each fold
        self.said: Said | None = None  # what all ranks said at the last one
        self.records: list[Record] = []
        self.waited_s = 0.0  # in all folds so far, for the sums of all ranks
        self._waits_since = 0.0

    def release(self) -> None:
        """Take all hooks away."""
        self.gradients.release()
        self.statistics.release()

    # -- a pass over the shards ----------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a pass over the shards of a mini-batch."""
        self._world.demand_free()
        self._world.set_busy(_OPEN)
        self.records = []
        self.gradients.open()
        self.buffers.open()
        self._kept.note()

    def open_shard(self, shard: Shard) -> Record:
        """Begin a shard, from the buffers as they stood when the pass opened."""
        record = Record(shard, self.statistics.recording())
        self.records.append(record)
        return record

    def open_without_observations(self) -> Record:
        """Begin what stands for a shard on a rank that has none, so that it takes part in synced batch norm."""
        return Record(Shard(0, 0, 0), self.statistics.recording())

    def close_shard(self, record: Record, *, graph_goes_on: bool = False) -> None:
        """End a shard, and put the buffers back; its backward may come later."""
        self.statistics.stop()
        record.taken = self.buffers.take(graph_goes_on=graph_goes_on)

    def meet(self) -> None:
        """Be told if another rank called the layers of synced batch norm otherwise. Every rank must call this.

        Before each collective of another length that follows the layers': see [Note: One length]. Nor do the gradients'
        own sums begin before backward has ended, so that all ranks make their collectives in one order.
        """
        for talk in self.talks:
            talk.word()

    def leave(self, why: Exception) -> None:
        """Say in such a word that this rank goes through the layers no more; raises `why` if others do."""
        self._world.set_busy(None)
        try:
            for talk in self.talks:
                talk.word(ENDS_LOOP)
        except RuntimeError:
            raise why from None  # the others have been told

    @contextmanager
    def masking(self, factor: Weight) -> Iterator[None]:
        """A backward inside, whose loss is multiplied by `factor`, adds nothing to others' sums where that is 0."""
        with ExitStack() as ending:
            for talk in self.talks:
                ending.enter_context(talk.masking(torch.as_tensor(factor) == 0))
            yield

    @contextmanager
    def among_the_shards(self) -> Iterator[None]:
        """Collectives that all ranks make between their shards and the fold."""
        self._world.set_busy(None)
        try:
            yield
        finally:
            self._world.set_busy(_OPEN)

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
            met: whether `meet` was called after the last backward.
            meanwhile: called while the sums are under way, for work that would otherwise come after them.

        Raises:
            ValueError: shards that differ in metrics or in the change of a buffer; a sparse gradient.
            PeerFailed: another rank has a problem.
        """
        self._world.set_busy(None)
        if not met:
            self.meet()
        asked = self.requests()
        seen, problem = self._see(problem or asked.problem)
        if self._layout is None:
            self._world.agree(problem)
            self._layout = agreed(self._world.gather(seen), None)
        layout = self._layout
        new = problem is None and not layout.covers(seen)
        given, problem = self._collect(layout, len(mini_batch.sizes), problem)
        slots = self._slots(len(given), len(mini_batch.sizes))
        if problem is None and not new:
            self._pack(slots, layout)
        control = word(mini_batch, problem=problem is not None, new=new, asked=asked)
        sums = self._sum((*control, *given), meanwhile)
        said = self.said = Said.of(sums, self._world.size)
        if said.problem:
            self._world.agree(problem)
        if said.parted:
            self._world.check_same("epoch and position of a step's mini-batch", (mini_batch.epoch, mini_batch.position))
        if said.ends:
            self.check_end(said.ends, mini_batch)
        if said.new:
            layout, slots = self._renegotiate(seen, layout, len(mini_batch.sizes))
        self.gradients.close([count > 0 for count in sums[LENGTH:]])
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
            self._world.set_busy(None)
            if layout is not None:
                word = torch.tensor([1, *[0] * (LENGTH - 1 + len(layout.parameters))], dtype=torch.int32)
                work = None if self._rides else self._world.start_sum(word)
                for summing, length in outline:
                    rows = summing.nothing()  # new ones: what was handed out stays as it is
                    if self._rides and summing is outline[-1][0]:
                        rows[0][length + PROBLEM] = 1
                    summing.start(rows)
                finish_all([*begun, *(summing for summing, _ in outline)])
                self._world.finish(work)
            self._world.agree(problem)

        return tell

    def _see(self, problem: Exception | None) -> tuple[Layout, Exception | None]:
        """The layout that this rank's shards ask for, and what is wrong with them."""
        metrics: tuple[str, ...] | None = None
        for record in self.records:
            names = tuple(sorted(record.metrics))
            if metrics is not None and metrics != names and problem is None:
                problem = metrics_differ("an earlier shard", metrics, f"shard {record.shard.number}", names)
            metrics = names
        if problem is None and (name := self.gradients.changed_since_opened()) is not None:
            problem = RuntimeError(
                f"parameters stay as they are from a step's first shard to its fold; {name} was written in between (an "
                "Embedding with max_norm does this in its forward; an optimizer's step?): do it after step.fold()"
            )
        calls = [tuple(map(len, record.captures)) for record in self.records] or [(0,) * len(self.statistics.layers)]
        layout = Layout(
            metrics=metrics,
            weighted=any(record.weight is not None for record in self.records),
            calls=calls[0] if len(calls) == 1 else tuple(map(max, *calls)),
            buffers=frozenset().union(*(record.taken for record in self.records)),
            parameters=self.gradients.wanted,
        )
        return layout, problem

    def _tail(self, layout: Layout, shards: int) -> int:
        """How many values ride behind the gradients: the control word, and a row for each shard."""
        control = LENGTH + len(layout.parameters) if self._rides else 0
        return control + shards * self._width(layout)

    def _collect(self, layout: Layout, shards: int, problem: Exception | None) -> tuple[list[bool], Exception | None]:
        try:
            return self.gradients.collect(self._tail(layout, shards)), problem
        except (ValueError, RuntimeError) as error:
            return [False] * self.gradients.planned, problem or error

    def _slots(self, flags: int, shards: int) -> torch.Tensor:
        """The rows of all shards, (S, width), in the tail of the step's sum; they add nothing yet."""
        tail = self.gradients.tail
        tail.fill_(IDENTITY)
        return tail[LENGTH + flags :].view(shards, -1) if self._rides else tail.view(shards, -1)

    def check_end(self, ranks: int, mini_batch: MiniBatch) -> None:
        """Raise ValueError on every rank unless a stream that ended on so many `ranks` did so on all, alike.

        Every rank must call this.
        """
        if ranks != self._world.size:
            raise ValueError(
                f"a stream must give every rank the same observations; in mini-batch {mini_batch.position + 1} of "
                f"epoch {mini_batch.epoch + 1} it ended on {ranks} of {self._world.size} ranks: give all ranks the "
                "whole of it, Batches makes the shards"
            )
        self._world.check_same("the observations of a stream's last mini-batch", mini_batch.observations)

    def _sum(self, word: tuple[int, ...], meanwhile: Callable[[], None]) -> list[float]:
        """Sum everything up; returns the control word over all ranks, and a count per parameter."""

        def wait() -> None:
            meanwhile()
            self._waits_since = time.perf_counter()

        if self._rides:
            place = self.gradients.tail[: len(word)]
            if (kept := self._words.get(word)) is None:
                if len(self._words) > _WORDS:
                    self._words.clear()
                kept = self._words[word] = torch.tensor(word, dtype=place.dtype)
            place.copy_(kept)
            self.gradients.sum_up(wait)
            self.waited_s += time.perf_counter() - self._waits_since
            said: list[float] = place.tolist()
            return said
        control = torch.tensor(word, dtype=torch.int32)
        work = self._world.start_sum(control)
        self.gradients.sum_up(wait)
        self._world.finish(work)
        self.waited_s += time.perf_counter() - self._waits_since
        return control.tolist()

    def gradient_norm(self, iteration: int) -> torch.Tensor | None:
        """The Euclidean norm of the whole mini-batch's gradients, shape (); None in steps that leave it out.

        Where the guard did not ask for it, it reads each gradient once more, 0.3 ms per million on a CPU: there k
        million are read in every k-th step.
        """
        if self.gradients.known_norm is not None:
            return self.gradients.known_norm
        elements = self.gradients.elements if self._rides else 0
        if (iteration - 1) % max(1, elements // _NORM_EACH):
            return None
        replanned = self.said is not None and self.said.new  # then the buckets are new ones
        return self.gradients.norm() if replanned else self.gradients.folded_norm()

    # -- rows ----------------------------------------------------------------------------------------------

    def _widths(self, layout: Layout) -> list[int]:
        values = 2 + len(layout.metrics or ())
        return [values, self.statistics.width(layout.calls), self.buffers.width(layout.buffers)]

    def _width(self, layout: Layout) -> int:
        return sum(self._widths(layout))

    def _pack(self, slots: torch.Tensor, layout: Layout) -> None:
        for record in self.records:
            values, statistics, buffers = slots[record.shard.number].split(self._widths(layout))
            weight = record.shard.observations if record.weight is None else record.weight
            loss = record.losses[0] if len(record.losses) == 1 else torch.stack(record.losses).sum()
            said = [loss, *(record.metrics[name] for name in layout.metrics or ())]
            if layout.weighted:
                values[0] = weight
            torch.stack([one.to(values.dtype) for one in said], out=values[1:])
            self.statistics.pack(record.captures, layout.calls, statistics)
            self.buffers.pack(record.taken, layout.buffers, buffers)

    def _renegotiate(self, seen: Layout, layout: Layout, shards: int) -> tuple[Layout, torch.Tensor]:
        """A rank saw something that the layout has no room for: agree on a new one, and send the rows again."""
        layout = agreed(self._world.gather(seen), layout)
        shape, dtype = (shards, self._width(layout)), self.gradients.slot_dtype
        slots = torch.full(shape, IDENTITY, dtype=dtype, device=self._world.device)
        self._pack(slots, layout)
        return layout, self._world.sum(slots)

    def _unpack(self, slots: torch.Tensor, layout: Layout, mini_batch: MiniBatch) -> Folded:
        widths = self._widths(layout)
        values = slots[:, : widths[0]]
        total = values[:, 0].sum() if layout.weighted else None
        if total is not None:
            share = shares(values[:, 0])
            if len(share) > 1:  # an only shard's weight is the sum already
                self.gradients.scale(torch.where(total > 0, mini_batch.observations / total, 0.0))
        else:
            share = self._share(mini_batch.sizes, slots)
        means = weighted_mean(values[:, 1:], share, guarded=layout.weighted)
        bad = False if self._guard is None else self._guard.judge(means[0], self.gradients)
        folded = Folded(layout.metrics or (), means, total, values[:, 1], share, bad)
        if bad is not False:
            self._kept.put_back(bad)
        if bad is True:
            self.buffers.put_back(layout.buffers)
        elif any(widths[1:]):
            _, statistics, buffers = slots.split(widths, dim=1)
            keep = None if bad is False else bad
            self.statistics.apply(statistics, layout.calls, keep)
            full = [number for number, size in enumerate(mini_batch.sizes) if size]
            # By observations also where losses have weights of the user's own: forward saw them all.
            self.buffers.apply(buffers, layout.buffers, self._share(mini_batch.sizes, slots), full, keep)
        return folded

    def _share(self, sizes: tuple[int, ...], slots: torch.Tensor) -> torch.Tensor:
        """Each shard's part of the observations, kept for the two sizes that an epoch's mini-batches have."""
        if sizes not in self._shares:
            self._shares[sizes] = shares(torch.tensor(sizes, dtype=slots.dtype)).to(slots.device)
        return self._shares[sizes]
