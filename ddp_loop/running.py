"""Running statistics of several batch-norm layers, moved together by those of the whole mini-batch, or put back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_loop.pooling import pooled


class Group:
    """Layers whose channels lie side by side, so that a few operations move them all.

    Args:
        numbers: which of the job's layers these are.
        layers: with running statistics, each.
    """

    def __init__(self, numbers: list[int], layers: list[_BatchNorm]) -> None:
        self.numbers = numbers
        self.sizes = [layer.num_features for layer in layers]
        self.channels = sum(self.sizes)
        self.width = len(layers) + 3 * self.channels
        self._layers = layers
        owner = torch.arange(len(layers)).repeat_interleave(torch.tensor(self.sizes))  # of each channel
        self._owner = owner.to(layers[0].running_mean.device if layers[0].running_mean is not None else "cpu")
        self._momenta: list[float | None] = []
        self._factors = torch.empty(0)

    def move(self, rows: torch.Tensor, keep: torch.Tensor | None = None) -> None:
        """Move the running statistics by the pooled ones of all shards.

        Args:
            rows: (S, width): counts, then means, what rounding took from these, and variances as torch keeps
                them, times m / (m - 1); zeros for a shard that did not call a layer.
            keep: whether all stay as they are, shape (), bool.
        """
        layers, owner = self._layers, self._owner
        rows = rows.double()
        counts, means, rests, variances = rows.split([len(layers), *3 * [self.channels]], dim=1)
        counts = counts.index_select(1, owner)
        # Merge the biased ones, then re-bias.
        biased = variances * ((counts - 1).clamp_(min=0) / counts.clamp(min=1))
        mean, variance = pooled(counts, means + rests, biased)
        total = counts.sum(0)
        variance *= total / (total - 1).clamp_(min=1)
        used = total > 0
        called = rows[:, : len(layers)].sum(0) > 0
        self._count(called if keep is None else called & ~keep)
        # A layer that no shard called moves by 0: its own values, to the bit.
        factor = torch.where(used, self._factor(owner), 0.0)
        for name, new in (("running_mean", mean), ("running_var", variance)):
            olds: list[torch.Tensor] = [getattr(layer, name) for layer in layers]
            old = torch.cat(olds).double()
            now = (1 - factor) * old + factor * new
            if keep is not None:
                now = torch.where(keep, old, now)
            torch._foreach_copy_(olds, list(now.split(self.sizes)))

    def _count(self, called: torch.Tensor) -> None:
        """One more mini-batch for the layers that were called."""
        pairs = [(layer.num_batches_tracked, one) for layer, one in zip(self._layers, called.long(), strict=True)]
        known = [(tracked, one) for tracked, one in pairs if tracked is not None]
        torch._foreach_add_([tracked for tracked, _ in known], [one for _, one in known])

    def _factor(self, owner: torch.Tensor) -> torch.Tensor:
        """How far each channel's moving average goes: the layer's momentum, or with None 1 / (calls so far)."""
        momenta = [layer.momentum for layer in self._layers]
        if momenta != self._momenta or None in momenta:
            self._momenta = momenta
            factors = [self._of_layer(layer, owner.device) for layer in self._layers]
            self._factors = torch.stack(factors).index_select(0, owner)
        return self._factors

    @staticmethod
    def _of_layer(layer: _BatchNorm, device: torch.device) -> torch.Tensor:
        if layer.momentum is None and layer.num_batches_tracked is not None:
            return 1.0 / layer.num_batches_tracked.clamp(min=1).double()
        return torch.full((), layer.momentum or 0.0, dtype=torch.float64, device=device)


class Kept:
    """Running statistics that layers move themselves, in forward, kept so that they can be put back.

    Args:
        layers: their buffers are kept.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)
        self._now: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []

    def note(self) -> None:
        """Keep what they are now."""
        self._now = [one for layer in self._layers for one in layer.buffers(recurse=False)]
        self._kept = [one.clone() for one in self._now]

    def put_back(self, where: torch.Tensor | bool) -> None:
        """Make them what they were, if `where`, shape ()."""
        for now, kept in zip(self._now, self._kept, strict=True):
            now.copy_(torch.where(where, kept, now) if isinstance(where, torch.Tensor) else kept if where else now)
