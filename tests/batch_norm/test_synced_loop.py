"""Synced batch norm in a Loop: one device on the whole mini-batch, whatever the ranks have of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, gradients_of, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over, loss_of, samples
from tests.support.training import loop_on, sgd, take

pytestmark = pytest.mark.on_gpus_too

SAMPLES = 14  # the last mini-batch of 6 has 2: of 3 ranks one has none


def network() -> nn.Sequential:
    """The first layer's inputs need no gradient, another one is used twice, the last one is frozen."""
    torch.manual_seed(7)
    twice = nn.BatchNorm1d(4)
    first = nn.BatchNorm1d(4, momentum=None, affine=False)
    middle = (nn.Linear(4, 4), twice, nn.Tanh(), nn.Linear(4, 4), twice, nn.Tanh())
    return nn.Sequential(first, *middle, nn.BatchNorm1d(4).eval(), nn.Linear(4, 1)).double()


def train_plainly() -> Tensors:
    """One device: torch's own loop on the same mini-batches."""
    model = network()
    optimizer = sgd(model, 0.9)
    for rows in samples(SAMPLES).split(6) * 2:
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return [one.detach().double() for one in model.state_dict().values()]


def train(is_low: bool, shards: int | None) -> Tensors:
    """The same through a Loop, its layers synced; in bfloat16, or in float64."""
    dtype = torch.float32 if is_low else torch.float64
    with dl.join_world() as world:
        model = network().to(dtype)
        optimizer = sgd(model, 0.9)
        dl.sync_batch_norm(model, world)
        options: dict[str, Any] = {"shards": shards, "allow_single_sample_shards": True}
        for step in loop_over(world, "", model, optimizer, count=SAMPLES, epochs=2, **options):
            for rows in step:
                with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
                    outputs = model(rows.to(dtype)).to(dtype)
                step.backward(mse_loss(outputs, rows.sum(1, keepdim=True).to(dtype)))
            step.fold()
            optimizer.step()
        return [one.detach().double() for one in dl.local_batch_norm(model).state_dict().values()]


@pytest.mark.covers("D5")
@pytest.mark.parametrize(("is_low", "bound"), [(False, 1e-10), (True, 0.05)])  # a step's rounding, amplified by 6 steps
@pytest.mark.parametrize(("ranks", "shards"), [(3, None), (3, 2), (1, None)])
@pytest.mark.quick_on_gpus
def test_a_loop_with_synced_layers_is_one_device_on_the_whole_mini_batch_with_the_same_bits_each_time(
    is_low: bool, bound: float, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    """Weights, gathered outputs and layers that are synced later are in `test_differential.py`."""
    found = same_on_all([*on_ranks(ranks, train, is_low, shards), *on_ranks(ranks, train, is_low, shards)])
    assert distance(found, train_plainly()) < bound


@dataclass(frozen=True, slots=True)
class Inner:
    values: torch.Tensor

    def __post_init__(self) -> None:
        assert len(self.values), "a user's check"


@dataclass
class Outer:
    inner: Inner
    name: str = "rows"
    derived: int = field(default=0, init=False)


COLLATED: dict[str, tuple[Callable[[list[torch.Tensor]], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (lambda rows: Outer(Inner(torch.stack(rows))), lambda batch: batch.inner.values),
    "array": (lambda rows: {"x": np.stack([row.numpy() for row in rows])}, lambda batch: torch.from_numpy(batch["x"])),
    "texts": (
        lambda rows: [" ".join(map(repr, row.tolist())) for row in rows],
        lambda batch: torch.tensor([float(one) for text in batch for one in text.split()]).reshape(-1, 4),
    ),
}


def running_mean_over(kind: str) -> torch.Tensor:
    combine, rows_of = COLLATED[kind]
    with dl.join_world() as world:
        model = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64))
        dl.sync_batch_norm(model, world)
        batches = dl.Batches(list(samples(SAMPLES).cpu()), 6, world, shuffle=False, collate_fn=combine)
        loop = loop_on(batches, model, allow_single_sample_shards=True)
        for step in loop:
            for batch in step:
                rows = rows_of(batch).to(world.device, torch.float64)
                step.backward(model(rows).square().mean())
            step.fold()
        mean = model[0].running_mean
        assert isinstance(mean, torch.Tensor)
        return mean.clone()


@pytest.mark.parametrize("kind", COLLATED)
def test_a_rank_without_samples_adds_none_whatever_holds_the_rows(kind: str, on_ranks: OnRanks) -> None:
    plain = nn.BatchNorm1d(4, dtype=torch.float64)
    for rows in samples(SAMPLES).split(6):
        plain(rows)
    for found in on_ranks(3, running_mean_over, kind):
        torch.testing.assert_close(found.cpu(), plain.running_mean, rtol=0, atol=1e-6)  # texts become float32


def fold_a_loss_in_bfloat16(weights: tuple[float, ...] | None) -> Tensors:
    """All gradients in one, of two ranks' samples, by default unequally many; only the loss has low precision."""
    with dl.join_world() as world:
        model = dl.sync_batch_norm(network(), world)
        batches = dl.Batches(samples(5 if weights is None else 4), 6, world, shuffle=False)
        for step in loop_on(batches, model):
            for rows in step:
                loss = loss_of(model, rows).to(torch.bfloat16)
                step.backward(loss, weight=None if weights is None else weights[world.rank])
            step.fold()
        return [torch.cat([one.flatten() for one in gradients_of(model)])]


@pytest.mark.parametrize("weights", [None, (3.0, 1.0), (1.0, 0.0)])
def test_a_loss_of_low_precision_has_its_weight_in_the_backward_of_synced_layers(
    weights: tuple[float, float] | None, on_ranks: OnRanks
) -> None:
    model = network()
    rows = samples(5 if weights is None else 4)
    errors = (model(rows) - rows.sum(1, keepdim=True)).square()
    each = torch.ones(5) if weights is None else torch.tensor(weights).repeat_interleave(2)
    (errors[:, 0] * each).sum().div(each.sum()).backward()
    found = same_on_all(on_ranks(2, fold_a_loss_in_bfloat16, weights))
    wanted = torch.cat([one.flatten() for one in gradients_of(model)])
    assert distance(found, [wanted]) < 0.01  # bfloat16 rounds a share by 0.004


def train_on_several_shards(world: dl.World, folder: str, is_late: bool) -> None:
    model = network()
    if not is_late:
        dl.sync_batch_norm(model, world)
    loop = loop_over(world, folder, model, count=12, shards=3, allow_single_sample_shards=True)
    dl.sync_batch_norm(model, world)  # synced layers stay as they are
    for step in loop:
        take(step, model)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])  # one rank would normalise over each shard, and two over the mini-batch
def test_several_shards_on_a_rank_are_refused_with_the_remedy(ranks: int, is_late: bool, refused: Refused) -> None:
    said = "at most one shard per rank" if is_late else "at most one shard per rank. Got 3 shards .* local_batch_norm"
    refused(ranks, train_on_several_shards, is_late, kind="ValueError", said=said)


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
        (
            "one rank evaluates",
            "RuntimeError",
            r"rank 1 at the end of its pass.*train\(\) and eval\(\) on all ranks alike",
        ),
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
