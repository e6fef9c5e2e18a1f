"""Ordinary torch lines around the fold: closures, clipping, schedules, averages, two optimizers.

The networks have no batch norm, so one device on the whole mini-batch is the truth; in float64 the bound is 1e-12
relative to the largest element of each tensor: no sum here has more than some hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import BOUND, loop_over, loss_of, network, samples
from tests.support.training import train

pytestmark = pytest.mark.on_gpus_too


def make_lbfgs(model: nn.Module, line_search: str | None) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)


def close_in(line_search: str | None, shards: int | None) -> tuple[Tensors, int]:
    """The parameters, and how often the steps were iterated."""
    with dl.join_world() as world:
        model = network()
        optimizer = make_lbfgs(model, line_search)
        passes = 0
        for step in loop_over(world, "", model, optimizer, run_dir=None, shards=shards):

            def closure(step: dl.Step = step) -> torch.Tensor:
                for rows in step:
                    step.backward(loss_of(model, rows))
                return step.fold().loss

            optimizer.step(closure)
            passes += step.passes
        return values_of(model), passes


@pytest.mark.covers("B10")
@pytest.mark.parametrize(("ranks", "shards"), [(3, None), (2, 5)])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.slow
def test_lbfgs_calls_its_closure_as_often_as_on_one_device(
    line_search: str | None, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    model = network()
    optimizer = make_lbfgs(model, line_search)
    for rows in samples(24).split(6):

        def closure(rows: torch.Tensor = rows) -> torch.Tensor:
            model.zero_grad()
            loss = loss_of(model, rows)
            loss.backward()
            return loss

        optimizer.step(closure)
    calls = optimizer.state[next(model.parameters())]["func_evals"]
    results = on_ranks(ranks, close_in, line_search, shards)
    assert [passes for _, passes in results] == [calls] * ranks
    assert calls > 12  # several a step
    # Directions divide by differences of gradients, which cancel: 5e-15 is seen after 4 steps of 4 iterations.
    assert distance(same_on_all([values for values, _ in results]), values_of(model)) <= BOUND


class Update:
    """What comes after the fold: clip, step, schedule the learning rate, average the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = CosineAnnealingLR(self.optimizer, T_max=12)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))

    def __call__(self, *_: object) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()
        self.average.update_parameters(self.model)

    def result(self) -> Tensors:
        return [torch.tensor(self.schedule.get_last_lr()), *values_of(self.model, self.average)]


def update_after_the_fold() -> Tensors:
    model = network()
    update = Update(model)
    train(model, data=samples(70), batch_size=9, shards=8, state={"o": update.optimizer}, after_fold=update)
    return update.result()


@pytest.mark.covers("B10")
@pytest.mark.parametrize("ranks", [2, 3])
def test_clipping_and_schedule_and_average_and_accumulation_equal_one_device(ranks: int, on_ranks: OnRanks) -> None:
    model = network()
    update = Update(model)
    for rows in samples(70).split(9):
        model.zero_grad()
        loss_of(model, rows).backward()
        update()
    assert distance(same_on_all(on_ranks(ranks, update_after_the_fold)), update.result()) <= BOUND


# -- two networks, two optimizers ---------------------------------------------------------------------------


class Players:
    """A generator, from noise (n, 4) to (n, 1), and a discriminator of (n, 4), whose first value is drawn or made."""

    def __init__(self) -> None:
        self.generator = network()
        self.discriminator = network()
        self.optimizers = [
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
            torch.optim.SGD(self.generator.parameters(), lr=0.2, momentum=0.5),
        ]

    def loss(self, again: int, rows: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The discriminator's, and in the second pass the generator's."""
        made = torch.cat([self.generator(noise), rows[:, 1:]], dim=1)
        if again:
            return softplus(-self.discriminator(made)).mean()
        return softplus(-self.discriminator(rows)).mean() + softplus(self.discriminator(made.detach())).mean()


def play(shards: int) -> Tensors:
    with dl.join_world(seed=5) as world:
        players = Players()
        state = [players.discriminator, *players.optimizers]
        losses = []
        for step in loop_over(world, "", players.generator, *state, run_dir=None, shards=shards):
            for again, optimizer in enumerate(players.optimizers):
                for rows in step:
                    step.backward(players.loss(again, rows, torch.randn_like(rows)))
                losses.append(step.fold().loss)
                assert all((parameter.grad is not None) == bool(again) for parameter in players.generator.parameters())
                optimizer.step()
        return [torch.stack(losses), *values_of(players.generator, players.discriminator)]


def noise_of(step: int, again: int, rows: torch.Tensor, shards: int) -> torch.Tensor:
    """What the shards draw, one after the other."""
    drawn = []
    for shard, piece in enumerate(rows.split(dl.split_sizes(len(rows), shards))):
        dl.seed_shard(5, step, shard, rows.device, again)
        drawn.append(torch.randn_like(piece))
    return torch.cat(drawn)


@pytest.mark.covers("B10")
@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (3, 3), (3, 4)])
@pytest.mark.quick_on_gpus
def test_two_networks_with_an_optimizer_each_take_turns_within_a_step(
    ranks: int, shards: int, on_ranks: OnRanks
) -> None:
    players = Players()
    losses = []
    with torch.random.fork_rng():
        for step, rows in enumerate(samples(24).split(6), 1):
            for again, optimizer in enumerate(players.optimizers):
                loss = players.loss(again, rows, noise_of(step, again, rows, shards))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
    expected = [torch.stack(losses), *values_of(players.generator, players.discriminator)]
    assert distance(same_on_all(on_ranks(ranks, play, shards)), expected) <= BOUND
