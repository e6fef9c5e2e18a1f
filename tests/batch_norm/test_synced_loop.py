"""Synced batch norm in a Loop whose ranks part; the drawn jobs of test_differential.py are of those that do not."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.refusals import ALL, Refused, loop_over, samples
from tests.support.training import train_in

pytestmark = pytest.mark.on_gpus_too

SAMPLES = 14  # the last mini-batch of 6 has 2: of 3 ranks one has none


def network() -> nn.Sequential:
    """The first layer's inputs need no gradient, another one is used twice, the last one is frozen."""
    torch.manual_seed(7)
    twice = nn.BatchNorm1d(4)
    first = nn.BatchNorm1d(4, momentum=None, affine=False)
    middle = (nn.Linear(4, 4), twice, nn.Tanh(), nn.Linear(4, 4), twice, nn.Tanh())
    return nn.Sequential(first, *middle, nn.BatchNorm1d(4).eval(), nn.Linear(4, 1)).double()


def train_on_several_shards(world: dl.World, folder: str, is_late: bool) -> None:
    model = network()
    if not is_late:
        dl.sync_batch_norm(model, world)
    train_in(
        world, model, shards=3, run_dir=folder, before_step=lambda step: dl.sync_batch_norm(model, world),
        allow_single_sample_shards=True,
    )  # fmt: skip


@pytest.mark.parametrize("is_late", [False, True])
def test_several_shards_on_a_rank_are_refused_with_the_remedy(is_late: bool, refused: Refused) -> None:
    said = "at most one shard per rank" if is_late else "at most one shard per rank. Got 3 shards .* local_batch_norm"
    refused(2, train_on_several_shards, is_late, kind="ValueError", said=said, by=ALL)


def fail(gradient: torch.Tensor) -> NoReturn:
    raise LookupError("a bad image")


def go_another_way(world: dl.World, model: nn.Sequential) -> None:
    """Rank 1 calls two layers of one size in another order: the messages match."""
    for number in (0, 2) if world.rank == 1 else (2, 0):
        model[number](samples(2))


def part(world: dl.World, folder: str, fault: str) -> None:
    model = network()
    dl.sync_batch_norm(model, world)
    for step in loop_over(world, folder, model, count=SAMPLES, epochs=2, allow_single_sample_shards=True):
        now = fault if world.rank == 1 and step.iteration == 2 else ""
        for rows in step:
            if fault == "no rows are left out" and not len(rows):
                continue
            model.train(now != "one rank evaluates")
            outputs = model(rows)
            if now == "one rank raises in backward":
                outputs.register_hook(fail)
            elif now == "one rank raises":
                fail(outputs)
            step.backward(outputs.mean())
        if (fault, step.iteration) == ("one rank goes another way", 2):
            go_another_way(world, model)
        if now == "one rank leaves before the fold":
            break
        step.fold()
        assert (fault, step.iteration) != ("one rank goes another way", 2)
        if now == "one rank leaves":
            break
        if (fault, step.iteration) == ("one rank goes another way after the last fold", 6):
            go_another_way(world, model)
    world.sum(torch.ones(1))


ANOTHER = "forward of layer `2` .*, rank 1 at the forward of layer `0`"


@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("one rank goes another way", "RuntimeError", ANOTHER),
        ("one rank goes another way after the last fold", "RuntimeError|CallMismatch", ANOTHER),
        ("no rows are left out", "RuntimeError", "at the end of its pass|also for the tensors of no rows"),
        ("one rank evaluates", "RuntimeError", "rank 1 at the end of its pass"),
        ("one rank leaves", "RuntimeError", "rank 1 at the end of its loop"),
        ("one rank leaves before the fold", "RuntimeError", "rank 1 at the end of its loop"),
        ("one rank raises", "LookupError", "a bad image"),
        ("one rank raises in backward", "LookupError", "a bad image"),
    ],
)
def test_ranks_that_part_ways_get_the_error(fault: str, kind: str, said: str, late: bool, refused: Refused) -> None:
    if late and kind == "RuntimeError" and said != ANOTHER:
        # Where one rank calls more layers than another, one waits for a message and the other compares. Here a sum
        # blocks its rank, so the messages between the ranks show it.
        kind, said = "RuntimeError|PeerFailed", f"{said}|a step's sum"
    # Found from these messages, it takes 1.5 s and more; on a device no sum holds a rank up.
    refused(3, part, fault, kind=kind, said=said, by=None, waits=late)
