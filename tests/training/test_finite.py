"""Losses and gradients that are not finite: found on all ranks in the same step, laid at a sample's door.

Steps that are skipped are in test_skipping.py.
"""

from __future__ import annotations

import math
from typing import Any

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
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, network, samples

pytestmark = [pytest.mark.covers("D10"), pytest.mark.on_gpus_too]

BAD = 17  # the sample whose label is no number
COUNT, SIZE = 24, 6


def data(bad: float) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = samples(COUNT)
    labels = inputs.sum(1, keepdim=True)
    labels[BAD] = bad
    return inputs, labels


def train_on_a_bad_label(world: dl.World, folder: str, bad: float, shards: int | None, **keywords: Any) -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = dl.Batches(data(bad), SIZE, world, shards=shards)
    state = {"model": model, "optimizer": optimizer}
    for step in dl.Loop(batches, 1, state=state, run_dir=folder, progress=False, **keywords):
        for inputs, labels in step:
            step.backward(mse_loss(model(inputs), labels))
        before = values_of(model)
        try:
            step.fold()
        except FloatingPointError:
            assert world.accelerator.is_asynchronous or is_same(values_of(model), before)  # the optimizer never saw it
            raise
        optimizer.step()
    return model


def step_of_the_bad_label() -> tuple[int, list[int]]:
    """In which step the sample comes, and the mini-batch of it."""
    with dl.join_world() as world:
        batches = dl.Batches(torch.arange(COUNT), SIZE, world, shards=1)
        for number, loaded in enumerate(batches.epoch(1), 1):
            rows = loaded.data(0).tolist()
            if BAD in rows:
                return number, rows
    raise AssertionError("every sample comes once an epoch")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (1, 3), (3, None), (2, 3), (3, 8)])
@pytest.mark.quick_on_gpus
def test_a_label_that_is_no_number_is_named_on_every_rank(
    ranks: int, shards: int | None, bad: float, refused: Refused
) -> None:
    number, rows = step_of_the_bad_label()
    sizes = dl.split_sizes(SIZE, shards or ranks)
    shard = next(n for n, size in enumerate(sizes) if rows.index(BAD) < sum(sizes[:n]) + size)
    mine = rows[sum(sizes[:shard]) :][: sizes[shard]]
    said = (
        f"The loss of step {number} is (nan|inf), from shard {shard} of {len(sizes)}, samples "
        rf'{", ".join(map(str, mine))} of the data\. (Not finite by now, .*)?Look for NaN .* on_nonfinite="allow"'
    )
    refused(ranks, train_on_a_bad_label, bad, shards, kind="FloatingPointError", said=said, by=ALL)


def allow_it() -> int:
    with dl.join_world() as world:
        model = network()
        batches = dl.Batches(data(math.nan), SIZE, world)
        losses = []
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False, on_nonfinite="allow"):
            for inputs, labels in step:
                step.backward(mse_loss(model(inputs), labels))
            losses.append(step.fold().loss.item())
        return sum(map(math.isnan, losses))


def test_a_loop_that_can_bear_it_goes_on(on_ranks: OnRanks) -> None:
    assert on_ranks(2, allow_it) == [1, 1]


def want_another_rule(world: dl.World, folder: str) -> None:
    train_on_a_bad_label(world, folder, 0.0, None, on_nonfinite="ignore")


def disagree_on_the_rule(world: dl.World, folder: str) -> None:
    train_on_a_bad_label(world, folder, 0.0, None, on_nonfinite="allow" if world.rank else "raise")


def test_a_rule_that_is_none_is_refused(refused: Refused) -> None:
    refused(2, want_another_rule, kind="ValueError", said="on_nonfinite must be one of .* Got 'ignore'", by=ALL)
    refused(
        2,
        disagree_on_the_rule,
        kind="ValueError",
        said="on_nonfinite, ordered.* must be the same on every rank",
        by=ALL,
    )


def extremes_of(values: list[float], dtype: torch.dtype) -> bool:
    """Whether a loop that raises lets these gradients, one a parameter, and some that have none, pass."""
    with dl.join_world() as world:
        parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in values]
        for parameter, value in zip(parameters, values, strict=True):
            given = torch.tensor([-1, value, 1], dtype=dtype)
            parameter.register_hook(lambda gradient, given=given: given)
        unused = nn.Parameter(torch.full((2,), math.nan, dtype=dtype))
        optimizer = torch.optim.SGD([*parameters, unused])
        # A bucket for each: 4 bytes.
        loop = dl.Loop(
            dl.Batches(torch.ones(4), 4, world), 1, state={"optimizer": optimizer}, progress=False, bucket_cap_mib=4e-6
        )
        try:
            for step in loop:
                for rows in step:
                    step.backward(sum((parameter.real.sum() for parameter in parameters), 0 * rows.sum()))
                step.fold()
        except FloatingPointError as error:
            return "though the loss is" not in str(error)
        return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_only_what_is_not_finite_is_refused(dtype: torch.dtype) -> None:
    huge = torch.finfo(dtype).max
    assert extremes_of([huge, -huge, huge], dtype)
    for bad in (math.nan, math.inf, -math.inf):
        for place in range(3):
            assert not extremes_of([bad if place == number else huge for number in range(3)], dtype)


def meet_a_parameter_later() -> str:
    with dl.join_world() as world:
        model = nn.Linear(4, 1).double()
        late = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
        optimizer = torch.optim.SGD([*model.parameters(), late], lr=0.1)
        loop = dl.Loop(dl.Batches(samples(18), 6, world), 1, state={"o": optimizer}, progress=False)
        try:
            for step in loop:
                late.requires_grad_(step.iteration > 1)
                for rows in step:
                    loss = (model(rows) ** 2).mean()
                    step.backward(loss + late.abs().sqrt() * world.rank if step.iteration == 2 else loss + late)
                step.fold()
                optimizer.step()
        except FloatingPointError as error:
            return str(error)
        return ""


def test_a_parameter_that_is_met_later_is_looked_at(late: bool, on_ranks: OnRanks) -> None:
    told = "In step 2 one is not (o.0.2 is the first" if late else "In step 2 the gradient of o.0.2 is not"
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
        share, fine = torch.full((2,), 0.5, device=device), torch.ones(2, device=device)

        def result(iteration: int, loss: torch.Tensor, losses: torch.Tensor) -> StepResult:
            values = loss.reshape(1)
            return StepResult(1, iteration, 4, (), values, None, losses, share, False, gradients)

        bad = torch.tensor(math.nan, device=device)
        assert guard.check(bad, gradients) is False
        guard.after(result(1, bad, fine / torch.tensor([1, math.nan]).to(fine)), mini_batch)
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
