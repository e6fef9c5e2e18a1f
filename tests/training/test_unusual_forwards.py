"""Forwards that use their parameters in unusual ways, as the tests of torch's DDP do: the plain loop's gradients.

The bound is 1e-12 relative to the largest element: float64 rounds at 1.1e-16, and no sum has more than some hundred
terms. A gradient that the plain loop leaves at None is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support.harness import OnRanks

pytestmark = pytest.mark.on_gpus_too

BOUND = 1e-12
STEPS, SAMPLES, WIDTH = 3, 7, 4
Gradients = list[dict[str, torch.Tensor | None]]  # by name, of each step


class TwoHeads(nn.Module):
    """Two outputs, and a layer that takes no part."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(WIDTH, 6), nn.Linear(6, width), nn.Linear(6, width)
        self.unused = nn.Linear(6, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.one(hidden), self.other(hidden)


class Outputs(NamedTuple):
    """What a model may return."""

    first: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


@dataclass
class Wrapped:
    """An output that is no tensor."""

    inner: Outputs


class Nested(TwoHeads):
    """Outputs inside a dataclass, a named tuple, a dict and a list."""

    def forward(self, x: torch.Tensor) -> Any:
        one, other = super().forward(x)
        return Wrapped(Outputs(one, {"rest": [other]}))


class Empty(TwoHeads):
    """A layer without outputs, whose weight has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Linear(WIDTH, 1)
        self.empty.weight = nn.Parameter(torch.empty(0, WIDTH))
        self.empty.bias = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = super().forward(x)
        return one + self.empty(x).sum(1, keepdim=True), other


class Checkpointed(nn.Module):
    """Two layers, computed again inside backward: the second one, twice, or another one in each step."""

    def __init__(self, which: str, *, reentrant: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.which, self.reentrant = which, reentrant
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if shared:
            self.first.weight = self.second.weight

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        if self.which == "another":
            return self.again(self.first if step % 2 else self.second, x)
        x = self.again(self.second, self.first(x))
        return self.again(self.second, x) if self.which == "twice" else x

    def again(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.tanh(layer(y)), x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Fourier(nn.Module):
    """Complex parameters in the frequencies of a real signal."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signal: torch.Tensor = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)
        return signal

    def double(self) -> Fourier:
        self.filter.data = self.filter.data.to(torch.complex128)
        return self


class Undefined(torch.autograd.Function):
    """The identity; its backward gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def triple(module: nn.Module, of_input: Any, of_output: Any) -> tuple[torch.Tensor]:
    return (of_input[0] * 3,)


def with_hooks() -> nn.Module:
    """Hooks of a module that change its input, its output and the gradient of its input."""
    model = TwoHeads()
    model.body.register_forward_pre_hook(lambda module, inputs: (torch.relu(inputs[0]),))
    model.body.register_forward_hook(lambda module, inputs, output: output * 2)
    model.one.register_full_backward_hook(triple)
    return model


def in_frequencies(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    return [model(x).square().mean()]


def of_both(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    one, other = model(x)
    return [one.square().mean() + other.mean()]


def of_one(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    return [model(x)[1].square().mean()]


def one_after_the_other(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    one, other = model(x)
    return [one.square().mean(), other.square().mean()]


def of_nested(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    found = model(x).inner
    return [found.first.square().mean() + found.rest["rest"][0].mean()]


def of_two_forwards(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    one, other = model(x), model(2 * x)
    return [one[0].square().mean() + other[0].square().mean() + other[1].mean()]


def after_unused_forwards(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    model(x)
    with torch.no_grad():
        teacher = model(x)[0] + 1
    return [(model(x)[0] - teacher).square().mean()]


def with_a_part_without_a_graph(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    one, other = model(x)
    return [(one.detach() + other).square().mean()]


def with_a_tensor_of_the_step_before(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    made = getattr(model, "made", None)
    if made is None:
        made = model.made = torch.full((3,), 0.5, dtype=x.dtype)
    return [(model(x)[0] + made).square().mean()]


def without_gradients_in_a_part(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    one, other = model(x)
    return [Undefined.apply(one).mean() + other.square().mean()]  # type: ignore[no-untyped-call]


def by_the_step(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    return [model(x)[step % 2].square().mean()]


def recomputed(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    return [model(x.requires_grad_(), step).square().mean()]


def as_a_function(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    values = {name: 2 * parameter for name, parameter in model.named_parameters()}
    return [functional_call(model, values, (x,))[0].square().mean()]


def of_packed(model: Any, x: torch.Tensor, step: int) -> list[torch.Tensor]:
    lengths = 1 + (x[:, 0].abs() * 10).long() % WIDTH
    packed = pack_padded_sequence(x.unsqueeze(-1), lengths.cpu(), batch_first=True, enforce_sorted=False)
    return [model(packed)[1][0].square().mean()]


@dataclass(frozen=True)
class Case:
    """A network, and the losses of a shard: `losses(model, rows, step)`, each with a backward."""

    build: Callable[[], nn.Module]
    losses: Callable[[Any, torch.Tensor, int], list[torch.Tensor]]


CASES: dict[str, Case] = {
    "an output that the loss leaves out": Case(TwoHeads, of_one),
    "a backward for each output": Case(TwoHeads, one_after_the_other),
    "outputs that are nested": Case(Nested, of_nested),
    "a layer without outputs": Case(Empty, of_both),
    "two forwards before a backward": Case(TwoHeads, of_two_forwards),
    "forwards whose outputs are not used": Case(TwoHeads, after_unused_forwards),
    "an output without a graph": Case(TwoHeads, with_a_part_without_a_graph),
    "a tensor that a forward made": Case(TwoHeads, with_a_tensor_of_the_step_before),
    "a gradient that is undefined": Case(TwoHeads, without_gradients_in_a_part),
    "other parameters in each step": Case(TwoHeads, by_the_step),
    "hooks of modules": Case(with_hooks, of_both),
    "a functional call": Case(TwoHeads, as_a_function),
    "a packed sequence": Case(lambda: nn.LSTM(1, 3, batch_first=True), of_packed),
    "complex parameters": Case(Fourier, in_frequencies),
    "a checkpointed layer": Case(lambda: Checkpointed("once"), recomputed),
    "a layer checkpointed twice": Case(lambda: Checkpointed("twice"), recomputed),
    "another layer checkpointed in each step": Case(lambda: Checkpointed("another"), recomputed),
    "checkpointed layers with one weight": Case(lambda: Checkpointed("twice", shared=True), recomputed),
    "a reentrant checkpoint": Case(lambda: Checkpointed("once", reentrant=True), recomputed),
    "reentrant checkpoints in turn": Case(lambda: Checkpointed("another", reentrant=True), recomputed),
}


def make(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return CASES[name].build().double()


def rows_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def trained(name: str, shards: int | None) -> Gradients:
    with dl.join_world(seed=0) as world:
        model, case, found = make(name), CASES[name], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.cat([rows_of(step) for step in range(1, STEPS + 1)])
        batches = dl.Batches(data, SAMPLES, world, shards=shards, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model, "optimizer": optimizer}, progress=False):
            for rows in step:
                *others, last = case.losses(model, rows, step.iteration)
                for one in others:
                    step.backward(one, more_losses=True)
                step.backward(last)
            step.fold()
            found.append(gradients_of(model))
            optimizer.step()
        return found


def expected(name: str, shards: int) -> Gradients:
    model, case, found = make(name), CASES[name], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        model.zero_grad()
        for rows in rows_of(step).tensor_split(shards):
            loss = torch.stack(case.losses(model, rows.clone(), step)).sum()
            (loss * (len(rows) / SAMPLES)).backward()
        found.append(gradients_of(model))
        optimizer.step()
    return found


def is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if not other.numel():
        return one.shape == other.shape
    return float((one - other).abs().max()) <= BOUND * max(1.0, float(other.abs().max()))


@pytest.mark.covers("D3")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ranks", "shards"), [(3, None), (2, 5), (1, 3)])
@pytest.mark.quick_on_gpus
def test_gradients_are_those_of_the_plain_loop(name: str, ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    reference = expected(name, shards or ranks)
    for found in on_ranks(ranks, trained, name, shards):
        for step, (one, other) in enumerate(zip(found, reference, strict=True), 1):
            assert [key for key in other if not is_same(one[key], other[key])] == [], f"step {step}"


def infer_on_one_rank(infers: bool, synced: bool) -> Gradients:
    """Train, and look at the outputs on rank 1 alone, in evaluation mode, after each step."""
    with dl.join_world(seed=0) as world:
        torch.manual_seed(7)
        model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        if synced:
            model = dl.sync_batch_norm(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(torch.cat([rows_of(1), rows_of(2)]), SAMPLES, world, shuffle=False)
        found = []
        for step in dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, progress=False):
            for rows in step:
                step.backward(model(rows).square().mean())
            step.fold()
            optimizer.step()
            found.append(gradients_of(model))
            if infers and world.rank == 1:
                model.eval()
                with torch.no_grad():
                    model(rows_of(3))
                model.train()
        return found


@pytest.mark.parametrize("synced", [False, True])
def test_one_rank_may_infer_alone_between_two_steps(synced: bool, on_ranks: OnRanks) -> None:
    for found, other in zip(*(on_ranks(2, infer_on_one_rank, infers, synced) for infers in (True, False)), strict=True):
        assert all(map(torch.equal, *([p for step in run for p in step.values()] for run in (found, other))))


class Failing(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise ArithmeticError("planted")


def train_once(world: dl.World, model: nn.Module, fails: bool) -> None:
    batches = dl.Batches(rows_of(1), SAMPLES, world, shuffle=False)
    for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
        for rows in step:
            output = model(rows)[0]
            if fails:
                output = Failing.apply(output)  # type: ignore[no-untyped-call]
            step.backward(output.square().mean())
        step.fold()


def train_after_an_error(fails: bool) -> dict[str, torch.Tensor | None]:
    """The gradients of a loop; one before it over the same model ended in an error of a backward, on all ranks."""
    with dl.join_world(seed=0) as world:
        model = make("an output that the loss leaves out")
        if fails:
            with pytest.raises(ArithmeticError, match="planted"):
                train_once(world, model, fails=True)
        train_once(world, model, fails=False)
        return gradients_of(model)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_new_loop_after_an_error_of_backward_is_as_any_other(ranks: int, on_ranks: OnRanks) -> None:
    (found, *_), (other, *_) = (on_ranks(ranks, train_after_an_error, fails) for fails in (True, False))
    assert found["body.weight"] is not None
    assert [key for key in other if not is_same(found[key], other[key])] == []
