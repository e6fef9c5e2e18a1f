"""A graph crosses a fold, as in DCGAN: one forward of the generator serves the pass of both networks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import softplus

import ddp_loop as dl
from tests.support.comparing import Tensors, is_close, is_same, same_on_all, state_of
from tests.support.harness import OnRanks
from tests.support.refusals import samples
from tests.support.training import loop_on

pytestmark = [pytest.mark.covers("J1"), pytest.mark.on_gpus_too]

SIZE = 9


class Counted(nn.Module):
    """Divides by a moving average that it writes in place, seen by torch's version counter, and then saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(5, dtype=torch.float64))
        self.size: torch.Tensor

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.size.lerp_(values.abs().mean(0), 0.1)
        return values / self.size.view(1, -1)


class OwnForward(nn.BatchNorm1d):
    """A batch norm with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input * 2)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(5),
    "none": nn.Identity,
    "counted": Counted,
    "own forward": lambda: OwnForward(5),
    # Torch's kernel writes its running statistics past the version counter.
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
    ),
}


def networks(kind: str) -> nn.ModuleDict:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        generator = nn.Sequential(nn.Linear(2, 5), NORMS[kind](), nn.Tanh(), nn.Linear(5, 2))
        # Called twice before a backward, `Counted` raises in torch too.
        norm = NORMS["none" if kind == "counted" else kind]()
        discriminator = nn.Sequential(nn.Linear(2, 5), norm, nn.Tanh(), nn.Linear(5, 1))
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator}).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def first_loss(both: nn.ModuleDict, drawn: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Real points are in the first two columns, noise is in the others."""
    discriminator = both["discriminator"]
    loss: torch.Tensor = softplus(-discriminator(drawn[:, :2])).mean() + softplus(discriminator(fake.detach())).mean()
    return loss


def second_loss(both: nn.ModuleDict, fake: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = softplus(-both["discriminator"](fake)).mean()
    return loss


def train_whole(kind: str, count: int = 3 * SIZE) -> Tensors:
    """Torch's own loop, over whole mini-batches."""
    both = networks(kind)
    for_generator = optimizer_of(both["generator"])
    for_discriminator = optimizer_of(both["discriminator"])
    for drawn in samples(count).split(SIZE):
        both.zero_grad()
        fake = both["generator"](drawn[:, 2:])
        first_loss(both, drawn, fake).backward()
        for_discriminator.step()
        both.zero_grad()
        second_loss(both, fake).backward()
        for_generator.step()
    return state_of(both)


def train(
    kind: str, shards: int | None, *, crosses: bool = True, is_synced: bool = False, count: int = 3 * SIZE
) -> Tensors:
    """Without a graph that crosses the fold, the second pass computes the forward of the generator again, in a copy."""
    with dl.join_world() as world:
        both = networks(kind)
        generator = both["generator"]
        if is_synced:
            dl.sync_batch_norm(both, world)
        buffers = [id(one) for one in both.buffers()]
        for_generator = optimizer_of(generator)
        for_discriminator = optimizer_of(both["discriminator"])
        batches = dl.Batches(samples(count), SIZE, world, shards=shards, shuffle=False)
        rules: dict[str, Any] = {"both.generator.1.size": "mean"} if kind == "counted" else {}
        state = {"both": both, "generator's": for_generator, "discriminator's": for_discriminator}
        for step in dl.Loop(batches, 1, state=state, buffer_reduction=rules, progress=False, check_replicas_every=1):
            fakes: list[torch.Tensor] = []
            before = copy.deepcopy(generator)
            for drawn in step:
                if not fakes:  # the last step's graphs are gone
                    assert buffers == [id(one) for one in both.buffers()]
                fakes.append(generator(drawn[:, 2:]))
                step.backward(first_loss(both, drawn, fakes[-1]))
            step.fold()
            for_discriminator.step()
            for fake, drawn in zip(fakes, step, strict=True):
                if not crosses:
                    parameters: dict[str, torch.Tensor] = dict(generator.named_parameters())
                    fake = functional_call(copy.deepcopy(before), parameters, (drawn[:, 2:],))
                step.backward(second_loss(both, fake))
            step.fold()
            for_generator.step()
        return state_of(both)


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize("kind", NORMS)
def test_one_shard_has_the_bits_of_torchs_own_loop(kind: str, on_ranks: OnRanks) -> None:
    (found,) = on_ranks(1, train, kind, None)
    assert is_same(found, train_whole(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", NORMS)
def test_four_shards_have_the_bits_of_two_forwards_on_1_2_and_3_ranks(kind: str, on_ranks: OnRanks) -> None:
    (wanted,) = on_ranks(1, train, kind, 4, crosses=False)
    for ranks in (1, 2, 3):
        assert is_same(same_on_all(on_ranks(ranks, train, kind, 4)), wanted)


def test_synced_batch_norm_equals_the_plain_loop_over_whole_mini_batches(on_ranks: OnRanks) -> None:
    count = 2 * SIZE + 2  # the last 2 leave the third rank without samples
    found = same_on_all(on_ranks(3, train, "batch norm", None, is_synced=True, count=count))
    assert is_close(found, train_whole("batch norm", count))


def train_through_evaluation_mode(shards: int | None, is_synced: bool) -> Tensors:
    """A graph holds the running statistics themselves, which the other call of the layer moves."""
    with dl.join_world() as world:
        model = networks("batch norm")["discriminator"]
        if is_synced:
            dl.sync_batch_norm(model, world)
        optimizer = optimizer_of(model)
        batches = dl.Batches(samples(3 * SIZE), SIZE, world, shards=shards, shuffle=False)
        for step in loop_on(batches, model, optimizer):
            kept = []
            for drawn in step:
                kept.append(model.eval()(drawn[:, 2:]).square().mean())
                step.backward(model.train()(drawn[:, :2]).square().mean())
            step.fold()
            for loss, _ in zip(kept, step, strict=True):
                step.backward(loss)
            step.fold()
            optimizer.step()
        return state_of(model)


@pytest.mark.parametrize(("ranks", "shards", "is_synced"), [(1, None, False), (2, 3, False), (2, None, True)])
def test_running_statistics_move_past_the_version_counter_as_in_torch(
    ranks: int, shards: int | None, is_synced: bool, on_ranks: OnRanks
) -> None:
    model = networks("batch norm")["discriminator"]
    optimizer = optimizer_of(model)
    for drawn in samples(3 * SIZE).split(SIZE):
        loss = model.eval()(drawn[:, 2:]).square().mean()
        model.train()(drawn[:, :2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert is_close(same_on_all(on_ranks(ranks, train_through_evaluation_mode, shards, is_synced)), state_of(model))
