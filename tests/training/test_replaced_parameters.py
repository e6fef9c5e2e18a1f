"""Parameters and modules that others take the place of in mid-run, recognised by identity."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import loss_of, network, samples

pytestmark = pytest.mark.both_modes

BOUND = 1e-12  # float64, some sums


def head(number: int) -> nn.Linear:
    torch.manual_seed(number)
    return nn.Linear(6, 1).double()


def replace(model: nn.Sequential, how: str, number: int) -> None:
    """Put other parameters of the same number and shapes into the model."""
    if how == "head":
        model[2] = head(number)
    elif how == "assign":
        model.load_state_dict(deepcopy(model.state_dict()), assign=True)
    elif how == "parameter":
        model[2].weight = nn.Parameter(head(number).weight.detach() * 2)
    else:  # a normalised head: a module with statistics of its own comes with it
        model[2] = nn.Sequential(nn.BatchNorm1d(6).double(), head(number))


def train(how: str, shards: int | None, differing: bool = False, at: str = "before the shards") -> Tensors:
    with dl.join_world(device="cpu", seed=0) as world:
        model = network()
        batches = dl.Batches(samples(24), 6, world, shards=shards, shuffle=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            if step.iteration == 3 and at == "before the shards":
                replace(model, how, 5 + world.rank * differing)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            optimizer.step()
            if step.iteration == 2 and at == "after the step":
                replace(model, how, 5 + world.rank * differing)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return [*values_of(model), *(one.double() for one in model.buffers())]


def train_plainly(how: str, pieces: int = 1) -> Tensors:
    """One process. With several shards batch norm is that of each shard, and its statistics are pooled by hand."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, rows in enumerate(samples(24).split(6), 1):
        if number == 3:
            replace(model, how, 5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return [*values_of(model), *(one.double() for one in model.buffers())]


@pytest.mark.covers("J4")
@pytest.mark.parametrize("at", ["before the shards", "after the step"])
@pytest.mark.parametrize("how", ["head", "assign", "parameter"])
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (1, 2), (2, None), (3, 7)])
@pytest.mark.quick_in_both_modes
def test_replaced_parameters_are_folded_like_the_ones_before(
    how: str, at: str, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    found = same_on_all(on_ranks(ranks, train, how, shards, False, at))
    assert distance(found, train_plainly(how)) <= BOUND


@pytest.mark.covers("J4")
def test_a_layer_of_batch_norm_that_comes_in_mid_run_is_watched_like_the_others(on_ranks: OnRanks) -> None:
    (one,) = on_ranks(1, train, "norm", 2)
    for ranks in (2, 3):
        assert distance(same_on_all(on_ranks(ranks, train, "norm", 2)), one) <= BOUND
    counted = [value for value in one if value.dim() == 0]
    assert counted == [torch.tensor(2.0, dtype=torch.float64)]  # steps, not shards


@pytest.mark.covers("J4")
@pytest.mark.parametrize("at", ["before the shards", "after the step"])
def test_parameters_that_differ_between_ranks_are_rank_0s_before_their_first_use(at: str, on_ranks: OnRanks) -> None:
    found = same_on_all(on_ranks(2, train, "head", None, True, at))
    assert distance(found, train_plainly("head")) <= BOUND


def add_another(differing: bool) -> Tensors:
    with dl.join_world(device="cpu", seed=0) as world:
        model, other = network(), nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(samples(24), 6, world, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, progress=False):
            if step.iteration == 2:
                nn.init.constant_(other.weight, 0.5 + world.rank * differing)
                nn.init.zeros_(other.bias)
                optimizer.add_param_group({"params": list(other.parameters())})
            for rows in step:
                output = model(rows) + (other(rows) if step.iteration > 1 else 0)
                step.backward(mse_loss(output, rows.sum(1, keepdim=True)))
            step.fold()
            optimizer.step()
        return values_of(model, other)


@pytest.mark.covers("J4")
def test_an_added_group_has_rank_0s_values_in_its_first_gradient(on_ranks: OnRanks) -> None:
    assert distance(same_on_all(on_ranks(2, add_another, True)), same_on_all(on_ranks(2, add_another, False))) == 0


def activations_made_anew() -> int:
    """Modules without parameters may come and go in each forward, on a rank without a shard they do not."""

    class Anew(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1).double()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.activation = nn.Tanh()
            return self.activation(self.layer(rows))  # type: ignore[no-any-return]

    with dl.join_world(device="cpu", seed=0) as world:
        model, folds = Anew(), set()
        loop = dl.Loop(dl.Batches(samples(4), 1, world), 1, state={"model": model}, progress=False)
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            folds.add(id(loop.fold))
        return len(folds)


def test_modules_without_tensors_change_nothing(on_ranks: OnRanks) -> None:
    assert on_ranks(2, activations_made_anew) == [1, 1]
