"""Buffers that shards change differently, whatever they hold: refused by name on every rank, never averaged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import ddp_loop as dl
from ddp_loop.training import Buffers, find_buffers
from tests.support.comparing import same_on_all
from tests.support.devices import GPU
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples

pytestmark = [pytest.mark.covers("D6"), pytest.mark.on_gpus_too]


class Layer(nn.Module):
    """Hands its rows on."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(rows)
        return rows

    def write(self, rows: torch.Tensor) -> None:
        raise NotImplementedError


class Codebook(Layer):
    """Moving averages of counts and sums, and the codes as their quotient, as many scripts write it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: torch.Tensor
        self.sums: torch.Tensor
        self.codes: torch.Tensor
        self.register_buffer("codes", samples(3).clone())
        self.register_buffer("counts", torch.ones(3, dtype=torch.float64))
        self.register_buffer("sums", samples(3).clone())

    def write(self, rows: torch.Tensor) -> None:
        picked = nn.functional.one_hot(torch.cdist(rows, self.codes).argmin(1), 3).to(rows)
        self.counts.mul_(0.9).add_(picked.sum(0), alpha=0.1)
        self.sums.mul_(0.9).add_(picked.T @ rows, alpha=0.1)
        self.codes.copy_(self.sums / self.counts.unsqueeze(1))


class Maximum(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.largest: torch.Tensor
        self.register_buffer("largest", torch.zeros(4, dtype=torch.float64))

    def write(self, rows: torch.Tensor) -> None:
        self.largest.copy_(torch.maximum(self.largest, rows.amax(0)))


class Rotary(Layer):
    """Computes its table again for the longest row of the shard, in a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)

    def write(self, rows: torch.Tensor) -> None:
        base = 1e4 * float(rows.abs().max())
        self.inv_freq = 1.0 / base ** torch.tensor([0.0, 0.5])


class OwnStatistics(Layer):
    """Batch norm's running statistics by arithmetic of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.running_mean: torch.Tensor
        self.running_var: torch.Tensor
        self.register_buffer("running_mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("running_var", torch.ones(4, dtype=torch.float64))

    def write(self, rows: torch.Tensor) -> None:
        self.running_mean.lerp_(rows.mean(0), 0.1)
        self.running_var.lerp_(rows.var(0, correction=0), 0.1)


class Phase(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.phase: torch.Tensor
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))

    def write(self, rows: torch.Tensor) -> None:
        self.phase[1] *= torch.complex(rows.mean(), rows.max())


WRONG: dict[type[Layer], str] = {
    Codebook: r"Element 0 of model\.0\.codes \(torch\.float64\) became \S+ in shard 0 and \S+ in shard 1",
    Maximum: r"model\.0\.largest .* after step\.gather .* is a mean over the samples, .* \"min\", \"max\"",
    Rotary: r"Element 1 of model\.0\.inv_freq",
    OwnStatistics: r"model\.0\.running_mean .* Call F\.batch_norm .* less than the variance of all",
    Phase: r"Element 1 of model\.0\.phase \(torch\.complex64\) became \(\S+j\) in shard 0 .* rule: \"first\"",
}


def train(
    world: dl.World, folder: str, make: Callable[[], nn.Module], shards: int | None, steps: int | None = None,
    **keywords: Any,
) -> nn.Sequential:  # fmt: skip
    model = nn.Sequential(make(), network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in loop_over(world, folder, model, optimizer, shards=shards, steps=steps, **keywords):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        optimizer.step()
    return model


@pytest.mark.both_exchanges
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("make", WRONG)
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, None), (1, 3), (2, 3), (3, 3)])
def test_a_buffer_that_depends_on_the_shard_is_refused_by_name(
    make: type[Layer], ranks: int, shards: int | None, refused: Refused
) -> None:
    refused(ranks, train, make, shards, kind="ValueError", said=WRONG[make], by=ALL)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_last_step_of_a_run_is_not_spared(steps: int, refused: Refused) -> None:
    # On a GPU the next step finds it, and a run of one step has none.
    refused(2, train, Maximum, None, steps, kind="ValueError", said=r"model\.0\.largest", by=ALL)


def differ_in_the_first_step(world: dl.World, folder: str) -> None:
    model = nn.Sequential(Maximum(), network())
    for step in loop_over(world, folder, model):
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        model[0] = nn.Identity()  # the next step has another fold


@pytest.mark.one_device(GPU, "elsewhere the first fold raises")
def test_a_new_fold_does_not_forget_what_the_former_one_had_to_find_out(refused: Refused) -> None:
    refused(2, differ_in_the_first_step, kind="ValueError", said=r"model\.0\.largest", by=ALL)


def buffers_of_one_shard(make: Callable[[], nn.Module]) -> list[torch.Tensor]:
    with dl.join_world() as world:
        return [one.clone() for one in train(world, ".", make, None, run_dir=None).buffers()]


@pytest.mark.parametrize("make", WRONG)
def test_one_shard_has_the_bits_of_the_plain_loop(make: type[Layer], on_ranks: OnRanks) -> None:
    model = nn.Sequential(make(), network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in samples(24).split(6):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    (found,) = on_ranks(1, buffers_of_one_shard, make)
    assert all(map(torch.equal, found, model.buffers()))


# -- what all shards change alike --------------------------------------------------------------------------


class Alike(Layer):
    """Functions of the step alone: a decaying rate, powers of a float32, NaN, and -0.0 beside 0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.rate: torch.Tensor
        self.power: torch.Tensor
        self.nothing: torch.Tensor
        self.zero: torch.Tensor
        self.register_buffer("rate", torch.tensor(0.1, dtype=torch.float64))
        self.register_buffer("power", torch.full((3,), 5 / 3))
        self.register_buffer("nothing", torch.full((2,), math.nan))
        self.register_buffer("zero", torch.ones(1, dtype=torch.bfloat16))

    def write(self, rows: torch.Tensor) -> None:
        self.rate.mul_(0.999)
        self.power.mul_(1 / 3)
        self.nothing.fill_(math.nan)
        self.zero.fill_(-0.0 if float(rows[0, 0]) < 0 else 0.0)


def train_alike(shards: int | None) -> list[torch.Tensor]:
    with dl.join_world() as world:
        return [one.clone() for one in train(world, ".", Alike, shards, run_dir=None).buffers()]


@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, 4), (1, 4)])
def test_floats_that_all_shards_change_alike_need_no_rule(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    layer = Alike()
    for _ in range(4):
        layer(torch.ones(1, 4))
    for found in on_ranks(ranks, train_alike, shards):
        assert [one.dtype for one in found] == [one.dtype for one in layer.buffers()]
        for one, wanted in zip(found, layer.buffers(), strict=True):
            assert torch.allclose(one, wanted, rtol=0.0, atol=0.0, equal_nan=True)


def spectral(parametrized: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = parametrizations.spectral_norm if parametrized else torch.nn.utils.spectral_norm
    found: nn.Module = norm(nn.Linear(4, 4).double())
    return found


def train_spectral(parametrized: bool, shards: int | None) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = train(world, ".", lambda: spectral(parametrized), shards, run_dir=None)
        return [one.clone() for one in model.buffers()]


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("parametrized", [True, False])
def test_the_vectors_of_spectral_norm_are_the_same_in_all_shards(parametrized: bool, on_ranks: OnRanks) -> None:
    first = [one.clone() for one in spectral(parametrized).buffers()]
    found = same_on_all(on_ranks(2, train_spectral, parametrized, 4))
    assert all(not torch.equal(one, before) for one, before in zip(found, first, strict=True))


def instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True, dtype=torch.float64), nn.Flatten()
    )


def train_instances(shards: int | None) -> list[torch.Tensor]:
    with dl.join_world() as world:
        return [one.clone() for one in train(world, ".", instance_norm, shards, run_dir=None).buffers()]


@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, None), (3, 4)])
def test_instance_norms_statistics_are_one_devices(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    layers = instance_norm()
    for rows in samples(24).split(6):
        layers(rows)
    found = same_on_all(on_ranks(ranks, train_instances, shards))
    # Its statistics are means over the samples; a sum of 6 float64 terms.
    assert all(torch.allclose(one, wanted, 1e-13, 1e-14) for one, wanted in zip(found, layers.buffers(), strict=True))


def test_the_default_rule_is_a_mean_for_instance_norm_alone() -> None:
    model = nn.ModuleDict({"norm": instance_norm(), "wrong": Codebook(), "own": OwnStatistics()})
    rules = {name: buffer.reduction for name, buffer in find_buffers({"model": model}, set(), {}).items()}
    means = {name for name, rule in rules.items() if rule == "mean"}
    assert means == {"model.norm.1.running_mean", "model.norm.1.running_var"}
    assert set(rules.values()) == {"mean", "same"}


def test_shards_without_samples_have_no_say() -> None:
    layer = Maximum()
    buffers = Buffers(find_buffers({"model": layer}, set(), {}))
    rows = torch.tensor([[1.0] * 4, [2.0] * 4, [1.0] * 4], dtype=torch.float64)
    buffers.apply(rows, frozenset({"model.largest"}), torch.tensor([0.5, 0.0, 0.5]), [0, 2])
    buffers.settle()
    assert layer.largest.tolist() == [1.0] * 4
