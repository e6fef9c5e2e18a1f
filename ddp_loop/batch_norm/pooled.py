"""Pooled batch-norm statistics: a union's mean and variance from its parts', applied to the layers.

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

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_loop.accelerators import accelerator_of, copies_of, sent

_FEW = 15  # rows, up to which torch adds them one by one too
_FAR = 2.0**20  # squares of deviations from the shift: float64 keeps 1e-16 * 2^20 = 1e-10 of the variance
_MOMENTUM = attrgetter("module.momentum")


def pool_statistics(
    counts: torch.Tensor, means: torch.Tensor, variances: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool the parts' means and biased variances, (S, C) each, into the union's, (C,) each.

    A part whose count is 0 adds exactly 0. See [Note: Pooled variance].

    Args:
        counts: the number of values per channel in each part, broadcastable to (S, C).
        means: the mean of each channel in each part, (S, C).
        variances: the biased variance of each channel in each part, (S, C).

    Source: Chan, Golub, LeVeque: Algorithms for computing the sample variance, 1983.
    """
    return pool_with_count(counts, means, variances)[1:]


def pool_with_count(
    counts: torch.Tensor, means: torch.Tensor, variances: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The number of values of the union, and its statistics. Args as for `pool_statistics`."""
    # Up to `_FEW` rows one after another, as torch adds them; its kernel takes 20 times as long.
    sum_of_rows: Callable[[torch.Tensor], torch.Tensor] = partial(reduce, torch.add)
    if not 0 < len(counts) <= _FEW:
        sum_of_rows = partial(torch.sum, dim=0)
    count = sum_of_rows(counts)
    total = count.clamp(min=1)
    mean = sum_of_rows(counts * means) / total
    return count, mean, sum_of_rows(counts * (variances + (means - mean) ** 2)) / total


def from_moments(count: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean, about the shift, and biased variance from moments that were added up. See [Note: Moments]."""
    divisor = count.clamp(min=1)
    mean = first / divisor
    return mean, (second / divisor).sub_(mean.square()).clamp_(min=0)


def numbers_on(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers as a tensor; a GPU's host does not wait."""
    return sent(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


class NormLayer(NamedTuple):
    """A norm layer with the names of its running statistics. Calls of the user's own classes carry their momentum."""

    module: Any
    mean: str = "running_mean"
    variance: str = "running_var"
    is_custom: bool = False


class PooledStatistics(NamedTuple):
    """The statistics of all shards together, as one union, for the layers of a group.

    Attributes:
        counts: the number of values of each channel, (C,).
        called: whether a shard called the layer, perhaps without values, (L,), bool.
        mean, variance: of each channel, the variance biased, (C,).
        momenta: of the user's norm layers, (customs,).
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
        layers: each has running statistics; the user's own classes come last.
    """

    def __init__(self, numbers: list[int], layers: Sequence[NormLayer]) -> None:
        self.numbers = numbers
        self.customs = sum(layer.is_custom for layer in layers)
        self._layers = layers
        self._torch_layers = layers[: len(layers) - self.customs]
        means = [layer.module._buffers[layer.mean] for layer in layers]
        self.sizes = list(map(len, means))
        channels = sum(self.sizes)
        self._columns = [len(layers), *3 * [channels], self.customs]  # of a row
        self.width = sum(self._columns)
        self._moments = [len(layers), *2 * [channels], self.customs, len(layers)]
        self.moments_width = sum(self._moments)
        device = means[0].device
        owners = [number for number, size in enumerate(self.sizes) for _ in range(size)]
        self._owner = numbers_on(owners, torch.int64, device)  # of each channel
        eps = [0.0 if layer.is_custom else layer.module.eps for layer in layers]
        self._eps = numbers_on(eps, torch.float64, device)
        self._momenta: list[float | None] = []
        self._factors = self._eps

    def pooled(self, rows: torch.Tensor) -> PooledStatistics:
        """Pool the rows of all shards.

        Args:
            rows: (S, width): counts, means, the rounding errors of the means, variances as torch keeps them (times
                m / (m - 1)), and the momenta of the user's norm layers; zeros for a shard that did not call a layer,
                and the count `NO_VALUES` of a call without values.
        """
        sent, means, rests, variances, momenta = rows.double().split(self._columns, dim=1)
        counts = sent.clamp(min=0).index_select(1, self._owner)
        # Merge the biased variances, then correct the bias.
        biased = variances * ((counts - 1).clamp_(min=0) / counts.clamp(min=1))
        total, mean, variance = pool_with_count(counts, means + rests, biased)
        return PooledStatistics(total, (sent != 0).any(0), mean, variance, momenta.amax(0))

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
        counts, first, second, momenta, callers = sums.split(self._moments)
        total = counts.index_select(0, self._owner)
        off, variance = from_moments(total, first, second)
        # Equal in all shards that call the layer, so their mean is exact for a float32.
        momenta = momenta / callers[len(callers) - self.customs :].clamp(min=1)
        return PooledStatistics(total, callers > 0, shift + off, variance, momenta)

    def shift(self) -> torch.Tensor:
        """The running means, (C,), float64; 0 in place of values that are not finite."""
        means = [layer.module._buffers[layer.mean] for layer in self._layers]
        return torch.cat(means).double().nan_to_num_(0.0, 0.0, 0.0)

    def is_far(self, pooled: PooledStatistics, shift: torch.Tensor) -> bool:
        """Whether a mean is so far from the shift that the variance lost digits; the host waits."""
        factor = self._factor(pooled.momenta)
        off = (pooled.mean - shift).square_().mul_(factor)
        now = torch.cat([layer.module._buffers[layer.variance] for layer in self._layers]).double()
        kept = now.lerp_(pooled.variance, factor).add_(self._eps.index_select(0, self._owner))
        return bool((off > _FAR * kept).any())

    def move(self, pooled: PooledStatistics, is_bad: torch.Tensor | None) -> None:
        """Update the running statistics with the pooled ones of all shards.

        Args:
            pooled: of all shards.
            is_bad: whether the step moves nothing, shape (), bool.
        """
        total = pooled.counts
        unbiased = pooled.variance * (total / (total - 1).clamp_(min=1))
        called = (pooled.called if is_bad is None else pooled.called & ~is_bad).long()
        means = []
        variances = []
        tracked = []
        added: list[Any] = []
        counts = called.tolist() if accelerator_of(called.device).is_host else called
        for layer, count in zip(self._layers, counts, strict=True):
            buffers = layer.module._buffers
            # Past the version counter, as torch's kernels write them: a graph that crosses the fold may hold these.
            means.append(buffers[layer.mean].data)
            variances.append(buffers[layer.variance].data)
            if not layer.is_custom and buffers["num_batches_tracked"] is not None:
                tracked.append(buffers["num_batches_tracked"])
                added.append(count)
        if tracked:
            torch._foreach_add_(tracked, added)
        # A layer that no shard called, or all without values, keeps its values to the bit.
        factor = torch.where(total > 0, self._factor(pooled.momenta), 0.0)
        for olds, new in ((means, pooled.mean), (variances, unbiased)):
            old = torch.cat(olds).double()
            now = (1 - factor) * old + factor * new
            if is_bad is not None:
                now = torch.where(is_bad, old, now)
            torch._foreach_copy_(olds, list(now.split(self.sizes)))

    def _factor(self, custom_momenta: torch.Tensor) -> torch.Tensor:
        """The weight of the new value in each channel's moving average: the momentum, or 1 / (calls so far) if None.

        The momenta of the user's norm layers come with the shards, (customs,).
        """
        momenta = list(map(_MOMENTUM, self._torch_layers))
        if momenta != self._momenta or None in momenta or self.customs:
            self._momenta = momenta
            factors = []
            for momentum, layer in zip(momenta, self._torch_layers, strict=True):
                tracked = layer.module._buffers["num_batches_tracked"]
                if momentum is None and tracked is not None:
                    factors.append(1.0 / tracked.clamp(min=1).double())
                else:
                    factors.append(self._eps.new_full((), momentum or 0.0))
            self._factors = torch.stack([*factors, *custom_momenta]).index_select(0, self._owner)
        return self._factors


class RunningStatsSnapshot:
    """A copy of running statistics that layers update themselves, in forward and in its recomputation inside backward.

    Args:
        layers: the layers whose buffers are copied.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = list(layers)
        self._pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # now, kept; by dtype
        self._first_call: RemovableHandle | None = None

    def record(self, *, training_only: bool = False) -> None:
        """Copy the current values, of all layers or only of those in training mode."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for layer in self.layers:
            for buffer in layer._buffers.values() if layer.training or not training_only else ():
                if buffer is not None:
                    by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self._pairs = [(now, copies_of(now)) for now in by_dtype.values()]

    def record_if_called(self) -> None:
        """Copy the values of layers in training mode before the next call of any module, if one comes before `restore`.

        A backward that recomputes no forward calls none, and costs nothing.
        """

        def before_call(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._forget_call()
            self.record(training_only=True)

        self._forget_call()
        self._first_call = register_module_forward_pre_hook(before_call)

    def _forget_call(self) -> None:
        if self._first_call is not None:
            self._first_call.remove()
            self._first_call = None

    def restore(self, where: torch.Tensor | Literal[True] = True) -> None:
        """Restore the copied values if `where`, shape (), is true. A second call does nothing."""
        self._forget_call()
        for now, kept in self._pairs:
            values = kept
            if isinstance(where, torch.Tensor):
                values = [torch.where(where, *both) for both in zip(kept, now, strict=True)]
            # Past the version counter, as the layers do: the graph of another backward may hold these.
            torch._foreach_copy_([buffer.data for buffer in now], values)
        self._pairs = []
