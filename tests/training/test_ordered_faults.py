"""Ranks that leave an ordered fold are reported; frozen layers, empty shards and resumed runs keep its bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.determinism import digest
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of, network
from tests.support.training import train

pytestmark = pytest.mark.on_gpus_too


# -- bits ----------------------------------------------------------------------------------------------------------


def momentum_of_negative_zeros(samples: int) -> str:
    """Gradients of -0.0, which a sum with zeros would make 0.0."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(
        model,
        lambda model, rows: model.weight.sum() * -0.0,
        torch.ones(samples, 2),
        samples,
        optimizer=optimizer,
        shards=4,
    )
    return digest(optimizer.state[model.weight]["momentum_buffer"])


@pytest.mark.covers("H7")
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.slow
def test_an_empty_shard_leaves_the_sign_of_a_zero_alone(samples: int, on_ranks: OnRanks) -> None:
    digests = {one for ranks in (1, 5) for one in on_ranks(ranks, momentum_of_negative_zeros, samples)}
    assert digests == {digest(torch.full((1, 2), -0.0))}


def spare_buffers() -> list[int]:
    with dl.join_world() as world:
        model = network()
        kept = []
        loop = loop_over(world, "", model, shards=8, epochs=2, run_dir=None)
        for step in loop:
            for number, rows in enumerate(step):
                step.backward(loss_of(model, rows), weight=len(rows) if number else 0)
            step.fold()
            kept.append(sum(len(bucket.memory.spare) for bucket in loop.fold.gradients.buckets))
        return kept


@pytest.mark.quick_on_gpus
def test_no_step_leaves_more_memory_behind_than_the_one_before(on_ranks: OnRanks) -> None:
    for kept in on_ranks(3, spare_buffers):
        assert kept[2:] == kept[2:3] * 6


# -- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "left"),
    [
        ((5, 1, 1), 7),
        ((4, 0, 4), 8),  # at the very end of an epoch
        ((12, 3, 0), 0),  # a finished run
        ((20, 5, 0), 0),  # and one of a longer loop
    ],
)
def test_a_loop_makes_the_steps_that_are_left(place: tuple[int, int, int], left: int) -> None:
    made = []
    with dl.join_world() as world:
        loop = loop_over(world, "", model := network(), epochs=3, run_dir=None)
        loop.load_state_dict(dict(zip(("iteration", "epoch", "position"), place, strict=True)))
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            made.append(step.iteration)
    assert made == [*range(13 - left, 13)]
