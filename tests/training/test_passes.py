"""Passes that repeat a step's shards, as the closures of LBFGS do.

The network has no batch norm, so one device on the whole mini-batch is the truth; in float64 the bound is 1e-12
relative to the largest element of each tensor: no sum here has more than some hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import BOUND, loop_over, loss_of, network, samples
from tests.support.training import take


def lbfgs() -> tuple[nn.Module, torch.optim.LBFGS]:
    model = network()
    return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def close_in() -> tuple[Tensors, int]:
    """The parameters, and how often the steps were iterated."""
    with dl.join_world() as world:
        model, optimizer = lbfgs()
        passes = 0
        for step in loop_over(world, "", model, optimizer, shards=5):
            optimizer.step(lambda step=step: take(step, model).loss)
            passes += step.passes
        return values_of(model), passes


@pytest.mark.covers("B10")
@pytest.mark.slow
def test_lbfgs_calls_its_closure_as_often_as_on_one_device(on_ranks: OnRanks) -> None:
    model, optimizer = lbfgs()
    for rows in samples(24).split(6):

        def closure(rows: torch.Tensor = rows) -> torch.Tensor:
            model.zero_grad()
            loss = loss_of(model, rows)
            loss.backward()
            return loss

        optimizer.step(closure)
    calls = optimizer.state[next(model.parameters())]["func_evals"]
    results = on_ranks(3, close_in)
    assert [passes for _, passes in results] == [calls] * 3
    assert calls > 12  # several a step
    # Directions divide by differences of gradients, which cancel: 5e-15 is seen after 4 steps of 4 iterations.
    assert distance(same_on_all([values for values, _ in results]), values_of(model)) <= BOUND


def draw_in_two_passes() -> None:
    with dl.join_world(seed=5) as world:
        for step in loop_over(world, "", model := network(), shards=3):
            drawn = []
            after = []
            for _ in range(2):
                for rows in step:
                    drawn.append(torch.randn_like(rows))
                    step.backward(loss_of(model, rows))
                step.fold()
                after.append(torch.randn(3))
            for number, found in enumerate(drawn):
                dl.seed_shard(5, step.iteration, number % 3, world.device, number // 3)
                assert torch.equal(found, torch.randn_like(found))
            assert not is_same(drawn[:3], drawn[3:])
            for number, found in enumerate(after):
                dl.seed_step(5, step.iteration, world.device, number)
                assert torch.equal(found, torch.randn_like(found))
            assert not torch.equal(*after)


def test_each_pass_over_a_shard_and_each_fold_draws_numbers_of_its_own(on_ranks: OnRanks) -> None:
    on_ranks(1, draw_in_two_passes)
