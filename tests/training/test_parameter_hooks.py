"""Hooks and backwards of the script's own that do no harm, or one: each shard would run a hook on a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.comparing import Tensors, gradients_of, is_close, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import loss_of, network
from tests.support.training import LossOf, sgd, train, train_plainly

pytestmark = pytest.mark.on_gpus_too


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01)


def clamp_accumulated(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def hooked(how: str) -> nn.Sequential:
    model = network()
    getattr(model[0].weight, how)(clamp if how == "register_hook" else clamp_accumulated)
    return model


def train_hooked(how: str) -> Tensors:
    model = hooked(how)
    train(model, optimizer=sgd(model), shards=1)
    return values_of(model)


@pytest.mark.covers("D3")
@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_with_one_shard_a_hook_gives_the_bits_of_the_plain_loop(how: str, on_ranks: OnRanks) -> None:
    model = hooked(how)
    train_plainly(model, optimizer=sgd(model))
    assert is_same(same_on_all(on_ranks(3, train_hooked, how)), values_of(model))


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


def gradients_by(loss: LossOf) -> Tensors:
    model = hook_others()
    train(model, loss)
    return gradients_of(model)


@pytest.mark.parametrize("loss", [hooking, perturbing, penalising])
def test_what_a_script_may_do_gives_the_gradients_of_one_process(loss: LossOf, on_ranks: OnRanks) -> None:
    wanted = train_plainly(hook_others(), loss)[-1]
    assert is_close(same_on_all(on_ranks(2, gradients_by, loss)), wanted)
