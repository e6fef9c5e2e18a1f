"""Statistics of batch-norm layers where losses weigh nothing or dtypes differ, and the room that calls get."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from ddp_loop.batch_norm import BatchNormStatistics
from tests.support.comparing import Tensors, buffers_of, is_same
from tests.support.dispatching import Dispatched
from tests.support.harness import OnRanks
from tests.support.refusals import network, samples
from tests.support.training import loop_on, train

pytestmark = [pytest.mark.covers("D4"), pytest.mark.on_gpus_too]


def buffers_with_weight(weight: float | None) -> Tensors:
    model = nn.Sequential(nn.BatchNorm1d(4).double(), *network())
    train(model, shards=2, weight=lambda step: weight)
    return buffers_of(model)


@pytest.mark.covers("D6")
def test_buffers_follow_the_samples_also_where_all_losses_weigh_0() -> None:
    found = buffers_with_weight(0.0)
    assert is_same(found, buffers_with_weight(None))
    assert float(found[0].abs().sum()) > 0


def test_the_shards_of_a_pass_use_the_memory_of_the_pass_before() -> None:
    layer = nn.BatchNorm1d(3)
    statistics = BatchNormStatistics({"layer": layer})
    try:
        former = statistics.recording()
        layer(torch.randn(4, 3))
        statistics.open([former])
        captures = [statistics.recording() for _ in range(2)]
        assert captures[0].by_call[0].whole is former.by_call[0].whole is not captures[1].by_call[0].whole
        for each in captures:
            assert each.by_call[0].counts == [0]
            assert not each.by_call[0].whole.any()
        layer.to(torch.float64)
        statistics.open(captures)
        assert statistics.recording().by_call[0].whole.dtype == torch.float64
    finally:
        statistics.release()


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


@pytest.mark.quick_on_gpus
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


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_backward_copies_running_statistics_only_where_it_recomputes_a_forward(
    world: dl.World, use_reentrant: bool | None
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    plain = copy.deepcopy(model)
    rows = torch.randn(8, 4, requires_grad=True)
    plain(rows)
    copied: list[int] = []

    def note(operator: Any, arguments: Any, result: Any) -> None:
        if operator is torch.ops.aten._foreach_copy_.default:
            copied.extend(one.data_ptr() for one in arguments[1])

    for step in loop_on(dl.Batches(rows, 8, world, shuffle=False), model):
        for given in step:
            given.requires_grad_()
            loss = (
                model(given) if use_reentrant is None else checkpoint(model, given, use_reentrant=use_reentrant)
            ).mean()
            with Dispatched(note):
                step.backward(loss)
        step.fold()
    assert is_same(buffers_of(model), buffers_of(plain))
    assert (model.get_buffer("1.running_mean").data_ptr() in copied) is (use_reentrant is not None)
