"""What happens to watched batch-norm layers besides plain training: errors that are caught, copies, later calls."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.batch_norm import BatchNormStatistics
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of, network, samples
from tests.support.training import train

pytestmark = [pytest.mark.covers("D4"), pytest.mark.on_gpus_too]

Tensors = list[torch.Tensor]


def buffers_of(model: nn.Module) -> Tensors:
    return [buffer.clone() for buffer in model.buffers()]


def do_beside(kind: str, norm: Any, rows: torch.Tensor) -> None:
    if kind == "forward fails":
        before = (norm.running_mean, norm.running_var, norm.momentum)
        with pytest.raises((RuntimeError, ValueError)):
            norm(torch.ones(2, 7, dtype=torch.float64))
        after = (norm.running_mean, norm.running_var, norm.momentum)
        assert all(one is other for one, other in zip(after, before, strict=True))
    elif kind:  # a copy is torch's own: its statistics move at once
        other = copy.deepcopy(norm) if kind == "deepcopy" else pickle.loads(pickle.dumps(norm))
        start = other.running_mean.clone()
        other(rows)
        assert torch.allclose(other.running_mean, 0.9 * start + 0.1 * rows.mean(0), rtol=1e-12)


def train_beside(kind: str) -> Tensors:
    """In each shard something else is done with the layer besides."""
    model = nn.Sequential(nn.BatchNorm1d(4).double(), *network())

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        do_beside(kind, model.get_submodule("0"), rows)
        return loss_of(model, rows)

    train(model, loss, shards=3)
    return buffers_of(model)


@pytest.mark.one_device("cpu", "the fake GPU's tensors cannot be pickled")
@pytest.mark.parametrize("kind", ["forward fails", "deepcopy", "pickle"])
def test_errors_that_are_caught_and_copies_leave_the_statistics_alone(kind: str, on_ranks: OnRanks) -> None:
    expected = on_ranks(2, train_beside, "")[0]
    for found in on_ranks(2, train_beside, kind):
        assert all(map(torch.equal, found, expected))


def buffers_with_weight(weight: float | None) -> Tensors:
    with dl.join_world() as world:
        model = nn.Sequential(nn.BatchNorm1d(4).double(), *network())
        for step in loop_over(world, ".", model, run_dir=None, shards=2):
            for rows in step:
                step.backward(loss_of(model, rows), weight=weight)
            step.fold()
        return buffers_of(model)


@pytest.mark.covers("D6")
def test_buffers_follow_the_samples_also_where_all_losses_weigh_0() -> None:
    found = buffers_with_weight(0.0)
    assert all(map(torch.equal, found, buffers_with_weight(None)))
    assert float(found[0].abs().sum()) > 0


class Later(nn.Module):
    """A batch norm that forward calls not at all in the first step, once in the second, twice in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number in range(int(rows[0, 0]) // 12):
            self.norm(rows + number)
        return self.last(rows)  # type: ignore[no-any-return]


def means_by_step() -> Tensors:
    rows = torch.arange(36.0, dtype=torch.float64).reshape(12, 3)
    model = Later().double()
    return train(model, loss_of, rows, 4, after_fold=lambda step, result: buffers_of(model)[0])


@pytest.mark.quick_on_gpus
def test_a_layer_that_is_called_more_often_from_some_step_on_is_followed(on_ranks: OnRanks) -> None:
    rows = torch.arange(36.0, dtype=torch.float64).reshape(3, 4, 3).mean(1)
    second = 0.1 * rows[1]
    third = 0.9 * (0.9 * second + 0.1 * rows[2]) + 0.1 * (rows[2] + 1)
    for found in on_ranks(2, means_by_step):
        assert torch.allclose(torch.stack(found), torch.stack([0 * second, second, third]), rtol=1e-12)


class TwoPrecisions(nn.Module):
    """The same rows go through a layer of float32 and one of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.BatchNorm1d(4)
        self.wide = nn.BatchNorm1d(4).double()
        self.last = nn.Linear(4, 1).double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.single(rows.float()) + self.wide(rows))  # type: ignore[no-any-return]


def train_two_precisions() -> Tensors:
    model = TwoPrecisions()
    train(model, batch_size=24, shards=4)
    return buffers_of(model)


def test_a_layer_of_float64_beside_one_of_float32_keeps_its_digits(on_ranks: OnRanks) -> None:
    rows = samples(24)
    statistics = torch.stack([0.1 * rows.mean(0), 0.9 + 0.1 * rows.var(0)])
    for single_mean, single_variance, _, mean, variance, _ in on_ranks(2, train_two_precisions):
        assert torch.allclose(torch.stack([single_mean, single_variance]).double(), statistics, rtol=1e-5)
        assert torch.allclose(torch.stack([mean, variance]), statistics, rtol=1e-12)


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
