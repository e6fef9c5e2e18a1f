"""What happens to watched batch-norm layers besides plain training: errors that are caught, and copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.batch_norm import BatchNormStatistics
from tests.support.harness import OnRanks

pytestmark = [pytest.mark.covers("D4"), pytest.mark.on_gpus_too]

Extra = Callable[[nn.Module, torch.Tensor], None]


def train(kind: str | None) -> list[torch.Tensor]:
    """The state after three steps; in each shard something else is done with the network besides."""
    extras: dict[str | None, Extra] = {
        None: lambda model, rows: None,
        "forward fails": fail,
        "deepcopy": lambda model, rows: use(copy.deepcopy(model), rows),
        "pickle": lambda model, rows: use(pickle.loads(pickle.dumps(model)), rows),
    }
    with dl.join_world(seed=0) as world:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
        rows = torch.randn(24, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        for step in dl.Loop(dl.Batches(rows, 8, world, shards=4), 1, state={"model": model}, progress=False):
            for shard in step:
                extras[kind](model, shard)
                step.backward(model(shard).mean())
            step.fold()
        return [tensor.clone() for tensor in model.state_dict().values()]


def fail(model: nn.Module, rows: torch.Tensor) -> None:
    norm = model.get_submodule("1")
    before = norm.running_mean, norm.running_var, norm.momentum
    with suppress(RuntimeError, ValueError):
        norm(torch.ones(2, 7, dtype=torch.float64))
    after = norm.running_mean, norm.running_var, norm.momentum
    assert all(one is other for one, other in zip(after, before, strict=True))


def use(model: nn.Module, rows: torch.Tensor) -> None:
    """A copy is torch's own: its statistics move at once."""
    norm = model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    start = norm.running_mean.clone()
    inputs = model.get_submodule("0")(rows)
    norm(inputs)
    assert torch.allclose(norm.running_mean, 0.9 * start + 0.1 * inputs.mean(0), rtol=1e-12)


@pytest.mark.one_device("cpu", "the fake GPU's tensors cannot be pickled")
@pytest.mark.parametrize("kind", ["forward fails", "deepcopy", "pickle"])
def test_errors_that_are_caught_and_copies_leave_the_statistics_alone(kind: str, on_ranks: OnRanks) -> None:
    expected = on_ranks(2, train, None)[0]
    for found in on_ranks(2, train, kind):
        assert all(map(torch.equal, found, expected))


class Counting(nn.Module):
    """A floating buffer that forward changes, beside batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("level", torch.full((2,), 5.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.get_buffer("level").mul_(0.5).add_(rows.mean())
        return self.last(self.norm(rows)).mean()  # type: ignore[no-any-return]


def buffers_with_weights(weights: list[float] | None, shards: int) -> list[torch.Tensor]:
    with dl.join_world(seed=0) as world:
        model = Counting().double()
        rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        batches, rules = dl.Batches(rows, 8, world, shards=shards), {"model.level": "mean"}
        for step in dl.Loop(batches, 1, state={"model": model}, buffer_reduction=rules, progress=False):  # type: ignore[arg-type]
            given = iter(weights or [])
            for shard in step:
                step.backward(model(shard), weight=next(given, None))
            step.fold()
        return [tensor.clone() for tensor in model.buffers()]


@pytest.mark.covers("D6")
@pytest.mark.parametrize(("shards", "weights"), [(1, [0.0]), (2, [0.0, 0.0]), (3, [0.0, 7.0, 1.0])])
def test_buffers_follow_the_samples_whatever_the_losses_weigh(shards: int, weights: list[float]) -> None:
    found, expected = buffers_with_weights(weights, shards), buffers_with_weights(None, shards)
    assert all(map(torch.equal, found, expected))
    assert float(found[0].abs().sum()) > 0


class Later(nn.Module):
    """A batch norm that forward calls not at all in the first step, once in the second, twice in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, rows: torch.Tensor, calls: int) -> torch.Tensor:
        for number in range(calls):
            self.norm(rows + number)
        return self.last(rows).mean()  # type: ignore[no-any-return]


def call_later() -> list[torch.Tensor]:
    with dl.join_world(seed=0) as world:
        model = Later().double()
        rows = torch.arange(36.0, dtype=torch.float64).reshape(12, 3)
        means = []
        for step in dl.Loop(dl.Batches(rows, 4, world, shuffle=False), 1, state={"model": model}, progress=False):
            for shard in step:
                step.backward(model(shard, step.iteration - 1))
            step.fold()
            means.append(torch.as_tensor(model.norm.running_mean).clone())
        return means


@pytest.mark.quick_on_gpus
def test_a_layer_that_is_called_more_often_from_some_step_on_is_followed(on_ranks: OnRanks) -> None:
    rows = torch.arange(36.0, dtype=torch.float64).reshape(3, 4, 3).mean(1)
    second = 0.1 * rows[1]
    third = 0.9 * (0.9 * second + 0.1 * rows[2]) + 0.1 * (rows[2] + 1)
    for found in on_ranks(2, call_later):
        for one, other in zip(found, (torch.zeros(3), second, third), strict=True):
            assert torch.allclose(one, other.double(), rtol=1e-12)


class TwoPrecisions(nn.Module):
    """The same rows go through a layer of float32 and one of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.wide = nn.BatchNorm1d(3), nn.BatchNorm1d(3).double()
        self.last = nn.Linear(3, 1).double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.single(rows.float()) + self.wide(rows)).mean()  # type: ignore[no-any-return]


def train_two_precisions() -> list[torch.Tensor]:
    with dl.join_world(seed=0) as world:
        model = TwoPrecisions()
        rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        for step in dl.Loop(dl.Batches(rows, 12, world, shards=4), 1, state={"model": model}, progress=False):
            for shard in step:
                step.backward(model(shard))
            step.fold()
        found = model.single.running_mean, model.wide.running_mean, model.wide.running_var
        return [torch.as_tensor(one).clone() for one in found]


def test_a_layer_of_float64_beside_one_of_float32_keeps_its_digits(on_ranks: OnRanks) -> None:
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mean, variance = 0.1 * rows.mean(0), 0.9 + 0.1 * rows.var(0)
    for single, double, deviation in on_ranks(2, train_two_precisions):
        assert torch.allclose(single.double(), mean, rtol=1e-5)
        assert torch.allclose(double, mean, rtol=1e-12)
        assert torch.allclose(deviation, variance, rtol=1e-12)


def test_a_shard_has_room_for_as_many_calls_as_its_layers_had() -> None:
    layers = {"once": nn.BatchNorm1d(3), "twice": nn.BatchNorm1d(3), "never": nn.BatchNorm1d(3)}
    statistics = BatchNormStatistics(layers)
    try:
        statistics.open()
        captures = statistics.recording()
        for name in ("once", "twice", "twice"):
            layers[name](torch.randn(4, 3))
        assert captures.calls == [1, 2, 0]
        assert [call.counts for call in captures.by_call] == [[4, 4, 0], [0, 4, 0]]
    finally:
        statistics.release()
