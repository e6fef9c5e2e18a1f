"""Steps whose loss or gradients are not finite: raised, skipped or allowed, by all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed.replica_check import named_tensors
from ddp_loop.training import Buffers, find_buffers
from ddp_loop.training.checks import IN_A_ROW
from tests.support.cases import SPOILING
from tests.support.comparing import Tensors, buffers_of, is_same, same_on_all, state_of
from tests.support.devices import GPU
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over, samples
from tests.support.training import loop_on

pytestmark = [pytest.mark.covers("D10"), pytest.mark.on_gpus_too]

BAD = 9  # the sample that spoils a step, which is the second one
STEPS = 4
SIZE = 8
RULES: dict[str, Any] = {"model.0.level": "mean"}


class Drift(nn.Module):
    """Has buffers of its own: a floating one, which it replaces, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.level: torch.Tensor
        self.calls: torch.Tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.level = self.level.lerp(rows.detach().mean(0), 0.1)
            self.calls += 1
        return rows


def model_of(world: dl.World) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [Drift(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)]
    return nn.Sequential(*layers).double().to(world.device)


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.1, weight_decay=0.1)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": MOMENTUM,
    "adam": ADAM,
    "fused sgd": partial(MOMENTUM, fused=True),
    "fused adam": partial(ADAM, fused=True),
    "dampened fused sgd": partial(MOMENTUM, fused=True, dampening=0.5),
}


def loss_of(outputs: torch.Tensor, how: str, *, spoils: bool) -> torch.Tensor:
    loss = outputs.square().mean()
    return loss + SPOILING[how](outputs) if spoils and how in SPOILING else loss


@dataclass
class Ran:
    """What a job did."""

    states: list[Tensors]  # of the model, before the first step and after each; and of all that the job has at the end
    losses: list[float]
    given: list[bool]  # whether the bad step left gradients
    skipped: int


def run(
    how: str, rule: str = "skip", *, optimizer: str = "sgd", kind: str = "", bad: int = BAD,
    **keywords: Any,
) -> Ran:  # fmt: skip
    """Train; where `how` is "left out" the script leaves the bad step out itself."""
    with dl.join_world() as world:
        model = model_of(world)
        update = OPTIMIZERS[optimizer](model.parameters())
        known = OPTIMIZERS[optimizer](model[4].parameters()) if kind == "of its own" else update
        state: dict[str, Any] = {"model": model, "optimizer": known}
        data = (samples(SIZE * STEPS), torch.arange(SIZE * STEPS))
        batches = dl.Batches(data, SIZE, world, shuffle=False)
        options: dict[str, Any] = {"on_nonfinite": rule, "buffer_reduction": RULES, "progress": False, **keywords}
        loop = dl.Loop(batches, 1, state=state, **options)
        states = [state_of(model)]
        losses = []
        given = []
        buffers = [id(buffer) for buffer in model.buffers()]
        for step in loop:
            before = buffers_of(model)
            for rows, numbers in step:
                step.backward(loss_of(model(rows), how, spoils=bad in numbers))
            losses.append(step.fold().loss.item())
            given.append(any(parameter.grad is not None for parameter in model.parameters()))
            is_bad = step.iteration == bad // SIZE + 1
            if is_bad and how == "left out":
                for buffer, kept in zip(model.buffers(), before, strict=True):
                    buffer.copy_(kept)
            else:
                update.step()
            if is_bad and kind == "loses found_inf":
                update.param_groups[0]["fused"] = False
            states.append(state_of(model))
        assert [id(buffer) for buffer in model.buffers()] == buffers  # the same tensors, not just the same values
        assert "found_inf" not in vars(update)  # nothing is left behind
        states.append([tensor.detach().clone() for tensor in named_tensors(state).values()])
        return Ran(states, losses, given, loop.skipped)


JOBS: list[tuple[int, dict[str, Any]]] = [
    (3, {"optimizer": "fused sgd"}),
    (1, {"optimizer": "fused adam", "kind": "loses found_inf"}),
    (2, {"optimizer": "fused adam", "kind": "of its own"}),
    (2, {"optimizer": "fused adam", "bad": 0}),
    # Torch's fused SGD makes its momentum in the first step: skipped there, it would hold what memory held.
    (2, {"optimizer": "fused sgd", "bad": 0}),
    (2, {"optimizer": "dampened fused sgd", "bad": 0}),
]


def assert_skipped(results: list[Ran], wanted: list[Ran], how: str, job: dict[str, Any], late: bool) -> None:
    """On an asynchronous device the gradients of the bad step stay where the host need not wait for it."""
    bad = job.get("bad", BAD) // SIZE
    waits = job.get("kind") == "of its own" or job["optimizer"].startswith("dampened")
    for found, other in zip(results, wanted, strict=True):
        assert is_same(found.states[bad], found.states[bad + 1])
        assert not is_same(found.states[bad + 1], found.states[bad + 2])
        assert all(map(is_same, found.states, other.states))
        assert found.skipped == 1
        assert found.given[bad] == (late and "fused" in job["optimizer"] and not waits)
        assert math.isnan(found.losses[bad]) == (how == "loss")  # as it came
    same_on_all([found.states[-1] for found in results])


@pytest.mark.parametrize(
    ("how", "ranks", "job"), [*(("gradient", *job) for job in JOBS), ("loss", 2, {"optimizer": "sgd"})]
)
def test_a_step_that_is_skipped_changes_no_bit_and_training_goes_on_as_without_it(
    how: str, ranks: int, job: dict[str, Any], late: bool, on_ranks: OnRanks
) -> None:
    wanted = on_ranks(ranks, run, "left out", "allow", **job)
    assert_skipped(on_ranks(ranks, run, how, **job), wanted, how, job, late)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["fused adam", "fused sgd", "adam"])
def test_on_a_gpu_a_skipped_step_changes_no_bit(optimizer: str) -> None:
    job: dict[str, Any] = {"optimizer": optimizer}
    for how in ("loss", "gradient"):
        assert_skipped([run(how, **job)], [run("left out", "allow", **job)], how, job, late=True)


def train_scaled(optimizer: str, rule: str) -> Tensors:
    """The model after steps of which a GradScaler skips the first one, for a gradient that is no number."""
    with dl.join_world() as world:
        model = model_of(world)
        update = OPTIMIZERS[optimizer](model.parameters())
        scaler = torch.amp.GradScaler(world.device.type, init_scale=4.0)
        batches = dl.Batches(samples(SIZE * STEPS), SIZE, world, shuffle=False)
        state = {"model": model, "optimizer": update, "scaler": scaler}
        options: dict[str, Any] = {"on_nonfinite": rule, "buffer_reduction": RULES, "progress": False}
        for step in dl.Loop(batches, 1, state=state, **options):
            for rows in step:
                step.backward(scaler.scale(loss_of(model(rows), "gradient", spoils=step.iteration == 1)))
            step.fold()
            scaler.step(update)
            scaler.update()
        return state_of(model)


@pytest.mark.one_device(GPU, "on the CPU the loop does not look at a scaler's gradients")
@pytest.mark.parametrize("rule", ["raise", "skip"])
def test_fused_sgd_has_its_momentum_after_a_first_step_that_a_scaler_skips(rule: str, on_ranks: OnRanks) -> None:
    unfused = on_ranks(2, train_scaled, "sgd", rule)
    for found, wanted in zip(on_ranks(2, train_scaled, "fused sgd", rule), unfused, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def raise_of(world: dl.World, folder: str, how: str, shards: int | None) -> None:
    late = world.accelerator.is_asynchronous
    model = model_of(world)
    update = ADAM(model.parameters())
    for step in loop_over(world, folder, model, update, shards=shards, buffer_reduction=RULES):
        before = state_of(model)
        for rows in step:
            step.backward(loss_of(model(rows), how, spoils=step.iteration == 2 and world.rank == 0))
        try:
            step.fold()
        except FloatingPointError:
            assert step.iteration == 2 + late
            assert late or is_same(state_of(model), before)
            raise
        update.step()


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.quick_on_gpus
def test_a_gradient_that_is_no_number_is_named_on_every_rank(shards: int | None, late: bool, refused: Refused) -> None:
    said = r"The gradient of model\.1\.weight in step 2 is not finite, though the loss is, [0-9.]+\. "
    if late:
        since = r"\(model\.1\.weight is the first parameter that is not finite since\)"
        said = rf"A gradient in step 2 is not finite {since}, though the loss is, [0-9.]+\. "
    refused(2, raise_of, "gradient", shards, kind="FloatingPointError", said=said)
    said = "The loss of step 2 is nan, from shard"
    refused(2, raise_of, "loss", shards, kind="FloatingPointError", said=said)


def test_a_loop_that_allows_it_takes_the_step() -> None:
    ran = run("gradient", "allow")
    assert ran.skipped == 0
    assert any(bool(one.isnan().any()) for one in ran.states[2])


# -- buffers -----------------------------------------------------------------------------------------------


def test_buffers_that_stay_are_not_asked_whether_they_were_changed_alike() -> None:
    drift = Drift()
    buffers = Buffers(find_buffers({"drift": drift}, set(), {}))
    rows = torch.arange(8, dtype=torch.float64).reshape(2, 4)
    share = torch.tensor([0.5, 0.5])
    buffers.apply(rows, frozenset({"drift.level"}), share, [0, 1], torch.tensor(True))
    assert torch.equal(drift.level, torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="must change a buffer alike"):  # noqa: PT012
        buffers.apply(rows, frozenset({"drift.level"}), share, [0, 1], torch.tensor(False))
        buffers.open()  # raises on an asynchronous device


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("value", [torch.ones(4), torch.ones(2, 3)], ids=str)
def test_buffers_of_a_whole_mini_batch_become_those_of_its_start_though_they_were_replaced(
    value: torch.Tensor, late: bool
) -> None:
    drift = Drift()
    buffers = Buffers(find_buffers({"drift": drift}, set(), {}), is_whole=True)
    buffers.found["drift.level"].late = late
    buffers.open()
    assert buffers.take() == {}
    drift.level = value.clone()  # between two steps
    buffers.open()
    drift.level = value + 1  # in a forward
    buffers.take()
    buffers.finish(torch.tensor(True) if late else True)
    assert torch.equal(drift.level, value)


def leave_a_shard() -> bool:
    """Whether the buffers stay."""
    with dl.join_world() as world:
        model = model_of(world)
        before = state_of(model)
        batches = dl.Batches(samples(SIZE), SIZE, world)
        steps = iter(loop_on(batches, model, buffer_reduction=RULES))
        for rows in next(steps):
            model(rows)
            break
        return is_same(state_of(model), before)


def test_a_shard_without_a_backward_changes_no_buffer(on_ranks: OnRanks) -> None:
    assert on_ranks(2, leave_a_shard) == [True] * 2


# -- how often ---------------------------------------------------------------------------------------------


def two_passes(first: str) -> tuple[int, list[bool]]:
    """The number of skipped steps, and whether the model moved in each pass."""
    with dl.join_world() as world:
        model = model_of(world)
        update = MOMENTUM(model.parameters())
        loop = loop_over(world, "", model, update, count=12, buffer_reduction=RULES, on_nonfinite="skip")
        moved = []
        for step in loop:
            for how in (first, "loss"):
                before = state_of(model)
                for rows in step:
                    step.backward(loss_of(model(rows), how, spoils=step.iteration == 2))
                step.fold()
                update.step()
                moved.append(not is_same(before, state_of(model)))
        return loop.skipped, moved


@pytest.mark.parametrize("first", ["", "loss"])
def test_of_two_passes_only_the_bad_one_is_left_out(first: str, on_ranks: OnRanks) -> None:
    assert on_ranks(2, two_passes, first) == [(1, [True, True, not first, False])] * 2  # of one step, counted once


def never_finite(world: dl.World, folder: str) -> None:
    """But in one step."""
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([weight], fused=True)
    data = torch.ones(2 * 2 * IN_A_ROW)
    loop = dl.Loop(dl.Batches(data, 2, world), 1, state={"o": optimizer}, progress=False, on_nonfinite="skip")
    for step in loop:
        for rows in step:
            step.backward((rows * weight).mean() * (1.0 if step.iteration == 50 else math.nan))
        step.fold()
        optimizer.step()


def test_a_run_of_which_every_step_is_skipped_ends(refused: Refused) -> None:
    said = "not 100 in a row. Step 150 is the last of as many. The loss of step 150 is nan"
    refused(2, never_finite, kind="FloatingPointError", said=said)


@pytest.mark.parametrize(
    ("how", "rule", "skipped"),
    [("gradient", "skip", [0, 1, 0, 0]), ("", "skip", [0] * STEPS), ("", "raise", [None] * STEPS)],
)
def test_rows_say_which_step_was_skipped(how: str, rule: str, skipped: list[int | None]) -> None:
    rows: list[dict[str, Any]] = []
    run(how, rule, on_row=rows.append)
    assert [row.get("skipped") for row in rows] == skipped
