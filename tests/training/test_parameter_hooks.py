"""Hooks and backwards of the script's own that do no harm, or one: each shard would run a hook on a parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.comparing import Tensors, gradients_of, is_close, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, loop_over, loss_of, network, samples
from tests.support.training import train

pytestmark = pytest.mark.on_gpus_too


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01)


def clamp_accumulated(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def hooked(how: str) -> nn.Sequential:
    model = network()
    weight = model[0].get_parameter("weight")
    if how == "register_hook":
        weight.register_hook(clamp)
    else:
        weight.register_post_accumulate_grad_hook(clamp_accumulated)
    return model


HOOKS = ["register_hook", "register_post_accumulate_grad_hook"]


def train_hooked(how: str) -> Tensors:
    model = hooked(how)
    train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), shards=1)
    return values_of(model)


@pytest.mark.covers("D3")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("how", HOOKS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_with_one_shard_a_hook_gives_the_bits_of_the_plain_loop(ranks: int, how: str, on_ranks: OnRanks) -> None:
    model = hooked(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in samples(24).split(6):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    assert is_same(same_on_all(on_ranks(ranks, train_hooked, how)), values_of(model))


def loop_over_hooked(world: dl.World, folder: str, how: str) -> None:
    loop_over(world, folder, hooked(how))


@pytest.mark.covers("D3")
@pytest.mark.parametrize("how", HOOKS)
def test_a_hook_that_is_there_before_the_loop_is_refused(how: str, refused: Refused) -> None:
    said = rf"hook on a parameter.* model\.0\.weight has one of {how}\..* after step\.fold\(\)"
    refused(2, loop_over_hooked, how, kind="ValueError", said=said, by=ALL)


def hook_others() -> nn.Sequential:
    """Hooks on modules and on what gets no gradient."""
    model = network()
    bias = model[0].get_parameter("bias")
    bias.register_hook(clamp)
    bias.requires_grad_(False)
    model[1].register_full_backward_hook(lambda module, given, received: None)
    return model


def hooking(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, rows)
    loss.register_hook(lambda gradient: 2 * gradient)
    return loss


def perturbing(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Adversarial inputs: the script's own backward, whose gradients it takes away itself."""
    loss_of(model, rows).backward()
    model.zero_grad()
    return loss_of(model, rows)


def penalising(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """A gradient penalty by torch.autograd.grad makes no gradient of the parameters."""
    rows.requires_grad_()
    (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
    return loss_of(model, rows) + (slope**2).mean()


def gradients_by(loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Tensors:
    model = hook_others()
    train(model, loss)
    return gradients_of(model)


@pytest.mark.parametrize("loss", [hooking, perturbing, penalising])
def test_what_a_script_may_do_gives_the_gradients_of_one_process(
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], on_ranks: OnRanks
) -> None:
    model = hook_others()
    loss(model, samples(24)[18:]).backward()
    assert is_close(same_on_all(on_ranks(2, gradients_by, loss)), gradients_of(model))


def train_twice() -> Tensors:
    """Two loops over the same parameters: the hooks of each one are the package's own."""
    with dl.join_world() as world:
        model = network()
        one, other = (loop_over(world, "", model, run_dir=None, bucket_cap_mib=1e-5) for _ in range(2))
        for steps in zip(one, other, strict=True):
            for step in steps:
                for rows in step:
                    step.backward(loss_of(model, rows))
                step.fold()
        return gradients_of(model)


def test_the_hooks_of_another_loop_are_no_hooks_of_the_script(on_ranks: OnRanks) -> None:
    model = network()
    loss_of(model, samples(24)[18:]).backward()
    assert is_close(same_on_all(on_ranks(2, train_twice)), gradients_of(model))
