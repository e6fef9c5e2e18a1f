"""Values beside the gradients in a step's sum: a row for each shard, its layout, and moments of batch norm.

[Note: Rows] Each shard has one row. Its rank fills it in, and all others leave it at -0.0, so the sum over ranks
copies it exactly. Each rank merges the rows in shard order. A row is `weight, loss, metrics |
batch-norm statistics | other buffers`. A rank knows the columns only from its own shards, and without samples it knows
none. So the ranks exchange their columns at the first fold, and again only when the sum itself says that a rank has
something new.

[Note: Rows or moments] A column of statistics in each shard's row costs S x C values: for ResNet-50 on 1,024 shards
327 MB a step, three times its gradients. Moments about the running means add up, so a rank sends its pieces'
moments alone, O(C) float64 values on any number of shards (`batch_norm/pooled`). Rows are exact, and quicker while they
are few. So moments are used where rows would take more than `_FEW_BYTES` and more than a hundredth of the parameters'
bytes. This depends neither on the ranks nor on the steps before, so the bits of a run do not either.

[Note: Modes] A shard's modes are the modules that were in evaluation mode when its backward began. They are read there
and not as the pass opens, since scripts call `train()` between the two, which a rank without a shard does not. The
layout has all modes that the ranks agreed on so far. In each pass the control word has the number of a rank's modes
among them, so ranks in different known modes are found without an exchange, and going to and fro costs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from operator import attrgetter, le

import torch
from torch.nn import Parameter

from ddp_loop.accelerators import sent
from ddp_loop.batch_norm import BatchNormStatistics, Captures, PooledStatistics
from ddp_loop.data import Shard
from ddp_loop.distributed import IDENTITY, World, fill_identity, merge, sendable
from ddp_loop.training.buckets import FlatAllReduce, finish_all
from ddp_loop.training.buffers import Buffers, weighted_mean
from ddp_loop.training.gradients import Gradients
from ddp_loop.training.ordered_sum import ReductionOrder
from ddp_loop.training.validation import (
    Weight,
)

Places = tuple[str, str]  # of two shards or ranks, in words
Modes = tuple[str, ...]  # the modules in evaluation mode, by name
Alike = tuple[tuple[str, ...], frozenset[str], bool, tuple[Modes, ...]]  # alike in all shards of a mini-batch
_ALIKE = attrgetter("metrics", "summed", "weighted", "modes")  # of a `RowLayout`
_COLUMNS = attrgetter("metrics", "summed", "weighted")
_CHANGED_BUFFERS = attrgetter("changed_buffers")
_CAPTURES = attrgetter("captures")
_MOST_MODES = 64  # then the agreed ones are forgotten: a script draws them
_MOST_SIZES = 16  # that are kept; mini-batches of sequences have sizes of their own, one after the other
_FEW_BYTES = 2**18
_SHARE = 100
_BLOCK = 2**20  # columns of rows that are turned into moments at once
_ROW = 3  # values of a channel in a row: mean, the mean's rounding error, variance

GATHER_EVERYWHERE = (
    "Every rank must call step.gather, or none. Some ranks fold without it. Call it also where a rank has no shard."
)


@sendable
@dataclass(frozen=True)
class RowLayout:
    """The columns of a row, as one rank or all of them know them.

    Attributes:
        metrics: names, sorted; none from a rank without a shard.
        summed: which of "loss" and the metrics add up.
        weighted: whether the shards came with weights of their own.
        modes: of a rank's shards, or all that were agreed on; none from a rank without a shard. See [Note: Modes].
        calls: the most calls of each batch-norm layer in a shard.
        buffers: the other buffers that a shard changed.
        parameters: those that want a gradient.
        unplanned: those that got a gradient and had been left out of the plan.
    """

    metrics: tuple[str, ...]
    summed: frozenset[str]
    weighted: bool
    modes: tuple[Modes, ...]
    calls: tuple[int, ...]
    buffers: frozenset[str]
    parameters: tuple[str, ...]
    unplanned: frozenset[str]

    def covers(self, local: RowLayout) -> bool:
        """Whether a row of this layout has room for a rank's `local` one."""
        return (
            (not local.modes or (local.modes[0] in self.modes and _COLUMNS(local) == _COLUMNS(self)))
            and all(map(le, local.calls, self.calls))
            and local.buffers <= self.buffers
            and local.parameters == self.parameters
            and not local.unplanned
        )


def agreed(layouts: Sequence[RowLayout], former: RowLayout | None) -> RowLayout:
    """The layout that covers the layouts of all ranks, and the former one.

    Raises:
        ValueError: metric names, modes, the parameters that want a gradient, or whether there are weights, differ
            between ranks.
        RuntimeError: other ranks gather where this one folds.
    """
    if not all(isinstance(layout, RowLayout) for layout in layouts):
        raise RuntimeError(GATHER_EVERYWHERE)
    for rank, layout in enumerate(layouts):
        if layout.parameters != layouts[0].parameters:
            differing = sorted(set(layout.parameters) ^ set(layouts[0].parameters)) or "their order"
            raise ValueError(
                "The same parameters must want a gradient on every rank. Ranks 0 and "
                f"{rank} differ in {differing}. Freeze, unfreeze and add parameters on all ranks alike."
            )
    require_alike(layouts)
    known = [*layouts] if former is None else [*layouts, former]
    modes = tuple(dict.fromkeys(mode for layout in reversed(known) for mode in layout.modes))
    return replace(
        next((layout for layout in layouts if layout.modes), former or layouts[0]),
        modes=modes if len(modes) <= _MOST_MODES else modes[-1:],
        calls=tuple(map(max, zip(*(layout.calls for layout in known), strict=True))),
        buffers=frozenset().union(*(layout.buffers for layout in known)),
        parameters=layouts[0].parameters,
        unplanned=frozenset().union(*(layout.unplanned for layout in layouts)),
    )


def now_evaluated(layout: RowLayout, former: RowLayout) -> list[str]:
    """Which whole models are in evaluation mode in the newest modes, and were in training mode before."""
    if not former.modes:
        return []
    newest = set().union(*set(layout.modes).difference(former.modes))
    return sorted(name for name in newest.difference(*former.modes) if "." not in name)


def require_alike(layouts: Sequence[RowLayout]) -> None:
    """Raise ValueError if ranks with shards had other metrics, weights or modes, by the layouts of all ranks."""
    with_shards = [(f"rank {rank}", _ALIKE(layout)) for rank, layout in enumerate(layouts) if layout.modes]
    for where, alike in with_shards:
        first, other = with_shards[0]
        if alike != other:
            raise _unlike((first, where), other, alike)


def _unlike(where: Places, alike: Alike, other: Alike) -> ValueError:
    """The error of two shards that differ where all must be alike."""
    first, second = where
    names, sums, is_weighted, (modes,) = alike
    other_names, other_sums, other_weighted, (other_modes,) = other
    if names != other_names:
        return ValueError(
            f"Every shard must come with the same metrics. {first} has {sorted(names)}, {second} has "
            f"{sorted(other_names)}. Give step.backward the same keywords for each shard."
        )
    if sums != other_sums:
        return ValueError(
            f"Every shard must come with the same reductions. {first} adds up {sorted(sums)}, {second} "
            f"{sorted(other_sums)}, and the rest is averaged. Give step.backward the same reduction=, and the same "
            "metrics as dl.Sum, for each shard."
        )
    if is_weighted != other_weighted:
        has, lacks = where if is_weighted else where[::-1]
        return ValueError(
            f"Every shard of a mini-batch must come with a weight, or none. {has} has one, {lacks} has none. Give "
            "step.backward weight= for each shard; by default it is the number of the shard's samples."
        )
    name = min(set(modes) ^ set(other_modes))
    evaluates, trains = where if name in modes else where[::-1]
    return ValueError(
        f"Each module must be in the same mode, train() or eval(), in every shard. {name} was in evaluation mode on "
        f"{evaluates}, and in training mode on {trains}. Call model.train() and model.eval() on all ranks alike."
    )


def layout_of(
    records: Sequence[ShardRecord], layers: int, parameters: tuple[str, ...], unplanned: frozenset[str] = frozenset()
) -> tuple[RowLayout, Exception | None]:
    """The layout that a rank's shards need under so many batch-norm `layers`, and the error where they differ."""
    problem: Exception | None = None
    alike: Alike = ((), frozenset(), False, ())
    calls = (0,) * layers
    for record in records:
        before = alike
        alike = (tuple(sorted(record.metrics)), record.summed, record.weight is not None, (record.modes,))
        if alike != before and record is not records[0]:
            problem = problem or _unlike(("an earlier shard", f"shard {record.shard.number}"), before, alike)
        if layers:
            calls = tuple(map(max, calls, record.captures.calls))
    buffers = frozenset[str]().union(*map(_CHANGED_BUFFERS, records))
    return RowLayout(*alike, calls, buffers, parameters, unplanned), problem


def fractions(weights: torch.Tensor) -> torch.Tensor:
    """w_s / sum(w) for each shard, shape (S,); 0 for all where the sum is 0. One shard's share is exactly 1."""
    total = weights.sum()
    return torch.where(total == 0, 0.0, weights / total)  # NaN stays NaN


@lru_cache(maxsize=_MOST_SIZES)
def _sample_fractions(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Each shard's part of the samples, (S,); kept, since most mini-batches have the sizes of one before."""
    return sent(fractions(torch.tensor(sizes, dtype=dtype, device="cpu")), device)


@dataclass(slots=True)
class ShardRecord:
    """The values that one shard leaves for the fold, beside its gradients."""

    shard: Shard
    captures: Captures
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()  # which of "loss" and the metrics add up
    weight: Weight | None = None
    changed_buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # the buffers that it changed
    done: bool = False  # had its last backward
    failed: bool = False  # a backward raised, perhaps with parts of its gradients made
    held: bool = False  # its outputs wait for a loss of the whole mini-batch
    modes: Modes = ()  # when its backward began


def use_moments(
    statistics: BatchNormStatistics, shards: int, parameters: Iterable[Parameter], dtype: torch.dtype
) -> bool:
    """Whether statistics travel as moments. See [Note: Rows or moments].

    Args:
        statistics: of the job.
        shards: S, of each mini-batch.
        parameters: those that may get gradients.
        dtype: of the rows.
    """
    rows = shards * _ROW * statistics.channels * dtype.itemsize
    return rows > _FEW_BYTES and rows * _SHARE > sum(parameter.nbytes for parameter in parameters)


@dataclass(eq=False)
class Rows:
    """The rows of a step's shards under one layout: filled by each rank, summed, merged in shard order, applied.

    Args:
        statistics, buffers: of the job.
        world: from `join_world`.
        order: in which moments are added up.
        dtype: of the step's sums.
        as_moments: whether statistics travel as moments.
        layout: that the ranks agreed on.

    Attributes:
        width: of a row.
        moments: in place of the columns of statistics; None with these, and where no layer is called.
        extra_sums: those that travel beside the rows.
    """

    statistics: BatchNormStatistics
    buffers: Buffers
    world: World
    order: ReductionOrder
    dtype: torch.dtype
    as_moments: bool
    layout: RowLayout

    def __post_init__(self) -> None:
        layout = self.layout
        self._values = 2 + len(layout.metrics)  # columns: the weight, the loss and the metrics
        self._statistics_end = self._values + (0 if self.as_moments else self.statistics.width(layout.calls))
        self.width = self._statistics_end + self.buffers.width(layout.buffers, self.dtype)
        self.moments: MomentSums | None = None
        if self.as_moments and any(layout.calls):
            self.moments = MomentSums(self.statistics, layout.calls, self.world, self.order, self.dtype)
        self.extra_sums = [] if self.moments is None else [self.moments.summing]
        adds_up = torch.tensor([name in layout.summed for name in ("loss", *layout.metrics)], device="cpu")
        self._adds_up = sent(adds_up, self.world.device) if layout.summed else None

    def sum_now(self, records: Sequence[ShardRecord], shards: int) -> torch.Tensor:
        """Bring the rows of so many `shards`, and moments, together in sums of their own. Every rank must call this.

        Args:
            records: of this rank's shards.
        """
        rows = torch.full((shards, self.width), IDENTITY, dtype=self.dtype, device=self.world.device)
        self.fill(rows, records)
        if self.moments is not None:
            self.moments.sum_now()
        return self.world.sum(rows)

    def fill(self, rows: torch.Tensor, records: Sequence[ShardRecord]) -> None:
        """Fill in the rows of this rank's shards, by their records, in `rows`, (S, width), and their moments."""
        layout = self.layout
        if self.moments is not None:
            self.moments.fill(records)
        if not records:
            return
        first = records[0].shard.number  # the rank's shards are neighbors
        mine = rows[first : first + len(records)]
        statistics_end = self._statistics_end
        pieces: list[torch.Tensor] = []
        for row, record in enumerate(records):
            pieces.append(record.losses[0] if len(record.losses) == 1 else _total(record.losses))
            pieces.extend(map(record.metrics.__getitem__, layout.metrics))
            if layout.weighted:  # not by `mine[row, 0] = weight`, a copy that a GPU's host waits for
                mine[row, 0].fill_(record.shard.samples if record.weight is None else record.weight)
            if layout.buffers:
                self.buffers.pack(record.changed_buffers, layout.buffers, mine[row, statistics_end:])
        mine[:, 1 : self._values].copy_(torch.stack(pieces).view(len(records), -1))
        if statistics_end > self._values:
            self.statistics.pack(map(_CAPTURES, records), layout.calls, mine[:, self._values : statistics_end])

    def merge(
        self, rows: torch.Tensor, sizes: tuple[int, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Merge weights, losses and metrics of all shards, (S, width), with `sizes` samples each.

        Returns:
            The weights' sum, (), None where it is the samples; each shard's part of the means, (S,); its loss, (S,);
            loss and metrics of the mini-batch, (1 + metrics,). The next pass writes none of them.
        """
        columns = rows[:, : self._values].clone()
        values = columns[:, 1:]
        if self.layout.weighted:
            total = columns[:, 0].sum()
            fraction = fractions(columns[:, 0])
            means = weighted_mean(values, fraction)
        else:
            total = None
            fraction = _sample_fractions(sizes, rows.dtype, rows.device)
            means = values[0] if len(sizes) == 1 else (values * fraction.unsqueeze(1)).sum(0)
        if self._adds_up is not None:
            means = torch.where(self._adds_up, values.sum(0), means)
        return total, fraction, values[:, 0], means

    def apply(
        self, rows: torch.Tensor, sizes: tuple[int, ...], records: Sequence[ShardRecord], is_bad: torch.Tensor | bool
    ) -> None:
        """Move running statistics and buffers by the rows of all shards, unless it `is_bad`. Args as in `merge`.

        Every rank must call this.

        Args:
            records: of this rank's shards.

        Raises:
            ValueError: shards changed a buffer of the rule "same" differently.
        """
        layout = self.layout
        if self.buffers.is_whole:
            self.buffers.finish(is_bad)
        if is_bad is True:
            self.buffers.restore(layout.buffers)
            return
        unknown = None if is_bad is False else is_bad  # a tensor, which only the device can read
        statistics_end = self._statistics_end
        if self.moments is not None:
            self.moments.apply(records, unknown)
        elif statistics_end > self._values:
            self.statistics.apply(rows[:, self._values : statistics_end], layout.calls, unknown)
        if self.width > statistics_end:
            full = [number for number, size in enumerate(sizes) if size]
            # By samples also where losses have weights of their own: forward saw them all.
            fraction = _sample_fractions(sizes, torch.float64, rows.device)
            self.buffers.apply(rows[:, statistics_end:], layout.buffers, fraction, full, unknown)


def _total(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in losses]).sum()


@dataclass(eq=False)
class MomentSums:
    """The moments of a step's shards: this rank's added up, its pieces sent, the sum applied.

    Args:
        statistics: of the job.
        calls: the most calls of each layer in a shard.
        world: from `join_world`.
        order: in which shards are added up.
        dtype: of a shard's row.

    Attributes:
        summing: the sum over the ranks.
    """

    statistics: BatchNormStatistics
    calls: tuple[int, ...]
    world: World
    order: ReductionOrder
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._groups = self.statistics.groups(self.calls)
        self._widths = [group.moments_width for group in self._groups]
        self._shifts: list[torch.Tensor] = []  # about which the moments are
        device = self.world.device
        self.summing = FlatAllReduce(self.world, self.order, sum(self._widths), torch.float64, device)
        first = self.summing.empty()
        # This rank's pieces; the sum comes into the first.
        self._pieces = [first, *(torch.empty_like(first) for _ in range(1, self.order.pieces[self.world.rank]))]

    def fill(self, records: Sequence[ShardRecord], shifts: list[torch.Tensor] | None = None) -> None:
        """Add up the moments of this rank's shards, in its largest whole nodes of the tree; -0.0 without records.

        Args:
            records: of the shards that have samples.
            shifts: about which, (channels,) for each group; by default the running means.
        """
        self._shifts = [group.shift() for group in self._groups] if shifts is None else shifts
        moments = self._moments(records)
        full = {record.shard.number for record in records}
        sums: list[torch.Tensor | None] = []
        for number, merges in zip(self.order.mine, self.order.merges, strict=True):
            sums.append(next(moments) if number in full else None)
            merge(sums, merges, torch.Tensor.add_)
        for piece, total in zip_longest(self._pieces, sums):
            fill_identity(piece)
            if total is not None:
                piece[: len(total)].copy_(total)

    def _moments(self, records: Sequence[ShardRecord]) -> Iterator[torch.Tensor]:
        """The moments of each shard, (width,)."""
        width = self.statistics.width(self.calls)
        block = max(1, _BLOCK // width)
        for first in range(0, len(records), block):
            some = records[first : first + block]
            rows = torch.empty(len(some), width, dtype=self.dtype, device=self.world.device)
            self.statistics.pack(map(_CAPTURES, some), self.calls, rows)
            columns = rows.split_with_sizes([group.width for group in self._groups], dim=1)
            parts = [
                group.moments(part, shift)
                for group, part, shift in zip(self._groups, columns, self._shifts, strict=True)
            ]
            yield from torch.cat(parts, dim=1)

    def start(self) -> None:
        """Start the sum over the ranks. Every rank must call this."""
        self.summing.start(self._pieces)

    def sum_now(self) -> None:
        """Make that sum at once. Every rank must call this."""
        self.start()
        finish_all([self.summing], self.world)

    def apply(self, records: Sequence[ShardRecord], is_bad: torch.Tensor | None) -> None:
        """Update the running statistics with the pooled ones of all shards. Every rank must call this.

        Where a mean is far from the shift, the moments about the means just found are added up too. All ranks see that
        in the same sums. On a GPU the host would have to wait, so there the first ones are taken.

        Args:
            records: of this rank's shards.
            is_bad: whether the step moves nothing, shape (), bool.
        """
        pooled = self._pooled()
        if not self.world.accelerator.is_asynchronous and any(
            group.is_far(statistics, shift)
            for group, statistics, shift in zip(self._groups, pooled, self._shifts, strict=True)
        ):
            self.fill(records, [statistics.mean.nan_to_num(0.0, 0.0, 0.0) for statistics in pooled])
            self.sum_now()
            pooled = self._pooled()
        for group, statistics in zip(self._groups, pooled, strict=True):
            group.move(statistics, is_bad)

    def _pooled(self) -> list[PooledStatistics]:
        sums = self._pieces[0][: sum(self._widths)].split_with_sizes(self._widths)
        each = zip(self._groups, sums, self._shifts, strict=True)
        return [group.pooled_moments(part, shift) for group, part, shift in each]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: values of the whole mini-batch, the same on every rank, still on the device.

    Attributes:
        epoch, iteration: counted from 1; the iteration counts on from epoch to epoch.
        samples: R, of the mini-batch.
        names: of the metrics.
        values: loss and metrics, (1 + metrics,): weighted means, or sums where the shards gave sums.
        total: the sum of the shards' weights, shape (); None if the weights are the samples.
        losses: of each shard, (S,).
        shares: each shard's part of the means, (S,).
        is_bad: whether the step is not finite and moves nothing; a tensor of shape () where only the device knows.
        summed: which of "loss" and the metrics add up.
    """

    epoch: int
    iteration: int
    samples: int
    names: tuple[str, ...]
    values: torch.Tensor
    total: torch.Tensor | None
    losses: torch.Tensor
    shares: torch.Tensor
    is_bad: torch.Tensor | bool
    _gradients: Gradients
    summed: frozenset[str] = frozenset()

    @property
    def loss(self) -> torch.Tensor:
        """The weighted mean of the shards' losses, with `reduction="sum"` their sum; shape ()."""
        return self.values[0]

    @property
    def weight(self) -> torch.Tensor:
        """The total weight of the means, sum_s(w_s): by default the number of samples; shape ()."""
        return self.values.new_full((), self.samples) if self.total is None else self.total

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """The weighted mean of each metric by name, a `Sum` added up; shape () each."""
        return dict(zip(self.names, self.values[1:].unbind(), strict=True))

    @property
    def gradient_norm(self) -> torch.Tensor:
        """The Euclidean norm of the gradients at this moment; shape ()."""
        return self._gradients.norm()
