"""Losses and gradients that are not finite: found on all ranks in the same step, laid at a sample's door.

Steps that are skipped are in test_skipping.py.
"""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from ddp_loop.data import MiniBatch
from ddp_loop.training.checks import NonFiniteGuard, NonFiniteStateCheck
from ddp_loop.training.rows import StepResult
from tests.support.comparing import is_same, values_of
from tests.support.devices import GPU
from tests.support.harness import OnRanks, caught
from tests.support.refusals import ALL, Refused, network, samples
from tests.support.training import sgd, train

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
    model = network()
    optimizer = sgd(model)
    batches = dl.Batches(data(bad), 6, world, shards=shards, seed=5)
    state = {"model": model, "optimizer": optimizer}
    for step in dl.Loop(batches, 1, state=state, run_dir=folder, progress=False):
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
    refused(ranks, train_on_a_bad_label, bad, shards, kind="FloatingPointError", said=said, by=ALL)


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


def say_it_late() -> None:
    with dl.join_world(device="gpu") as world:
        device = "cuda"
        gradients = dl.Fold({}, {}, world, shards=2).gradients
        scaler = {"scaler": torch.amp.GradScaler(device)}  # so that only losses are looked at
        blame = NonFiniteStateCheck(scaler, world, "raise").blame
        guard = NonFiniteGuard(
            "raise", lambda epoch, start, count: torch.arange(start, start + count), scaler, blame, print
        )
        mini_batch = MiniBatch(0, 0, 0, 4, (2, 2), ())
        share = torch.full((2,), 0.5, device=device)
        fine = torch.ones(2, device=device)

        def result(iteration: int, loss: torch.Tensor, losses: torch.Tensor) -> StepResult:
            values = loss.reshape(1)
            return StepResult(1, iteration, 4, (), values, None, losses, share, False, gradients)

        bad = torch.tensor(nan, device=device)
        assert guard.check(bad, gradients) is False
        guard.after(result(1, bad, fine / torch.tensor([1, nan]).to(fine)), mini_batch)
        assert guard.check(fine[0], gradients) is False
        with pytest.raises(FloatingPointError, match="step 1 is nan, from shard 1 of 2, samples 2, 3 of the data"):
            guard.after(result(2, fine[0], fine), mini_batch)
        guard.after(result(3, fine[0], fine), mini_batch)
        guard.check_pending()


@pytest.mark.one_device(GPU, "tests a late error")
def test_a_guard_that_waits_for_no_device_says_it_at_the_next_step(on_ranks: OnRanks) -> None:
    on_ranks(1, say_it_late)


@pytest.mark.gpu
def test_on_a_real_gpu_a_guard_says_it_at_the_next_step_too() -> None:
    say_it_late()
