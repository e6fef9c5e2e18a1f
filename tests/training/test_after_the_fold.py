"""Ordinary torch lines around the fold: closures, clipping, schedules, averages, two optimizers.

The networks have no batch norm, so one device on the whole mini-batch is the truth; in float64 the bound is 1e-12
relative to the largest element of each tensor: no sum here has more than some hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

from collections.abc import Callable

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

pytestmark = pytest.mark.on_gpus_too

# -- closures ----------------------------------------------------------------------------------------------


def closure_over(step: dl.Step, model: nn.Module) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        for rows in step:
            step.backward(loss_of(model, rows))
        return step.fold().loss

    return closure


def plain_closure_over(rows: torch.Tensor, model: nn.Module) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        return loss

    return closure


def make_lbfgs(model: nn.Module, line_search: str | None) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)


def close_in(line_search: str | None, shards: int | None) -> tuple[Tensors, list[int]]:
    """The parameters, and how often each step was iterated."""
    with dl.join_world() as world:
        model = network()
        optimizer = make_lbfgs(model, line_search)
        passes = []
        for step in loop_over(world, "", model, optimizer, run_dir=None, shards=shards):
            optimizer.step(closure_over(step, model))
            passes.append(step.passes)
        return values_of(model), passes


@pytest.mark.covers("B10")
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, None), (2, 5)])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.slow
def test_lbfgs_calls_its_closure_as_often_as_on_one_device(
    line_search: str | None, ranks: int, shards: int | None, on_ranks: OnRanks
) -> None:
    model = network()
    optimizer = make_lbfgs(model, line_search)
    for rows in samples(24).split(6):
        optimizer.step(plain_closure_over(rows, model))
    calls = optimizer.state[next(model.parameters())]["func_evals"]
    results = on_ranks(ranks, close_in, line_search, shards)
    assert [sum(passes) for _, passes in results] == [calls] * ranks
    assert calls > 12  # several a step
    # Directions divide by differences of gradients, which cancel: 5e-15 is seen after 4 steps of 4 iterations.
    assert distance(same_on_all([values for values, _ in results]), values_of(model)) <= BOUND


# -- what comes after the fold ------------------------------------------------------------------------------

PARTS = ["clipping", "schedule", "average", "accumulation", "all of them"]


class After:
    """What a loop does after the fold: clip, step, schedule the learning rate, average the weights."""

    def __init__(self, part: str, model: nn.Module) -> None:
        self.model, self.part = model, part
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = CosineAnnealingLR(self.optimizer, T_max=12)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))

    def does(self, part: str) -> bool:
        return self.part in (part, "all of them")

    def __call__(self) -> None:
        if self.does("clipping"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        if self.does("schedule"):
            self.schedule.step()
        if self.does("average"):
            self.average.update_parameters(self.model)

    def result(self) -> Tensors:
        averaged = self.average if self.does("average") else self.model
        return [torch.tensor(self.schedule.get_last_lr()), *values_of(self.model, averaged)]


def go_on_after_the_fold(part: str) -> Tensors:
    with dl.join_world() as world:
        model = network()
        shards = 8 if part in ("accumulation", "all of them") else None  # of 9 samples
        batches = dl.Batches(samples(70), 9, world, shards=shards, shuffle=False)
        after = After(part, model)
        for step in dl.Loop(batches, 1, state={"model": model, "optimizer": after.optimizer}, progress=False):
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            after()
        return after.result()


def go_on_plainly(part: str) -> Tensors:
    model = network()
    after = After(part, model)
    for rows in samples(70).split(9):
        model.zero_grad()
        loss_of(model, rows).backward()
        after()
    return after.result()


@pytest.mark.covers("B10")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("part", PARTS)
def test_clipping_and_schedule_and_average_and_accumulation_equal_one_device(
    part: str, ranks: int, on_ranks: OnRanks
) -> None:
    assert distance(same_on_all(on_ranks(ranks, go_on_after_the_fold, part)), go_on_plainly(part)) <= BOUND


def test_each_part_that_comes_after_the_fold_changes_the_result() -> None:
    """So the test before this one could tell."""
    for part in PARTS[:3]:
        assert distance(go_on_plainly(part), go_on_plainly("accumulation")) > 1e-3


# -- two networks, two optimizers ---------------------------------------------------------------------------


def make_players() -> tuple[nn.Sequential, nn.Sequential]:
    """A generator, from noise (n, 4) to (n, 1), and a discriminator of (n, 4), whose first value is drawn or made."""
    return network(), network()


def joined(made: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([made, rows[:, 1:]], dim=1)


def against(discriminator: nn.Module, rows: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return softplus(-discriminator(rows)).mean() + softplus(discriminator(joined(made, rows))).mean()


def play(shards: int) -> Tensors:
    with dl.join_world(seed=5) as world:
        generator, discriminator = make_players()
        for_generator = torch.optim.SGD(generator.parameters(), lr=0.2, momentum=0.5)
        for_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1, momentum=0.9)
        rows_of_passes = []
        for step in loop_over(
            world, "", generator, discriminator, for_generator, for_discriminator, run_dir=None, shards=shards
        ):
            for rows in step:
                made = generator(torch.randn_like(rows)).detach()
                step.backward(against(discriminator, rows, made), made=made.squeeze(1))
            row = step.fold()
            assert all(parameter.grad is None for parameter in generator.parameters())  # no pass gave it one
            for_discriminator.step()
            rows_of_passes += [row.loss, row.metrics["made"]]

            for rows in step:
                made = generator(torch.randn_like(rows))
                step.backward(softplus(-discriminator(joined(made, rows))).mean(), made=made.squeeze(1))
            row = step.fold()
            for_generator.step()
            rows_of_passes += [row.loss, row.metrics["made"]]
        return [torch.stack(rows_of_passes), *values_of(generator, discriminator)]


def play_plainly(shards: int) -> Tensors:
    """One device on the whole mini-batch; its noise is what the shards draw, one after the other."""
    generator, discriminator = make_players()
    for_generator = torch.optim.SGD(generator.parameters(), lr=0.2, momentum=0.5)
    for_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1, momentum=0.9)
    seen = []

    def noise(step: int, again: int, like: torch.Tensor) -> torch.Tensor:
        drawn = []
        for shard, piece in enumerate(like.split(dl.split_sizes(len(like), shards))):
            dl.seed_shard(5, step, shard, like.device, again)
            drawn.append(torch.randn_like(piece))
        return torch.cat(drawn)

    for step, rows in enumerate(samples(24).split(6), 1):
        made = generator(noise(step, 0, rows)).detach()
        loss = against(discriminator, rows, made)
        discriminator.zero_grad()
        loss.backward()
        for_discriminator.step()
        seen += [loss.detach(), made.mean()]
        made = generator(noise(step, 1, rows))
        loss = softplus(-discriminator(joined(made, rows))).mean()
        generator.zero_grad()
        loss.backward()
        for_generator.step()
        seen += [loss.detach(), made.detach().mean()]
    return [torch.stack(seen), *values_of(generator, discriminator)]


@pytest.mark.covers("B10")
@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (3, 3), (2, 4), (3, 4)])
@pytest.mark.quick_on_gpus
def test_two_networks_with_an_optimizer_each_take_turns_within_a_step(
    ranks: int, shards: int, on_ranks: OnRanks
) -> None:
    with torch.random.fork_rng():
        expected = play_plainly(shards)
    assert distance(same_on_all(on_ranks(ranks, play, shards)), expected) <= BOUND
