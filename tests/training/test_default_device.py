"""A default device that is not the data's, as after `torch.set_default_device("cuda")` in a world on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too

Task = Callable[[dl.World, str], list[torch.Tensor]]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index]


ROWS = samples(24)


def plain(world: dl.World, folder: str) -> list[torch.Tensor]:
    with torch.device("cpu"):  # what the script makes
        model = nn.Sequential(*network(), nn.BatchNorm1d(1, dtype=torch.float64))
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        spare = nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for one in spare.parameters():
            one.fill_(0.5)
    batches = dl.Batches(ROWS, 6, world, shards=2)
    state = {"model": model, "optimizer": optimizer, "average": average, "spare": spare}
    loop = dl.Loop(batches, 2, state=state, run_dir=folder, trace=True, progress=False, check_replicas_every=1)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    batches = dl.Batches(ROWS, 6, world, shards=2)
    options: dict[str, Any] = {
        "on_nonfinite": "skip",
        "bucket_cap_mib": 1e-6,
        "on_row": lambda row: None,
        "progress": False,
    }
    for step in dl.Loop(batches, 1, state=state, run_dir=folder, **options):
        for rows in step:
            step.backward(loss_of(model, rows) * (torch.inf if step.iteration == 2 else 1.0))
        step.fold()
        optimizer.step()
    return list(model.state_dict().values())


def loader_and_gather(world: dl.World, folder: str) -> list[torch.Tensor]:
    with torch.device("cpu"):
        model = network()
    batches = dl.Batches(Rows(), 6, world, shards=3)
    for step in dl.Loop(batches, 1, state={"model": model}, progress=False, check_replicas_every=0):
        for rows in step:
            step.hold(model(rows))
        outputs = step.gather()
        step.backward(outputs.square().mean())
        step.fold()
    return [one.grad for one in model.parameters() if one.grad is not None]


def nothing(world: dl.World, folder: str) -> list[torch.Tensor]:
    """A mini-batch that counts for nothing."""
    with torch.device("cpu"):
        model = network()
    found = []
    for step in dl.Loop(dl.Batches(ROWS, 6, world), 1, state={"model": model}, progress=False):
        for rows in step:
            step.backward(loss_of(model, rows), weight=0.0)
        result = step.fold()
        found += [result.gradient_norm, result.loss, result.weight]
    return found


TASKS: dict[str, Task] = {
    "plain": plain,
    "skipping": skipping,
    "loader and gather": loader_and_gather,
    "nothing": nothing,
}


def run_with_a_default_device(task: str, folder: str, device: str | None) -> list[torch.Tensor]:
    if device is None:
        with dl.join_world(device="cpu") as world:
            return [one.clone() for one in TASKS[task](world, folder)]
    with torch.device(device), dl.join_world(device="cpu") as world:
        return [one.clone() for one in TASKS[task](world, folder)]


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_follows_the_default_device(task: str, ranks: int, on_ranks: OnRanks, tmp_path: Path) -> None:
    """Each tensor that the package makes names its device: one on "meta" has no values."""
    wanted = on_ranks(ranks, run_with_a_default_device, task, str(tmp_path / "one"), None)
    found = on_ranks(ranks, run_with_a_default_device, task, str(tmp_path / "two"), "meta")
    for one, other in zip(found, wanted, strict=True):
        assert len(one) == len(other)
        for value, expected in zip(one, other, strict=True):
            assert torch.equal(value, expected)
