"""Gradient accumulation that a migrated script left in: steps folded without a moved parameter in between."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of, network

pytestmark = pytest.mark.on_gpus_too

MOVES = ("in place", "past the counter", "fused", "scaled")


def warned(move: str, every: int = 1, first: int = 1, passes: int = 1, spoils: bool = False) -> list[str]:
    """What is said where the optimizer steps in the first and then in every so many steps.

    Some optimizers outside of torch write past the parameters' version counters, and torch's fused ones leave them
    alone. A learning rate of 0, as in the first 4 steps, leaves the bits, and a scaler skips steps: here the first 3.
    """
    with dl.join_world() as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=move == "fused")
        scaler = torch.amp.GradScaler("cpu", growth_interval=1000, enabled=move == "scaled")
        options: dict[str, Any] = {"on_nonfinite": "skip"} if spoils else {}
        for step in loop_over(world, "", model, optimizer, scaler, count=72, **options):
            optimizer.param_groups[0]["lr"] = 0.0 if step.iteration <= 4 and move != "past the counter" else 0.1
            for _ in range(passes):
                for rows in step:
                    loss = loss_of(model, rows)
                    if move == "scaled" and step.iteration <= 3:
                        loss.register_hook(lambda slope: slope * torch.inf)
                    step.backward(scaler.scale(loss * float("nan") if spoils and step.iteration == 5 else loss))
                step.fold()
            if (step.iteration - first) % every:
                continue
            if move == "past the counter":
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=-0.1)
            else:
                scaler.step(optimizer)
                scaler.update()
        return [
            str(one.message) for one in caught if "no parameter moved" in str(one.message) and one.filename == __file__
        ]


@pytest.mark.parametrize(("move", "every", "first"), [*zip(MOVES, (4, 2, 4, 2), (1, 2, 1, 2), strict=True)])
@pytest.mark.quick_on_gpus
def test_it_is_said_once_from_rank_0(move: str, every: int, first: int, on_ranks: OnRanks) -> None:
    said, nothing = on_ranks(2, warned, move, every, first)
    assert len(said) == 1
    assert "lost. Call optimizer.step() after each fold, and no zero_grad() between the two." in said[0]
    assert nothing == []


@pytest.mark.parametrize("move", MOVES)
def test_nothing_is_said_of_a_script_that_steps_each_time(move: str, on_ranks: OnRanks) -> None:
    """Also where a scaler skips the first steps, a learning rate of 0 moves nothing, or each step has two passes."""
    assert on_ranks(2, warned, move) == [[], []]
    assert on_ranks(2, warned, move, passes=2, spoils=True) == [[], []]
