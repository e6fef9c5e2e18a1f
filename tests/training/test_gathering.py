"""Losses that need the whole mini-batch: outputs of all shards gathered, with their gradients.

The reference is one process that computes the loss on the whole mini-batch in float64. No sum has more than some
hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, normalize

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, is_same, same_on_all, state_of
from tests.support.gathering import encoder, spread
from tests.support.harness import OnRanks
from tests.support.refusals import BOUND, Refused, loop_over, network, samples
from tests.support.training import loop_on, sgd

pytestmark = [pytest.mark.covers("D13"), pytest.mark.on_gpus_too]

SIZE = 12
SHARDS = 3


class Contrast(nn.Module):
    """Each row's partner, among all of the mini-batch, by cosine; the temperature is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.temperature = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def loss(self, ones: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        likeness = normalize(ones) @ normalize(others).T / self.temperature
        return cross_entropy(likeness, torch.arange(len(ones), device=ones.device))


class Phases(nn.Module):
    """Complex outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64).view(4, 2).to(torch.complex128))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows * (1 + 0.5j)) @ self.weight


def with_a_criterion() -> nn.Module:
    return nn.ModuleDict({"network": network(), "criterion": nn.Linear(4, 1)})


# -- scenes: a pass over a step ----------------------------------------------------------------------------


def only_hold(step: Any, model: Any) -> torch.Tensor:
    for rows in step:
        step.hold(model(rows))
    return spread(step.gather())


def draw_behind(step: Any, model: Any) -> torch.Tensor:
    for rows in step:
        step.hold(model(rows))
    return spread(dropout(step.gather(), 0.3))


def hold_two_views(step: Any, model: Any) -> torch.Tensor:
    for rows in step:
        step.hold(model.encoder(rows + 0.1), model.encoder(rows.flip(1)))
    return model.loss(*step.gather())  # type: ignore[no-any-return]


def with_labels(step: Any, model: Any) -> torch.Tensor:
    for rows in step:
        step.hold(model(rows), rows[:, 0] > 0, (rows[:, 1] * 10).long(), rows.bfloat16())
    outputs, *labels = step.gather()
    whole = samples(48)[SIZE * (step.iteration - 1) :][:SIZE]
    assert is_same(labels, [whole[:, 0] > 0, (whole[:, 1] * 10).long(), whole.bfloat16()])
    assert [one.requires_grad for one in (outputs, *labels)] == [True, False, False, False]
    return spread(outputs)


def longer_later(step: Any, model: Any) -> torch.Tensor:
    for rows in step:
        step.hold(torch.cat([model(rows)] * step.iteration, dim=1))
    return spread(step.gather())


def hold_no_graph(step: Any, model: Any) -> torch.Tensor:
    for rows in step:
        step.hold(rows)
    return model["criterion"](step.gather()).sum()  # type: ignore[no-any-return]


Scene = Callable[[Any, Any], torch.Tensor]
Build = Callable[[], nn.Module]
SCENES: list[tuple[Scene, Build]] = [
    (hold_two_views, Contrast),
    (with_labels, encoder),
    (longer_later, encoder),
    (only_hold, Phases),
    (hold_no_graph, with_a_criterion),
]


class WholeStep:
    """A step of the plain loop: its only shard is the mini-batch."""

    def __init__(self, rows: torch.Tensor, iteration: int) -> None:
        self.rows = rows
        self.iteration = iteration

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self.rows

    def hold(self, *outputs: torch.Tensor) -> None:
        self.held = outputs

    def gather(self) -> Any:
        return self.held if len(self.held) > 1 else self.held[0]


def results_of(model: nn.Module) -> Tensors:
    """What was trained, and which parameters have no gradient, as 2."""
    return [torch.tensor([1.0 + (one.grad is None) for one in model.parameters()]), *state_of(model)]


def model_of(build: Build) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build() if build is Phases else build().double()
    return model, sgd(model)


def train(scene: Scene, build: Build, shards: int) -> Tensors:
    """4 steps of 12 samples."""
    with dl.join_world() as world:
        model, optimizer = model_of(build)
        batches = dl.Batches(samples(48), SIZE, world, shards=shards, shuffle=False)
        for step in loop_on(batches, model, optimizer):
            step.backward(scene(step, model))
            step.fold()
            optimizer.step()
        return results_of(model)


def train_plainly(scene: Scene, build: Build) -> Tensors:
    with torch.random.fork_rng():
        model, optimizer = model_of(build)
    for iteration, rows in enumerate(samples(48).split(SIZE), 1):
        optimizer.zero_grad()
        scene(WholeStep(rows, iteration), model).backward()
        optimizer.step()
    return results_of(model)


@pytest.mark.parametrize(("scene", "build"), SCENES)
@pytest.mark.quick_on_gpus
def test_a_loss_of_the_whole_mini_batch_is_that_of_one_process(scene: Scene, build: Build, on_ranks: OnRanks) -> None:
    wanted = train_plainly(scene, build)
    assert is_same(on_ranks(1, train, scene, build, 1)[0], wanted)
    assert distance(same_on_all(on_ranks(2, train, scene, build, SHARDS)), wanted) < BOUND


def test_what_is_drawn_after_a_gather_does_not_depend_on_the_ranks(on_ranks: OnRanks) -> None:
    alone = on_ranks(1, train, draw_behind, encoder, SHARDS)[0]
    assert distance(same_on_all(on_ranks(2, train, draw_behind, encoder, SHARDS)), alone) < BOUND
    assert distance(train_plainly(only_hold, encoder), alone) > 0.01


def train_on_copies(world: dl.World, folder: str, has_graph: bool) -> None:
    """As caches of gradients do it: a loss of leaves that the script makes of the outputs."""
    model = model_of(encoder)[0]
    for step in loop_over(world, "", model):
        for rows in step:
            outputs = model(rows)
            step.hold(outputs if has_graph else outputs.detach())
        whole = step.gather()
        step.backward((whole.detach().clone() if has_graph else whole).requires_grad_().square().mean())
        step.fold()


@pytest.mark.parametrize("has_graph", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_does_not_reach_the_model_is_refused(ranks: int, has_graph: bool, refused: Refused) -> None:
    said = r"must depend on the gathered outputs, or on a parameter in state\. .* not from copies"
    refused(ranks, train_on_copies, has_graph, kind="ValueError", said=said, by=0)
