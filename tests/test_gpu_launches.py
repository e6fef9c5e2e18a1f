"""Launches of a step of a deep network on fake GPUs, against the plain loop over the same shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("J18")

LAYERS = 53  # as many as a ResNet-50 has
ROWS = 8  # of a shard
WARM_UP, COUNTED, STEPS = 11, 2, 15  # a loop's first steps and its last one check more
MOST = 1.15  # times as many launches as the plain loop
MOST_MORE = 18  # launches than the plain loop, with one shard on one rank
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


def network(norm: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), NORMS[norm]()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)).cuda()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def plain_steps(norm: str, shards: int) -> Iterator[None]:
    model = network(norm)
    optimizer = sgd(model)
    data = torch.randn(shards * ROWS, 4, 2, 2).cuda(), torch.zeros(shards * ROWS, dtype=torch.long).cuda()
    while True:
        optimizer.zero_grad()
        for rows, labels in zip(*(one.split(ROWS) for one in data), strict=True):
            cross_entropy(model(rows), labels).backward()
        optimizer.step()
        yield


def own_steps(norm: str, shards: int, world: dl.World) -> Iterator[None]:
    model = network(norm)
    optimizer = sgd(model)
    size = shards * world.size * ROWS
    data = torch.randn(size * STEPS, 4, 2, 2), torch.zeros(size * STEPS, dtype=torch.long)
    batches = dl.Batches(data, size, world, shards=shards * world.size)
    for step in loop_on(batches, model, optimizer):
        for rows, labels in step:
            step.backward(cross_entropy(model(rows), labels))
        step.fold()
        optimizer.step()
        yield


def count(norm: str, shards: int) -> tuple[list[int], list[int]]:
    """The launches of the last steps of the plain loop and of ours, with so many shards on each rank."""
    import fake_cuda_extension as device

    with dl.join_world(device="gpu", seed=0) as world:
        counts = []
        for steps in (plain_steps(norm, shards), own_steps(norm, shards, world)):
            launches = [device.launches() for _ in islice(steps, WARM_UP + COUNTED)]
            last = launches[-COUNTED - 1 :]
            counts.append([after - before for before, after in pairwise(last)])
        return counts[0], counts[1]


def bucket_mib() -> list[float]:
    """The sizes of the buckets of 28 MiB of gradients."""
    with dl.join_world(device="gpu", seed=0) as world:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(28))).to(world.device)
        batches = dl.Batches(torch.ones(2 * world.size, 512), 2 * world.size, world)
        loop = loop_on(batches, model)
        for step in loop:
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
            found = [bucket.length * 4 / 2**20 for bucket in loop.fold.gradients.buckets]
        return found


def test_buckets_on_a_gpu_are_as_large_as_those_of_ddp(on_fake_gpus: OnRanks) -> None:
    assert on_fake_gpus(1, bucket_mib) == [[1.0, 25.0, 2.0]]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("norm", NORMS)
def test_a_step_launches_hardly_more_than_the_plain_loop(
    on_fake_gpus: OnRanks, norm: str, ranks: int, shards: int
) -> None:
    for plain, ours in on_fake_gpus(ranks, count, norm, shards):
        assert min(plain) > 4 * LAYERS * shards  # the device counts
        assert max(ours) <= (MOST * min(plain) if ranks * shards > 1 else min(plain) + MOST_MORE)
