"""The loop that most tests of training run, in one call, and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import gradients_of
from tests.support.refusals import loss_of, samples

LossOf = Callable[..., torch.Tensor]


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def mean(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return torch.as_tensor(model(rows).mean())


def mean_square(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return torch.as_tensor(model(rows).square().mean())


def loop_on(
    batches: dl.Batches | dl.SequenceBatches,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    epochs: int | None = 1,
    **options: Any,
) -> dl.Loop:
    """A loop over given mini-batches, by default one epoch; without an optimizer the state has none."""
    state: dict[str, object] = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
    return dl.Loop(batches, epochs, state=state, **{"progress": False, **options})


def take(step: dl.Step, model: nn.Module, loss: LossOf = loss_of, **keywords: Any) -> dl.StepResult:
    """A pass over a step's shards, and the fold."""
    for rows in step:
        step.backward(loss(model, rows), **keywords)
    return step.fold()


def train_in(
    world: dl.World,
    model: nn.Module,
    loss: LossOf = loss_of,
    data: Any = None,
    batch_size: int = 6,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    shards: int | None = None,
    state: dict[str, object] | None = None,
    weight: Callable[[dl.Step], Any] = lambda step: None,
    before_step: Callable[[dl.Step], Any] = lambda step: None,
    after_fold: Callable[[dl.Step, dl.StepResult], Any] = lambda step, result: result,
    **options: Any,
) -> list[Any]:
    """On a rank: train; by default for an epoch of 4 steps of 6 samples in their order.

    Args:
        world, model, optimizer: what is trained where; without an optimizer no step is taken.
        loss: `loss(model, *shard)`, shape ().
        data, batch_size, shards: of `Batches`.
        state: what is in the loop's state beside the two.
        weight: of each shard's loss in a step.
        before_step, after_fold: called before each pass with the step, and after it, before the update, with the step
            and its result.
        options: of `Loop`.

    Returns:
        What `after_fold` returned for each step; by default the steps' results.
    """
    found: list[Any] = []
    batches = dl.Batches(samples(24) if data is None else data, batch_size, world, shards=shards, shuffle=False)
    trained = {"model": model, **({} if optimizer is None else {"optimizer": optimizer}), **(state or {})}
    for step in dl.Loop(batches, **{"epochs": 1, "progress": False, **options}, state=trained):
        before_step(step)
        for shard in step:
            given = shard if isinstance(shard, tuple) else (shard,)
            step.backward(loss(model, *given), weight=weight(step))
        found.append(after_fold(step, step.fold()))
        if optimizer is not None:
            optimizer.step()
    return found


def train(model: nn.Module, *arguments: Any, **keywords: Any) -> list[Any]:
    """As `train_in`, in a world that is joined for it."""
    with dl.join_world() as world:
        return train_in(world, model, *arguments, **keywords)


def train_plainly(
    model: nn.Module,
    loss: LossOf = loss_of,
    data: Any = None,
    batch_size: int = 6,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    after_backward: Callable[[], Any] | None = None,
) -> list[Any]:
    """By torch's own loop over whole mini-batches; what `after_backward` returned, by default the gradients."""
    found = []
    tensors = samples(24) if data is None else data
    pieces = zip(
        *(one.split(batch_size) for one in (tensors if isinstance(tensors, tuple) else (tensors,))), strict=True
    )
    for mini_batch in pieces:
        model.zero_grad()
        loss(model, *mini_batch).backward()
        found.append(gradients_of(model) if after_backward is None else after_backward())
        if optimizer is not None:
            optimizer.step()
    return found
