"""Batch norm whose forward is the user's: a subclass that transposes, freezes, reads or writes its running statistics.

Statistics are compared with 1e-12: float64, sums of some ten terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ddp_loop as dl
from tests.support.comparing import is_close
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused

pytestmark = pytest.mark.on_gpus_too

Tensors = list[torch.Tensor]
ROWS = 12


class Transposing(nn.BatchNorm1d):
    """Normalises (N, L, C), as transformers hold it."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.transpose(1, 2)).transpose(1, 2)


class Plain(nn.BatchNorm1d):
    """Gives torch what it is given."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.flatten(0, 1)).view_as(rows)


class Frozen(nn.BatchNorm1d):
    """Normalises by its running statistics, in training too."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(0, 1)
        return F.batch_norm(flat, self.running_mean, self.running_var, self.weight, self.bias).view_as(rows)


class Reading(nn.BatchNorm1d):
    """Its output depends on its running variance; it moves its statistics by hand."""

    running_mean: torch.Tensor
    running_var: torch.Tensor
    momentum: float

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(0, 1)
        output = rows / (self.running_var.clone() + self.eps).sqrt()
        with torch.no_grad():
            self.running_mean += self.momentum * (flat.mean(0) - self.running_mean)
            self.running_var += self.momentum * (flat.var(0) - self.running_var)
        return output


class Fixed(nn.BatchNorm1d):
    """Has a momentum that no attribute tells."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(0, 1)
        return F.batch_norm(flat, self.running_mean, self.running_var, training=True, momentum=0.3).view_as(rows)


class Moving(nn.Module):
    """A norm layer of the user's own, whose statistics have names of their own."""

    moving_mean: torch.Tensor
    moving_var: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_var", torch.ones(channels))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(0, 1)
        return F.batch_norm(flat, self.moving_mean, self.moving_var, training=self.training).view_as(rows)


def rows_of() -> torch.Tensor:
    numbers = torch.randn(ROWS, 2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return numbers * torch.arange(1, ROWS + 1).view(-1, 1, 1)


def network(kind: Callable[[int], nn.Module]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(kind(3), nn.Linear(3, 1)).double()
    list(model.buffers())[1].mul_(4)
    return model


def train(world: dl.World, kind: Callable[[int], nn.Module], shards: int | None = None) -> tuple[Tensors, Tensors]:
    """The statistics and the last layer's gradient, after two steps over the same rows."""
    model = network(kind)
    for step in dl.Loop(dl.Batches(rows_of(), ROWS, world, shards=shards), 2, state={"model": model}, progress=False):
        for rows in step:
            step.backward(model(rows).square().mean())
        step.fold()
    return [buffer.clone() for buffer in model.buffers()], [one.grad.clone() for one in model[1].parameters()]


def train_on(kind: Callable[[int], nn.Module], shards: int) -> tuple[Tensors, Tensors]:
    with dl.join_world(seed=0) as world:
        return train(world, kind, shards)


def expected(kind: Callable[[int], nn.Module]) -> tuple[Tensors, Tensors]:
    """The same in one process without a Loop."""
    model = network(kind)
    for _ in range(2):
        model.zero_grad()
        model(rows_of()).square().mean().backward()
    return list(model.buffers()), [one.grad for one in model[1].parameters()]


@pytest.mark.parametrize("kind", [Transposing, Plain, Frozen, Reading, Moving])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.quick_on_gpus
def test_statistics_are_those_of_the_values_that_the_norm_sees(
    on_ranks: OnRanks, kind: Callable[[int], nn.Module], ranks: int
) -> None:
    statistics, gradients = expected(kind)
    for found, folded in on_ranks(ranks, train_on, kind, 4):
        if kind is Reading:  # torch counts the mini-batches of a forward that does not
            assert is_close(found[:2], statistics[:2])
        else:
            assert is_close(found, statistics)
        if kind in (Frozen, Reading):  # the others normalise by the shard
            assert is_close(folded, gradients)


def called_by_name(shards: int) -> Tensors:
    with dl.join_world(seed=0) as world:
        model = nn.BatchNorm1d(3).double()
        for step in dl.Loop(
            dl.Batches(rows_of()[:, 0], ROWS, world, shards=shards), 1, state={"model": model}, progress=False
        ):
            for rows in step:
                step.backward(model(input=rows).square().mean())
            step.fold()
        return list(model.buffers())


def test_a_norm_may_be_given_its_input_by_name() -> None:
    assert is_close(called_by_name(4)[:1], called_by_name(1)[:1])


def with_a_hidden_momentum(world: dl.World, folder: str) -> None:
    train(world, Fixed)


def test_a_momentum_that_the_layer_does_not_have_is_refused(refused: Refused) -> None:
    refused(
        2, with_a_hidden_momentum, kind="RuntimeError", said="gives F.batch_norm 0.3, and its momentum is 0.1", by=ALL
    )


# -- calls that differ from one another --------------------------------------------------------------------


def call_off(model: Any, rows: torch.Tensor) -> Any:
    """As virtual adversarial training does: a second forward that moves no statistics."""
    model[0].track_running_stats = False
    model(rows * 3 + 2)
    model[0].track_running_stats = True
    return model(rows)


def call_without_momentum(model: Any, rows: torch.Tensor) -> Any:
    model[0].momentum = 0.0
    model(rows * 3 + 2)
    model[0].momentum = 0.1
    return model(rows)


def train_toggling(world: dl.World, shards: int, *, off_at_first: bool = False) -> Tensors:
    model = network(nn.BatchNorm1d)
    model[0].track_running_stats = not off_at_first
    batches = dl.Batches(rows_of()[:, 0], ROWS, world, shards=shards, shuffle=False)
    for step in dl.Loop(batches, 2, state={"model": model}, progress=False):
        for rows in step:
            step.backward(call_off(model, rows).square().mean())
        step.fold()
    return [buffer.clone() for buffer in model.buffers()]


def train_toggling_on(shards: int, off_at_first: bool) -> Tensors:
    with dl.join_world(seed=0) as world:
        return train_toggling(world, shards, off_at_first=off_at_first)


@pytest.mark.parametrize("off_at_first", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_call_without_tracking_moves_nothing(on_ranks: OnRanks, ranks: int, off_at_first: bool) -> None:
    model = network(nn.BatchNorm1d)
    for _ in range(2):
        call_off(model, rows_of()[:, 0])
    for found in on_ranks(ranks, train_toggling_on, 4, off_at_first):
        assert is_close(found, list(model.buffers()))


def with_a_momentum_for_a_call(world: dl.World, folder: str) -> None:
    model = network(nn.BatchNorm1d)
    for step in dl.Loop(dl.Batches(rows_of()[:, 0], ROWS, world), 1, state={"model": model}, progress=False):
        for rows in step:
            step.backward(call_without_momentum(model, rows).square().mean())
        step.fold()


def test_a_momentum_for_one_call_is_refused(refused: Refused) -> None:
    said = r"was called with another momentum than it has now, "
    refused(2, with_a_momentum_for_a_call, kind="RuntimeError", said=said, by=ALL)
