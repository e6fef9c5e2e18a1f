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
from tests.support.comparing import gradients_of, is_close
from tests.support.harness import OnRanks
from tests.support.refusals import Refused
from tests.support.training import loop_on

pytestmark = [pytest.mark.covers("D3"), pytest.mark.on_gpus_too]

BUCKETS, WIDTH, BATCH = 4, 2, 8
DATA = torch.arange(6.0 * BATCH * WIDTH, dtype=torch.float64).view(-1, WIDTH).cos()  # of 6 steps
PACKAGE = str(Path(dl.__file__).parent)


class Chain(nn.Module):
    """Multiplies by one weight after the other; backward comes to the last one first."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.rand(WIDTH, dtype=torch.float64) + 0.5 for _ in range(length))
        self.way = ""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights = list(self.weights)
        if self.way == "reentrant":  # the last weight's gradient comes first, and once more at the end
            rows = checkpoint(lambda given: given * weights[-1], rows.requires_grad_(), use_reentrant=True)
        for weight in reversed(weights) if self.way == "reversed" else weights:
            rows = torch.tanh(rows * weight)
        return rows.mean()


def loop_of(model: Chain, world: dl.World, shards: int | None = None) -> dl.Loop:
    batches = dl.Batches(DATA, BATCH, world, shards=shards, shuffle=False)
    size = len(model.weights) // BUCKETS * WIDTH * 8 / 2**20
    return loop_on(batches, model, bucket_cap_mib=size)


def begin_early(shards: int | None, reversed_steps: tuple[int, ...]) -> tuple[list[int], list[list[torch.Tensor]]]:
    """How many sums began in each shard's backward, and each step's gradients."""
    started = []
    gradients = []
    with dl.join_world() as world:
        loop = loop_of(model := Chain(12), world, shards)
        for step in loop:
            model.way = "reversed" if step.iteration in reversed_steps else ""
            for rows in step:
                step.backward(model(rows))
                started.append(loop.fold.gradients.current.next)
            step.fold()
            gradients.append(gradients_of(model))
    return started, gradients


@pytest.mark.parametrize(
    ("shards", "reversed_steps", "expected"),
    [
        (None, (), [0, 3, 3, 3, 3, 3]),  # the first step has yet to agree on what travels with the gradients
        (None, (4,), [0, 3, 3, 0, 3, 3]),  # another order: these sums begin after backward
        (None, (4, 5, 6), [0, 3, 3, 0, 3, 3]),
        (4, (), [0, 0, *[0, 3] * 5]),  # and not before the last shard's
    ],
)
def test_sums_begin_in_backward_and_a_change_of_order_costs_one_step(
    shards: int | None, reversed_steps: tuple[int, ...], expected: list[int], on_ranks: OnRanks
) -> None:
    model = Chain(12)
    for started, gradients in on_ranks(2, begin_early, shards, reversed_steps):
        assert started == expected
        for iteration, (rows, found) in enumerate(zip(DATA.split(BATCH), gradients, strict=True), 1):
            model.zero_grad()
            model.way = "reversed" if iteration in reversed_steps else ""
            model(rows).backward()
            assert is_close(found, gradients_of(model))


def count_calls(length: int) -> int:
    """The calls of the package's functions in a step's last backward."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    with dl.join_world() as world:
        loop = loop_of(model := Chain(length), world)
        for step in loop:
            for rows in step:
                loss = model(rows)
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


def come_again(world: dl.World, folder: str) -> None:
    model = Chain(12)
    for step in loop_of(model, world):
        model.way = "reentrant" if step.iteration == 5 else ""
        for rows in step:
            step.backward(model(rows))
        step.fold()


def test_a_gradient_that_comes_after_its_sum_has_begun_is_refused(refused: Refused) -> None:
    refused(2, come_again, kind="RuntimeError", said=r"weights\.\d+ got a second one.*use_reentrant=False")
