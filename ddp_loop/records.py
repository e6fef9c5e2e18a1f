"""What a shard leaves behind for the fold, and what the fold makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ddp_loop.batchnorm import Capture
from ddp_loop.shards import Shard
from ddp_loop.values import Weight


@dataclass(slots=True)
class Record:
    """What one shard leaves behind for the fold, beside its gradients."""

    shard: Shard
    captures: list[list[Capture]]
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    weight: Weight | None = None
    taken: dict[str, torch.Tensor] = field(default_factory=dict)
    done: bool = False  # its last backward was made
    failed: bool = False  # a backward raised, and may have left parts of its gradients


@dataclass(frozen=True, slots=True)
class Folded:
    """The whole mini-batch's values, still on the device.

    Attributes:
        metrics: their names.
        values: loss and metrics, (1 + metrics,).
        weight: the sum of the shards' weights, (); None where these are their observations.
        losses: of each shard, (S,).
        share: each shard's part of the means, (S,).
        bad: whether the step is not finite and moves nothing; a tensor of shape () where the host does not know it.
    """

    metrics: tuple[str, ...]
    values: torch.Tensor
    weight: torch.Tensor | None
    losses: torch.Tensor
    share: torch.Tensor
    bad: torch.Tensor | bool
