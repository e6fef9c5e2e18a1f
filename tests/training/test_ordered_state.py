"""What is kept beside the model has the same bits on any number of ranks too: scaler, schedule, EMA, two optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset

import ddp_loop as dl
from tests.support.cases import make_data
from tests.support.harness import OnRanks
from tests.support.runs import digests

STEPS = 20
SHARDS = 6


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3))


def with_a_scaler_and_an_average() -> dict[str, str]:
    """fp16 with a scaler, clipping by the global norm, a schedule, and a moving average of the weights."""
    with dl.join_world(seed=2) as world:
        model = network()
        average = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5)  # so large that it must be halved
        scaler.scale(torch.zeros(()))
        inputs, labels = make_data((6,), 108)
        batches = dl.Batches((inputs.float(), labels), 24, world, shards=SHARDS)
        state: dict[str, object] = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
        loop = dl.Loop(batches, steps=STEPS, state=state, progress=False)
        for step in loop:
            for inputs, labels in step:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = cross_entropy(model(inputs), labels)
                loss.register_hook(scaler.scale)
                step.backward(loss)
            row = step.fold()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return digests({**state, "average": average, "norm": row.gradient_norm})


def with_two_optimizers() -> dict[str, str]:
    """A generator against a discriminator: two networks, two passes over each mini-batch."""
    with dl.join_world(seed=2) as world:
        generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        judge = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        one = torch.optim.Adam(generator.parameters(), lr=0.01)
        other = torch.optim.RMSprop(judge.parameters(), lr=0.01)
        batches = dl.Batches(make_data((6,), 100)[0].float(), 24, world, shards=SHARDS)
        state: dict[str, object] = {"generator": generator, "judge": judge, "one": one, "other": other}
        for step in dl.Loop(batches, steps=STEPS, state=state, progress=False):
            for rows in step:
                made = generator(torch.randn(len(rows), 4)).detach()
                step.backward(judge(made).mean() - judge(rows).mean())
            step.fold()
            other.step()
            for rows in step:
                step.backward(-judge(generator(torch.randn(len(rows), 4))).mean())
            step.fold()
            one.step()
        return digests(state)


class Drawing(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set whose samples are drawn again each time they are read."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(6), torch.tensor(index % 3)


def with_parts_that_come_and_go() -> dict[str, str]:
    """A data set that draws, a layer unfrozen in mid-run, a branch that not every shard takes, two losses a shard."""
    with dl.join_world(seed=2) as world:
        model = nn.ModuleDict({"body": network(), "branch": nn.Linear(3, 3), "late": nn.Linear(3, 3)})
        model["late"].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = dl.Batches(Drawing(), 24, world, shards=SHARDS)
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, steps=STEPS, state=state, progress=False, bucket_cap_mib=0.0001)
        for step in loop:
            model["late"].requires_grad_(step.iteration > 7)
            for inputs, labels in step:
                outputs = model["body"](inputs)
                if inputs[0, 0] > 0:
                    outputs = outputs + model["branch"](outputs)
                step.backward(0.1 * mse_loss(outputs, torch.zeros_like(outputs)), more_losses=True)
                step.backward(cross_entropy(model["late"](model["body"](inputs)), labels))
            step.fold()
            optimizer.step()
        return digests(state)


@pytest.mark.covers("H7", "B10")
@pytest.mark.parametrize("job", [with_a_scaler_and_an_average, with_two_optimizers, with_parts_that_come_and_go])
@pytest.mark.slow
@pytest.mark.both_exchanges
def test_everything_that_is_kept_has_the_same_bits(job: Callable[[], dict[str, Any]], on_ranks: OnRanks) -> None:
    expected = on_ranks(1, job)[0]
    for ranks in (2, 3, 4, 7):  # 7: one has no shard
        for found in on_ranks(ranks, job):
            assert [name for name in expected if found[name] != expected[name]] == []
