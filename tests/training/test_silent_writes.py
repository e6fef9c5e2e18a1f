"""Buffers that are written without torch's version counter: found, and reduced by their rule or refused.

Compared with 1e-12: float64, sums of some ten terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ddp_loop as dl
from ddp_loop.training import Buffers, find_buffers
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused

pytestmark = pytest.mark.on_gpus_too

State = dict[str, torch.Tensor]


class OwnNorm(nn.Module):
    """Batch norm as many write it; its momentum has a name of its own, and is given by place or by name."""

    running_mean: torch.Tensor
    running_var: torch.Tensor
    scale: torch.Tensor | None = None

    def __init__(self, channels: int, call: str) -> None:
        super().__init__()
        self.call, self.decay = call, 0.3
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean, var = self.running_mean, self.running_var
        if self.call == "torch":
            return torch.batch_norm(rows, None, None, mean, var, self.training, self.decay, 1e-5, False)
        if self.call == "places":
            return F.batch_norm(rows, mean, var, None, None, self.training, self.decay)
        return F.batch_norm(rows, mean, var, momentum=self.decay, training=self.training)


def rows_of() -> torch.Tensor:
    return torch.randn(22, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def network(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 1)).double()


def norm_of(call: str) -> nn.Module:
    return nn.BatchNorm1d(4, momentum=0.3, affine=False) if call == "torch's layer" else OwnNorm(4, call)


def train(call: str, shards: int | None) -> State:
    with dl.join_world(seed=0) as world:
        model = network(norm_of(call))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(rows_of(), 11, world, shards=shards)
        for step in dl.Loop(batches, 3, state={"model": model}, progress=False, check_replicas_every=1):
            for rows in step:
                step.backward(model(rows).square().mean())
            step.fold()
            optimizer.step()
        assert not model[1]._forward_hooks
        return {name: tensor.clone() for name, tensor in model.state_dict().items() if "tracked" not in name}


@pytest.mark.covers("D4")
@pytest.mark.parametrize("call", ["names", "places", "torch"])
@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (2, None), (2, 4), (3, 4), (3, 1)])
@pytest.mark.slow
def test_a_norm_layer_of_ones_own_gives_the_bits_of_torchs_layer(
    call: str, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    expected = on_ranks(ranks, train, "torch's layer", shards)[0]
    for found in on_ranks(ranks, train, call, shards):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def train_on_a_rank_without_rows() -> State:
    """Mini-batches of 2 over 3 ranks: the third never learns the momentum from a call."""
    with dl.join_world(seed=0) as world:
        model = network(OwnNorm(4, "names"))
        batches = dl.Batches(rows_of().repeat_interleave(2, 0)[:8], 4, world, shards=2, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False, check_replicas_every=1):
            for rows in step:
                step.backward(model(rows).square().mean())
            step.fold()
        return dict(model.state_dict())


@pytest.mark.covers("D4", "C6")
def test_a_rank_without_shards_moves_own_norms_alike(on_ranks: OnRanks) -> None:
    results = on_ranks(3, train_on_a_rank_without_rows)
    assert float(results[2]["1.running_mean"].abs().sum()) > 0
    for found in results:
        assert all(torch.equal(one, results[0][name]) for name, one in found.items())


def train_scripted(world: dl.World, folder: str, rules: dict[str, Any], shards: int | None) -> State:
    model = torch.jit.script(network(nn.BatchNorm1d(4)))
    batches = dl.Batches(rows_of(), 11, world, shards=shards, shuffle=False)
    for step in dl.Loop(
        batches, 1, state={"model": model}, progress=False, buffer_reduction=rules, check_replicas_every=1
    ):
        for rows in step:
            step.backward(model(rows).square().mean())
        step.fold()
    return {name: tensor.clone() for name, tensor in model.named_buffers()}


def train_scripted_in_a_world(rules: dict[str, Any], shards: int | None) -> State:
    with dl.join_world(seed=0) as world:
        return train_scripted(world, "", rules, shards)


SCRIPTED = "ignore:.*torch.jit:DeprecationWarning"


@pytest.mark.covers("D4")
@pytest.mark.filterwarnings(SCRIPTED)
def test_scripted_batch_norm_over_several_shards_is_refused(refused: Refused) -> None:
    said = r"of model\.1\.running_mean .* Call F\.batch_norm .* 'model\.1\.running_var': 'mean'"
    refused(2, train_scripted, {}, None, kind="ValueError", said=said, by=ALL)


@pytest.mark.covers("D6")
@pytest.mark.filterwarnings(SCRIPTED)
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (2, 4), (1, 1), (2, 1)])
def test_scripted_batch_norm_with_a_rule_is_pooled_by_it(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    mean = torch.zeros(4, dtype=torch.float64)
    first = network(nn.Identity())[0]
    with torch.no_grad():
        for rows in rows_of().split(11):
            mean = 0.9 * mean + 0.1 * first(rows).mean(0)
    rules = {"model.1.running_mean": "mean", "model.1.running_var": "mean"}
    for found in on_ranks(ranks, train_scripted_in_a_world, rules, shards):
        assert torch.allclose(found["1.running_mean"], mean, rtol=1e-12, atol=1e-14)
        assert int(found["1.num_batches_tracked"]) == 2


class Codebook(nn.Module):
    """Buffers written through .data, as moving averages of codebooks are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("level", torch.full((2,), 4.0, dtype=torch.float64))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))
        self.register_buffer("constant", torch.tensor([float("nan"), 0.1]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.get_buffer("level").data.mul_(0.5).add_(rows.mean())
        self.get_buffer("begun").data.fill_(True)
        return self.weight * rows.mean()


def train_codebook(shards: int | None, between: bool) -> State:
    with dl.join_world() as world:
        model = Codebook()
        batches = dl.Batches(torch.arange(6.0, dtype=torch.float64), 3, world, shards=shards, shuffle=False)
        loop = dl.Loop(
            batches,
            1,
            state={"model": model},
            buffer_reduction={"model.level": "mean"},
            progress=False,
            check_replicas_every=1,
        )
        for step in loop:
            for rows in step:
                step.backward(model(rows))
            step.fold()
            if between:
                model.get_buffer("level").data.add_(1.0)
        return dict(model.named_buffers())


@pytest.mark.covers("D6")
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize(("ranks", "shards"), [(1, 2), (2, None), (3, 2), (3, 3), (1, 1)])
@pytest.mark.quick_on_gpus
def test_buffers_written_through_data_follow_their_rules(
    ranks: int, shards: int | None, between: bool, on_ranks: OnRanks
) -> None:
    # Each shard halves the level and adds its mean; weighted by samples that adds the mini-batch's mean.
    level = (4.0 / 2 + 1.0 + between) / 2 + 4.0 + between
    for found in on_ranks(ranks, train_codebook, shards, between):
        assert torch.allclose(found["level"], torch.full((2,), level, dtype=torch.float64), rtol=1e-12)
        assert bool(found["begun"])
        assert torch.equal(found["constant"][1:], torch.tensor([0.1]))


def test_a_constant_buffer_of_nan_does_not_travel() -> None:
    buffers = Buffers(find_buffers({"model": Codebook()}, set(), {}))
    buffers.open()
    assert buffers.take() == {}


def late_buffers() -> tuple[Codebook, Buffers]:
    """As on a GPU, where the host would wait for a buffer's bits."""
    model = Codebook()
    buffers = Buffers(find_buffers({"model": model}, set(), {}))
    for buffer in buffers.found.values():
        buffer.late = True
    return model, buffers


@pytest.mark.covers("D6")
def test_where_the_host_would_wait_the_first_pass_finds_what_every_later_one_takes() -> None:
    model, buffers = late_buffers()
    level = model.get_buffer("level")
    for number in range(5):
        level.data.fill_(float(number))  # between the passes
        buffers.open()
        level.data.add_(10.0)
        taken = buffers.take()
        assert taken.keys() == {"model.level"}
        assert taken["model.level"].tolist() == [10.0 + number] * 2
        assert level.tolist() == [number] * 2


@pytest.mark.covers("D6")
@pytest.mark.parametrize("begins", [1, 2])
def test_where_the_host_would_wait_a_write_that_is_found_later_is_an_error(begins: int) -> None:
    model, buffers = late_buffers()
    for number in range(3):
        buffers.open()
        if number >= begins:
            model.get_buffer("level").data.add_(1.0)
        if number == begins:
            break
        assert buffers.take() == {}
    if begins == 1:  # passes 1, 2, 4, 8, ... look
        with pytest.raises(RuntimeError, match=r"It did not for model\.level, first seen in pass 2"):
            buffers.take()
    else:
        assert buffers.take() == {}


@pytest.mark.parametrize("write", [lambda buffer: buffer.data.add_(1), lambda buffer: buffer.add_(1)])
def test_a_recomputation_leaves_buffers_alone_however_they_are_written(write: Callable[[torch.Tensor], object]) -> None:
    model = nn.Module()
    model.register_buffer("count", torch.ones(2))
    buffers = Buffers(find_buffers({"model": model}, set(), {}))
    with buffers.untouched():
        write(model.get_buffer("count"))
    assert model.get_buffer("count").tolist() == [1.0, 1.0]
