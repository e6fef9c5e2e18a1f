"""Steps whose loss or gradients are not finite: raised, skipped or allowed, by all ranks alike."""

from __future__ import annotations

import math
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed.replica_check import named_tensors
from ddp_loop.training import Buffers, find_buffers
from ddp_loop.training.checks import IN_A_ROW, NonFiniteGuard, NonFiniteStateCheck
from tests.support.comparing import Tensors, is_same, same_on_all
from tests.support.devices import GPU
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, samples

pytestmark = [pytest.mark.covers("D10"), pytest.mark.on_gpus_too]

BAD, BAD_STEP, STEPS, SIZE = 9, 2, 4, 8  # the sample that spoils a step, which is the second one
RULES: dict[str, Any] = {"model.0.level": "mean"}


class Drift(nn.Module):
    """Has buffers of its own: a floating one, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.level: torch.Tensor
        self.calls: torch.Tensor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.level.lerp_(rows.detach().mean(0), 0.1)
            self.calls += 1
        return rows


def model_of(world: dl.World, *, synced: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(Drift(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    model = model.to(world.device)
    if synced:
        dl.sync_batch_norm(model, world)  # its layers are replaced in place
    return model


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind.endswith("sgd"):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=kind == "fused sgd")
    return torch.optim.Adam(model.parameters(), lr=0.1, fused=kind == "fused adam", weight_decay=0.1)


def spoiled(loss: torch.Tensor, numbers: torch.Tensor, weight: torch.Tensor, how: str, bad: int = BAD) -> torch.Tensor:
    """The loss of a shard, bad if the sample is in it."""
    if not bool((numbers == bad).any()) or not how:
        return loss
    if how in ("loss", "value"):
        return loss * math.nan if how == "loss" else loss + math.nan  # whose gradients are finite
    return loss + (weight.sum() * 0).sqrt()  # adds 0, with a gradient of 0 * inf


@dataclass
class Ran:
    """All tensors of the job before the first step and after each; the losses; how many steps were skipped."""

    state: list[Tensors] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    given: list[bool] = field(default_factory=list)  # whether the bad step left gradients


def train(
    how: str, rule: str = "skip", *, shards: int | None = None, optimizer: str = "sgd",
    synced: bool = False, held: bool = False, leave_out: bool = False, scaler: bool = False, bad: int = BAD,
    **keywords: Any,
) -> Ran:  # fmt: skip
    with dl.join_world() as world:
        model = model_of(world, synced=synced)
        update = optimizer_of(optimizer, model)
        data = samples(SIZE * STEPS), torch.arange(SIZE * STEPS)
        batches = dl.Batches(data, SIZE, world, shards=shards, shuffle=False)
        state: dict[str, Any] = {"model": model, "optimizer": update}
        scale = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaler)
        if scaler:
            scale.scale(torch.zeros(()))
            state["scaler"] = scale
        options: dict[str, Any] = {"progress": False, "on_nonfinite": rule, "buffer_reduction": RULES, **keywords}
        loop = dl.Loop(batches, 1, state=state, **options)
        ran = Ran([copies(state)])
        buffers = [id(buffer) for buffer in model.buffers()]
        for step in loop:
            for rows, numbers in step:
                outputs = model(rows)
                if held:
                    step.hold(outputs, numbers)
                else:
                    loss = spoiled((outputs**2).mean(), numbers, next(model.parameters()), how, bad)
                    if scaler:
                        loss.register_hook(scale.scale)
                    step.backward(loss)
            if held:
                outputs, numbers = step.gather()
                step.backward(spoiled((outputs**2).mean(), numbers, outputs, how))
            ran.losses.append(step.fold().loss.item())
            if step.iteration == bad // SIZE + 1:
                ran.given = [parameter.grad is not None for parameter in model.parameters()]
            if leave_out and step.iteration == BAD_STEP:
                put_back(model, ran.state[-1], state)
            else:
                scale.step(update) if scaler else update.step()
                scale.update() if scaler else None
            ran.state.append(copies(state))
        ran.skipped = loop.skipped
        assert [id(buffer) for buffer in model.buffers()] == buffers  # the same tensors, not just the same values
        assert "found_inf" not in vars(update)  # nothing is left behind
        return ran


def copies(state: dict[str, Any]) -> Tensors:
    return [tensor.detach().clone() for tensor in named_tensors(state).values()]


def put_back(model: nn.Module, kept: Tensors, state: dict[str, Any]) -> None:
    """Give the buffers what they held; parameters and the optimizer's state are not moved yet."""
    values = dict(zip(named_tensors(state), kept, strict=True))
    for name, buffer in model.named_buffers(prefix="model"):
        buffer.copy_(values[f"buffer {name}"])


@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (1, 3), (2, None), (3, 3), (2, 4)])
@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_step_that_is_skipped_changes_no_bit_and_training_goes_on_as_without_it(
    how: str, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    for optimizer in ("sgd", "adam"):
        results = on_ranks(ranks, train, how, shards=shards, optimizer=optimizer)
        expected = on_ranks(ranks, train, "", "allow", shards=shards, optimizer=optimizer, leave_out=True)
        for result in results:
            assert is_same(result.state[BAD_STEP], result.state[BAD_STEP - 1])
            assert not is_same(result.state[BAD_STEP], result.state[BAD_STEP + 1])
            assert result.skipped == 1
            assert result.given == [False] * 6
            assert math.isnan(result.losses[BAD_STEP - 1]) == (how == "loss")  # as it came
        for number in range(STEPS + 1):
            values = same_on_all([result.state[number] for result in results])
            assert is_same(values, expected[0].state[number])


@pytest.mark.one_device(GPU, "compares with the CPU")
@pytest.mark.parametrize("optimizer", ["fused adam", "fused sgd", "adam"])
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (2, 4), (1, None)])
def test_an_asynchronous_device_skips_the_same_step(
    optimizer: str, ranks: int, shards: int | None, on_ranks: OnRanks, on_cpus: OnRanks
) -> None:
    for how in ("loss", "gradient"):
        late = on_ranks(ranks, train, how, shards=shards, optimizer=optimizer)
        known = on_cpus(ranks, train, how, shards=shards, optimizer=optimizer)
        for one, other in zip(late, known, strict=True):
            assert one.given == [optimizer.startswith("fused")] * 6  # known by found_inf, or waited for
            assert one.skipped == 1
            assert all(map(is_same, one.state, other.state))


@pytest.mark.one_device(GPU, "compares with the CPU")
@pytest.mark.parametrize("optimizer", ["fused adam", "fused sgd"])
def test_the_first_step_can_be_skipped_too(optimizer: str, on_ranks: OnRanks, on_cpus: OnRanks) -> None:
    # torch's fused SGD makes its momentum in the first step: skipped there, it would hold what memory held.
    late = on_ranks(2, train, "loss", optimizer=optimizer, bad=0)
    known = on_cpus(2, train, "loss", optimizer=optimizer, bad=0)
    for one, other in zip(late, known, strict=True):
        assert is_same(one.state[1][:6], one.state[0][:6])
        assert is_same(one.state[STEPS], other.state[STEPS])
        assert one.skipped == 1
        assert one.given == [optimizer == "fused adam"] * 6  # so this one is waited for


def step_with_an_optimizer_of_its_own() -> tuple[bool, bool]:
    with dl.join_world() as world:
        known, unknown = nn.Parameter(torch.ones(2)), nn.Linear(2, 1)
        inside, outside = torch.optim.Adam([known], fused=True), torch.optim.Adam(unknown.parameters(), fused=True)
        state = {"model": unknown, "optimizer": inside}
        loop = dl.Loop(dl.Batches(torch.ones(4, 2), 4, world), 1, state=state, progress=False, on_nonfinite="skip")
        for step in loop:
            for rows in step:
                step.backward(unknown(rows * known).mean() * math.nan)
            step.fold()
            inside.step()
            outside.step()
        parameters = [known, *unknown.parameters()]
        return all(p.grad is None for p in parameters), all(bool(p.isfinite().all()) for p in parameters)


def test_an_optimizer_that_the_loop_does_not_know_takes_no_bad_step(on_ranks: OnRanks) -> None:
    assert on_ranks(2, step_with_an_optimizer_of_its_own) == [(True, True)] * 2


@pytest.mark.parametrize("job", [{"synced": True}, {"held": True}, {"held": True, "shards": 4}])
def test_synced_batch_norm_and_gathered_losses_are_skipped_too(job: dict[str, Any], on_ranks: OnRanks) -> None:
    for how in ("loss", "gradient"):
        for result in on_ranks(2, train, how, optimizer="fused adam", **job):
            # One is right before the bad step, and the other right after it.
            assert is_same(result.state[BAD_STEP], result.state[BAD_STEP - 1])
            assert not is_same(result.state[BAD_STEP], result.state[BAD_STEP + 1])
            assert result.skipped == 1


def test_with_a_scaler_only_the_loss_is_looked_at(on_ranks: OnRanks) -> None:
    for how, skipped in (("loss", 1), ("value", 1), ("gradient", 0)):
        for result in on_ranks(2, train, how, scaler=True):
            assert result.skipped == skipped
            same = [bool(torch.equal(a, b)) for a, b in zip(result.state[2], result.state[1], strict=True)]
            assert same[:6] == [True] * 6  # parameters, which the scaler saved
            assert all(same) == bool(skipped)  # buffers
    assert [result.skipped for result in on_ranks(2, train, "gradient", "raise", scaler=True)] == [0, 0]


def raise_of(world: dl.World, folder: str, how: str, shards: int | None) -> None:
    model = model_of(world)
    update = optimizer_of("adam", model)
    state = {"model": model, "optimizer": update}
    data = samples(SIZE * STEPS), torch.arange(SIZE * STEPS)
    batches = dl.Batches(data, SIZE, world, shards=shards, shuffle=False)
    loop = dl.Loop(batches, 1, state=state, buffer_reduction=RULES, progress=False)
    late = world.accelerator.is_asynchronous
    for step in loop:
        before = copies(state)
        for rows, numbers in step:
            step.backward(spoiled((model(rows) ** 2).mean(), numbers, next(model.parameters()), how))
        try:
            step.fold()
        except FloatingPointError:
            assert step.iteration == BAD_STEP + late
            assert late or is_same(copies(state), before)
            raise
        update.step()


@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, 4)])
@pytest.mark.quick_on_gpus
def test_a_gradient_that_is_no_number_is_named_on_every_rank(
    ranks: int, shards: int | None, late: bool, refused: Refused
) -> None:
    found = r"one is not \(model\.1\.weight is the first parameter that is not finite since\)"
    found = found if late else r"the gradient of model\.1\.weight is not"
    said = rf"gradients must be finite numbers\. In step 2 {found}, though the loss is, [0-9.]+\. "
    refused(ranks, raise_of, "gradient", shards, kind="FloatingPointError", said=said, by=ALL)
    said = "The loss of step 2 is nan, from shard"
    refused(ranks, raise_of, "loss", shards, kind="FloatingPointError", said=said, by=ALL)


def test_a_loop_that_allows_it_takes_the_step(on_ranks: OnRanks) -> None:
    for result in on_ranks(2, train, "gradient", "allow"):
        assert result.skipped == 0
        assert any(bool(one.isnan().any()) for one in result.state[BAD_STEP])


def test_buffers_that_stay_are_not_asked_whether_they_were_changed_alike() -> None:
    drift = Drift()
    buffers = Buffers(find_buffers({"drift": drift}, set(), {}))
    rows, share = torch.arange(8, dtype=torch.float64).reshape(2, 4), torch.tensor([0.5, 0.5])
    buffers.apply(rows, frozenset({"drift.level"}), share, [0, 1], torch.tensor(True))
    assert torch.equal(drift.level, torch.zeros(4, dtype=torch.float64))

    def change_unlike() -> None:
        buffers.apply(rows, frozenset({"drift.level"}), share, [0, 1], torch.tensor(False))
        buffers.open()  # raises on an asynchronous device

    with pytest.raises(ValueError, match="must change a buffer alike"):
        change_unlike()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("value", [torch.ones(4), torch.ones(4, dtype=torch.float64), torch.ones(2, 3)], ids=str)
def test_buffers_of_a_whole_mini_batch_become_those_of_its_start_though_they_were_replaced(
    value: torch.Tensor, late: bool
) -> None:
    drift, layer = Drift(), nn.BatchNorm1d(4)
    buffers = Buffers(find_buffers({"drift": drift, "layer": layer}, set(), {}), is_whole=True)
    for buffer in buffers.found.values():
        buffer.late = late
    for _ in range(2):
        buffers.open()
        layer(torch.rand(3, 4))
        assert buffers.take() == {}
    drift.level = value.clone()  # between two steps
    before = [one.clone() for one in (*drift.buffers(), *layer.buffers())]
    buffers.open()
    drift.level = drift.level + 1  # in a forward
    layer(torch.rand(3, 4))
    buffers.take()
    assert not torch.equal(drift.level, before[0])
    assert not torch.equal(layer.get_buffer("running_mean"), before[2])
    buffers.finish(torch.tensor(True) if late else True)
    assert is_same([*drift.buffers(), *layer.buffers()], before)


def leave_a_shard() -> tuple[bool, bool]:
    """Whether buffers stay as they are in a shard that is left before its backward, and in one that is left after."""
    with dl.join_world() as world:
        stays = []
        for after in (True, False):  # then no collective may follow
            model = model_of(world)
            before = [one.clone() for one in model.buffers()]
            batches = dl.Batches(samples(SIZE), SIZE, world)
            steps = iter(dl.Loop(batches, 1, state={"model": model}, buffer_reduction=RULES, progress=False))
            step = next(steps)
            for rows in step:
                loss = (model(rows) ** 2).mean()
                if after:
                    step.backward(loss)
                break
            if after:
                step.fold()
            stays.append(all(map(torch.equal, model.buffers(), before)))
        return stays[1], stays[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shard_without_a_backward_changes_no_buffer(ranks: int, on_ranks: OnRanks) -> None:
    assert on_ranks(ranks, leave_a_shard) == [(True, False)] * ranks


def two_passes(first: str) -> tuple[int, list[bool]]:
    with dl.join_world() as world:
        model = model_of(world)
        optimizer = optimizer_of("sgd", model)
        state = {"model": model, "optimizer": optimizer}
        batches = dl.Batches((samples(2 * SIZE), torch.arange(2 * SIZE)), SIZE, world, shuffle=False)
        loop = dl.Loop(batches, 1, state=state, buffer_reduction=RULES, progress=False, on_nonfinite="skip")
        moved = []
        for step in loop:
            for how in (first, "loss"):
                before = copies(state)
                for rows, numbers in step:
                    step.backward(spoiled((model(rows) ** 2).mean(), numbers, next(model.parameters()), how))
                step.fold()
                optimizer.step()
                moved.append(len(before) != len(copies(state)) or not is_same(before, copies(state)))
        return loop.skipped, moved


def test_of_two_passes_only_the_bad_one_is_left_out(on_ranks: OnRanks) -> None:
    assert on_ranks(2, two_passes, "") == [(1, [True, True, True, False])] * 2
    assert on_ranks(2, two_passes, "loss") == [(1, [True, True, False, False])] * 2  # of one step, counted once


def lose_found_inf() -> None:
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([weight], fused=True)
    with dl.join_world() as world:
        gradients = dl.Fold({}, {"weight": weight}, world, shards=1).gradients
        state = {"optimizer": optimizer}
        blame = NonFiniteStateCheck(state, world, "skip").blame
        guard = NonFiniteGuard("skip", lambda epoch, start, count: torch.arange(count), state, blame, world.print)
        guard.check(torch.tensor(math.nan), gradients)
        assert vars(optimizer)["found_inf"].item() == 1
        optimizer.param_groups[0]["fused"] = False
        assert guard.check(torch.tensor(1.0), gradients) is False
        assert "found_inf" not in vars(optimizer)


@pytest.mark.one_device(GPU, "on the host no optimizer gets found_inf")
def test_an_optimizer_that_loses_found_inf_takes_the_next_step(on_ranks: OnRanks) -> None:
    on_ranks(1, lose_found_inf)


def printed(optimizer: str) -> str:
    with redirect_stdout(StringIO()) as out:
        train("", optimizer=optimizer)
    return out.getvalue()


@pytest.mark.one_device(GPU, "on the host there is nothing to wait for")
@pytest.mark.parametrize(
    ("optimizer", "says"), [("fused adam", False), ("fused sgd", False), ("adam", True), ("sgd", True)]
)
def test_an_optimizer_that_the_host_waits_for_is_named_once(optimizer: str, says: bool, on_ranks: OnRanks) -> None:
    kind = "Adam" if optimizer.endswith("adam") else "SGD"
    said = (
        f'ddp_loop: With on_nonfinite="skip" the host waits for the device in each step. {kind} '
        "is not fused. Pass fused=True where the optimizer has it.\n"
    )
    assert on_ranks(1, printed, optimizer)[0].count(said) == says


def never_finite(world: dl.World, folder: str, relief: int) -> None:
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([weight], fused=True)
    data = torch.ones(2 * 2 * IN_A_ROW)
    loop = dl.Loop(dl.Batches(data, 2, world), 1, state={"o": optimizer}, progress=False, on_nonfinite="skip")
    for step in loop:
        for rows in step:
            step.backward((rows * weight).mean() * (1.0 if step.iteration == relief else math.nan))
        step.fold()
        optimizer.step()


def test_a_run_of_which_every_step_is_skipped_ends(refused: Refused) -> None:
    said = "not 100 in a row. Step {} is the last of as many. A mini-batch's loss must be a finite number"
    refused(2, never_finite, 0, kind="FloatingPointError", said=said.format(100), by=ALL)
    refused(2, never_finite, 50, kind="FloatingPointError", said=said.format(150), by=ALL)


def test_rows_say_which_step_was_skipped() -> None:
    rows: list[dict[str, Any]] = []
    train("gradient", on_row=rows.append)
    assert [row["skipped"] for row in rows] == [0, 1, 0, 0]
    rows = []
    train("", on_row=rows.append)
    assert [row["skipped"] for row in rows] == [0] * STEPS
    rows = []
    train("", "raise", on_row=rows.append)
    assert all("skipped" not in row for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["fused adam", "fused sgd", "adam"])
def test_on_a_gpu_a_skipped_step_changes_no_bit(optimizer: str) -> None:
    for how in ("loss", "gradient"):
        result = train(how, optimizer=optimizer)
        assert is_same(result.state[BAD_STEP], result.state[BAD_STEP - 1])
        assert not is_same(result.state[BAD_STEP], result.state[BAD_STEP + 1])
        assert (result.skipped, result.given) == (1, [optimizer.startswith("fused")] * 6)
