"""Ranks that leave an ordered fold are reported; frozen layers, empty shards and resumed runs keep its bits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.determinism import digest
from tests.support.harness import FAULT_S, OnRanks, caught
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network
from tests.support.training import train

pytestmark = pytest.mark.on_gpus_too


def leave(world: dl.World, folder: str, where: str) -> None:
    """Rank 1 leaves in step 3, when the sums of its last backward have begun, or after a gather."""
    model = network()
    for step in loop_over(world, folder, model, shards=4, bucket_cap_mib=1e-4):
        leaves = world.rank == 1 and step.iteration == 3
        for rows in step:
            if where == "between gather and fold":
                step.hold(model(rows))
            else:
                step.backward(loss_of(model, rows))
        if where == "between gather and fold":
            outputs = step.gather()
            if leaves:
                break
            step.backward(outputs.square().mean())
        if leaves:
            break
        step.fold()
    world.sum(torch.ones(1))


@pytest.mark.covers("D10")
@pytest.mark.parametrize("where", ["after the last backward", "between gather and fold"])
@pytest.mark.slow
def test_the_peers_report_a_rank_that_leaves_when_sums_have_begun(where: str, refused: Refused) -> None:
    refused(3, leave, where, kind="PeerFailed", said="rank|left", by=None)


def train_but_leave_on_rank_3(began: list[float]) -> None:
    with dl.join_world(timeout_s=20) as world:
        model = network()
        for step in loop_over(world, "", model, shards=3, run_dir=None):
            began.append(time.monotonic())
            if world.rank == 3 and step.iteration == 3:
                break
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()


def what_leaving_gives() -> tuple[str, str, float]:
    began: list[float] = []
    kind, text, _ = caught(train_but_leave_on_rank_3, began)
    return kind, text, time.monotonic() - began[-1]


@pytest.mark.covers("D10")
@pytest.mark.slow
def test_the_peers_report_a_rank_without_a_shard_that_leaves(on_ranks: OnRanks) -> None:
    *others, leaver = on_ranks(4, what_leaving_gives)
    assert leaver[0] == ""
    for kind, text, took_s in others:
        assert (kind, "rank 3 failed" in text, "left the loop in step 3" in text) == ("PeerFailed", True, True), text
        assert took_s < FAULT_S


# -- bits ----------------------------------------------------------------------------------------------------------


def unfreeze_twice() -> str:
    model = network()
    model.requires_grad_(False)
    model[2].get_parameter("bias").requires_grad_(True)

    def unfreeze(step: dl.Step, result: dl.StepResult) -> None:
        model[2].get_parameter("weight").requires_grad_(step.iteration >= 2)  # in two steps that follow each other
        model[0].requires_grad_(step.iteration >= 3)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer=optimizer, shards=8, epochs=2, after_fold=unfreeze)
    return digest(torch.cat([one.detach().flatten() for one in model.parameters()]))


@pytest.mark.covers("H7")
@pytest.mark.quick_on_gpus
@pytest.mark.both_exchanges
def test_layers_unfrozen_one_after_the_other_have_the_same_bits_on_any_number_of_ranks(on_ranks: OnRanks) -> None:
    assert len({one for ranks in (1, 2, 3) for one in on_ranks(ranks, unfreeze_twice)}) == 1


def momentum_of_negative_zeros(samples: int) -> str:
    """Gradients of -0.0, which a sum with zeros would make 0.0."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, minus_zero, torch.ones(samples, 2), samples, optimizer=optimizer, shards=4)
    return digest(optimizer.state[model.weight]["momentum_buffer"])


def minus_zero(model: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    return model.weight.sum() * -0.0


@pytest.mark.covers("H7")
@pytest.mark.parametrize("samples", [1, 3, 4])
def test_an_empty_shard_leaves_the_sign_of_a_zero_alone(samples: int, on_ranks: OnRanks) -> None:
    digests = {one for ranks in (1, 3, 5) for one in on_ranks(ranks, momentum_of_negative_zeros, samples)}
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


def test_no_step_leaves_more_memory_behind_than_the_one_before(on_ranks: OnRanks) -> None:
    for kept in on_ranks(3, spare_buffers):
        assert kept[2:] == kept[2:3] * 6


# -- going on ------------------------------------------------------------------------------------------------------


def place(iteration: int, epoch: int, position: int) -> dict[str, int]:
    return {"iteration": iteration, "epoch": epoch, "position": position}


def go_on(state: dict[str, int]) -> int:
    with dl.join_world() as world:
        loop = loop_over(world, "", model := network(), epochs=3, run_dir=None)
        loop.load_state_dict(state)
        steps = 0
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            steps += 1
        return steps


@pytest.mark.parametrize(
    ("state", "left"),
    [
        (place(0, 0, 0), 12),
        (place(5, 1, 1), 7),
        (place(4, 0, 4), 8),  # at the very end of an epoch
        (place(12, 3, 0), 0),  # a finished run
        (place(20, 5, 0), 0),  # and one of a longer loop
    ],
)
def test_a_loop_makes_the_steps_that_are_left(state: dict[str, int], left: int, on_ranks: OnRanks) -> None:
    assert on_ranks(2, go_on, state) == [left, left]


def load(world: dl.World, folder: str, state: dict[str, int], has_begun: bool) -> None:
    loop = loop_over(world, folder, network())
    if has_begun:
        next(iter(loop))
    loop.load_state_dict(state)


@pytest.mark.parametrize("state", [place(5, 1, 2), place(5, 0, 5), place(-1, 0, -1), {"epoch": 0, "position": 1}, {}])
def test_a_state_that_no_loop_gave_is_refused(state: dict[str, Any], refused: Refused) -> None:
    said = "Got .* (Use the data and the batch_size|Pass that dict)"
    refused(2, load, state, False, kind="ValueError", said=said, by=ALL)


def test_a_loop_that_has_begun_goes_on_nowhere_else(refused: Refused) -> None:
    said = "This one has begun. Create a new Loop"
    refused(1, load, place(1, 0, 1), True, kind="RuntimeError", said=said, by=ALL)
