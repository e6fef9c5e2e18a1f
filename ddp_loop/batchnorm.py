"""Batch-norm statistics of the whole mini-batch, pooled from the batch statistics of its shards.

[Note: Pooled variance] For shards j with m_j values behind each channel's statistic (observations times
positions), M = sum(m_j):

    mean = sum(m_j mean_j) / M
    var  = sum(m_j (var_j + (mean_j - mean)^2)) / M          biased; M / (M - 1) times that is what torch keeps

Sums of squares would cancel (off by 1e-3 in float32 at mean 100); this form does not. Pooling the moving
averages instead understates the variance: for shards with mean 0, variance 1 and mean 3, variance 4 and decay
0.1 from (0, 1), the whole mini-batch gives 1.375, pooled moving averages 1.1725, a weighted mean of variances
1.15 (`examples/statistics.py`).

[Note: Capture] torch keeps no batch statistics, but with momentum 1 its running statistics are just those. So
while a layer's forward runs in a shard, it works on a pair of spare buffers with momentum 1; a second call in
the same shard gets a second pair. The layer's own buffers are not touched before the fold, so every shard
starts from the same ones.

[Note: Far means] torch rounds a shard's mean in float32: at mean 1,000 and deviation 1 it is off by 7e-5, and
the pooled variance then by 1e-5. Where a mean lies far from 0 against the deviation, what is left of it is
computed in a second pass over the values and travels beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

BatchNorm = _BatchNorm
_SPARE = ("running_mean", "running_var", "num_batches_tracked")


def pooled(counts: torch.Tensor, means: torch.Tensor, variances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of the union from those of its parts, (S, C) each to (C,) each.

    A part whose count is 0 adds exactly 0. See [Note: Pooled variance].

    Source: Chan, Golub, LeVeque: Algorithms for computing the sample variance, 1983.
    """
    total = counts.sum(0).clamp(min=1)
    mean = (counts * means).sum(0) / total
    return mean, (counts * (variances + (means - mean) ** 2)).sum(0) / total


def batch_norm_layers(modules: Mapping[str, nn.Module]) -> dict[str, BatchNorm]:
    """All layers below `modules` that keep running batch-norm statistics, by name."""
    return {
        name: layer
        for prefix, module in modules.items()
        for name, layer in module.named_modules(prefix=prefix)
        if isinstance(layer, BatchNorm) and layer.track_running_stats and layer.running_mean is not None
    }


@dataclass(slots=True)
class Capture:
    """One call's batch statistics: `count` values behind each channel, mean + rest, unbiased variance."""

    count: int
    mean: torch.Tensor
    rest: torch.Tensor
    variance: torch.Tensor


_FAR = 64.0  # means further than so many deviations from 0; closer ones put less than 2e-6 into the variance


def rest_of_mean(values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """What rounding took from the mean of each channel, (C,); 0 where it does not matter, and on a GPU.

    On a GPU asking would hold the host up.
    """
    far = values.device.type == "cpu" and bool((mean * mean > _FAR**2 * variance).any())
    if not far or values.dtype == torch.float64:
        return torch.zeros_like(mean)
    rows = values.detach().transpose(0, 1).reshape(len(mean), -1)
    return (rows - mean.unsqueeze(1)).mean(1).to(mean.dtype)


class BatchNormStatistics:
    """Watches `layers` through the shards of a step and moves their running statistics once.

    `recording()` starts a shard's list of captures; `discard()` ends it, and what is called then (recomputation
    inside backward) leaves no trace; `stop()` hands the layers back to torch.
    """

    def __init__(self, layers: Mapping[str, BatchNorm]) -> None:
        self.layers = list(layers.values())
        self._captures: list[list[Capture]] | None = None
        self._active = False
        self._spared: dict[BatchNorm, dict[str, Any]] = {}
        self._hooks: list[RemovableHandle] = []
        for number, layer in enumerate(self.layers):
            self._hooks.append(layer.register_forward_pre_hook(self._before))
            after = self._make_after(number)
            self._hooks.append(layer.register_forward_hook(after, always_call=True))

    def release(self) -> None:
        """Take the hooks away."""
        self.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def recording(self) -> list[list[Capture]]:
        """Begin a shard: the captures of each layer, in the order of its calls, will stand in the list returned."""
        self._active = True
        self._captures = [[] for _ in self.layers]
        return self._captures

    def discard(self) -> None:
        """Keep nothing of what is called from now on, and leave the running statistics alone."""
        self._captures = None

    def go_on(self, captures: list[list[Capture]]) -> None:
        """Add to a shard's captures again."""
        self._captures = captures

    def stop(self) -> None:
        """End the shard: layers called from now on move their own statistics, as torch does."""
        self._active, self._captures = False, None

    # -- capture -------------------------------------------------------------------------------------------

    def _before(self, layer: BatchNorm, inputs: tuple[torch.Tensor, ...]) -> None:
        mean = layer.running_mean
        if not (self._active and layer.training) or layer in self._spared or mean is None:
            return
        buffers = layer._buffers
        self._spared[layer] = {"momentum": layer.momentum, **{name: buffers.get(name) for name in _SPARE}}
        layer.__dict__["momentum"] = 1.0  # past nn.Module's __setattr__, which takes a microsecond
        buffers["running_mean"], buffers["running_var"] = torch.zeros_like(mean), torch.zeros_like(mean)
        buffers["num_batches_tracked"] = None

    def _make_after(self, number: int) -> Any:
        def after(layer: BatchNorm, inputs: tuple[torch.Tensor, ...], output: torch.Tensor | None) -> None:
            if layer not in self._spared:
                return
            spared = self._spared.pop(layer)
            mean, variance = layer.running_mean, layer.running_var
            layer.__dict__["momentum"] = spared.pop("momentum")
            layer._buffers.update(spared)
            if output is None or mean is None or variance is None:
                return  # forward raised
            if self._captures is not None:
                count = output.numel() // output.shape[1]
                rest = rest_of_mean(inputs[0], mean, variance)
                self._captures[number].append(Capture(count, mean, rest, variance))

        return after

    # -- rows ----------------------------------------------------------------------------------------------

    def width(self, calls: Sequence[int]) -> int:
        """Columns of a row: for each call of each layer its count, and its channels' means, rests, variances."""
        return sum(times * (1 + 3 * layer.num_features) for times, layer in zip(calls, self.layers, strict=True))

    def _entries(self, calls: Sequence[int], call: int) -> list[int]:
        return [number for number, times in enumerate(calls) if times > call]

    def pack(self, captures: list[list[Capture]], calls: Sequence[int], row: torch.Tensor) -> None:
        """Write a shard's captures into its row: by call, counts, then means, then rests, then variances."""
        pieces: list[torch.Tensor] = []
        for call in range(max(calls, default=0)):
            entries = self._entries(calls, call)
            found = [captures[number][call] if call < len(captures[number]) else None for number in entries]
            counts = [0.0 if one is None else float(one.count) for one in found]
            pieces.append(torch.tensor(counts, dtype=row.dtype).to(row.device, non_blocking=True))
            empty = [row.new_zeros(self.layers[number].num_features) for number in entries]
            for kind in ("mean", "rest", "variance"):
                pieces += [
                    blank if one is None else getattr(one, kind).to(row.dtype)
                    for one, blank in zip(found, empty, strict=True)
                ]
        if pieces:
            torch.cat(pieces, out=row)

    @torch.no_grad()
    def apply(self, rows: torch.Tensor, calls: Sequence[int]) -> None:
        """Move the running statistics by the pooled ones of all shards, rows (S, width), one call after another."""
        offset = 0
        for call in range(max(calls, default=0)):
            entries = self._entries(calls, call)
            layers = [self.layers[number] for number in entries]
            channels = sum(layer.num_features for layer in layers)
            width = len(layers) + 3 * channels
            self._move(layers, channels, rows[:, offset : offset + width].double())
            offset += width

    def _move(self, layers: list[BatchNorm], channels: int, rows: torch.Tensor) -> None:
        sizes = [layer.num_features for layer in layers]
        counts, means, rests, variances = rows.split([len(layers), channels, channels, channels], dim=1)
        repeats = torch.tensor(sizes, device=rows.device)
        counts = counts.repeat_interleave(repeats, dim=1, output_size=channels)
        # Each shard's variance comes as torch keeps it, times m / (m - 1); merge the biased ones, then re-bias.
        biased = variances * (counts - 1).clamp(min=0) / counts.clamp(min=1)
        mean, variance = pooled(counts, means + rests, biased)
        total = counts.sum(0)
        variance = variance * total / (total - 1).clamp(min=1)
        used = total > 0
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        moved = used[firsts].long()
        tracked = [layer.num_batches_tracked for layer in layers]
        torch._foreach_add_([t for t in tracked if t is not None], [m for m, t in zip(moved, tracked) if t is not None])  # noqa: B905
        factor = self._factors(layers, sizes, rows)
        for name, new in (("running_mean", mean), ("running_var", variance)):
            olds: list[torch.Tensor] = [getattr(layer, name) for layer in layers]
            old = torch.cat([one.double() for one in olds])
            now = torch.where(used, (1 - factor) * old + factor * new, old)
            torch._foreach_copy_(olds, list(now.split(sizes)))

    def _factors(self, layers: list[BatchNorm], sizes: list[int], rows: torch.Tensor) -> torch.Tensor:
        """The step of each channel's moving average: the layer's momentum, or with None 1 / (calls so far)."""
        if all(layer.momentum is not None for layer in layers):
            values = [float(layer.momentum or 0.0) for layer in layers for _ in range(layer.num_features)]
            return torch.tensor(values, dtype=rows.dtype).to(rows.device, non_blocking=True)
        pieces = []
        for layer, size in zip(layers, sizes, strict=True):
            if layer.momentum is None and layer.num_batches_tracked is not None:
                pieces.append((1.0 / layer.num_batches_tracked.clamp(min=1).double()).expand(size))
            else:
                pieces.append(rows.new_full((size,), layer.momentum or 0.0))
        return torch.cat(pieces)
