"""The loop that most tests of training run, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ddp_loop as dl
from tests.support.refusals import loss_of, samples


def train(
    model: nn.Module,
    loss: Callable[..., torch.Tensor] = loss_of,
    data: Any = None,
    batch_size: int = 6,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    shards: int | None = None,
    state: dict[str, object] | None = None,
    after_fold: Callable[[dl.Step, dl.StepResult], Any] | None = None,
    **options: Any,
) -> list[Any]:
    """On a rank: join a world, and train; by default for an epoch of 4 steps of 6 samples in their order.

    Args:
        model, optimizer: what is trained; without an optimizer no step is taken.
        loss: `loss(model, *shard)`, shape ().
        data, batch_size, shards: of `Batches`.
        state: what is in the loop's state beside the two.
        after_fold: called after each fold, before the update, with the step and its result.
        options: of `Loop`.

    Returns:
        What `after_fold` returned for each step; without it the steps' results.
    """
    found: list[Any] = []
    with dl.join_world() as world:
        batches = dl.Batches(samples(24) if data is None else data, batch_size, world, shards=shards, shuffle=False)
        trained = {"model": model, **({} if optimizer is None else {"optimizer": optimizer}), **(state or {})}
        for step in dl.Loop(batches, **{"epochs": 1, "progress": False, **options}, state=trained):
            for shard in step:
                step.backward(loss(model, *(shard if isinstance(shard, tuple) else (shard,))))
            result = step.fold()
            found.append(result if after_fold is None else after_fold(step, result))
            if optimizer is not None:
                optimizer.step()
    return found
