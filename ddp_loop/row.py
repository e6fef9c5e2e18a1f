"""What a step gave, of the whole mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddp_loop.gradients import Gradients
from ddp_loop.records import Folded


@dataclass(frozen=True, slots=True)
class Row:
    """What a step gave, of the whole mini-batch and the same on every rank; still on the device.

    Attributes:
        epoch, iteration: counted from 1; the iteration goes on from epoch to epoch.
        observations: R, of the mini-batch.
    """

    epoch: int
    iteration: int
    observations: int
    _folded: Folded
    _gradients: Gradients

    @property
    def loss(self) -> torch.Tensor:
        """The weighted mean over the shards; shape ()."""
        return self._folded.values[0]

    @property
    def weight(self) -> torch.Tensor:
        """What the means are over, sum_s(w_s): by default the observations; shape ()."""
        weight = self._folded.weight
        return self._folded.values.new_tensor(self.observations) if weight is None else weight

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """Likewise each metric, by name; shape () each."""
        return dict(zip(self._folded.metrics, self._folded.values[1:].unbind(), strict=True))

    @property
    def gradient_norm(self) -> torch.Tensor:
        """The Euclidean norm of the gradients as they are when it is asked for; shape ()."""
        return self._gradients.norm()
