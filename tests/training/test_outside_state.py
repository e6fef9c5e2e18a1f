"""Parameters that a loss trains and that are in no part of `state`: named, on all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.harness import OnRanks, in_world
from tests.support.refusals import Refused, loop_over, loss_of, network
from tests.support.training import LossOf, sgd, train

pytestmark = pytest.mark.covers("J4")

SAID = r"must be part of state.* centre of a Criterion, shape \(1,\), got gradients and was changed.*Add its module"


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, rows.sum(1, keepdim=True)) + (output.mean() - self.centre).square().sum()


def train_criterion(
    world: dl.World,
    folder: str | None,
    how: str,
    shards: int | None,
    since: int = 1,
    fused: bool = False,
    count: int = 24,
    epochs: int = 4,
) -> None:
    """The criterion is part of the loss from step `since` on."""
    model = network()
    criterion = Criterion().requires_grad_(how != "frozen")
    trained = [*model.parameters(), *([] if how == "not trained" else criterion.parameters())]
    optimizer = torch.optim.SGD(trained, lr=0.1, fused=fused)
    more: dict[str, object] = {"in state": criterion, "in an optimizer of state": optimizer}
    known = [more[how]] if how in more else []
    for step in loop_over(world, folder, model, *known, shards=shards, epochs=epochs, count=count):
        for rows in step:
            if how == "held":
                step.hold(model(rows), rows)
            else:
                step.backward(criterion(model(rows), rows) if step.iteration >= since else loss_of(model, rows))
        if how == "held":
            step.backward(criterion(*step.gather()))
        step.fold()
        optimizer.step()


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, ("outside", None)),
        (2, ("outside", 4, 6, True)),
        (3, ("outside", None, 6)),
        (3, ("outside", 7, 1, True)),
        (2, ("held", None)),  # the loss is of gathered outputs
        (2, ("outside", None, 1, False, 1)),  # rank 1 has no shard
        (1, ("outside", None, 130, False, 24, 50)),  # in 200 steps: found in step 192
    ],
)
def test_a_criterion_that_is_trained_outside_of_state_is_named(
    ranks: int, how: tuple[str, int], refused: Refused
) -> None:
    refused(ranks, train_criterion, *how, kind="RuntimeError", said=SAID, by=None)


@pytest.mark.parametrize("how", ["in state", "in an optimizer of state", "frozen", "not trained"])
def test_what_is_known_frozen_or_not_trained_is_no_matter(how: str, on_ranks: OnRanks) -> None:
    on_ranks(3, in_world, train_criterion, None, how, 7)


def scaled(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """By a parameter that each forward makes."""
    return loss_of(model, rows) * nn.Parameter(torch.ones((), dtype=torch.float64))


def with_slope(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """By an input that wants a gradient."""
    inputs = rows.clone().requires_grad_()
    loss = loss_of(model, inputs)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + slope.square().mean()


def distilled(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = model(rows)
    return mse_loss(model(rows), wanted + 1)


def train_otherwise(loss: LossOf) -> None:
    model = network()
    train(model, loss, optimizer=sgd(model), epochs=4)


@pytest.mark.parametrize("loss", [scaled, with_slope, distilled])
def test_other_leaves_are_no_matter(loss: LossOf, on_ranks: OnRanks) -> None:
    on_ranks(2, train_otherwise, loss)


def warned(world: dl.World, how: str) -> list[str]:
    """What is said of a loop without gradients in its first step."""
    model = network()
    optimizer = sgd(model)
    options: dict[str, Any] = {"on_nonfinite": "skip"} if how == "not finite" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = loop_over(world, "", model, optimizer, epochs=1, **options)
        if how == "replaced":
            model = network()
        for step in loop:
            for rows in step:
                loss = loss_of(model, rows)
                is_bad = how == "not finite" and step.iteration == 1
                step.backward(loss * torch.nan if is_bad else loss, weight=float(how != "weightless"))
            step.fold()
            optimizer.step()
    return [str(one.message) for one in caught if one.filename == __file__]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_that_is_replaced_after_the_loop_is_said_to_get_no_gradient(ranks: int, on_ranks: OnRanks) -> None:
    [[said], *others] = on_ranks(ranks, in_world, warned, "replaced")
    assert said.startswith("No parameter of state got a gradient in step 1, so optimizer.step() changes none of them.")
    assert others == [[]] * (ranks - 1)
    assert on_ranks(ranks, in_world, warned, "as it is") == [[]] * ranks
    assert on_ranks(ranks, in_world, warned, "not finite") == [[]] * ranks
    [[of_weights], *_] = on_ranks(ranks, in_world, warned, "weightless")
    assert of_weights.startswith("All weights of a mini-batch are 0")
