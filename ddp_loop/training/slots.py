"""The rows of a step's shards: filled by each rank, brought together by the step's sum, merged in shard order.

See [Note: Slots] in `payload`: a row is `weight, loss, metrics | batch-norm statistics | other buffers`. Statistics of
many shards are `moments` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from ddp_loop.accelerators import sent
from ddp_loop.batch_norm import BatchNormStatistics
from ddp_loop.distributed import World
from ddp_loop.training.buffers import Buffers
from ddp_loop.training.flat_all_reduce import FlatAllReduce
from ddp_loop.training.moments import MomentSums
from ddp_loop.training.payload import PayloadLayout, ShardRecord, shares, total_of, weighted_mean
from ddp_loop.training.validation import Weight

_DTYPE = attrgetter("dtype")
_MOST_SIZES = 16  # that are kept; mini-batches of sequences have sizes of their own, one after the other


class Slots:
    """Fills, merges and applies the rows of a step's shards.

    Args:
        statistics, buffers: of the job.
        dtype, device: of the step's sums.
        moments: in place of the columns of statistics; None with these.
    """

    def __init__(
        self,
        statistics: BatchNormStatistics,
        buffers: Buffers,
        dtype: torch.dtype,
        device: torch.device,
        moments: MomentSums | None = None,
    ) -> None:
        self._statistics = statistics
        self._buffers = buffers
        self._dtype = dtype
        self._device = device
        self._moments = moments
        self._measured: tuple[PayloadLayout | None, list[int]] = None, []
        self._shares: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._summed: dict[PayloadLayout, torch.Tensor] = {}

    def widths(self, layout: PayloadLayout) -> list[int]:
        """The numbers of columns of values, statistics and buffers."""
        if layout is not self._measured[0]:
            buffers = self._buffers.width(layout.buffers, self._dtype)
            statistics = self._statistics.width(layout.calls) if self._moments is None else 0
            self._measured = layout, [2 + len(layout.metrics or ()), statistics, buffers]
        return self._measured[1]

    def sums(self, layout: PayloadLayout) -> list[FlatAllReduce]:
        """Those that travel beside the rows."""
        return [] if self._moments is None else self._moments.sums(layout.calls)

    def start_sums(self) -> None:
        """Start those. Every rank must call this."""
        if self._moments is not None:
            self._moments.start()

    def sum_now(self, slots: torch.Tensor, world: World) -> torch.Tensor:
        """Bring rows and moments together in sums of their own; returns the rows. Every rank must call this."""
        if self._moments is not None:
            self._moments.sum_now()
        return world.sum(slots)

    def fill(self, slots: torch.Tensor, records: Sequence[ShardRecord], layout: PayloadLayout) -> None:
        """Fill in the rows of this rank's shards, by their records, in `slots`, (S, width), and their moments."""
        widths = self.widths(layout)
        if self._moments is not None:
            self._moments.fill(records, layout.calls)
        values, statistics, buffers = slots.split_with_sizes(widths, dim=1)
        if not records:
            return
        names = layout.metrics or ()
        pieces: list[torch.Tensor] = []
        for record in records:
            pieces.append(record.losses[0] if len(record.losses) == 1 else _total(record.losses))
            pieces.extend(map(record.metrics.__getitem__, names))
        first = records[0].shard.number
        last = records[-1].shard.number  # the rank's shards are neighbors
        mine = values[first : last + 1, 1:]
        mine.copy_(_stacked(pieces, values.dtype).view(mine.shape))
        for record in records if layout.weighted or layout.buffers else ():
            number = record.shard.number
            if layout.weighted:
                _write(values[number, :1], record.shard.samples if record.weight is None else record.weight)
            if layout.buffers:
                self._buffers.pack(record.taken, layout.buffers, buffers[number])
        if widths[1]:
            for record in records:
                self._statistics.pack(record.captures, layout.calls, statistics[record.shard.number])

    def share(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Each shard's part of the samples, (S,); kept, since most mini-batches have the sizes of one before."""
        if (sizes, dtype) not in self._shares:
            if len(self._shares) == _MOST_SIZES:
                self._shares.clear()
            self._shares[sizes, dtype] = sent(shares(torch.tensor(sizes, dtype=dtype, device="cpu")), self._device)
        return self._shares[sizes, dtype]

    def merge(
        self, slots: torch.Tensor, layout: PayloadLayout, sizes: tuple[int, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Merge weights, losses and metrics of all shards, (S, width), with `sizes` samples each.

        Returns:
            The weights' sum, (), None where it is the samples; each shard's part of the means, (S,); its loss, (S,);
            loss and metrics of the mini-batch, (1 + metrics,). The next pass writes none of them.
        """
        rows = slots[:, : self.widths(layout)[0]].clone()
        values = rows[:, 1:]
        total = rows[:, 0].sum() if layout.weighted else None
        if total is None:
            share = self.share(sizes, rows.dtype)
            means = values[0] if len(sizes) == 1 else (values * share.unsqueeze(1)).sum(0)
        else:
            share = shares(rows[:, 0])
            means = weighted_mean(values, share)
        if not layout.sums:
            return total, share, values[:, 0], means
        if layout not in self._summed:
            names = ("loss", *(layout.metrics or ()))
            adds_up = torch.tensor([name in (layout.sums or ()) for name in names], device="cpu")
            self._summed = {layout: sent(adds_up, self._device)}
        # A shard of weight 0 adds nothing to the loss, but its sums count.
        totals = torch.cat([total_of(values[:, :1], share), values[:, 1:].sum(0)])
        return total, share, values[:, 0], torch.where(self._summed[layout], totals, means)

    def apply(
        self, slots: torch.Tensor, layout: PayloadLayout, sizes: tuple[int, ...], bad: torch.Tensor | bool
    ) -> None:
        """Move running statistics and buffers by the rows of all shards, unless the step is `bad`. Args as in `merge`.

        Every rank must call this.

        Raises:
            ValueError: shards changed a buffer of the rule "same" differently.
        """
        widths = self.widths(layout)
        if self._buffers.is_whole:
            self._buffers.finish(bad)
        if bad is True:
            self._buffers.restore(layout.buffers)
        elif self._moments is not None or any(widths[1:]):
            _, statistics, buffers = slots.split_with_sizes(widths, dim=1)
            keep = None if bad is False else bad
            if self._moments is None:
                self._statistics.apply(statistics, layout.calls, keep)
            else:
                self._moments.apply(layout.calls, keep)
            if layout.buffers:
                full = [number for number, size in enumerate(sizes) if size]
                # By samples also where losses have weights of their own: forward saw them all.
                self._buffers.apply(buffers, layout.buffers, self.share(sizes, torch.float64), full, keep)


def _write(place: torch.Tensor, weight: Weight) -> None:
    """Write a weight into its place, (1,). `place[0] = number` would be a copy that a GPU's host waits for."""
    if isinstance(weight, torch.Tensor):
        place.copy_(weight)
    else:
        place.fill_(weight)


def _stacked(values: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Values of shape () as a tensor, (n,), of this dtype."""
    if len(set(map(_DTYPE, values))) > 1:
        values = [value.to(dtype) for value in values]
    return torch.stack(values).to(dtype)


def _total(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in losses]).sum()
