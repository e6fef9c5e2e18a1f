"""Gradient accumulation that a migrated script left in: steps folded without a moved parameter in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of, network

pytestmark = pytest.mark.on_gpus_too

Move = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def move_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.step()


def move_past_the_counter(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """As some optimizers outside of torch write: the parameters' version counters do not see it."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-0.1)


def warned(every: int, first: int, move: str, keywords: dict[str, Any]) -> list[str]:
    moves: dict[str, Move] = {"in place": move_in_place, "past the counter": move_past_the_counter}
    with dl.join_world() as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in loop_over(world, "", model, optimizer, count=72, run_dir=None, **keywords):
            for rows in step:
                loss = loss_of(model, rows)
                step.backward(loss * float("nan") if "on_nonfinite" in keywords and step.iteration == 5 else loss)
            step.fold()
            if (step.iteration - first) % every == 0:
                moves[move](model, optimizer, step.iteration)
        return [str(one.message) for one in caught if "no parameter moved" in str(one.message)]


@pytest.mark.parametrize("move", ["in place", "past the counter"])
@pytest.mark.parametrize(("every", "first"), [(4, 1), (4, 4), (2, 2)])
@pytest.mark.quick_on_gpus
def test_it_is_said_once_from_rank_0(every: int, first: int, move: str, on_ranks: OnRanks) -> None:
    said, nothing = on_ranks(2, warned, every, first, move, {})
    assert len(said) == 1
    assert "lost. Call optimizer.step() after each fold." in said[0]
    assert nothing == []


@pytest.mark.parametrize("move", ["in place", "past the counter"])
@pytest.mark.parametrize("keywords", [{}, {"on_nonfinite": "skip"}], ids=["all finite", "a step that is skipped"])
def test_nothing_is_said_of_a_script_that_steps_each_time(
    move: str, keywords: dict[str, Any], on_ranks: OnRanks
) -> None:
    assert on_ranks(2, warned, 1, 1, move, keywords) == [[], []]


def scale_losses() -> list[str]:
    """The scaler skips the first steps."""
    with dl.join_world() as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", growth_interval=1000)
        scales = []
        for step in loop_over(world, "", model, optimizer, scaler, count=72, run_dir=None):
            for rows in step:
                loss = loss_of(model, rows.float())
                if step.iteration <= 3:
                    loss.register_hook(lambda slope: slope * torch.inf)
                step.backward(scaler.scale(loss))
            step.fold()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales[2] < scales[1] < scales[0]
        return [str(one.message) for one in caught if "no parameter moved" in str(one.message)]


def test_nothing_is_said_of_steps_that_a_scaler_skips(on_ranks: OnRanks) -> None:
    assert on_ranks(2, scale_losses) == [[], []]


def accumulate_in_passes() -> list[str]:
    """Two passes over one step's shards, and one step of the optimizer after both."""
    with dl.join_world() as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in loop_over(world, "", model, optimizer, run_dir=None):
            for _ in range(2):
                for rows in step:
                    step.backward(loss_of(model, rows))
                step.fold()
            optimizer.step()
        return [str(one.message) for one in caught]


def test_nothing_is_said_of_several_passes_in_one_step(on_ranks: OnRanks) -> None:
    assert on_ranks(2, accumulate_in_passes) == [[], []]


def warm_up(fused: bool, every: int) -> list[str]:
    """torch's fused kernels leave the version counters alone, and a rate of 0 leaves the bits."""
    with dl.join_world() as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        for step in loop_over(world, "", model, optimizer, count=72, run_dir=None):
            optimizer.param_groups[0]["lr"] = 0.0 if step.iteration <= 4 else 0.1
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            if step.iteration % every == 0:
                optimizer.step()
        return [str(one.message) for one in caught if "no parameter moved" in str(one.message)]


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_said_of_steps_with_a_learning_rate_of_0(fused: bool, on_ranks: OnRanks) -> None:
    assert on_ranks(2, warm_up, fused, 1) == [[], []]


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_said_of_every_fourth_step_all_the_same(fused: bool, on_ranks: OnRanks) -> None:
    assert [len(said) for said in on_ranks(2, warm_up, fused, 4)] == [1, 0]
