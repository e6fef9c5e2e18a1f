"""Pooled batch-norm statistics: mean and variance of a union from those of its parts, applied to the layers.

[Note: Pooled variance] For shards j with m_j values per channel (samples times positions) and
M = sum(m_j):

    mean = sum(m_j mean_j) / M
    var  = sum(m_j (var_j + (mean_j - mean)^2)) / M          biased; torch keeps M / (M - 1) times this

Sums of squares would cancel (off by 1e-3 in float32 at mean 100); this form does not. Pooling the moving
averages instead understates the variance: for shards with mean 0, variance 1 and mean 3, variance 4 and decay
0.1 from (0, 1), the whole mini-batch gives 1.375, pooled moving averages 1.1725, a weighted mean of variances
1.15 (`examples/pooled_statistics.py`).

[Note: Moments] Rows of all shards grow with their number. Moments about a shift k, one for each channel, add up:

    n = sum(m_j)       a = sum(m_j (mean_j - k))       b = sum(m_j (var_j + (mean_j - k)^2))
    mean = k + a / n   var = b / n - (a / n)^2

They are float64, and k is the running mean, which is the same in all shards. The difference cancels where the mean is
far from k: var is off by about 1e-16 (mean - k)^2. A channel `is_far` where that could be 1e-9 of the new running
variance, as in the first steps of a layer whose mean is 1,000 deviations from 0. Then the moments are added up once
more, about the mean just found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_loop.accelerators import accelerator_of, sent
from ddp_loop.batch_norm.custom_layers import CustomNorm

_FEW = 15  # rows, up to which torch adds them one by one too
_FAR = 2.0**20  # squares of deviations from the shift: float64 keeps 1e-16 * 2^20 = 1e-10 of the variance


def pool_statistics(
    counts: torch.Tensor, means: torch.Tensor, variances: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of the union from those of its parts, (S, C) each to (C,) each.

    A part whose count is 0 adds exactly 0. See [Note: Pooled variance].

    Args:
        counts: the number of values per channel in each part, broadcastable to (S, C).
        means: the mean of each channel in each part, (S, C).
        variances: the biased variance of each channel in each part, (S, C).

    Source: Chan, Golub, LeVeque: Algorithms for computing the sample variance, 1983.
    """
    total = _sum_of_rows(counts).clamp(min=1)
    mean = _sum_of_rows(counts * means) / total
    return mean, _sum_of_rows(counts * (variances + (means - mean) ** 2)) / total


def _sum_of_rows(values: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, one row after another as torch does it; its kernel takes 20 times as long."""
    if not 0 < len(values) <= _FEW:
        return values.sum(0)
    first, *others = values.unbind()
    for one in others:
        first = first + one
    return first


@dataclass(slots=True)
class PooledStatistics:
    """The statistics of all shards for the layers of a group: those of the union.

    Attributes:
        counts: the number of values per channel of each layer, (L,).
        called: whether a shard called the layer, perhaps without values, (L,), bool.
        mean, variance: of each channel, the variance biased, (C,).
        momenta: of the user's norm layers, (own,).
    """

    counts: torch.Tensor
    called: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor
    momenta: torch.Tensor


class LayerGroup:
    """Layers whose channels are concatenated, so that a few operations update all of them.

    Args:
        numbers: the positions of these layers among the job's layers.
        layers: each has running statistics.
    """

    def __init__(self, numbers: list[int], layers: Sequence[_BatchNorm | CustomNorm]) -> None:
        self.numbers = numbers
        self.sizes = [layer.num_features for layer in layers]
        self.own = [place for place, layer in enumerate(layers) if isinstance(layer, CustomNorm)]  # the last ones
        self.channels = sum(self.sizes)
        self._columns = [len(layers), *3 * [self.channels], len(self.own)]  # of a row
        self.width = sum(self._columns)
        self.moments_width = 2 * len(layers) + 2 * self.channels + len(self.own)
        self._layers = layers
        sizes = torch.tensor(self.sizes, device="cpu")
        owner = torch.arange(len(layers), device="cpu").repeat_interleave(sizes)  # of each channel
        there = layers[0].running_mean.device if layers[0].running_mean is not None else owner.device
        self._owner = sent(owner, there)
        eps = [layer.eps if isinstance(layer, _BatchNorm) else 0.0 for layer in layers]
        self._eps = sent(torch.tensor(eps, dtype=torch.float64, device="cpu"), there)
        self._momenta: list[float | None] = []
        self._factors = torch.empty(0, device="cpu")

    def pooled(self, rows: torch.Tensor) -> PooledStatistics:
        """Pool the rows of all shards.

        Args:
            rows: (S, width): counts, means, the rounding errors of the means, variances as torch keeps them (times
                m / (m - 1)), and the momenta of the user's norm layers; zeros for a shard that did not call a layer,
                and the count `NO_VALUES` of a call without values.
        """
        sent, means, rests, variances, momenta = rows.double().split(self._columns, dim=1)
        layer_counts = sent.clamp(min=0)
        counts = layer_counts.index_select(1, self._owner)
        # Merge the biased variances, then correct the bias.
        biased = variances * ((counts - 1).clamp_(min=0) / counts.clamp(min=1))
        mean, variance = pool_statistics(counts, means + rests, biased)
        return PooledStatistics(_sum_of_rows(layer_counts), (sent != 0).any(0), mean, variance, momenta.amax(0))

    def moments(self, rows: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """The moments of some shards, to be added up, (K, moments_width). See [Note: Moments].

        Args:
            rows: as for `pooled`, (K, width).
            shift: about which, (C,), float64.
        """
        sent, means, rests, variances, momenta = rows.double().split(self._columns, dim=1)
        counts = sent.clamp(min=0)
        values = counts.index_select(1, self._owner)
        off = (means - shift).add_(rests)
        first = values * off
        second = (values - 1).clamp_(min=0).mul_(variances).addcmul_(first, off)
        return torch.cat([counts, first, second, momenta, (sent != 0).double()], dim=1)

    def pooled_moments(self, sums: torch.Tensor, shift: torch.Tensor) -> PooledStatistics:
        """The statistics whose moments about `shift` add up to `sums`, (moments_width,)."""
        own = len(self.own)
        counts, first, second, momenta, callers = sums.split_with_sizes(
            [len(self.sizes), *2 * [self.channels], own, len(self.sizes)]
        )
        total = counts.index_select(0, self._owner).clamp_(min=1)
        off = first / total
        variance = (second / total).sub_(off.square()).clamp_(min=0)
        # Equal in all shards that call the layer, so their mean is exact for a float32.
        momenta = momenta / callers[len(callers) - own :].clamp(min=1)
        return PooledStatistics(counts, callers > 0, shift + off, variance, momenta)

    def shift(self) -> torch.Tensor:
        """The running means, (C,), float64; 0 in place of what is not finite."""
        means = [_statistic(layer, "running_mean") for layer in self._layers]
        return torch.cat(means).double().nan_to_num_(0.0, 0.0, 0.0)

    def is_far(self, pooled: PooledStatistics, shift: torch.Tensor) -> bool:
        """Whether a mean is so far from the shift that the variance lost digits; the host waits."""
        factor = self._factor(pooled.momenta)
        off = (pooled.mean - shift).square_().mul_(factor)
        now = torch.cat([_statistic(layer, "running_var") for layer in self._layers]).double()
        kept = now.lerp_(pooled.variance, factor).add_(self._eps.index_select(0, self._owner))
        return bool((off > _FAR * kept).any())

    def move(self, pooled: PooledStatistics, keep: torch.Tensor | None = None) -> None:
        """Update the running statistics with the pooled ones of all shards.

        Args:
            pooled: of all shards.
            keep: whether all stay as they are, shape (), bool.
        """
        layers = self._layers
        total = pooled.counts.index_select(0, self._owner)
        unbiased = pooled.variance * (total / (total - 1).clamp_(min=1))
        self._count(pooled.called, keep)
        # A layer that no shard called, or all without values, keeps its values to the bit.
        factor = torch.where(total > 0, self._factor(pooled.momenta), 0.0)
        for name, new in (("running_mean", pooled.mean), ("running_var", unbiased)):
            # Past the version counter, as torch's kernels: a graph that crosses the fold may hold them.
            olds = [_statistic(layer, name).data for layer in layers]
            old = torch.cat(olds).double()
            now = (1 - factor) * old + factor * new
            if keep is not None:
                now = torch.where(keep, old, now)
            torch._foreach_copy_(olds, list(now.split(self.sizes)))

    def _count(self, called: torch.Tensor, keep: torch.Tensor | None) -> None:
        """Count one more mini-batch for the layers that were called."""
        tracked = [
            None if isinstance(layer, CustomNorm) else layer._buffers["num_batches_tracked"] for layer in self._layers
        ]
        if keep is None and accelerator_of(called.device).is_host:
            pairs = zip(tracked, called.tolist(), strict=True)
            if known := [one for one, is_called in pairs if is_called and one is not None]:
                torch._foreach_add_(known, 1)
            return
        more = called.long() if keep is None else (called & ~keep).long()
        found = [(one, each) for one, each in zip(tracked, more, strict=True) if one is not None]
        if found:
            torch._foreach_add_([one for one, _ in found], [each for _, each in found])

    def _factor(self, momenta_of_own: torch.Tensor) -> torch.Tensor:
        """The weight of the new value in each channel's moving average: the momentum, or 1 / (calls so far) if None.

        The momenta of the user's norm layers come with the shards, (own,).
        """
        momenta = [layer.momentum for layer in self._layers]
        if momenta != self._momenta or None in momenta:
            self._momenta = momenta
            factors = [self._of_layer(layer, self._owner.device) for layer in self._layers]
            for place, momentum in zip(self.own, momenta_of_own, strict=True):
                factors[place] = momentum
            self._factors = torch.stack(factors).index_select(0, self._owner)
        return self._factors

    @staticmethod
    def _of_layer(layer: _BatchNorm | CustomNorm, device: torch.device) -> torch.Tensor:
        if layer.momentum is None and layer.num_batches_tracked is not None:
            return 1.0 / layer.num_batches_tracked.clamp(min=1).double()
        return torch.full((), layer.momentum or 0.0, dtype=torch.float64, device=device)


def _statistic(layer: _BatchNorm | CustomNorm, name: str) -> torch.Tensor:
    """A running statistic, without nn.Module's __getattr__."""
    found: Any = getattr(layer, name) if isinstance(layer, CustomNorm) else layer._buffers[name]
    return cast(torch.Tensor, found)


class RunningStatsSnapshot:
    """A copy of running statistics that layers update themselves in forward, so that they can be restored.

    Args:
        layers: the layers whose buffers are copied.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = list(layers)
        self._now: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []

    def record(self) -> None:
        """Copy their current values."""
        self._now = [one for layer in self.layers for one in layer.buffers(recurse=False)]
        self._kept = [one.clone() for one in self._now]

    def restore(self, where: torch.Tensor | bool) -> None:
        """Restore the copied values if `where`, shape (), is true."""
        for now, kept in zip(self._now, self._kept, strict=True):
            value = torch.where(where, kept, now) if isinstance(where, torch.Tensor) else kept if where else now
            now.data.copy_(value)  # past the version counter, like the layers


class RecomputeGuard:
    """Keeps the recomputation of forward inside backward from updating running statistics a second time.

    Args:
        layers: they update their statistics themselves. Their buffers are restored after each backward, in which
            activation checkpointing calls them again.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = list(layers)
        self._pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None  # now, kept; by dtype

    def begin(self) -> None:
        """Copy the buffers before a backward."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for layer in self.layers:
            for one in layer._buffers.values() if layer.training else ():
                if one is not None:
                    by_dtype.setdefault(one.dtype, []).append(one)
        with torch.no_grad():
            self._pairs = [(now, [torch.empty_like(one) for one in now]) for now in by_dtype.values()]
            for now, kept in self._pairs:
                torch._foreach_copy_(kept, now)

    def end(self) -> None:
        """Restore the buffers after a backward. A second call does nothing."""
        pairs = self._pairs
        self._pairs = None
        if not pairs:
            return
        with torch.no_grad():
            for now, kept in pairs:
                # `.data` bypasses the version counter: the graph of another backward may hold these.
                torch._foreach_copy_([one.data for one in now], kept)
