"""Batch-norm statistics of many shards: moments that add up over shards and ranks, in the order of the gradients.

[Note: Slots or moments] A column of statistics in each shard's row (`slots`) costs S x C values: for ResNet-50 on 1,024
shards 327 MB a step, three times its gradients. Moments about the running means add up, so a rank sends those of its
pieces alone, O(C) float64 values on any number of shards (`batch_norm/pooled`). Rows are exact, and quicker while they
are few. So moments are used where rows would take more than `_FEW_BYTES` and more than a hundredth of the parameters'
bytes. This depends neither on the ranks nor on the steps before, so the bits of a run do not either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import Parameter

from ddp_loop.accelerators import accelerator_of
from ddp_loop.batch_norm import BatchNormStatistics, PooledStatistics
from ddp_loop.distributed import World, fill_identity, merge, padded
from ddp_loop.training.flat_all_reduce import FlatAllReduce, finish_all
from ddp_loop.training.ordered_sum import ReductionOrder
from ddp_loop.training.payload import ShardRecord

_FEW_BYTES = 2**18
_SHARE = 100
_BLOCK = 2**20  # columns of rows that are turned into moments at once
_ROW = 3  # values of a channel in a row: mean, the mean's rounding error, variance


def use_moments(
    statistics: BatchNormStatistics, shards: int, parameters: Iterable[Parameter], dtype: torch.dtype
) -> bool:
    """Whether statistics travel as moments. See [Note: Slots or moments].

    Args:
        statistics: of the job.
        shards: S, of each mini-batch.
        parameters: those that may get gradients.
        dtype: of the rows.
    """
    rows = shards * _ROW * statistics.channels * dtype.itemsize
    return rows > _FEW_BYTES and rows * _SHARE > sum(parameter.nbytes for parameter in parameters)


def moment_sums(
    statistics: BatchNormStatistics,
    world: World,
    order: ReductionOrder,
    shards: int,
    parameters: Iterable[Parameter],
    dtype: torch.dtype,
) -> MomentSums | None:
    """The sums of moments, or None where statistics travel in rows. Args as for `use_moments` and `MomentSums`."""
    if not use_moments(statistics, shards, parameters, dtype):
        return None
    return MomentSums(statistics, world, order, dtype)


class MomentSums:
    """The moments of a step's shards: those of this rank added up, its pieces sent, the sum applied.

    Args:
        statistics: of the job.
        world: from `join_world`.
        order: in which shards are added up.
        dtype: of a shard's row.
    """

    def __init__(
        self, statistics: BatchNormStatistics, world: World, order: ReductionOrder, dtype: torch.dtype
    ) -> None:
        self._statistics = statistics
        self._world = world
        self._order = order
        self._dtype = dtype
        self._calls: tuple[int, ...] = ()  # of the layout for which the sum is planned
        self._summing: list[FlatAllReduce] = []  # one, or none before a layer was called
        self._rows: list[torch.Tensor] = []  # this rank's pieces; the sum comes into the first
        self._records: Sequence[ShardRecord] = ()
        self._shifts: list[torch.Tensor] = []

    def sums(self, calls: tuple[int, ...]) -> list[FlatAllReduce]:
        """The sum over the ranks, where layers have so many `calls` in a shard at most; none without a call."""
        if calls != self._calls:
            self._calls = calls
            self._summing = []
            self._rows = []
            if width := sum(group.moments_width for group in self._statistics.groups(calls)):
                length = padded(width, self._order)
                sum_ = FlatAllReduce(self._world, self._order, length, torch.float64, self._world.device)
                self._summing = [sum_]
                first = sum_.empty()
                others = range(1, self._order.pieces[self._world.rank])
                self._rows = [first, *(torch.empty_like(first) for _ in others)]
        return self._summing

    def fill(self, records: Sequence[ShardRecord], calls: tuple[int, ...]) -> None:
        """Add up the moments of this rank's shards, by their records, about the running means; -0.0 without records.

        Args:
            records: of this rank's shards.
            calls: the most calls of each layer in a shard.
        """
        self._records = records
        if self.sums(calls):
            self._fill([group.shift() for group in self._statistics.groups(calls)])

    def _fill(self, shifts: list[torch.Tensor]) -> None:
        self._shifts = shifts
        pieces = self._added_up()
        for place, row in enumerate(self._rows):
            piece = pieces[place] if place < len(pieces) else None
            fill_identity(row)
            if piece is not None:
                row[: len(piece)].copy_(piece)

    def _added_up(self) -> list[torch.Tensor | None]:
        """The sums of this rank's largest whole nodes of the tree; None for one without samples."""
        records = {record.shard.number: record for record in self._records}
        pieces: list[torch.Tensor | None] = []
        block = max(1, _BLOCK // self._statistics.width(self._calls))
        for first in range(0, len(self._order.mine), block):
            shards = self._order.mine[first : first + block]
            found = [records[shard] for shard in shards if shard in records]
            moments = dict(zip((one.shard.number for one in found), self._moments(found), strict=True))
            for shard, merges in zip(shards, self._order.merges[first:], strict=False):
                pieces.append(moments.get(shard))
                merge(pieces, merges, torch.Tensor.add_)
        return pieces

    def _moments(self, records: Sequence[ShardRecord]) -> Sequence[torch.Tensor]:
        """Those of some shards, (width,) each."""
        if not records:
            return ()
        width = self._statistics.width(self._calls)
        groups = self._statistics.groups(self._calls)
        rows = torch.empty(len(records), width, dtype=self._dtype, device=self._world.device)
        for row, record in zip(rows, records, strict=True):
            self._statistics.pack(record.captures, self._calls, row)
        columns = rows.split_with_sizes([group.width for group in groups], dim=1)
        parts = [group.moments(*of_group) for group, *of_group in zip(groups, columns, self._shifts, strict=True)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).unbind()

    def start(self) -> None:
        """Start the sum over the ranks. Every rank must call this."""
        for one in self._summing:
            one.start(self._rows)

    def sum_now(self) -> None:
        """Make that sum at once. Every rank must call this."""
        if self._summing and self._world.size > 1:
            self.start()
            finish_all(self._summing, self._world)

    def apply(self, calls: tuple[int, ...], keep: torch.Tensor | None = None) -> None:
        """Update the running statistics with the pooled ones of all shards. Every rank must call this.

        Where a mean is far from the shift, the moments about the means just found are added up too. All ranks see that
        in the same sums. On a GPU the host would have to wait, so there the first ones are taken.

        Args:
            calls: as in `fill`.
            keep: whether the statistics stay as they are, shape (), bool.
        """
        if not self._summing:
            return
        groups = self._statistics.groups(calls)
        pooled = self._pooled()
        if not accelerator_of(self._world.device).is_asynchronous and any(
            group.is_far(one, shift) for group, one, shift in zip(groups, pooled, self._shifts, strict=True)
        ):
            self._fill([one.mean.nan_to_num(0.0, 0.0, 0.0) for one in pooled])
            self.sum_now()
            pooled = self._pooled()
        for group, one in zip(groups, pooled, strict=True):
            group.move(one, keep)

    def _pooled(self) -> list[PooledStatistics]:
        groups = self._statistics.groups(self._calls)
        widths = [group.moments_width for group in groups]
        sums = self._rows[0][: sum(widths)].split_with_sizes(widths)
        return [group.pooled_moments(*of_group) for group, *of_group in zip(groups, sums, self._shifts, strict=True)]
