"""Statistics of many shards travel as moments: few bytes, the same bits on any number of ranks, the same statistics.

That they are those of the whole mini-batch in float64 is in `test_differential.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import ddp_loop as dl
from benchmarks.payload import PARAMETERS, Layers, channels_of_resnet50, counted, measure, travelling
from ddp_loop.batch_norm import BatchNormStatistics
from ddp_loop.training.rows import use_moments
from tests.support.comparing import is_same
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over
from tests.support.training import sgd, train, train_in

pytestmark = [pytest.mark.covers("J13", "D4"), pytest.mark.on_gpus_too]

WIDE = 400  # channels; with 64 shards more than the bytes up to which rows travel
Named = dict[str, torch.Tensor]


class OwnNorm(nn.Module):
    """A norm of the user's own, whose momentum torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(WIDE))
        self.register_buffer("running_var", torch.ones(WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = self.buffers()
        return functional.batch_norm(x, mean, variance, training=True, momentum=0.3)


def mixed() -> nn.Module:
    """Two layers of batch norm, one of a class of the user's; `test_differential.py` has other kinds."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv1d(2, WIDE, 1), nn.BatchNorm1d(WIDE), OwnNorm(), nn.Flatten(), nn.Linear(3 * WIDE, 1))


def mean_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).mean()  # type: ignore[no-any-return]


def train_mixed(dtype: torch.dtype, moments: bool, shards: int = 64) -> Named:
    """The statistics after three steps, and the weights. Of 100 shards ten are empty, 64 are unequal."""
    model = mixed().to(dtype)
    optimizer = sgd(model, 0.9)
    rows = torch.randn(270, 2, 3, generator=torch.Generator().manual_seed(2)).to(dtype)
    with travelling(moments=moments):
        train(model, mean_of, rows, 90, optimizer=optimizer, shards=shards, allow_single_sample_shards=True)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30))


# -- bytes -------------------------------------------------------------------------------------------------


def test_the_benchmark_has_resnet_50s_layers() -> None:
    channels = channels_of_resnet50()
    assert (len(channels), sum(channels)) == (53, 26560)
    assert sum(parameter.numel() for parameter in Layers().parameters()) == PARAMETERS == 25_557_032


@pytest.mark.slow
@pytest.mark.one_device("cpu", "the benchmark is of ranks on the CPU")
@pytest.mark.parametrize("shards", [8, 128])
def test_a_steps_payload_is_two_percent_of_resnet_50s_gradients_at_most(shards: int, on_ranks: OnRanks) -> None:
    parameters = PARAMETERS if shards == 8 else 10**6  # of the rule's side on which ResNet-50 is too
    for payload in on_ranks(2, measure, shards, parameters=parameters):
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


# -- bits and values -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.covers("H7")
@pytest.mark.both_exchanges
@pytest.mark.parametrize(("shards", "dtype"), [(64, torch.float64), (100, torch.float32)])
def test_many_shards_give_the_same_bits_on_1_to_4_ranks(shards: int, dtype: torch.dtype, on_ranks: OnRanks) -> None:
    first, *others = [found for ranks in (1, 3, 4) for found in on_ranks(ranks, train_mixed, dtype, True, shards)]
    assert all(is_same([*found.values()], [*first.values()]) for found in others)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])  # of bfloat16 a rounding
def test_moments_equal_rows(dtype: torch.dtype, bound: float, on_ranks: OnRanks) -> None:
    moments, rows = (on_ranks(2, train_mixed, dtype, way)[0] for way in (True, False))
    assert [name for name in rows if off(moments[name], rows[name]) > (0 if "num" in name else bound)] == []


# -- far from 0 ----------------------------------------------------------------------------------------------


def values_at(mean: float) -> torch.Tensor:
    """Rows of deviation 1, (256, WIDE, 2, 2), in float32, which rounds them where the mean is large."""
    generator = torch.Generator().manual_seed(3)
    return (mean + torch.randn(256, WIDE, 2, 2, generator=generator, dtype=torch.float64)).float()


def statistics_at(
    mean: float, steps: int, moments: bool, memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The mean and the variance of rows around a mean, and the number of sums of moments in each step."""
    norm = nn.BatchNorm2d(WIDE, momentum=1.0)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(4 * WIDE, 1))
    rows = values_at(mean).contiguous(memory_format=memory_format)
    with travelling(moments=moments), dl.join_world() as world, counted(world) as handed:
        sums = train_in(
            world, model, mean_of, rows, 256, shards=64, epochs=None, steps=steps,
            before_step=lambda step: handed.clear(),
            after_fold=lambda *_: sum(abs(one[0] - 8 * (1 + 2 * WIDE)) < 64 for one in handed if one),
        )  # fmt: skip
    found, variance, _ = norm.buffers()
    return found, variance, sums


def exactly(mean: float) -> tuple[torch.Tensor, torch.Tensor]:
    channels = values_at(mean).double().movedim(1, 0).flatten(1)
    return channels.mean(1), channels.var(1)


@pytest.mark.one_device("cpu", "on a GPU the means stay rounded, and the host does not look at the sums")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("mean", [0.0, 1e4, 1e6])
def test_a_mean_far_from_the_running_one_costs_no_digits(
    mean: float, moments: bool, memory_format: torch.memory_format, on_ranks: OnRanks
) -> None:
    (*found, sums), *_ = on_ranks(3, statistics_at, mean, 2, moments, memory_format)
    # float32 rounds the shards' means at 6e-8 * 1e6 = 0.06; sums of squares would be off by 6e-8 * 1e12 there.
    assert max(map(off, found, exactly(mean))) <= 1e-6
    assert sums == [2 if mean > 1024 else 1, 1] or not moments  # the second step's shift is the first one's mean


@pytest.mark.one_device("gpu", "on a GPU means stay rounded, and the first sum counts")
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.quick_on_gpus
def test_on_a_gpu_statistics_far_from_0_are_off_by_the_rounding_of_the_means(mean: float, on_ranks: OnRanks) -> None:
    (*rows, _), *_ = on_ranks(2, statistics_at, mean, 1, False)
    of_mean, of_variance = map(off, rows, exactly(mean))
    assert of_mean <= 1e-7 or mean == 0
    # Twice the rounding, 6e-8 of the mean, times a shard's distance from the mean of all, a quarter of a deviation.
    assert of_variance <= 3e-8 * max(mean, 30)
    (*moments, sums), *_ = on_ranks(2, statistics_at, mean, 1, True)
    assert max(map(off, moments, rows)) <= 1e-6
    assert sums == [1]


def constant_channel() -> tuple[torch.Tensor, list[int]]:
    """A channel that dies: the same value in all rows, ever nearer to 0."""
    model = nn.Sequential(nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 1))
    values = torch.cat([torch.full((256, WIDE), 1 + 1e-3 * 0.8**step) for step in range(60)])
    with travelling(moments=True), dl.join_world() as world, counted(world) as handed:
        sums = train_in(
            world, model, mean_of, values, 256, shards=64, before_step=lambda step: handed.clear(),
            after_fold=lambda *_: sum(one[0] >= 8 * (1 + 2 * WIDE) for one in handed),
        )  # fmt: skip
    return model[0].get_buffer("running_var"), sums


@pytest.mark.one_device("cpu", "on a GPU the host does not look at the sums")
@pytest.mark.slow
def test_a_constant_channel_is_not_summed_again(on_ranks: OnRanks) -> None:
    (variance, sums), *_ = on_ranks(2, constant_channel)
    assert set(sums[1:]) == {sums[0]}
    assert torch.allclose(variance, torch.full((WIDE,), 0.9**60), rtol=1e-5)


# -- a rank that ends ----------------------------------------------------------------------------------------


def depart(world: dl.World, folder: str, fails: bool) -> None:
    """Rank 1 fails in the second step, or leaves the loop."""
    model = nn.Sequential(nn.Linear(4, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 1)).double()
    with travelling(moments=True):
        loop = loop_over(world, folder, model, shards=3)
    for step in loop:
        if step.iteration == 2 and world.rank == 1:
            if fails:
                raise KeyError("a fault")
            break
        for rows in step:
            step.backward(mean_of(model, rows))
        step.fold()


@pytest.mark.quick_on_gpus
@pytest.mark.both_exchanges
@pytest.mark.parametrize(("fails", "kind", "said"), [(True, "KeyError", "a fault"), (False, "", "left the loop|^$")])
def test_a_rank_that_fails_or_leaves_ends_the_others_too(fails: bool, kind: str, said: str, refused: Refused) -> None:
    refused(3, depart, fails, kind=kind, said=said, by=1)
