"""Lower precision: bf16 autocast. How a loss scaler is used, and what it skips, is in `test_differential.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.training import loop_on, sgd

pytestmark = pytest.mark.on_gpus_too


def autocast(enabled: bool) -> AbstractContextManager[object]:
    device = torch.empty(0).device  # where this task makes its tensors
    return torch.autocast(device.type, dtype=torch.bfloat16) if enabled else nullcontext()


def image_network(channels_last: bool) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    return model.to(memory_format=torch.channels_last) if channels_last else model  # type: ignore[call-overload]


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(40, 3, 6, 6, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 5


def half_loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs).float(), labels)


def train_half(where: str, shards: int, channels_last: bool) -> tuple[Tensors, Tensors]:
    """Parameters, and what else came out; autocast around as much as `where` says, with evaluations in it."""
    with dl.join_world() as world, autocast(where == "everything"):
        model = image_network(channels_last)
        optimizer = sgd(model, 0.9)
        batches = dl.Batches(images(), 16, world, shards=shards, shuffle=False)
        values = []
        for step in loop_on(batches, model, optimizer, epochs=2):
            with autocast(where == "the pass"):
                for shard in step:
                    with autocast(where == "the backward too"):
                        with autocast(where == "the forward"):
                            loss = half_loss(model, *shard)
                        step.backward(loss)
            values.append(step.fold().loss)
            model.eval()
            half_loss(model, *images())  # a look at the outputs, with a graph, before the update
            model.train()
            optimizer.step()
            if step.is_last_of_epoch:
                with autocast(where != "nothing"):
                    found = dl.evaluate(model, batches, loss=lambda output, _: output.float().square().mean(1))
                values.append(torch.tensor(found["loss"]))
        return values_of(model), [torch.stack(values), *(one.clone() for one in model.buffers())]


def half_plainly() -> Tensors:
    """The parameters that two shards give in one process, of which each has half of a mini-batch."""
    model = image_network(channels_last=False)
    optimizer = sgd(model, 0.9)
    inputs, labels = images()
    for piece, wanted in [*zip(inputs.split(16), labels.split(16), strict=True)] * 2:
        optimizer.zero_grad()
        for shard in zip(piece.chunk(2), wanted.chunk(2), strict=True):
            with autocast(True):
                loss = half_loss(model, *shard)
            (loss * 0.5).backward()
        optimizer.step()
    return values_of(model)


@pytest.mark.covers("B10")
@pytest.mark.quick_on_gpus
def test_bf16_autocast_gives_the_bits_of_one_process_over_the_same_two_shards(on_ranks: OnRanks) -> None:
    # Two terms have one sum, whichever comes first.
    expected = on_ranks(1, half_plainly)[0]
    for parameters, _ in on_ranks(2, train_half, "the forward", 2, False):
        assert is_same(parameters, expected)


@pytest.mark.covers("B10", "J12")
@pytest.mark.parametrize(
    ("where", "channels_last"),
    [("the forward", True), ("the pass", False), ("the backward too", True), ("everything", False)],
)
def test_fixed_shards_give_the_same_bits_on_any_ranks_wherever_autocast_is(
    where: str, channels_last: bool, on_ranks: OnRanks
) -> None:
    """Its cache of weights in bf16 serves several shards, and no weight outlives its update there."""
    parameters, others = on_ranks(1, train_half, "the forward", 5, channels_last)[0]
    found = same_on_all([[*one, *other] for one, other in on_ranks(3, train_half, where, 5, channels_last)])
    assert is_same(found, [*parameters, *others])
    assert distance(on_ranks(1, train_half, "nothing", 5, channels_last)[0][0], parameters) > 1e-4  # bf16 it was
