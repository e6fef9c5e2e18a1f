"""A default device that is not the data's, as after `torch.set_default_device("cuda")` in a world on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import gradients_of, is_same
from tests.support.harness import OnRanks
from tests.support.refusals import loss_of, network, samples
from tests.support.sources import Mapped
from tests.support.training import loop_on, sgd, train_in

pytestmark = pytest.mark.on_gpus_too


ROWS = samples(24)


def plain(world: dl.World, folder: str) -> list[torch.Tensor]:
    with torch.device("cpu"):  # what the script makes
        model = nn.Sequential(*network(), nn.BatchNorm1d(1, dtype=torch.float64))
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        spare = nn.Linear(4, 1, dtype=torch.float64)
    optimizer = sgd(model)
    with torch.no_grad():
        for one in spare.parameters():
            one.fill_(0.5)
    batches = dl.Batches(ROWS, 6, world, shards=2)
    state = {"model": model, "optimizer": optimizer, "average": average, "spare": spare}
    loop = dl.Loop(
        batches, 2, state=state, run_dir=f"{folder}/plain", trace=True, progress=False, check_replicas_every=1
    )
    for step in loop:
        for rows in step:
            loss = loss_of(model, rows) + (spare(rows).mean() if step.iteration == 3 else 0.0)
            step.backward(loss, weight=float(len(rows)), size=rows.abs().mean(1), number=1.0, total=dl.Sum(2.0))
        result = step.fold()
        optimizer.step()
    found = dl.evaluate(model, batches, size=lambda outputs, rows: outputs.abs().mean(1), one=lambda outputs, rows: 1.0)
    predicted = dl.predict(model, batches)
    return [*model.state_dict().values(), result.values, torch.tensor(found["size"], device="cpu"), predicted]


def skipping(world: dl.World, folder: str) -> list[torch.Tensor]:
    with torch.device("cpu"):
        model = network()
    factors = [1.0, torch.inf, 1.0, 1.0]
    train_in(
        world, model, lambda model, rows: loss_of(model, rows) * factors[0], ROWS, shards=2,
        optimizer=sgd(model), after_fold=lambda step, result: factors.pop(0),
        run_dir=f"{folder}/skipping", on_nonfinite="skip", bucket_cap_mib=1e-6, on_row=lambda row: None,
    )  # fmt: skip
    return list(model.state_dict().values())


def loader_and_gather(world: dl.World) -> list[torch.Tensor]:
    with torch.device("cpu"):
        model = network()
    batches = dl.Batches(Mapped(24, ROWS.__getitem__), 6, world, shards=3)
    for step in loop_on(batches, model, check_replicas_every=0):
        for rows in step:
            step.hold(model(rows))
        step.backward(step.gather().square().mean())
        step.fold()
    return gradients_of(model)


def nothing(world: dl.World) -> list[torch.Tensor]:
    """Mini-batches that count for nothing."""
    with torch.device("cpu"):
        model = network()
    results = train_in(world, model, data=ROWS, weight=lambda step: 0.0)
    return [value for result in results for value in (result.gradient_norm, result.loss, result.weight)]


def all_with_a_default_device(folder: str, device: str | None) -> list[torch.Tensor]:
    with torch.device(device) if device else nullcontext(), dl.join_world(device="cpu") as world:
        found = [*plain(world, folder), *skipping(world, folder), *loader_and_gather(world), *nothing(world)]
        return [one.clone() for one in found]


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_follows_the_default_device(ranks: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    """Each tensor that the package makes names its device: one on "meta" has no values."""
    wanted = on_ranks(ranks, all_with_a_default_device, str(tmp_path / "one"), None)
    found = on_ranks(ranks, all_with_a_default_device, str(tmp_path / "two"), "meta")
    assert all(map(is_same, found, wanted))
