"""Backwards of the script's own between a step's first shard and its fold."""

from __future__ import annotations

import pytest
import torch

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, gradients_of, same_on_all
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too

SAID = (
    r"model\.\d\.\w+ (got one from another backward|was taken away or changed).*"
    r"step\.backward\(loss, more_losses=True\)"
)


def go_back(world: dl.World, folder: str, when: str, bucket_cap_mib: float, shards: int | None) -> None:
    model = network()
    for step in loop_over(world, folder, model, bucket_cap_mib=bucket_cap_mib, shards=shards):
        for rows in step:
            if when == "before":
                loss_of(model, rows).backward()
            step.backward(loss_of(model, rows))
            if when == "after":
                loss_of(model, rows).backward()
        if when == "between":
            loss_of(model, samples(2)).backward()
        step.fold()


@pytest.mark.covers("D3")
@pytest.mark.parametrize("shards", [None, 2, 5])
@pytest.mark.parametrize("bucket_cap_mib", [8.0, 1e-5])
@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.quick_on_gpus
def test_a_backward_of_the_scripts_own_is_refused_with_the_remedy(
    when: str, bucket_cap_mib: float, shards: int | None, refused: Refused
) -> None:
    refused(2, go_back, when, bucket_cap_mib, shards, kind="RuntimeError", said=SAID, by=ALL)


def perturb(own: bool) -> Tensors:
    """Adversarial inputs: the script's own backward, whose gradients it takes away itself."""
    with dl.join_world() as world:
        model = network()
        for step in loop_over(world, "", model, run_dir=None, steps=1, epochs=None):
            for rows in step:
                if own:
                    loss_of(model, rows).backward()
                    model.zero_grad()
                step.backward(loss_of(model, rows))
            step.fold()
            return gradients_of(model)
    return []


def test_one_whose_gradients_the_script_takes_away_is_no_matter(on_ranks: OnRanks) -> None:
    assert distance(same_on_all(on_ranks(2, perturb, True)), same_on_all(on_ranks(2, perturb, False))) == 0


def penalise() -> Tensors:
    """A gradient penalty by torch.autograd.grad makes no gradient of the parameters."""
    with dl.join_world() as world:
        model = network()
        for step in loop_over(world, "", model, run_dir=None, steps=1, epochs=None):
            for rows in step:
                rows = rows.requires_grad_()
                (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
                step.backward(loss_of(model, rows) + (slope**2).mean())
            step.fold()
            return gradients_of(model)
    return []


def test_a_gradient_penalty_is_that_of_one_process(on_ranks: OnRanks) -> None:
    model = network()
    rows = samples(24)[:6].requires_grad_()
    (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
    (loss_of(model, rows) + (slope**2).mean()).backward()
    assert distance(same_on_all(on_ranks(2, penalise)), gradients_of(model)) <= 1e-12  # float64


def go_back_in_what_does_not_count(world: dl.World, folder: str, shards: int | None) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=shards):
        for number, rows in enumerate(step):
            loss_of(model, rows).backward()
            step.backward(loss_of(model, rows), weight=number)
        step.fold()


@pytest.mark.covers("D3")
@pytest.mark.parametrize("shards", [None, 2, 5])
def test_one_in_a_shard_of_weight_0_is_refused_too(shards: int | None, refused: Refused) -> None:
    refused(2, go_back_in_what_does_not_count, shards, kind="RuntimeError", said=SAID, by=ALL)


def go_back_without_a_shard(world: dl.World, folder: str, shards: int | None) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=shards, count=1):
        for rows in step:
            step.backward(loss_of(model, rows))
        if world.rank == 1:
            loss_of(model, samples(2)).backward()
        step.fold()


@pytest.mark.covers("D3")
@pytest.mark.parametrize("shards", [None, 5])
def test_one_on_a_rank_without_a_shard_is_refused_with_the_remedy(shards: int | None, refused: Refused) -> None:
    refused(2, go_back_without_a_shard, shards, kind="RuntimeError", said=SAID, by=1)
