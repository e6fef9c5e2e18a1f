"""Running statistics recomputed over a data set, on ranks, as torch's `update_bn` makes them in one process.

Compared with 1e-12: float64, sums of some ten terms.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.optim.swa_utils import update_bn as torchs_update_bn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import Refused
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("D4")

State = dict[str, torch.Tensor]


def rows_of(count: int = 31) -> torch.Tensor:
    return 5 + torch.randn(count, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def network(dropout: float = 0.0) -> nn.Module:
    """Linear layers alone before each batch norm, so that the shards' own statistics do not matter to the next."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3))
    second = nn.Sequential(nn.Dropout(dropout), nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
    return Both(first, second).double()


class Both(nn.Module):
    """Two parallel branches, and a buffer that counts calls."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        self.get_buffer("level").data.add_(rows.mean())
        return self.first(rows).sum(1) + self.second(rows).sum(1)  # type: ignore[no-any-return]


def averaged() -> AveragedModel:
    model = AveragedModel(network())
    for _ in range(2):
        model.update_parameters(network())
    return model


def update(shards: int | None, dropout: float = 0.0, **keywords: Any) -> State:
    with dl.join_world(seed=0) as world:
        model = network(dropout) if dropout else averaged()
        model.eval()
        stream = torch.get_rng_state()
        dl.update_bn(model, dl.Batches(rows_of(), 11, world, shards=shards, **keywords))
        assert torch.equal(torch.get_rng_state(), stream)
        assert not any(module.training for module in model.modules())
        assert [layer.momentum for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)] == [
            0.3,
            0.1,
        ]
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (1, 4), (2, None), (3, None), (3, 4), (2, 1)])
def test_running_statistics_are_those_of_torchs_update_bn_in_one_process(
    ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    model = averaged()
    torchs_update_bn(rows_of().split(11), model)
    expected = model.state_dict()
    for found in on_ranks(ranks, update, shards, shuffle=False):
        for name, value in found.items():
            if "calls" in name or "level" in name:
                assert not value.any(), name  # torch's go on; here each rank would have another value
            else:
                assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize(("part", "shares"), [("", None), ("module.first", (0, 1, 0))])
def test_synced_layers_take_part(part: str, shares: tuple[int, ...] | None, on_ranks: OnRanks) -> None:
    model = averaged()
    torchs_update_bn(rows_of(20).split(6), model)
    for found in on_ranks(3, update_synced, part, shares):
        for name, value in found.items():
            if "running" in name or "tracked" in name:
                assert torch.allclose(value, model.state_dict()[name], rtol=1e-12, atol=1e-14), name


def update_synced(part: str, shares: tuple[int, ...] | None) -> State:
    """The last mini-batch has 2 rows over 3 ranks. The layers of a part of the model are synced."""
    with dl.join_world(seed=0) as world:
        model = averaged()
        dl.sync_batch_norm(model.get_submodule(part), world)
        dl.update_bn(model, dl.Batches(rows_of(20), 6, world, shares=shares, shuffle=False))
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.both_exchanges
def test_fixed_shards_give_the_same_bits_on_any_number_of_ranks(on_ranks: OnRanks) -> None:
    expected = on_ranks(1, update, 4, 0.5)[0]
    assert float(expected["second.2.running_var"].sum()) > 0
    for ranks in (2, 3):
        for found in on_ranks(ranks, update, 4, 0.5):
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def update_with_dicts() -> State:
    with dl.join_world() as world:
        model = averaged()
        batches = dl.Batches({"rows": rows_of()}, 11, world, shuffle=False)
        dl.update_bn(model, batches, forward=lambda model, data: model(data["rows"]))
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_forward_says_what_the_model_is_given(on_ranks: OnRanks) -> None:
    expected = on_ranks(1, update, None, shuffle=False)[0]
    found = on_ranks(2, update_with_dicts)[1]
    name = "module.first.1.running_var"
    assert torch.allclose(found[name], expected[name], rtol=1e-12)


def update_wrongly(world: dl.World, folder: str, kind: str) -> None:
    model: nn.Module = network()
    if kind == "wrapped":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "synced":
        dl.sync_batch_norm(model, world)
    dl.update_bn(model, dl.Batches(rows_of(), 11, world, shards=4 if kind == "synced" else None))


@pytest.mark.parametrize(("kind", "said"), [("wrapped", "DistributedDataParallel"), ("synced", "Got 4 shards on 2")])
def test_what_cannot_be_right_is_refused(kind: str, said: str, refused: Refused) -> None:
    refused(2, update_wrongly, kind, kind="ValueError", said=said)


def over_a_single_sample(world: dl.World, folder: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    dl.update_bn(model, dl.Batches(torch.rand(3, 2), 3, world, shards=1))
    dl.update_bn(model, dl.Batches(torch.rand(3, 2), 3, world))


def test_a_shard_of_one_sample_is_refused_with_the_remedy(refused: Refused) -> None:
    errors = refused(2, over_a_single_sample, kind="ValueError", said="more than 1 value per channel", by=1)
    assert "has a single sample. Change batch_size, or pass Batches shards=1" in errors[1].text


def fail_in_forward(world: dl.World, folder: str) -> None:
    def forward(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        if world.rank == 1:
            raise ArithmeticError("of rank 1")
        return model(data)  # type: ignore[no-any-return]

    dl.update_bn(network(), dl.Batches(rows_of(), 11, world), forward=forward)


def test_an_error_on_one_rank_is_raised_on_all(refused: Refused) -> None:
    refused(2, fail_in_forward, kind="ArithmeticError", said="of rank 1", by=1)


def go_on_after() -> tuple[State, bool]:
    """Training continues after it as after torch's own `update_bn`."""
    with dl.join_world(seed=0) as world:
        model = network()
        batches = dl.Batches(rows_of(), 11, world, shards=4, shuffle=False)
        loop = loop_on(batches, model, epochs=2, buffer_reduction={"model.level": "mean"}, check_replicas_every=1)
        for epoch in loop.epochs():
            for step in epoch:
                for rows in step:
                    step.backward(model(rows).mean())
                step.fold()
            dl.update_bn(model, batches)
        norm = model.get_submodule("first.1")
        assert isinstance(norm, nn.BatchNorm1d)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}, bool(norm._forward_hooks)


def test_it_may_come_between_the_epochs_of_a_loop(on_ranks: OnRanks) -> None:
    (found, hooked), (other, _) = on_ranks(2, go_on_after)
    assert all(torch.equal(one, other[name]) for name, one in found.items())
    assert int(found["first.1.num_batches_tracked"]) == 3
    assert not hooked
