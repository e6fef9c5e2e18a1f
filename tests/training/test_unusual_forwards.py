"""Forwards that use their parameters in unusual ways, as the tests of torch's DDP do: the plain loop's gradients.

The bound is 1e-12: float64 rounds at 1.1e-16, and no sum has more than some hundred terms. A gradient that the plain
loop leaves at None is None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.refusals import BOUND, loop_over, samples
from tests.support.training import train_in, train_plainly

pytestmark = pytest.mark.on_gpus_too

WIDTH = 4
Gradients = list[torch.Tensor | None]


class Outputs(NamedTuple):
    """What a model may return."""

    one: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


class TwoHeads(nn.Module):
    """Two outputs; a layer that takes no part, and one without outputs, whose weight has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 6)
        self.one = nn.Linear(6, 3)
        self.other = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)
        self.empty = nn.Linear(WIDTH, 1)
        self.empty.weight = nn.Parameter(torch.empty(0, WIDTH))
        self.empty.bias = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> Outputs:
        hidden = torch.tanh(self.body(x))
        return Outputs(self.one(hidden) + self.empty(x).sum(1, keepdim=True), {"other": [self.other(hidden)]})


def layers_of_one_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].weight = model[1].weight
    return model


class Undefined(torch.autograd.Function):
    """The identity; its backward gives no gradient, or raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception | None = None) -> torch.Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.error is not None:
            raise ctx.error
        return None, None


def triple(module: nn.Module, of_input: Any, of_output: Any) -> tuple[torch.Tensor]:
    return (of_input[0] * 3,)


def with_hooks() -> nn.Module:
    """Hooks of a module that change its input, its output and the gradient of its input."""
    model = TwoHeads()
    model.body.register_forward_pre_hook(lambda module, inputs: (torch.relu(inputs[0]),))
    model.body.register_forward_hook(lambda module, inputs, output: output * 2)
    model.one.register_full_backward_hook(triple)
    return model


def of_both(model: Any, x: torch.Tensor) -> Any:
    found = model(x)
    return found.one.square().mean() + found.rest["other"][0].mean()


def of_several_forwards(model: Any, x: torch.Tensor) -> Any:
    """One is not used, one has no graph; a tensor that the first one of all made serves all."""
    model(x)
    with torch.no_grad():
        teacher = model(x).one + 1
    if not hasattr(model, "made"):
        model.made = torch.full((3,), 0.5, dtype=x.dtype)
    return (model(x).one - teacher).square().mean() + (model(2 * x).one + model.made).square().mean()


def of_one_head_alone(model: Any, x: torch.Tensor) -> Any:
    found = model(x)
    part = Undefined.apply(found.one)  # type: ignore[no-untyped-call]
    return part.mean() + (found.one.detach() + found.rest["other"][0]).square().mean()


def as_a_function(model: Any, x: torch.Tensor) -> Any:
    values = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return functional_call(model, values, (x,)).one.square().mean()


def of_packed(model: Any, x: torch.Tensor) -> Any:
    lengths = 1 + (x[:, 0].abs() * 10).long() % WIDTH
    packed = pack_padded_sequence(x.unsqueeze(-1), lengths.cpu(), batch_first=True, enforce_sorted=False)
    return model(packed)[1][0].square().mean()


def of_recomputed(model: Any, x: torch.Tensor) -> Any:
    """Two forwards of a layer that are computed again inside backward."""
    first, second = model
    once = checkpoint(second, first(x), use_reentrant=False)
    return checkpoint(second, once.tanh(), use_reentrant=False).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], Any]]] = {
    "outputs that are nested": (TwoHeads, of_both),
    "several forwards": (TwoHeads, of_several_forwards),
    "a gradient that is undefined": (TwoHeads, of_one_head_alone),
    "hooks of modules": (with_hooks, of_both),
    "a functional call": (TwoHeads, as_a_function),
    "a packed sequence": (lambda: nn.LSTM(1, 3, batch_first=True), of_packed),
    "a layer checkpointed twice": (layers_of_one_weight, of_recomputed),
}


def make(name: str) -> nn.Module:
    build, _ = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return build().double()


def gradients_of(model: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def is_like(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=BOUND, atol=BOUND)


def train(name: str, shards: int | None, halves: bool) -> list[Gradients]:
    """The gradients of each step."""
    found = []
    model = make(name)
    _, loss_of = CASES[name]
    with dl.join_world() as world:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in loop_over(world, "", model, optimizer, run_dir=None, shards=shards):
            for rows in step:
                loss = loss_of(model, rows)
                if halves:  # a backward for each, through the same graph
                    step.backward(loss / 2, more_losses=True)
                    loss = loss / 2
                step.backward(loss)
            step.fold()
            found.append(gradients_of(model))
            optimizer.step()
    return found


def plain_gradients(name: str) -> list[Gradients]:
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_plainly(model, CASES[name][1], optimizer=optimizer, after_backward=lambda: gradients_of(model))


@pytest.mark.covers("D3")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ranks", "shards", "halves"), [(3, None, False), (2, 5, True)])
@pytest.mark.quick_on_gpus
def test_gradients_equal_the_plain_loops(
    name: str, ranks: int, shards: int | None, halves: bool, on_ranks: OnRanks
) -> None:
    wanted = plain_gradients(name)
    for found in on_ranks(ranks, train, name, shards, halves):
        for one, other in zip(found, wanted, strict=True):
            assert all(map(is_like, one, other))


def train_after_an_error(fails: bool) -> Gradients:
    """The gradients of a loop; one before it over the same model ended in an error of a backward, on all ranks."""

    def fail(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return Undefined.apply(model(rows).one, ArithmeticError("planted")).mean()  # type: ignore[no-any-return, no-untyped-call]

    model = make("outputs that are nested")
    with dl.join_world() as world:
        if fails:
            with pytest.raises(ArithmeticError, match="planted"):
                train_in(world, model, fail)
        train_in(world, model, lambda model, rows: model(rows).one.square().mean(), samples(6))
        return gradients_of(model)


def test_a_new_loop_after_an_error_of_backward_is_as_any_other(on_ranks: OnRanks) -> None:
    found, *_ = on_ranks(3, train_after_an_error, True)
    wanted, *_ = on_ranks(3, train_after_an_error, False)
    assert found[0] is not None
    assert all(map(is_like, found, wanted))
