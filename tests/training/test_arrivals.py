"""Sums begin as the last gradient of a bucket comes, whatever the order, without a Python call for each parameter."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support.harness import OnRanks

pytestmark = [pytest.mark.covers("D3"), pytest.mark.on_gpus_too]

BUCKETS, WIDTH, ROWS = 4, 2, 4
PACKAGE = str(Path(dl.__file__).parent)


class Chain(nn.Module):
    """Multiplies by one weight after the other; backward comes to the last one first."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.rand(WIDTH, dtype=torch.float64) + 0.5 for _ in range(length))
        self.reentrant = False

    def forward(self, rows: torch.Tensor, *, reverse: bool = False) -> torch.Tensor:
        weights = list(self.weights)
        if self.reentrant:  # the last weight's gradient comes first, and once more at the end
            rows = checkpoint(lambda given: given * weights[-1], rows.requires_grad_(), use_reentrant=True)
        for weight in reversed(weights) if reverse else weights:
            rows = torch.tanh(rows * weight)
        return rows


def loop_of(model: Chain, world: dl.World, steps: int) -> dl.Loop:
    data = torch.arange(steps * ROWS * world.size * WIDTH, dtype=torch.float64).view(-1, WIDTH).cos()
    batches = dl.Batches(data, ROWS * world.size, world, shuffle=False)
    size = len(model.weights) // BUCKETS * WIDTH * 8 / 2**20
    return dl.Loop(batches, 1, state={"model": model}, progress=False, bucket_cap_mib=size)


def begin_early(reversed_steps: tuple[int, ...]) -> tuple[list[int], bool]:
    """How many sums began in each step's backward, and whether the gradients were the plain loop's."""
    with dl.join_world(seed=0) as world:
        model, is_right, started = Chain(12), True, []
        loop = loop_of(model, world, 6)
        for step in loop:
            reverse = step.iteration in reversed_steps
            for rows in step:
                step.backward(model(rows, reverse=reverse).mean())
                started.append(loop.fold.gradients.current.next)
            step.fold()
            start = (step.iteration - 1) * ROWS * world.size
            whole = torch.arange(start * WIDTH, (start + ROWS * world.size) * WIDTH, dtype=torch.float64)
            expected = torch.autograd.grad(model(whole.view(-1, WIDTH).cos(), reverse=reverse).mean(), [*model.weights])
            found = [weight.grad for weight in model.weights]
            is_right &= all(
                torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True) if a is not None
            )
        return started, is_right


@pytest.mark.parametrize(
    ("reversed_steps", "expected"),
    [
        ((), [0, 3, 3, 3, 3, 3]),  # the first step has yet to agree on what travels with the gradients
        ((4,), [0, 3, 3, 0, 3, 3]),  # another order: these sums begin after backward
        ((4, 5, 6), [0, 3, 3, 0, 3, 3]),
    ],
)
def test_sums_begin_in_backward_and_a_change_of_order_costs_one_step(
    reversed_steps: tuple[int, ...], expected: list[int], on_ranks: OnRanks
) -> None:
    assert on_ranks(2, begin_early, reversed_steps) == [(expected, True)] * 2


def count_calls(length: int) -> int:
    """The calls of the package's functions in a step's last backward."""
    with dl.join_world(seed=0) as world:
        model, count = Chain(length), 0

        def note(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

        loop = loop_of(model, world, 6)
        for step in loop:
            for rows in step:
                loss = model(rows).mean()
                if step.iteration == 5:
                    sys.setprofile(note)
                try:
                    step.backward(loss)
                finally:
                    sys.setprofile(None)
            step.fold()
            assert len(loop.fold.gradients.buckets) == BUCKETS
        return count


@pytest.mark.quick_on_gpus
def test_a_backward_makes_no_more_python_calls_for_more_parameters(on_ranks: OnRanks) -> None:
    (few,), (many,) = on_ranks(1, count_calls, 20), on_ranks(1, count_calls, 80)
    assert few > 0
    assert many == few


def come_again(how: str) -> None:
    with dl.join_world(seed=0) as world:
        model = Chain(12)
        for step in loop_of(model, world, 6):
            is_late = step.iteration == 5
            model.reentrant = is_late and how == "reentrant"
            for rows in step:
                loss = model(rows).mean()
                step.backward(loss)
            if is_late and how == "own":
                (model.weights[-2] * 2).sum().backward()
            step.fold()


@pytest.mark.parametrize(("how", "said"), [("own", "got one from another backward"), ("reentrant", "got a second one")])
def test_a_gradient_that_comes_after_its_sum_has_begun_is_refused(how: str, said: str, on_ranks: OnRanks) -> None:
    with pytest.raises(dl.RankFailed, match=rf"weights\.\d+ {said}"):
        on_ranks(2, come_again, how)


def test_a_parameter_that_is_frozen_after_the_first_step_needs_no_hook() -> None:
    with dl.join_world() as world:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(dl.Batches(torch.ones(8, 4), 4, world), steps=4, state=state, bucket_cap_mib=1e-6)
        for step in loop:
            for rows in step:
                step.backward(model(rows).sum())
            step.fold()
            assert (model[2].weight.grad is None) == (step.iteration > 1)
            optimizer.step()
            model[2].requires_grad_(False)
