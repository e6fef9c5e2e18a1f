"""Synced batch norm in a Loop: one device on the whole mini-batch, whatever the ranks have of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.cases import CLASSES, TwiceUsed, make_data
from tests.support.comparing import is_same, same_on_all
from tests.support.devices import GPU
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused

pytestmark = pytest.mark.on_gpus_too

# A step's rounding, amplified by 6 steps.
TOLERANCE = 1e-10


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
        nn.BatchNorm1d(CLASSES, affine=False),
    )


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "convolutions": (convolutions, (2, 4, 4)),
    "a layer used twice": (TwiceUsed, (2, 4)),
}
Tensors = dict[str, torch.Tensor]


def make(name: str) -> nn.Module:
    torch.manual_seed(7)
    return NETWORKS[name][0]().double()  # type: ignore[no-any-return]


def plain(name: str, samples: int, batch_size: int) -> tuple[list[float], Tensors]:
    """One device: torch's own loop on the same mini-batches."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, losses = make_data(NETWORKS[name][1], samples), []
    for _ in range(2):
        for start in range(0, samples, batch_size):
            inputs, labels = (one[start : start + batch_size] for one in data)
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


def synced(
    name: str, samples: int, batch_size: int, shards: int | None = None, gathered: bool = False, mib: float = 8.0
) -> tuple[list[float], Tensors]:
    """The same through a Loop, its layers synced."""
    with dl.join_world(seed=0) as world:
        model = dl.sync_batch_norm(make(name), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = make_data(NETWORKS[name][1], samples)
        batches = dl.Batches(data, batch_size, world, shuffle=False, shards=shards)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, 2, state=state, progress=False, bucket_cap_mib=mib, allow_single_sample_shards=True)
        losses = []
        for step in loop:
            for inputs, labels in step:
                if gathered:
                    step.hold(model(inputs), labels)
                else:
                    step.backward(cross_entropy(model(inputs), labels))
            if gathered:
                step.backward(cross_entropy(*step.gather()))
            losses.append(step.fold().loss.item())
            optimizer.step()
        return losses, dl.local_batch_norm(model).state_dict()


def distance(found: Tensors, expected: Tensors) -> float:
    assert list(found) == list(expected)
    pairs = [(found[name].double(), one.double()) for name, one in expected.items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.covers("D5")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.quick_on_gpus
def test_a_loop_with_synced_layers_is_one_device_on_the_whole_mini_batch(
    name: str, ranks: int, on_ranks: OnRanks
) -> None:
    losses, state = plain(name, 14, 6)  # the last mini-batch has 2: on 3 and 4 ranks some have none
    results = on_ranks(ranks, synced, name, 14, 6)
    for found, tensors in results:
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert distance(tensors, state) < TOLERANCE
        assert all(torch.equal(one, tensors[key]) for key, one in results[0][1].items())


@pytest.mark.covers("D5", "D13")
@pytest.mark.parametrize("ranks", [2, 4])
def test_it_also_is_with_a_loss_of_gathered_outputs(ranks: int, on_ranks: OnRanks) -> None:
    losses, state = plain("convolutions", 14, 6)
    for found, tensors in on_ranks(ranks, synced, "convolutions", 14, 6, None, True):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert distance(tensors, state) < TOLERANCE


@pytest.mark.parametrize(("shards", "mib"), [(2, 8.0), (None, 0.0001)])
def test_fewer_shards_than_ranks_and_many_buckets_change_nothing(
    shards: int | None, mib: float, on_ranks: OnRanks
) -> None:
    losses, state = plain("convolutions", 14, 6)
    for found, tensors in on_ranks(3, synced, "convolutions", 14, 6, shards, False, mib):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert distance(tensors, state) < TOLERANCE


def weighted(kind: str) -> Tensors:
    """Rank 1's shard has weight 0, and a loss that is not a number."""
    with dl.join_world(seed=0) as world:
        model = dl.sync_batch_norm(make("convolutions"), world)
        batches = dl.Batches(make_data((2, 4, 4), 9), 9, world, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for inputs, labels in step:
                loss, weight = cross_entropy(model(inputs), labels), torch.tensor(1.0 + world.rank)
                if world.rank == 1:
                    loss, weight = loss / 0 - loss / 0, torch.tensor(0.0)
                step.backward(loss, weight=weight if kind == "tensor" else float(weight))
            step.fold()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.covers("D5", "D11")
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_shard_of_weight_0_still_is_part_of_the_statistics(kind: str, on_ranks: OnRanks) -> None:
    model = make("convolutions")
    inputs, labels = make_data((2, 4, 4), 9)
    outputs = model(inputs)
    losses = [cross_entropy(outputs[rows], labels[rows]) for rows in (slice(0, 3), slice(6, 9))]
    ((losses[0] + 3 * losses[1]) / 4).backward()
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    for found in on_ranks(3, weighted, kind):
        assert distance(found, expected) < TOLERANCE


def several_shards(world: dl.World, folder: str) -> None:
    model = dl.sync_batch_norm(make("convolutions"), world)
    dl.Loop(dl.Batches(make_data((2, 4, 4), 12), 6, world, shards=4), 1, state={"model": model}, progress=False)


def test_several_shards_on_a_rank_are_refused_with_the_remedy(refused: Refused) -> None:
    said = "at most one shard per rank. Got 4 shards .* local_batch_norm"
    refused(2, several_shards, kind="ValueError", said=said, by=ALL)


def go_another_way(world: dl.World, model: nn.Module) -> None:
    """Rank 1 calls two layers in another order."""
    for number in (1, 4) if world.rank == 1 else (4, 1):
        model[number](torch.ones(2, 4, 2, 2, dtype=torch.float64))  # type: ignore[index]


def train(world: dl.World, folder: str, fault: str) -> None:
    model = dl.sync_batch_norm(make("convolutions"), world)
    batches = dl.Batches(make_data((2, 4, 4), 14), 6, world, shuffle=False)
    loop = dl.Loop(batches, 2, state={"model": model}, run_dir=folder, progress=False, allow_single_sample_shards=True)
    for step in loop:
        for inputs, labels in step:
            if fault == "no rows are left out" and not len(inputs):
                continue
            now = fault if world.rank == 1 and step.iteration == 2 else ""
            model.train(now != "one rank evaluates")
            if now == "one rank raises":
                raise LookupError("a bad image")
            step.backward(cross_entropy(model(inputs), labels))
        if (fault, step.iteration) == ("one rank goes another way", 2):
            go_another_way(world, model)
        if now == "one rank leaves before the fold":
            break
        step.fold()
        if now == "one rank leaves":
            break
        if (fault, step.iteration) == ("one rank goes another way after the last fold", 6):
            go_another_way(world, model)
    world.sum(torch.ones(1))


@pytest.mark.covers("D10")
@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("one rank goes another way", "RuntimeError", "forward of layer `4` .*, rank 1 at the forward of layer `1`"),
        (
            "one rank goes another way after the last fold",
            "RuntimeError|CallMismatch",
            "forward of layer `4` .*, rank 1 at the forward of layer `1`",
        ),
        ("no rows are left out", "RuntimeError", "at the end of its pass|also for the tensors of no rows"),
        ("one rank evaluates", "RuntimeError", "rank 1 at the end of its pass"),
        ("one rank leaves", "RuntimeError", "rank 1 at the end of its loop"),
        ("one rank leaves before the fold", "RuntimeError", "rank 1 at the end of its loop"),
        ("one rank raises", "LookupError", "a bad image"),
    ],
)
def test_ranks_that_part_ways_get_the_error(fault: str, kind: str, said: str, late: bool, refused: Refused) -> None:
    if late and kind == "RuntimeError":
        # Where one rank calls more layers than another, one waits for a message and the other compares. Here a sum
        # blocks its rank, so the messages between the ranks show it.
        kind, said = "RuntimeError|PeerFailed", f"{said}|a step's sum"
    # Found from these messages, it takes 1.5 s and more; on a device no sum holds a rank up.
    refused(3, train, fault, kind=kind, said=said, by=None, waits=late)


def other_order(world: dl.World, folder: str, shift: bool = True) -> None:
    """Two layers of one size in another order on rank 1: the messages match, but all statistics are wrong."""
    torch.manual_seed(4)
    layers = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)]).double()
    model = dl.sync_batch_norm(nn.ModuleList([nn.Linear(4, 4).double(), layers]), world)
    batches = dl.Batches(torch.randn(24, 4, dtype=torch.float64), 6, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, progress=False):
        for rows in step:
            hidden = model[0](rows)  # type: ignore[index]
            for number in (1, 0) if shift and world.rank == 1 and step.iteration == 2 else (0, 1):
                hidden = model[1][number](hidden + number)  # type: ignore[index]
            step.backward((hidden**3).mean())
        step.fold()
        optimizer.step()
        assert step.iteration < 2 or not shift


@pytest.mark.one_device(GPU, "a synchronous device raises in the call itself")
def test_layers_of_one_size_in_another_order_are_refused_in_their_step_without_a_read(refused: Refused) -> None:
    said = r"rank 0 is at the forward of layer `1\.0` \(call 1 .*, rank 1 at the forward of layer `1\.1`"
    refused(2, other_order, kind="RuntimeError", said=said, by=ALL)


def sync_around(world: dl.World, folder: str, late: bool, shards: int | None = None) -> list[torch.Tensor]:
    model = make("convolutions")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = dl.Batches(make_data((2, 4, 4), 12), 6 if shards is None else 12, world, shards=shards)
    if not late:
        dl.sync_batch_norm(model, world)
    loop = dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, progress=False)
    if late:
        dl.sync_batch_norm(model, world)
    for step in loop:
        for inputs, labels in step:
            step.backward(cross_entropy(model(inputs), labels))
        step.fold()
        optimizer.step()
    return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]


def sync_in_a_world(late: bool) -> list[torch.Tensor]:
    with dl.join_world() as world:
        return sync_around(world, "", late)


@pytest.mark.covers("D5")
def test_a_model_may_also_be_synced_after_its_loop_was_made(on_ranks: OnRanks) -> None:
    assert is_same(same_on_all(on_ranks(2, sync_in_a_world, True)), same_on_all(on_ranks(2, sync_in_a_world, False)))


def test_several_shards_are_refused_then_too(refused: Refused) -> None:
    refused(2, sync_around, True, 4, kind="ValueError", said="at most one shard per rank", by=ALL)
