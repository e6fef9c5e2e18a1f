"""Collectives of torch.distributed in a forward: exact with one shard per rank, refused where a rank has several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from tests.support.comparing import is_same, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples

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


def train(world: dl.World, folder: str | None, shards: int | None, held: bool = False) -> nn.Module:
    model = nn.Sequential(Largest(), network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in loop_over(world, "", model, optimizer, shards=shards, run_dir=folder):
        for rows in step:
            if held:
                step.hold(model(rows), rows)
            else:
                step.backward(loss_of(model, rows))
        if held:
            found, rows = step.gather()
            step.backward((found - rows.sum(1, keepdim=True)).square().mean())
        step.fold()
        optimizer.step()
    return model


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("ranks", "shards", "by"), [(2, 4, ALL), (2, 5, ALL), (3, 4, 0)])
def test_they_are_refused_where_a_rank_has_several_shards(
    ranks: int, shards: int, by: int, held: bool, refused: Refused
) -> None:
    said = r"must not call torch.distributed where a rank has several shards.* shards made 1\. .*docs/buffers.md"
    refused(ranks, train, shards, held, kind="RuntimeError", said=said, by=by)


def train_in_a_world() -> list[torch.Tensor]:
    with dl.join_world() as world:
        return [one.detach().clone() for one in train(world, None, None).state_dict().values()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_one_shard_on_each_rank_they_are_exact(ranks: int, on_ranks: OnRanks) -> None:
    model = nn.Sequential(Largest(), network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in samples(24).split(6):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    found = same_on_all(on_ranks(ranks, train_in_a_world))
    assert all(
        torch.allclose(one, wanted, 1e-12, 1e-12)
        for one, wanted in zip(found, model.state_dict().values(), strict=True)
    )


def collect_between_steps() -> list[torch.Tensor]:
    """Its collectives come before and after the shards, where all ranks are at the same place."""
    with dl.join_world() as world:
        model = network()
        for step in loop_over(world, ".", model, run_dir=None, shards=2 * world.size):
            dist.barrier()
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            dist.all_reduce(torch.ones(2))
        return [one.detach().clone() for one in model.parameters()]


def test_between_the_steps_they_are_the_scripts_own_affair(on_ranks: OnRanks) -> None:
    one, other = on_ranks(2, collect_between_steps)
    assert is_same(one, other)
