"""Hooks on parameters: refused where a mini-batch has several shards, since each shard would run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples

pytestmark = pytest.mark.on_gpus_too

CLAMPED = r"hook on a parameter.* model\.0\.weight has one of register_hook\..* after step\.fold\(\)"
IN_BACKWARD = (
    r"hook on a parameter.* model\.0\.weight has one of register_post_accumulate_grad_hook\..*optimizer in back"
)


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01)


def clamp_accumulated(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def hook(model: nn.Sequential, how: str) -> None:
    weight = model[0].get_parameter("weight")
    if how == "tensor":
        weight.register_hook(clamp)
    else:
        weight.register_post_accumulate_grad_hook(clamp_accumulated)


def train_hooked(
    world: dl.World, folder: str, how: str, since: int, shards: int | None, bucket_cap_mib: float = 8.0
) -> Tensors:
    """Step `since` has the hook; 0 for a hook before the Loop is made."""
    model = network()
    if since == 0:
        hook(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"run_dir": None} if not folder else {}
    for step in loop_over(world, folder, model, shards=shards, bucket_cap_mib=bucket_cap_mib, **options):
        if step.iteration == since:
            hook(model, how)
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        optimizer.step()
    return values_of(model)


@pytest.mark.covers("D3")
@pytest.mark.parametrize("bucket_cap_mib", [8.0, 1e-5])
@pytest.mark.parametrize(("how", "said"), [("tensor", CLAMPED), ("accumulated", IN_BACKWARD)])
@pytest.mark.parametrize("since", [0, 1, 3])
@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (1, 4), (3, 4)])
@pytest.mark.quick_on_gpus
def test_a_hook_on_a_parameter_is_refused_with_the_remedy(
    ranks: int, shards: int | None, since: int, how: str, said: str, bucket_cap_mib: float, refused: Refused
) -> None:
    kind = "ValueError" if since == 0 else "RuntimeError"
    refused(ranks, train_hooked, how, since, shards, bucket_cap_mib, kind=kind, said=said, by=ALL)


def hook_on_one_rank(world: dl.World, folder: str, shards: int | None) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=shards):
        if step.iteration == 2 and world.rank == 1:
            hook(model, "tensor")
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()


@pytest.mark.parametrize("shards", [None, 4])
def test_a_hook_on_one_rank_alone_is_refused_on_all(shards: int | None, refused: Refused) -> None:
    refused(3, hook_on_one_rank, shards, kind="RuntimeError", said=CLAMPED, by=1)


def train_one_shard(how: str) -> Tensors:
    with dl.join_world(seed=0) as world:
        return train_hooked(world, "", how, 0, 1)


def train_plainly(how: str) -> Tensors:
    model = network()
    hook(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in samples(24).split(6):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return values_of(model)


@pytest.mark.covers("D3")
@pytest.mark.parametrize("how", ["tensor", "accumulated"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_one_shard_a_hook_gives_the_bits_of_the_plain_loop(ranks: int, how: str, on_ranks: OnRanks) -> None:
    assert is_same(same_on_all(on_ranks(ranks, train_one_shard, how)), train_plainly(how))


def hook_others() -> Tensors:
    """Hooks on activations, modules and frozen parameters follow the shards as the script says; they stay."""
    with dl.join_world(seed=0) as world:
        model = network()
        model[0].get_parameter("bias").register_hook(clamp)
        model[0].get_parameter("bias").requires_grad_(False)
        model[1].register_full_backward_hook(lambda module, given, received: None)
        for step in loop_over(world, "", model, run_dir=None):
            for rows in step:
                loss = loss_of(model, rows)
                loss.register_hook(torch.clone)
                step.backward(loss)
            step.fold()
        return values_of(model)


def test_hooks_on_what_gets_no_gradient_and_on_modules_stay(on_ranks: OnRanks) -> None:
    assert is_same(same_on_all(on_ranks(2, hook_others)), values_of(network()))


def train_twice() -> Tensors:
    """A second Loop over the same parameters: the hooks of the first one are the package's own."""
    with dl.join_world(seed=0) as world:
        model = network()
        one, other = (loop_over(world, "", model, run_dir=None, bucket_cap_mib=1e-5, steps=2) for _ in range(2))
        for first, second in zip(one, other, strict=True):
            for step in (first, second):
                for rows in step:
                    step.backward(loss_of(model, rows))
                step.fold()
        return values_of(model)


def test_the_hooks_of_another_loop_are_no_hooks_of_the_script(on_ranks: OnRanks) -> None:
    assert is_same(same_on_all(on_ranks(2, train_twice)), values_of(network()))
