"""Buffers of the rules "min" and "max", such as an observer's: the extremes of the whole mini-batch, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too

RULES = {"model.0.least": "min", "model.0.largest": "max"}


class Observer(nn.Module):
    """Keeps the extremes of all values it saw, as torch's MinMaxObserver does, and of their signs as integers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        is_float = dtype.is_floating_point
        highest = torch.inf if is_float else torch.iinfo(dtype).max
        lowest = -torch.inf if is_float else torch.iinfo(dtype).min
        self.register_buffer("least", torch.full((4,), highest, dtype=dtype))
        self.register_buffer("largest", torch.full((4,), lowest, dtype=dtype))
        self.least: torch.Tensor
        self.largest: torch.Tensor

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        seen = values.detach() if self.least.dtype.is_floating_point else values.detach() * 10
        seen = seen.to(self.least.dtype)
        self.least.copy_(torch.minimum(self.least, seen.amin(0)))
        self.largest.copy_(torch.maximum(self.largest, seen.amax(0)))
        return values


def observed(dtype: torch.dtype) -> nn.Sequential:
    """Its observer comes first: a matrix product's last bits may follow from the number of rows."""
    return nn.Sequential(Observer(dtype), *network())


def train_observed(dtype: torch.dtype, shards: int | None) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = observed(dtype)
        for step in loop_over(world, ".", model, run_dir=None, shards=shards, buffer_reduction=RULES):
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
        return [one.clone() for one in model.buffers()]


@pytest.mark.covers("D6")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, None), (1, 4), (3, 4)])
def test_extremes_are_those_of_the_whole_mini_batch(
    dtype: torch.dtype, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    model = observed(dtype)
    for rows in samples(24).split(6):
        model(rows)
    for found in on_ranks(ranks, train_observed, dtype, shards):
        for one, wanted in zip(found, model.buffers(), strict=True):
            assert torch.equal(one, wanted)


def give_a_complex_buffer(world: dl.World, folder: str) -> None:
    model = network()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    loop_over(world, folder, model, buffer_reduction={"model.phase": "max"})


def test_values_without_an_order_are_refused(refused: Refused) -> None:
    refused(2, give_a_complex_buffer, by=ALL, kind="ValueError", said='"max" needs values with an order')
