"""Statistics of many shards travel as moments: few bytes, the same bits on any number of ranks, the same statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ddp_loop as dl
from benchmarks.payload import PARAMETERS, Layers, channels_of_resnet50, counted, measure, travelling
from ddp_loop.batch_norm import BatchNormStatistics
from ddp_loop.training.rows import use_moments
from tests.support import reference
from tests.support.exchanges import on_machines
from tests.support.harness import OnRanks

pytestmark = [pytest.mark.covers("J13", "D4"), pytest.mark.on_gpus_too]

WIDE = 400  # channels; with 64 shards more than the bytes up to which rows travel
MINI_BATCH = 90  # over 100 shards ten are empty, over 64 they are unequal


class OwnNorm(nn.Module):
    """A norm of the user's own, whose momentum torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(WIDE))
        self.register_buffer("running_var", torch.ones(WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(
            x, self.get_buffer("running_mean"), self.get_buffer("running_var"), training=True, momentum=0.3
        )


class Mixed(nn.Module):
    """A layer that is called twice, one with a cumulative average, one in some shards alone, one frozen, one's own."""

    def __init__(self, *, with_own: bool = True) -> None:
        super().__init__()
        self.into = nn.Conv1d(2, WIDE, 1)
        self.twice, self.cumulative = nn.BatchNorm1d(WIDE), nn.BatchNorm1d(WIDE, momentum=None)
        self.rare, self.frozen = nn.BatchNorm1d(WIDE, momentum=0.2), nn.BatchNorm1d(WIDE).requires_grad_(False)
        self.own = OwnNorm() if with_own else nn.Identity()
        self.last = nn.Linear(WIDE, 1)

    def train(self, mode: bool = True) -> Mixed:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = torch.tanh(self.twice(3 + 2 * self.into(x)))
        values = self.own(1 + self.cumulative(3 + 2 * torch.tanh(self.twice(values))))
        if x[0, 0, 0] > 0:
            values = self.rare(values + 5)
        return self.last(self.frozen(values).mean(2)).mean()  # type: ignore[no-any-return]


def network(dtype: torch.dtype, *, with_own: bool = True) -> Mixed:
    torch.manual_seed(4)
    return Mixed(with_own=with_own).to(dtype)


def rows_of(steps: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(MINI_BATCH * steps, 2, 3, generator=torch.Generator().manual_seed(2)).to(dtype)


@contextmanager
def training(
    steps: int, shards: int, dtype: torch.dtype = torch.float32, *, with_own: bool = True, **options: Any
) -> Iterator[tuple[dl.World, Mixed, dl.Loop]]:
    """A loop of some steps, and its network and world."""
    with dl.join_world(seed=0) as world:
        model = network(dtype, with_own=with_own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = dl.Batches(rows_of(4, dtype), MINI_BATCH, world, shards=shards, shuffle=False)
        state = {"model": model, "optimizer": optimizer}
        yield world, model, dl.Loop(batches, steps=steps, state=state, progress=False, allow_single_sample_shards=True,
                                    **options)  # fmt: skip


def take(step: dl.Step, model: nn.Module) -> None:
    for rows in step:
        step.backward(model(rows))
    step.fold()
    for parameter in model.parameters():  # SGD without a reference to the optimizer
        if parameter.grad is not None:
            parameter.data.sub_(0.1 * parameter.grad)


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()


# -- bytes -------------------------------------------------------------------------------------------------


def test_the_benchmark_has_resnet_50s_layers() -> None:
    channels = channels_of_resnet50()
    assert (len(channels), sum(channels)) == (53, 26560)
    assert sum(parameter.numel() for parameter in Layers().parameters()) == PARAMETERS == 25_557_032


@pytest.mark.slow
@pytest.mark.one_device("cpu", "the benchmark is of ranks on the CPU")
@pytest.mark.parametrize("shards", [8, 64, 1024])
@pytest.mark.parametrize("ranks", [2])
def test_a_steps_payload_is_two_percent_of_resnet_50s_gradients_at_most(
    shards: int, ranks: int, on_ranks: OnRanks
) -> None:
    parameters = PARAMETERS if shards == 8 else 10**6  # of the rule's side on which ResNet-50 is too
    for payload in on_ranks(ranks, measure, shards, parameters=parameters, timeout_s=300.0):  # 1,024 shards take long
        assert payload.gradients >= 4 * PARAMETERS
        assert 0 < payload.share <= 0.02


@pytest.mark.parametrize(("shards", "parameters", "expected"), [
    (2, 10**4, False),  # few bytes
    (64, 10**4, True),
    (64, 10**8, False),  # few beside the gradients
    (1024, 10**8, True),
])  # fmt: skip
def test_the_rule_looks_at_shards_channels_and_gradients_alone(shards: int, parameters: int, expected: bool) -> None:
    statistics = BatchNormStatistics({"norm": nn.BatchNorm1d(WIDE)})
    try:
        weights = [nn.Parameter(torch.empty(parameters, device="meta"))]
        assert use_moments(statistics, shards, weights, torch.float32) is expected
    finally:
        statistics.release()


# -- bits --------------------------------------------------------------------------------------------------


def train(shards: int, dtype: torch.dtype) -> str:
    with training(2, shards, dtype) as (_, model, loop):
        for step in loop:
            take(step, model)
        return digest(model)


@pytest.mark.covers("H7")
@pytest.mark.both_exchanges
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # float64 keeps every digit of the sums
@pytest.mark.parametrize("shards", [64, pytest.param(100, marks=pytest.mark.slow)])
def test_many_shards_give_the_same_bits_on_1_to_4_ranks(shards: int, dtype: torch.dtype, on_ranks: OnRanks) -> None:
    found = [on_ranks(ranks, train, shards, dtype) for ranks in (1, 2, 3, 4)]
    assert len({one for results in found for one in results}) == 1


def train_on_two_machines(shards: int) -> str:
    with on_machines(2, 1):
        return train(shards, torch.float64)


@pytest.mark.one_device("cpu", "GPUs have one exchange, also between machines")
def test_the_bits_are_the_same_on_two_machines(on_ranks: OnRanks) -> None:
    found = on_ranks(3, train_on_two_machines, 100)
    assert {*found, *on_ranks(1, train, 100, torch.float64)} == {found[0]}


def train_to(to: int, folder: str) -> str:
    with training(to, 64, run_dir=folder, save_every=1, resume=True) as (_, model, loop):
        for step in loop:
            take(step, model)
        return digest(model)


@pytest.mark.slow
def test_a_run_resumes_with_the_same_bits_on_other_ranks(on_ranks: OnRanks, tmp_path: Any) -> None:
    undisturbed = on_ranks(1, train_to, 4, str(tmp_path / "one"))[0]
    for ranks, to in ((2, 1), (3, 3), (1, 4)):
        changed = on_ranks(ranks, train_to, to, str(tmp_path / "other"))[0]
    assert changed == undisturbed


# -- values ------------------------------------------------------------------------------------------------


def statistics_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_buffers()}


def train_for_values(shards: int, dtype: torch.dtype, *, with_own: bool, moments: bool) -> dict[str, torch.Tensor]:
    with travelling(moments=moments), training(3, shards, dtype, with_own=with_own) as (_, model, loop):
        for step in loop:
            take(step, model)
        return statistics_of(model)


def expect(shards: int) -> dict[str, torch.Tensor]:
    model, rows = network(torch.float64, with_own=False), rows_of(4, torch.float64)
    size, rest = divmod(MINI_BATCH, shards)
    sizes = [size + (shard < rest) for shard in range(shards)]

    def loss(model: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = model(rows)
        return value, value.detach()

    for number in range(3):
        mini_batch = rows[number * MINI_BATCH : (number + 1) * MINI_BATCH]
        reference.step(model, reference.cut((mini_batch,), sizes), loss)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(0.1 * parameter.grad)
    return statistics_of(model)


def distances(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each statistic, relative to the largest value."""
    return {
        name: float((found[name].double() - one.double()).abs().max() / one.double().abs().max().clamp(min=1e-30))
        for name, one in wanted.items()
    }


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("shards", [64, 100])
def test_statistics_equal_those_of_the_whole_mini_batch_in_float64(shards: int, on_ranks: OnRanks) -> None:
    wanted = expect(shards)
    for found in on_ranks(3, train_for_values, shards, torch.float64, with_own=False, moments=True):
        assert max(distances(found, wanted).values()) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_equal_rows(dtype: torch.dtype, on_ranks: OnRanks) -> None:
    moments, rows = (
        on_ranks(2, train_for_values, 64, dtype, with_own=True, moments=moments)[0] for moments in (True, False)
    )
    bound = 1e-6 if dtype == torch.float32 else 0.01  # a rounding of a bfloat16
    assert max(distances(moments, rows).values()) <= bound
    assert {name: one for name, one in moments.items() if "num" in name} == {
        name: one for name, one in rows.items() if "num" in name
    }


def values_at(mean: float) -> torch.Tensor:
    """Rows of deviation 1, (256, WIDE), in float32, which rounds them where the mean is large."""
    generator = torch.Generator().manual_seed(3)
    return (mean + torch.randn(256, WIDE, generator=generator, dtype=torch.float64)).float()


def statistics_at(mean: float, steps: int, *, moments: bool = True) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The statistics of rows around a mean, and the number of sums of moments in each step."""
    with travelling(moments=moments), dl.join_world(seed=0) as world, counted(world) as handed:
        model = nn.Sequential(nn.BatchNorm1d(WIDE, momentum=1.0), nn.Linear(WIDE, 1))
        width = 8 * (1 + 2 * WIDE)
        batches = dl.Batches(values_at(mean), 256, world, shards=64, shuffle=False)
        sums = []
        for step in dl.Loop(batches, steps=steps, state={"model": model}, progress=False):
            handed.clear()
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
            sums.append(sum(abs(row - width) < 64 for one in handed for row in one[:1]))
        return statistics_of(model[0]), sums


FAR = [0.0, 100.0, 1e4, 1e5, 1e6]


@pytest.mark.one_device("cpu", "on a GPU the host does not look at the sums")
@pytest.mark.parametrize("mean", FAR)
def test_a_mean_far_from_the_running_one_costs_no_digits(mean: float, on_ranks: OnRanks) -> None:
    exact = values_at(mean).double()
    (found, sums), *_ = on_ranks(2, statistics_at, mean, 2)
    wanted = {"running_mean": exact.mean(0), "running_var": exact.var(0)}
    found.pop("num_batches_tracked")
    assert max(distances(found, wanted).values()) <= 1e-6
    assert sums == [2 if mean > 1024 else 1, 1]  # the second step's shift is the first one's mean


@pytest.mark.one_device("gpu", "on a GPU the first sum counts")
@pytest.mark.parametrize("mean", FAR[:3])
@pytest.mark.quick_on_gpus
def test_on_a_gpu_the_first_sum_keeps_six_digits_up_to_ten_thousand_deviations(mean: float, on_ranks: OnRanks) -> None:
    (rows, _), *_ = on_ranks(2, statistics_at, mean, 1, moments=False)  # torch rounded the same means to float32
    (found, sums), *_ = on_ranks(2, statistics_at, mean, 1)
    assert max(distances(found, rows).values()) <= 1e-6
    assert sums == [1]


def constant_channel() -> tuple[dict[str, torch.Tensor], list[int]]:
    """A channel that dies: the same value in all rows, ever nearer to 0."""
    with travelling(moments=True), dl.join_world(seed=0) as world, counted(world) as handed:
        model = nn.Sequential(nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 1))
        batches = dl.Batches(torch.ones(256, WIDE), 256, world, shards=64)
        sums = []
        for step in dl.Loop(batches, steps=60, state={"model": model}, progress=False):
            handed.clear()
            for rows in step:
                step.backward(model(rows * (1 + 1e-3 * 0.8**step.iteration)).mean())
            step.fold()
            sums.append(sum(one[0] >= 8 * (1 + 2 * WIDE) for one in handed))
        return statistics_of(model[0]), sums


@pytest.mark.one_device("cpu", "on a GPU the host does not look at the sums")
@pytest.mark.slow
def test_a_constant_channel_is_not_summed_again(on_ranks: OnRanks) -> None:
    (found, sums), *_ = on_ranks(2, constant_channel)
    assert set(sums[1:]) == {sums[0]}
    assert torch.allclose(found["running_var"], torch.full((WIDE,), 0.9**60), rtol=1e-5)


# -- unusual steps -----------------------------------------------------------------------------------------


class Later(nn.Module):
    """A layer that some shards of the second step call twice, and all others once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 1)

    def forward(self, rows: torch.Tensor, twice: bool) -> torch.Tensor:
        values = self.norm(rows)
        return self.last(self.norm(values + rows) if twice else values).mean()  # type: ignore[no-any-return]


def call_later(moments: bool) -> list[dict[str, torch.Tensor]]:
    with travelling(moments=moments), dl.join_world(seed=0) as world:
        model = Later().double()
        rows = torch.randn(192, WIDE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        batches = dl.Batches((rows, torch.arange(192)), 64, world, shards=32, shuffle=False)
        found = []
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for values, numbers in step:
                step.backward(model(values, bool(numbers[0] == 64)))
            step.fold()
            found.append(statistics_of(model.norm))
        return found


@pytest.mark.quick_on_gpus
def test_a_layer_that_one_shard_calls_more_often_is_followed(on_ranks: OnRanks) -> None:
    wanted = on_ranks(2, call_later, False)[0]
    for found in on_ranks(3, call_later, True):
        assert [max(distances(one, other).values()) <= 1e-12 for one, other in zip(found, wanted, strict=True)] == [
            True
        ] * 3


def depart(how: str) -> str:
    """Rank 1 fails in the second step, or leaves the loop, which the others may do too."""
    try:
        with training(3, 64) as (world, model, loop):
            for step in loop:
                if step.iteration == 2 and how == "all leave":
                    break
                if step.iteration == 2 and world.rank == 1:
                    if how == "one fails":
                        raise ValueError("a fault")
                    break
                take(step, model)
            # A rank that left alone makes no collective of its own.
            return f"sum {float(world.sum(torch.ones(())))}" if how == "all leave" else "It left the loop."
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.quick_on_gpus
@pytest.mark.both_exchanges
@pytest.mark.parametrize(
    ("how", "said"), [("all leave", "sum 3.0"), ("one fails", "a fault"), ("one leaves", "left the loop")]
)
def test_a_rank_that_fails_or_leaves_ends_the_others_too(how: str, said: str, on_ranks: OnRanks) -> None:
    found = on_ranks(3, depart, how)
    assert [one for one in found if said not in one] == []


def skip_a_step() -> list[dict[str, torch.Tensor]]:
    with training(3, 64, on_nonfinite="skip") as (_, model, loop):
        found = []
        for step in loop:
            for number, rows in enumerate(step):
                bad = step.iteration == 2 and number == 3
                step.backward(model(rows) * (torch.inf if bad else 1))
            step.fold()
            found.append(statistics_of(model))
        return found


@pytest.mark.quick_on_gpus
def test_a_skipped_step_moves_no_statistics(on_ranks: OnRanks) -> None:
    for first, second, third in on_ranks(2, skip_a_step):
        assert all(torch.equal(second[name], one) for name, one in first.items())
        assert not torch.equal(third["twice.running_mean"], first["twice.running_mean"])
