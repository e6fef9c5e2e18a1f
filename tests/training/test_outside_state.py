"""Parameters that a loss trains and that are in no part of `state`: named, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import Tensors, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, loop_over, loss_of, network

pytestmark = pytest.mark.on_gpus_too

SAID = r"must be part of state.* centre of a Criterion, shape \(1,\), got gradients and was changed.*Add its module"


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, rows.sum(1, keepdim=True)) + (output.mean() - self.centre).square().sum()


def train(
    world: dl.World, folder: str, how: str, shards: int | None, since: int, count: int = 24, silent: bool = False
) -> Tensors:
    """The criterion is part of the loss from step `since` on."""
    model, criterion = network(), Criterion()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1, fused=silent)
    parts: dict[str, list[object]] = {"in state": [criterion], "in an optimizer of state": [optimizer]}
    more = parts.get(how, [])
    if how == "frozen":
        criterion.requires_grad_(False)
    if how == "not trained":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {} if folder else {"run_dir": None}
    for step in loop_over(world, folder, model, *more, shards=shards, epochs=4, count=count, **options):
        for rows in step:
            if how == "held":
                step.hold(model(rows), rows)
            elif step.iteration >= since:
                step.backward(criterion(model(rows), rows))
            else:
                step.backward(loss_of(model, rows))
        if how == "held":
            step.backward(criterion(*step.gather()))
        step.fold()
        optimizer.step()
    return values_of(model)


@pytest.mark.covers("J4")
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("since", [1, 6])
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (1, 4), (2, None), (2, 4), (3, None), (3, 7)])
@pytest.mark.quick_on_gpus
def test_a_criterion_that_is_trained_outside_of_state_is_named(
    ranks: int, shards: int | None, since: int, silent: bool, refused: Refused
) -> None:
    arguments = "outside", shards, since, 24, silent
    refused(ranks, train, *arguments, kind="RuntimeError", said=SAID)


@pytest.mark.covers("J4")
def test_it_is_named_where_the_loss_is_of_gathered_outputs(refused: Refused) -> None:
    refused(2, train, "held", None, 1, kind="RuntimeError", said=SAID)


@pytest.mark.covers("J4")
def test_it_is_named_beside_a_rank_without_a_shard(refused: Refused) -> None:
    refused(2, train, "outside", None, 1, 1, kind="RuntimeError", said=SAID, by=0)


def train_soundly(how: str, shards: int | None) -> Tensors:
    with dl.join_world(seed=0) as world:
        return train(world, "", how, shards, 1)


@pytest.mark.covers("J4")
@pytest.mark.parametrize("how", ["in state", "in an optimizer of state", "frozen", "not trained"])
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (2, None), (3, 7)])
def test_what_is_known_frozen_or_not_trained_is_no_matter(
    how: str, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    same_on_all(on_ranks(ranks, train_soundly, how, shards))


def losses_of(how: str, model: nn.Sequential, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    if how == "a new parameter in each forward":
        scale = nn.Parameter(torch.randn(1, dtype=torch.float64))
        yield (loss_of(model, rows) * scale).sum()
    elif how == "an input that wants a gradient":
        inputs = rows.clone().requires_grad_()
        loss = loss_of(model, inputs)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        yield loss + slope.square().mean()
    else:  # as in distillation
        with torch.no_grad():
            wanted = model(rows)
        yield mse_loss(model(rows), wanted + 1)


def train_otherwise(how: str) -> Tensors:
    with dl.join_world(seed=0) as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in loop_over(world, "", model, run_dir=None, epochs=4):
            for rows in step:
                for loss in losses_of(how, model, rows):
                    step.backward(loss)
            step.fold()
            optimizer.step()
        return values_of(model)


@pytest.mark.parametrize(
    "how", ["a new parameter in each forward", "an input that wants a gradient", "a target of the model"]
)
def test_other_leaves_are_no_matter(how: str, on_ranks: OnRanks) -> None:
    same_on_all(on_ranks(2, train_otherwise, how))
