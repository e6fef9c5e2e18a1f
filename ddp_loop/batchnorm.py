"""Batch-norm statistics of the whole mini-batch, pooled from the batch statistics of its shards.

[Note: Capture] torch keeps no batch statistics, but with momentum 1 its running statistics are just those. So
while a layer's forward runs in a shard, it works on a pair of spare buffers with momentum 1; a second call in
the same shard gets a second pair. The layer's own buffers are not touched before the fold, so every shard
starts from the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from ddp_loop.pooling import refined
from ddp_loop.running import Group

BatchNorm = _BatchNorm
_SPARE = ("running_mean", "running_var", "num_batches_tracked")


def is_synced(layer: nn.Module) -> bool:
    """Whether a layer takes its statistics from all ranks itself."""
    return bool(getattr(layer, "is_synced", False))


def batch_norm_layers(modules: Mapping[str, nn.Module]) -> dict[str, BatchNorm]:
    """All layers below `modules` that keep running batch-norm statistics, by name."""
    return {
        name: layer
        for prefix, module in modules.items()
        for name, layer in module.named_modules(prefix=prefix)
        if isinstance(layer, BatchNorm)
        and layer.track_running_stats
        and layer.running_mean is not None
        and not is_synced(layer)
    }


@dataclass(slots=True)
class Capture:
    """One call's batch statistics: `count` values behind each channel, mean + rest, unbiased variance."""

    count: int
    mean: torch.Tensor
    rest: torch.Tensor
    variance: torch.Tensor


class Watch:
    """A layer's forward hooks, before and after. A copy of the layer, by deepcopy or pickle, is not watched."""

    def __init__(self, statistics: BatchNormStatistics | None = None, number: int = 0) -> None:
        self._statistics, self._number = statistics, number

    def __call__(self, layer: BatchNorm, inputs: tuple[torch.Tensor, ...], *output: torch.Tensor | None) -> None:
        if self._statistics is None:
            return
        if output:
            self._statistics.after(self._number, layer, inputs[0], output[0])
        else:
            self._statistics.before(self._number, layer)

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:  # deepcopy asks it too
        return Watch, ()


class BatchNormStatistics:
    """Watches `layers` through the shards of a step and moves their running statistics once.

    `recording()` starts a shard's list of captures; `discard()` ends it, and what is called then (recomputation
    inside backward) leaves no trace; `stop()` hands the layers back to torch.
    """

    def __init__(self, layers: Mapping[str, BatchNorm]) -> None:
        self.layers = list(layers.values())
        self._captures: list[list[Capture]] | None = None
        self._active = False
        self._spared: dict[int, dict[str, Any]] = {}
        self._counts: dict[tuple[int, ...], torch.Tensor] = {}
        self._grouped: dict[tuple[int, ...], list[Group]] = {}
        self._hooks: list[RemovableHandle] = []
        for number, layer in enumerate(self.layers):
            watch = Watch(self, number)
            self._hooks.append(layer.register_forward_pre_hook(watch))
            self._hooks.append(layer.register_forward_hook(watch, always_call=True))

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

    def before(self, number: int, layer: BatchNorm) -> None:
        """Give a layer its spare buffers, if its shard is watched."""
        mean = layer.running_mean
        if is_synced(layer):
            raise RuntimeError(
                "a model is synced before its Loop is made; this one was after it: sync_batch_norm first"
            )
        if not (self._active and layer.training) or number in self._spared or mean is None:
            return
        buffers = layer._buffers
        self._spared[number] = {"momentum": layer.momentum, **{name: buffers.get(name) for name in _SPARE}}
        layer.__dict__["momentum"] = 1.0  # past nn.Module's __setattr__, which takes a microsecond
        buffers["running_mean"], buffers["running_var"] = torch.zeros_like(mean), torch.zeros_like(mean)
        buffers["num_batches_tracked"] = None

    def after(self, number: int, layer: BatchNorm, inputs: torch.Tensor, output: torch.Tensor | None) -> None:
        """Take what the spare buffers hold, and put the layer's own back."""
        if number not in self._spared:
            return
        spared = self._spared.pop(number)
        mean, variance = layer.running_mean, layer.running_var
        layer.__dict__["momentum"] = spared.pop("momentum")
        layer._buffers.update(spared)
        if output is None or mean is None or variance is None:
            return  # forward raised
        if self._captures is not None:
            count = output.numel() // output.shape[1]
            rest, biased = refined(inputs, mean, variance)
            if biased is not None:
                variance = biased * (count / max(count - 1, 1))
            self._captures[number].append(Capture(count, mean, rest, variance))

    # -- rows ----------------------------------------------------------------------------------------------

    def width(self, calls: tuple[int, ...]) -> int:
        """Columns of a row: for each call of each layer its count, and its channels' means, rests, variances."""
        return sum(group.width for group in self._groups(calls))

    def _groups(self, calls: tuple[int, ...]) -> list[Group]:
        """The layers that are called a first time, a second time, ..."""
        if calls not in self._grouped:
            each = [[n for n, times in enumerate(calls) if times > call] for call in range(max(calls, default=0))]
            self._grouped[calls] = [Group(numbers, [self.layers[n] for n in numbers]) for numbers in each]
        return self._grouped[calls]

    def pack(self, captures: list[list[Capture]], calls: tuple[int, ...], row: torch.Tensor) -> None:
        """Write a shard's captures into its row: by call, counts, then means, then rests, then variances."""
        pieces: list[torch.Tensor] = []
        for call, group in enumerate(self._groups(calls)):
            found = [captures[number][call] if call < len(captures[number]) else None for number in group.numbers]
            pieces.append(self._on_device(tuple(0 if one is None else one.count for one in found), row))
            for kind in ("mean", "rest", "variance"):
                for one, size in zip(found, group.sizes, strict=True):
                    pieces.append(row.new_zeros(size) if one is None else getattr(one, kind).to(row.dtype))
        if pieces:
            torch.cat(pieces, out=row)

    def _on_device(self, counts: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Counts as a tensor; kept, since the copy to a GPU would hold the host up and they are few."""
        if counts not in self._counts:
            if len(self._counts) > 64:  # sequences of ever other lengths
                self._counts.clear()
            self._counts[counts] = torch.tensor(counts, dtype=like.dtype).to(like.device)
        return self._counts[counts]

    def apply(self, rows: torch.Tensor, calls: tuple[int, ...], keep: torch.Tensor | None = None) -> None:
        """Move the running statistics by the pooled ones of all shards, rows (S, width), one call after another.

        Args:
            keep: whether they stay as they are, shape (), bool.
        """
        groups = self._groups(calls)
        for group, columns in zip(groups, rows.split([group.width for group in groups], dim=1), strict=True):
            group.move(columns, keep)
