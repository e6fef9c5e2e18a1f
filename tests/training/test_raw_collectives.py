"""Collectives of torch.distributed in a forward: exact with one shard per rank, refused where a rank has several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, gradients_of, is_close, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network
from tests.support.training import train, train_plainly

pytestmark = [pytest.mark.covers("D6"), pytest.mark.on_gpus_too, pytest.mark.both_exchanges]


class Largest(nn.Module):
    """The largest values of all ranks' shards, as scripts for DDP keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: torch.Tensor
        self.register_buffer("largest", torch.zeros(4, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = rows.amax(0)
        if dist.is_initialized():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        self.largest.copy_(torch.maximum(self.largest, found))
        return rows / self.largest


def keep_the_largest(world: dl.World, folder: str, shards: int, held: bool) -> None:
    model = nn.Sequential(Largest(), network())
    for step in loop_over(world, folder, model, shards=shards):
        for rows in step:
            if held:
                step.hold(model(rows))
            else:
                step.backward(loss_of(model, rows))
        if held:
            step.backward(step.gather().square().mean())
        step.fold()


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("ranks", "shards", "by"), [(2, 5, ALL), (3, 4, 0)])
def test_they_are_refused_where_a_rank_has_several_shards(
    ranks: int, shards: int, by: int, held: bool, refused: Refused
) -> None:
    said = r"must not call torch.distributed where a rank has several shards.* shards made 1\. .*docs/buffers.md"
    refused(ranks, keep_the_largest, shards, held, kind="RuntimeError", said=said, by=by)


def train_with_the_largest() -> Tensors:
    model = nn.Sequential(Largest(), network())
    train(model)
    return [*gradients_of(model), *model.buffers()]


def test_with_one_shard_on_each_rank_they_are_exact(on_ranks: OnRanks) -> None:
    model = nn.Sequential(Largest(), network())
    gradients = train_plainly(model)[-1]
    assert is_close(same_on_all(on_ranks(3, train_with_the_largest)), [*gradients, *model.buffers()])


def collect_between_steps() -> Tensors:
    """Its collectives come before and after the shards, where all ranks are at the same place."""
    model = network()

    def collect(*_: object) -> None:
        dist.all_reduce(torch.ones(2))

    train(model, shards=4, before_step=collect, after_fold=collect)
    return gradients_of(model)


def test_between_the_steps_they_are_the_scripts_own_affair(on_ranks: OnRanks) -> None:
    assert is_close(same_on_all(on_ranks(2, collect_between_steps)), train_plainly(network())[-1])
