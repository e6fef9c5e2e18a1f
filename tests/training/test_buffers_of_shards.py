"""Buffers that shards change: what one device leaves of them, or an error on every rank that names the buffer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ddp_loop as dl
from tests.support.comparing import Tensors, same_on_all
from tests.support.devices import GPU
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples
from tests.support.training import train

pytestmark = [
    pytest.mark.covers("D6"),
    pytest.mark.on_gpus_too,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning"),
]

Make = Callable[[], nn.Module]


class Layer(nn.Module):
    """Hands its rows on, and has its buffers written."""

    def __init__(self, write: Callable[[Any, torch.Tensor], object], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.write = write
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self, rows)
        return rows


# -- refused -----------------------------------------------------------------------------------------------


def write_codes(layer: Any, rows: torch.Tensor) -> None:
    """Moving averages of counts and sums, and the codes as their quotient, as many scripts write it."""
    picked = F.one_hot(torch.cdist(rows, layer.codes).argmin(1), 3).to(rows)
    layer.counts.mul_(0.9).add_(picked.sum(0), alpha=0.1)
    layer.sums.mul_(0.9).add_(picked.T @ rows, alpha=0.1)
    layer.codes.copy_(layer.sums / layer.counts.unsqueeze(1))


def codebook() -> nn.Module:
    return Layer(write_codes, codes=samples(3), counts=torch.ones(3, dtype=torch.float64), sums=samples(3))


def write_maximum(layer: Any, rows: torch.Tensor) -> None:
    layer.largest.copy_(torch.maximum(layer.largest, rows.amax(0)))


def maximum() -> nn.Module:
    return Layer(write_maximum, largest=torch.zeros(4, dtype=torch.float64))


def write_table(layer: Any, rows: torch.Tensor) -> None:
    """Of rotary embeddings: computed again for the longest row of the shard, in a new tensor."""
    base = 1e4 * float(rows.abs().max())
    layer.inv_freq = 1.0 / base ** torch.tensor([0.0, 0.5])


def rotary() -> nn.Module:
    return Layer(write_table, inv_freq=torch.ones(2))


def write_statistics(layer: Any, rows: torch.Tensor) -> None:
    """Batch norm's running statistics by arithmetic of its own."""
    layer.running_mean.lerp_(rows.mean(0), 0.1)
    layer.running_var.lerp_(rows.var(0, correction=0), 0.1)


def own_statistics() -> nn.Module:
    return Layer(write_statistics, running_mean=torch.zeros(4).double(), running_var=torch.ones(4).double())


def write_phase(layer: Any, rows: torch.Tensor) -> None:
    layer.phase[1] *= torch.complex(rows.mean(), rows.max())


def phase() -> nn.Module:
    return Layer(write_phase, phase=torch.ones(2, dtype=torch.complex64))


def scripted_norm() -> nn.Module:
    return torch.jit.script(nn.BatchNorm1d(4).double())


WRONG: dict[Make, str] = {
    codebook: r"Element 0 of model\.0\.codes \(torch\.float64\) became \S+ in shard 0 and \S+ in shard 1",
    maximum: r"model\.0\.largest .* after step\.gather .* is a mean over the samples, .* \"min\", \"max\"",
    rotary: r"Element 1 of model\.0\.inv_freq",
    own_statistics: r"model\.0\.running_mean .* Call F\.batch_norm .* less than the variance of all",
    phase: r"Element 1 of model\.0\.phase \(torch\.complex64\) became \(\S+j\) in shard 0 .* rule: \"first\"",
    scripted_norm: r"of model\.0\.running_mean .* Call F\.batch_norm .* 'model\.0\.running_var': 'mean'",
}


def differ(world: dl.World, folder: str, make: Make, shards: int | None, steps: int, is_left: bool = False) -> None:
    model = nn.Sequential(make(), *network())
    for step in loop_over(world, folder, model, shards=shards, steps=steps, epochs=None):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        if is_left:
            model[0] = nn.Identity()  # the next step has another fold


@pytest.mark.both_exchanges
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("make", WRONG)
@pytest.mark.parametrize("steps", [1, 4])  # on a GPU the next step finds it, and the last one has none
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, None), (1, 3), (2, 3), (3, 3)])
def test_a_buffer_that_depends_on_the_shard_is_refused_by_name(
    make: Make, steps: int, ranks: int, shards: int | None, refused: Refused
) -> None:
    refused(ranks, differ, make, shards, steps, kind="ValueError", said=WRONG[make], by=ALL)


@pytest.mark.one_device(GPU, "elsewhere the first fold raises")
def test_a_new_fold_does_not_forget_what_the_former_one_had_to_find_out(refused: Refused) -> None:
    refused(2, differ, maximum, None, 4, True, kind="ValueError", said=r"model\.0\.largest", by=ALL)


def give_a_complex_buffer(world: dl.World, folder: str) -> None:
    loop_over(world, folder, nn.Sequential(phase(), *network()), buffer_reduction={"model.0.phase": "max"})


def test_values_without_an_order_are_refused(refused: Refused) -> None:
    refused(2, give_a_complex_buffer, by=ALL, kind="ValueError", said='"max" needs values with an order')


# -- as one device leaves them -----------------------------------------------------------------------------


def write_alike(layer: Any, rows: torch.Tensor) -> None:
    """Functions of the step alone: a decaying rate, powers of a float32, NaN, and -0.0 beside 0.0."""
    layer.rate.mul_(0.999)
    layer.power.mul_(1 / 3)
    layer.nothing.fill_(math.nan)
    layer.zero.fill_(-0.0 if float(rows[0, 0]) < 0 else 0.0)


def alike() -> nn.Module:
    return Layer(
        write_alike,
        rate=torch.tensor(0.1, dtype=torch.float64),
        power=torch.full((3,), 5 / 3),
        nothing=torch.full((2,), math.nan),
        zero=torch.ones(1, dtype=torch.bfloat16),
    )


def write_silently(layer: Any, rows: torch.Tensor) -> None:
    """Through .data, as moving averages of codebooks are."""
    layer.level.data.mul_(0.5).add_(rows.mean())
    layer.begun.data.fill_(True)


def silent() -> nn.Module:
    level = torch.full((2,), 4.0, dtype=torch.float64)
    begun = torch.zeros((), dtype=torch.bool)
    return Layer(write_silently, level=level, begun=begun, constant=torch.tensor([math.nan, 0.1]))


def write_extremes(layer: Any, rows: torch.Tensor) -> None:
    """Of all values, as torch's MinMaxObserver does, and of ten times them as integers."""
    dtype = layer.least.dtype
    seen = (rows if dtype.is_floating_point else rows * 10).to(dtype)
    layer.least.copy_(torch.minimum(layer.least, seen.amin(0)))
    layer.largest.copy_(torch.maximum(layer.largest, seen.amax(0)))


def observer(dtype: torch.dtype) -> nn.Module:
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    least = torch.full((4,), info.max, dtype=dtype)
    return Layer(write_extremes, least=least, largest=torch.full((4,), info.min, dtype=dtype))


class OwnNorm(nn.Module):
    """Batch norm as many write it; its momentum has a name of its own, and is given by place or by name."""

    def __init__(self, call: str, mean: str, var: str) -> None:
        super().__init__()
        self.call = call
        self.decay = 0.3
        self.register_buffer(mean, torch.zeros(4, dtype=torch.float64))
        self.register_buffer(var, torch.ones(4, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean, var = self.buffers()
        if self.call == "torch":
            return torch.batch_norm(rows, None, None, mean, var, self.training, self.decay, 1e-5, False)
        if self.call == "places":
            return F.batch_norm(rows, mean, var, None, None, self.training, self.decay)
        return F.batch_norm(rows, mean, var, momentum=self.decay, training=self.training)


def spectral_norm() -> nn.Module:
    torch.manual_seed(0)
    return torch.nn.utils.spectral_norm(nn.Linear(4, 4).double())


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(2, track_running_stats=True, dtype=torch.float64)
    return nn.Sequential(nn.Unflatten(1, (2, 2)), norm, nn.Flatten())


EXTREMES = {"least": "min", "largest": "max"}
RIGHT: dict[str, tuple[Make, dict[str, str]]] = {
    "alike in all shards": (alike, {}),
    "spectral norm": (spectral_norm, {}),
    "instance norm": (instance_norm, {}),
    "silent": (silent, {"level": "mean"}),
    "scripted norm": (scripted_norm, {"running_mean": "mean", "running_var": "mean"}),
    "own norm by names": (partial(OwnNorm, "names", "running_mean", "running_var"), {}),
    "own norm by places": (partial(OwnNorm, "places", "moving_mean", "moving_variance"), {}),
    "own norm by torch": (partial(OwnNorm, "torch", "mean", "var"), {}),
    **{
        f"extremes in {dtype}": (partial(observer, dtype), EXTREMES)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8)
    },
}


def move_between(model: nn.Module) -> None:
    """What a script may do after a step."""
    if "0.level" in dict(model.named_buffers()):
        model.get_buffer("0.level").data.add_(1.0)


def buffers_on_ranks(make: Make, rules: dict[str, str], shards: int | None) -> Tensors:
    model = nn.Sequential(make(), *network())
    options: dict[str, Any] = {
        "buffer_reduction": {f"model.0.{name}": rule for name, rule in rules.items()},
        "check_replicas_every": 1,
        "after_fold": lambda step, result: move_between(model),
    }
    train(model, loss_of, samples(23), 12, shards=shards, **options)
    assert not model[0]._forward_hooks
    return [buffer.nan_to_num(7.0) for buffer in model.buffers()]


def buffers_on_one_device(make: Make) -> Tensors:
    model = nn.Sequential(make(), *network())
    for rows in samples(23).split(12):
        model(rows)
        move_between(model)
    return [buffer.nan_to_num(7.0) for buffer in model.buffers()]


@pytest.mark.parametrize("make", WRONG)
def test_one_shard_has_the_bits_of_one_device(make: Make, on_ranks: OnRanks) -> None:
    (found,) = on_ranks(1, buffers_on_ranks, make, {}, None)
    assert all(map(torch.equal, found, buffers_on_one_device(make)))


@pytest.mark.covers("D4", "C6")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("what", RIGHT)
@pytest.mark.parametrize(("ranks", "shards"), [(3, 4), (2, None), (1, 4), (3, 2), (1, None)])
def test_other_buffers_are_those_of_one_device(what: str, ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    make, rules = RIGHT[what]
    found = same_on_all(on_ranks(ranks, buffers_on_ranks, make, rules, shards))
    for number, (one, wanted) in enumerate(zip(found, buffers_on_one_device(make), strict=True)):
        assert one.dtype == wanted.dtype
        if (what, number) != ("scripted norm", 1):  # a mean of variances
            assert torch.allclose(one.double(), wanted.double(), rtol=1e-12, atol=1e-14)
