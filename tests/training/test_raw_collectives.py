"""Collectives of torch.distributed in a forward: exact with one shard per rank, refused where a rank has several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, gradients_of, is_close, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples
from tests.support.training import train

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
@pytest.mark.parametrize(("ranks", "shards", "by"), [(2, 4, ALL), (2, 5, ALL), (3, 4, 0)])
def test_they_are_refused_where_a_rank_has_several_shards(
    ranks: int, shards: int, by: int, held: bool, refused: Refused
) -> None:
    said = r"must not call torch.distributed where a rank has several shards.* shards made 1\. .*docs/buffers.md"
    refused(ranks, keep_the_largest, shards, held, kind="RuntimeError", said=said, by=by)


def train_with_the_largest() -> Tensors:
    model = nn.Sequential(Largest(), network())
    train(model)
    return [*gradients_of(model), *model.buffers()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_with_one_shard_on_each_rank_they_are_exact(ranks: int, on_ranks: OnRanks) -> None:
    model = nn.Sequential(Largest(), network())
    for rows in samples(24).split(6):
        model.zero_grad()
        loss_of(model, rows).backward()
    found = same_on_all(on_ranks(ranks, train_with_the_largest))
    assert is_close(found, [*gradients_of(model), *model.buffers()])


def collect_between_steps() -> Tensors:
    """Its collectives come before and after the shards, where all ranks are at the same place."""
    with dl.join_world() as world:
        model = network()
        for step in loop_over(world, "", model, run_dir=None, shards=2 * world.size):
            dist.barrier()
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            dist.all_reduce(torch.ones(2))
        return gradients_of(model)


def test_between_the_steps_they_are_the_scripts_own_affair(on_ranks: OnRanks) -> None:
    model = network()
    loss_of(model, samples(24)[18:]).backward()
    assert is_close(same_on_all(on_ranks(2, collect_between_steps)), gradients_of(model))
