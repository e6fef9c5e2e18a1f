"""train() and eval(): all ranks may change them alike; what differs is in test_refused_differences.py."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, gradients_of, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import loop_over, loss_of
from tests.support.training import take

pytestmark = [pytest.mark.covers("D6"), pytest.mark.on_gpus_too]


def network(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), middle, nn.Linear(6, 1)).double()


def alternate(how: str, shards: int | None, count: int) -> tuple[Tensors, int]:
    """All ranks change modes alike; a rank without a shard does so later, in its next shard."""
    with dl.join_world(seed=0) as world:
        model = network(nn.Dropout(0.2))
        layouts = list[object]()
        loop = loop_over(world, "", model, shards=shards, epochs=6, count=count)
        for step in loop:
            for _ in range(2):  # passes
                for rows in step:
                    if how == "once":
                        model.train(step.iteration < 3)
                    else:
                        model[1].train((step.iteration + step.passes) % 2 == 0)
                    step.backward(loss_of(model, rows))
                step.fold()
                if not layouts or loop.fold._rows is not layouts[-1]:
                    layouts.append(loop.fold._rows)
        return gradients_of(model), len(layouts)


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(("how", "ranks", "shards", "count"), [("once", 2, None, 7), ("each pass", 3, 4, 24)])
def test_modes_that_all_ranks_change_alike_cost_one_agreement(
    how: str, ranks: int, shards: int | None, count: int, on_ranks: OnRanks
) -> None:
    results = on_ranks(ranks, alternate, how, shards, count)
    same_on_all([gradients for gradients, _ in results])
    assert [layouts for _, layouts in results] == [2] * ranks  # one for each mode, in two or in 48 passes


def left_in_evaluation(at: int, whole: bool) -> list[str]:
    """What is said where the model, or a layer of it, is in evaluation mode from a step on."""
    with dl.join_world(seed=0) as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network(nn.Dropout(0.2))
        for step in loop_over(world, "", model, epochs=2):
            if step.iteration == at:
                (model if whole else model[1]).eval()
            take(step, model)
        return [str(one.message) for one in caught if "evaluation mode" in str(one.message)]


@pytest.mark.parametrize(("at", "whole", "lines"), [(3, True, 1), (1, True, 0), (3, False, 0)])
def test_a_model_that_stays_in_evaluation_mode_is_said_once(
    at: int, whole: bool, lines: int, on_ranks: OnRanks
) -> None:
    said, nothing = on_ranks(2, left_in_evaluation, at, whole)
    assert len(said) == lines
    assert nothing == []
    assert all("From step 3 on model is in evaluation mode" in line for line in said)
