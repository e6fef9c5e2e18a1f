"""Parameters and modules that others take the place of in mid-run, recognised by identity."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, same_on_all, values_of
from tests.support.harness import OnRanks, in_world
from tests.support.refusals import Refused, loop_over, loss_of, network, samples
from tests.support.training import sgd, take

pytestmark = [pytest.mark.covers("J4"), pytest.mark.on_gpus_too]

BOUND = 1e-12  # float64, some sums


def head(number: int) -> nn.Linear:
    torch.manual_seed(number)
    return nn.Linear(6, 1).double()


def change(model: Any, how: str, rank: int = 0) -> None:
    """Put other parameters or modules into the model."""
    if how == "head":
        model[2] = head(5)
    elif how == "another head on each rank":
        model[2] = head(5 + rank)
    elif how == "assign":
        model.load_state_dict(deepcopy(model.state_dict()), assign=True)
    elif how == "parameter":
        model[2].weight = nn.Parameter(head(5).weight.detach() * 2)
    elif how == "norm":  # a module with statistics of its own comes with the head
        model[2] = nn.Sequential(nn.BatchNorm1d(6).double(), head(5))
    elif how == "made":
        model[2].scale = nn.Parameter(torch.ones(()))
    elif how == "buffer":
        model.append(nn.BatchNorm1d(1, affine=False).double().eval())
    elif how == "table":
        model[2].register_buffer("table", torch.ones(6))
    elif how == "removed":
        model[2].bias = None
    else:
        model[1] = nn.Tanh()


def train(how: str, at: str, shards: int | None) -> Tensors:
    with dl.join_world() as world:
        model = network()
        optimizer = sgd(model, 0.9)
        for step in loop_over(world, "", model, shards=shards):
            if (step.iteration, at) == (3, "before the shards"):
                change(model, how, world.rank)
                optimizer = sgd(model, 0.9)
            take(step, model)
            optimizer.step()
            if (step.iteration, at) == (2, "after the step"):
                change(model, how, world.rank)
                optimizer = sgd(model, 0.9)
        return [*values_of(model), *(one.double() for one in model.buffers())]


def train_plainly(how: str) -> Tensors:
    model = network()
    optimizer = sgd(model, 0.9)
    for number, rows in enumerate(samples(24).split(6), 1):
        if number == 3:
            change(model, how)
            optimizer = sgd(model, 0.9)
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return values_of(model)


@pytest.mark.parametrize(("at", "ranks", "shards"), [("before the shards", 3, 7), ("after the step", 2, None)])
@pytest.mark.parametrize("how", ["head", "another head on each rank", "assign", "parameter"])
@pytest.mark.quick_on_gpus
def test_replaced_parameters_are_rank_0s_and_folded_like_the_ones_before(
    how: str, at: str, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    assert distance(same_on_all(on_ranks(ranks, train, how, at, shards)), train_plainly(how)) <= BOUND


def test_a_layer_of_batch_norm_that_comes_in_mid_run_is_watched_like_the_others(on_ranks: OnRanks) -> None:
    (one,) = on_ranks(1, train, "norm", "before the shards", 2)
    assert distance(same_on_all(on_ranks(3, train, "norm", "before the shards", 2)), one) <= BOUND
    assert [float(value) for value in one if value.dim() == 0] == [2.0]  # steps, not shards


# -- in a forward ------------------------------------------------------------------------------------------


class Growing(nn.Sequential):
    """Makes or replaces a part of itself in its third forward."""

    def __init__(self, how: str) -> None:
        super().__init__(*network())
        self._how = how
        self._forwards = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self._forwards += 1
        if self._forwards == 3:
            change(self, self._how)
        return super().forward(rows)  # type: ignore[no-any-return, no-untyped-call]


IN_FORWARD = {
    "made": r"model\.2\.scale is new or was replaced in between",
    "parameter": r"model\.2\.weight is new or was replaced in between",
    "head": r"model\.2\.weight is new or was replaced in between",
    "buffer": r"model\.3\.\w+ is new or was replaced in between",
    "removed": r"One was removed in between",
}


def grow_in_forward(world: dl.World, folder: str | None, how: str, shards: int | None, count: int) -> int:
    """The number of the folds that the steps had."""
    model = Growing(how)
    folds = set()
    loop = loop_over(world, folder, model, count=count, shards=shards, epochs=4)
    for step in loop:
        take(step, model)
        folds.add(id(loop.fold))
    return len(folds)


@pytest.mark.parametrize("how", IN_FORWARD)
@pytest.mark.parametrize(
    ("ranks", "shards", "count"),
    [(3, 7, 24), (2, None, 1), (1, None, 24)],
)
@pytest.mark.quick_on_gpus
def test_a_parameter_that_a_forward_makes_or_replaces_is_refused_in_that_step(
    how: str, ranks: int, shards: int | None, count: int, refused: Refused
) -> None:
    said = f"must stay the same ones.* {IN_FORWARD[how]}.*Make it before the Loop, by one forward"
    refused(ranks, grow_in_forward, how, shards, count, kind="RuntimeError", said=said, by=None)


@pytest.mark.parametrize("how", ["activation", "table"])
def test_modules_without_tensors_and_buffers_that_stay_change_nothing(how: str, on_ranks: OnRanks) -> None:
    assert on_ranks(2, in_world, grow_in_forward, None, how, None, 1) == [1, 1]


class Counting(nn.Sequential):
    """Makes a buffer in its first forward, and another one of it in each."""

    seen: torch.Tensor | None

    def __init__(self, how: str) -> None:
        super().__init__(*network())
        self.how = how
        self.register_buffer("seen", None)
        self.forwards = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.seen is None:
            with torch.inference_mode(self.how == "in inference mode"):
                self.seen = torch.zeros(1)
        elif self.how == "in place":
            self.seen += 1
        elif self.how in ("between steps", "in inference mode", "before, in inference mode"):
            pass
        elif self.how == "assigned":
            self.seen = self.seen + 1
        elif self.how == "the same again":
            self.seen = self.seen.clone()
        else:
            self.seen = torch.zeros(self.forwards)
        return super().forward(rows)  # type: ignore[no-any-return, no-untyped-call]


def count_in_forward(world: dl.World, folder: str | None, how: str) -> int:
    model = Counting(how)
    if how == "before, in inference mode":
        with torch.inference_mode():
            model.seen = torch.zeros(1)
    loop = loop_over(world, folder, model, count=24)
    for step in loop:
        take(step, model)
        if how == "between steps" and model.seen is not None:
            model.seen += 1
    return loop.iteration


@pytest.mark.parametrize("how", ["in place", "assigned"])
@pytest.mark.quick_on_gpus
def test_a_buffer_that_a_forward_makes_and_changes_is_refused(how: str, refused: Refused) -> None:
    refused(
        2,
        count_in_forward,
        how,
        kind="RuntimeError",
        said=r"model\.seen was made later\. Register it with its",
        by=None,
    )


@pytest.mark.parametrize(
    "how", ["the same again", "of another shape", "between steps", "in inference mode", "before, in inference mode"]
)
def test_a_table_that_a_forward_makes_may_be_made_again_or_changed_between_steps(how: str, on_ranks: OnRanks) -> None:
    assert on_ranks(2, in_world, count_in_forward, None, how) == [4, 4]


def lose_buffers() -> Tensors:
    with dl.join_world() as world:
        model = network()
        optimizer = sgd(model, 0.9)
        prune.random_unstructured(model[2], "weight", 0.5)
        model[0].register_buffer("seen", torch.zeros(()))
        for step in loop_over(world, "", model):
            if step.iteration == 3:
                prune.remove(model[2], "weight")
                del model[0].seen
            take(step, model)
            optimizer.step()
        return values_of(model)


def test_buffers_can_be_removed_between_two_steps(on_ranks: OnRanks) -> None:
    (one,) = on_ranks(1, lose_buffers)
    assert distance(same_on_all(on_ranks(2, lose_buffers)), one) <= BOUND
