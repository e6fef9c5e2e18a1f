"""Faults in an ordered fold are reported on every rank; frozen parameters and resumed runs do no harm."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop.determinism import digest
from tests.support.cases import make_data
from tests.support.harness import FAULT_S, OnRanks, caught
from tests.support.refusals import ALL, Refused

pytestmark = pytest.mark.on_gpus_too

TINY_MIB = 0.0001  # a bucket for each parameter


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def begin(world: dl.World, model: nn.Module, **options: Any) -> tuple[dl.Loop, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = dl.Batches(make_data((6,), 64), 16, world, shards=options.pop("shards", 4))
    state = {"model": model, "optimizer": optimizer}
    return dl.Loop(batches, options.pop("epochs", 2), state=state, progress=False, **options), optimizer


def leave(world: dl.World, folder: str, where: str) -> None:
    model = network()
    loop, optimizer = begin(world, model, bucket_cap_mib=TINY_MIB, run_dir=folder)
    for step in loop:
        leaves = world.rank == 1 and step.iteration == 3
        for inputs, labels in step:
            if where == "between gather and fold":
                step.hold(model(inputs), labels)
            else:
                step.backward(cross_entropy(model(inputs), labels))
        if where == "between gather and fold":
            outputs, labels = step.gather()
            if leaves:
                break
            step.backward(cross_entropy(outputs, labels))
        if leaves:
            break
        step.fold()
        optimizer.step()
    world.sum(torch.ones(1))


def train_but_leave_on_rank_3(began: list[float]) -> None:
    with dl.join_world(seed=1, timeout_s=20) as world:
        loop, optimizer = begin(world, model := network(), shards=3)
        for step in loop:
            began.append(time.monotonic())
            if world.rank == 3 and step.iteration == 3:
                break
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs), labels))
            step.fold()
            optimizer.step()


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


@pytest.mark.covers("D10")
@pytest.mark.parametrize("where", ["after the last backward", "between gather and fold"])
@pytest.mark.slow
def test_the_peers_report_a_rank_that_leaves_when_sums_have_begun(where: str, refused: Refused) -> None:
    refused(3, leave, where, kind="PeerFailed", said="rank|left", by=None)


def unfreeze_twice() -> str:
    with dl.join_world(seed=1) as world:
        model = network()
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        loop, optimizer = begin(world, model, shards=8)
        for step in loop:
            model[2].requires_grad_(step.iteration >= 3)  # in two steps that follow each other
            model[0].requires_grad_(step.iteration >= 4)
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs), labels))
            step.fold()
            optimizer.step()
        return digest(torch.cat([one.detach().flatten() for one in model.parameters()]))


@pytest.mark.covers("H7")
@pytest.mark.quick_on_gpus
@pytest.mark.both_exchanges
def test_layers_unfrozen_one_after_the_other_have_the_same_bits_on_any_number_of_ranks(on_ranks: OnRanks) -> None:
    assert len({one for ranks in (1, 2, 3) for one in on_ranks(ranks, unfreeze_twice)}) == 1


def normalise_in_forward(world: dl.World, folder: str) -> None:
    table = nn.Embedding(8, 3, max_norm=0.5)
    batches = dl.Batches(torch.arange(16) % 8, 8, world)
    for step in dl.Loop(batches, 1, state={"table": table}, run_dir=folder, progress=False):
        for rows in step:
            step.backward(table(rows).square().mean())
        step.fold()


def test_a_forward_that_changes_parameters_is_refused(refused: Refused) -> None:
    refused(2, normalise_in_forward, kind="RuntimeError", said="table.weight was written .* max_norm", by=None)


def try_again(world: dl.World, folder: str) -> None:
    model, failed = network(), list[bool]()
    loop, _ = begin(world, model, run_dir=folder)

    def fail_once(module: nn.Module, given: object, received: object) -> None:
        if not failed:
            failed.append(True)
            raise MemoryError("no room")

    model[0].register_full_backward_hook(fail_once)
    for step in loop:
        for inputs, labels in step:
            try:
                step.backward(cross_entropy(model(inputs), labels))
            except MemoryError:
                step.backward(cross_entropy(model(inputs), labels))
        step.fold()


def test_a_backward_that_failed_is_not_made_again(refused: Refused) -> None:
    refused(2, try_again, kind="RuntimeError", said="That of shard [02] raised, and may have left parts", by=None)


def spare_buffers() -> list[int]:
    with dl.join_world(seed=1) as world:
        model = network()
        loop, _ = begin(world, model, shards=8)
        kept = []
        for step in loop:
            for number, (inputs, labels) in enumerate(step):
                step.backward(cross_entropy(model(inputs), labels), weight=len(inputs) if number else 0)
            step.fold()
            kept.append(sum(len(bucket.memory.spare) for bucket in loop.fold.gradients.buckets))
        return kept


def test_no_step_leaves_more_memory_behind_than_the_one_before(on_ranks: OnRanks) -> None:
    for kept in on_ranks(3, spare_buffers):
        assert kept[2:] == kept[2:3] * 6


def momentum_of_negative_zeros(samples: int) -> str:
    """Gradients of -0.0, which a sum with zeros would make 0.0."""
    with dl.join_world(seed=1) as world:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = dl.Batches(torch.ones(samples, 2), samples, world, shards=4)
        for step in dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, progress=False):
            for _ in step:
                step.backward(model.weight.sum() * -0.0)
            step.fold()
            optimizer.step()
        return digest(optimizer.state[model.weight]["momentum_buffer"])


@pytest.mark.covers("H7")
@pytest.mark.parametrize("samples", [1, 3, 4])
def test_an_empty_shard_leaves_the_sign_of_a_zero_alone(samples: int, on_ranks: OnRanks) -> None:
    digests = {one for ranks in (1, 3, 5) for one in on_ranks(ranks, momentum_of_negative_zeros, samples)}
    assert digests == {digest(torch.full((1, 2), -0.0))}


# -- going on ----------------------------------------------------------------------------------------------


def go_on(state: dict[str, int], epochs: int) -> int:
    with dl.join_world(seed=1) as world:
        model = network()
        loop, _ = begin(world, model, epochs=epochs)
        loop.load_state_dict(state)
        steps = 0
        for step in loop:
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs), labels))
            step.fold()
            steps += 1
        return steps


@pytest.mark.parametrize(
    ("state", "left"),
    [
        ({"iteration": 0, "epoch": 0, "position": 0}, 12),
        ({"iteration": 5, "epoch": 1, "position": 1}, 7),
        ({"iteration": 4, "epoch": 0, "position": 4}, 8),  # at the very end of an epoch
        ({"iteration": 12, "epoch": 3, "position": 0}, 0),  # a finished run
        ({"iteration": 20, "epoch": 5, "position": 0}, 0),  # and one of a longer loop
    ],
)
def test_a_loop_makes_the_steps_that_are_left(state: dict[str, int], left: int, on_ranks: OnRanks) -> None:
    assert on_ranks(2, go_on, state, 3) == [left, left]


def load(world: dl.World, folder: str, state: dict[str, int]) -> None:
    begin(world, network())[0].load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [
        {"iteration": 5, "epoch": 1, "position": 2},
        {"iteration": 5, "epoch": 0, "position": 5},
        {"iteration": -1, "epoch": 0, "position": -1},
        {"epoch": 0, "position": 1},
        {},
    ],
)
def test_a_state_that_no_loop_gave_is_refused(state: dict[str, int], refused: Refused) -> None:
    refused(2, load, state, kind="ValueError", said="Got .* (Use the data and the batch_size|Pass that dict)", by=ALL)


def load_twice(world: dl.World, folder: str) -> None:
    loop, _ = begin(world, network())
    next(iter(loop))
    loop.load_state_dict(loop.state_dict())


def test_a_loop_that_has_begun_goes_on_nowhere_else(refused: Refused) -> None:
    refused(1, load_twice, kind="RuntimeError", said="This one has begun. Create a new Loop", by=ALL)
