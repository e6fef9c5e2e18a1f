"""Losses and gradients that are not finite: found on all ranks in the same step, laid at a sample's door.

Steps that are skipped are in test_skipping.py.
"""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import is_same, values_of
from tests.support.harness import OnRanks, caught, in_world
from tests.support.refusals import Refused, network, samples
from tests.support.training import loop_on, sgd, train

pytestmark = [pytest.mark.covers("D10"), pytest.mark.on_gpus_too]

BAD = 14  # the sample whose label is no number, the third one of the third mini-batch


def data(bad: float) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = samples(24)
    labels = inputs.sum(1, keepdim=True)
    labels[BAD] = bad
    return inputs, labels


def square(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(inputs), labels)


def train_on_a_bad_label(world: dl.World, folder: str, bad: float, shards: int | None) -> None:
    model = network().to(world.device)
    optimizer = sgd(model)
    batches = dl.Batches(data(bad), 6, world, shards=shards, seed=5)
    for step in loop_on(batches, model, optimizer, run_dir=folder):
        for inputs, labels in step:
            step.backward(square(model, inputs, labels))
        before = values_of(model)
        try:
            step.fold()
        except FloatingPointError:
            assert world.accelerator.is_asynchronous or is_same(values_of(model), before)  # the optimizer never saw it
            raise
        optimizer.step()


def place_of_the_bad_label() -> tuple[int, list[int]]:
    """In which step the sample comes, and the mini-batch of it."""
    with dl.join_world() as world:
        batches = dl.Batches(torch.arange(24), 6, world, shards=1, seed=5)
        rows = [loaded.data(0).tolist() for loaded in batches.epoch(1)]
    return next((number, own) for number, own in enumerate(rows, 1) if BAD in own)


@pytest.mark.parametrize(("ranks", "shards", "bad"), [(3, 8, nan), (2, 3, inf), (1, None, inf)])
@pytest.mark.quick_on_gpus
def test_a_label_that_is_no_number_is_named_on_every_rank(
    ranks: int, shards: int | None, bad: float, refused: Refused
) -> None:
    number, rows = place_of_the_bad_label()
    parts = torch.tensor(rows).tensor_split(shards or ranks)
    shard, mine = next((shard, part.tolist()) for shard, part in enumerate(parts) if BAD in part)
    said = (
        f"The loss of step {number} is (nan|inf), from shard {shard} of {len(parts)}, samples "
        rf'{", ".join(map(str, mine))} of the data\. (Not finite by now, .*)?Look for NaN .* on_nonfinite="allow"'
    )
    refused(ranks, train_on_a_bad_label, bad, shards, kind="FloatingPointError", said=said)


def what_is_said_of(values: list[float], dtype: torch.dtype) -> str:
    """The error of a loop with these gradients, one a parameter and a bucket, and of a parameter that has none."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in values)
    for parameter, value in zip(model, values, strict=True):
        given = torch.tensor([-1, value, 1], dtype=dtype)
        parameter.register_hook(lambda gradient, given=given: given)
    unused = nn.ParameterList([torch.full((2,), nan, dtype=dtype)])

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum((parameter.real.sum() for parameter in model.parameters()), 0 * rows.sum())
        return total

    _, said, _ = caught(lambda: train(model, loss, torch.ones(4), 4, state={"unused": unused}, bucket_cap_mib=4e-6))
    return said


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_only_what_is_not_finite_is_refused(dtype: torch.dtype) -> None:
    huge = torch.finfo(dtype).max
    assert what_is_said_of([huge, -huge, huge], dtype) == ""
    for values in ([nan, huge, huge], [huge, inf, huge], [huge, huge, -inf]):
        assert "though the loss is" in what_is_said_of(values, dtype)


def meet_a_parameter_later() -> str:
    model = nn.Linear(4, 1).double()
    late = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), late], lr=0.1)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(rows).square().mean() + late.abs().sqrt()
        return found

    def unfreeze(step: dl.Step, result: dl.StepResult) -> None:
        late.requires_grad_(True)

    _, said, _ = caught(lambda: train(model, loss, optimizer=optimizer, after_fold=unfreeze))
    return said


def test_a_parameter_that_is_met_later_is_looked_at(late: bool, on_ranks: OnRanks) -> None:
    told = "A gradient in step 2 is not finite (optimizer.0.2 is" if late else "The gradient of optimizer.0.2 in step 2"
    said = on_ranks(2, meet_a_parameter_later)
    assert all(told in one for one in said), said


@pytest.mark.gpu
def test_on_a_real_gpu_a_label_that_is_no_number_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=f"The loss of step {place_of_the_bad_label()[0]} is nan, from shard"):
        in_world(train_on_a_bad_label, str(tmp_path), nan, 3)
