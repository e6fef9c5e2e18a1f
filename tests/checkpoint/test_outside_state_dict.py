"""A resumed run has what no `state_dict` says: modes of layers, non-persistent buffers, factories, steps made."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.runs import go_by_epochs
from tests.support.training import mean_square, take

STEPS = 6
FROZEN_AT = 3
ROWS = torch.arange(48.0, dtype=torch.float64).reshape(12, 4).sin()


class Warmup(nn.Module):
    """Scales by a number that grows in each forward in training, and that no `state_dict` has."""

    level: torch.Tensor
    mask: torch.Tensor
    other: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones((), dtype=torch.float64), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.float64), persistent=False)
        self.register_buffer("other", torch.ones((), dtype=torch.float64), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.level += 0.5
            self.other = self.other * 1.25
        return rows * self.mask * self.level / self.other


Change = Callable[[int], None]


def ends_of(model: nn.Module, folder: str, stop_at: int, change: Change) -> list[list[float]]:
    """Train with a change after each step; returns the modes, all values in the end, and which have another device."""
    with suppress(dl.Stopped), dl.join_world(seed=3) as world:
        model.to(world.device)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        batches = dl.Batches(ROWS, 4, world, shards=2)
        loop = dl.Loop(batches, steps=STEPS, state={"model": model, "sgd": sgd}, run_dir=folder, progress=False)
        for step in loop:
            take(step, model, mean_square)
            sgd.step()
            change(step.iteration)
            if step.iteration == stop_at:
                loop.stop()
    modes = [float(layer.training) for layer in model.modules()]
    values = [one.flatten().tolist() for one in [*model.parameters(), *model.buffers()]]
    return [modes, *values, [float(one.device != world.device) for one in model.buffers()]]


def weights_of(folder: str, stop_at: int, mask: float = 1.0) -> list[list[float]]:
    """The ends of a norm that is frozen after step 3."""
    torch.manual_seed(0)
    warmup = Warmup()
    model = nn.Sequential(warmup, nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    warmup.mask.fill_(mask)

    def change(iteration: int) -> None:
        if iteration == FROZEN_AT:
            model[1].eval()

    return ends_of(model, folder, stop_at, change)


def test_a_buffer_that_the_run_did_not_change_is_as_the_resumed_script_makes_it(tmp_path: Path) -> None:
    weights_of(str(tmp_path), 4)
    assert [0.5] * 4 in weights_of(str(tmp_path), 0, 0.5)


class Kept(nn.BatchNorm1d):
    """Its statistics, a scale and a cache that the first step makes are in no `state_dict`."""

    scale: torch.Tensor
    cache: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self._non_persistent_buffers_set |= self._buffers.keys()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * self.scale


def frozen_weights_of(folder: str, stop_at: int) -> list[list[float]]:
    """The ends of a model that is in evaluation mode after step 3."""
    torch.manual_seed(0)
    kept = Kept()
    model = nn.Sequential(kept, nn.Dropout(0.5), nn.Linear(4, 1)).double()
    model[1].register_buffer("cache", None, persistent=False)

    def change(iteration: int) -> None:
        kept.scale.data.mul_(0.9)
        if kept.cache is None:
            kept.cache = model[1].cache = torch.ones(2, device=kept.scale.device)
        kept.cache.mul_(2)
        if iteration == FROZEN_AT:
            model.eval()

    return ends_of(model, folder, stop_at, change)


@pytest.mark.covers("E5")
@pytest.mark.on_gpus_too
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(("job", "modes"), [(weights_of, [1.0, 1.0, 0.0, 1.0]), (frozen_weights_of, [0.0] * 4)])
def test_modes_buffers_statistics_and_caches_that_no_state_dict_has_are_the_whole_runs(
    job: Callable[..., list[list[float]]], modes: list[float], on_ranks: OnRanks, tmp_path: Path
) -> None:
    whole = on_ranks(2, job, str(tmp_path / "whole"), 0)[0]
    assert whole[0] == modes
    for stop_at in (1, 4):
        folder = str(tmp_path / f"stopped {stop_at}")
        on_ranks(2, job, folder, stop_at)
        assert on_ranks(2, job, folder, 0) == [whole] * 2


def counts_by_epoch(folder: str, stop_at: int) -> tuple[dict[str, Any], list[str]]:
    """Train with a scheduler after each epoch; returns counts in nested defaultdicts, and torch's warnings."""
    seen: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    model = nn.Linear(4, 1).double()
    with warnings.catch_warnings(record=True) as said, dl.join_world(seed=3) as world:
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
        state = {"model": model, "sgd": sgd, "schedule": schedule, "seen": seen}
        loop = dl.Loop(dl.Batches(ROWS, 6, world), 3, state=state, run_dir=folder, progress=False)

        def count(iteration: int) -> None:
            seen["rates"][(iteration + 1) // 2].append(sgd.param_groups[0]["lr"])

        go_by_epochs(loop, model, sgd, stop_at, after_step=count, after_epoch=schedule.step)
    return {name: dict(one) for name, one in seen.items()}, [str(one.message) for one in said]


def test_a_resumed_script_has_its_factories_and_torch_does_not_warn_of_its_scheduler(tmp_path: Path) -> None:
    whole = counts_by_epoch(str(tmp_path / "whole"), 0)
    for stop_at in (2, 3):
        folder = str(tmp_path / f"stopped {stop_at}")
        counts_by_epoch(folder, stop_at)
        assert counts_by_epoch(folder, 0) == whole
    assert whole == ({"rates": {1: [0.1] * 2, 2: [0.05] * 2, 3: [0.025] * 2}}, [])
