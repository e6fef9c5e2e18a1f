"""Losses that need the whole mini-batch: outputs of all shards gathered, with their gradients.

The reference is one process that computes the loss on the whole mini-batch in float64. No sum has more than some
hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, normalize
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support.comparing import Tensors, distance, gradients_of, same_on_all, values_of
from tests.support.gathering import encoder, spread
from tests.support.harness import OnRanks
from tests.support.refusals import BOUND, loop_over, network, samples

pytestmark = [pytest.mark.covers("D13"), pytest.mark.on_gpus_too]

MINI_BATCH = 12  # two batch-norm values would be +1 and -1 whatever they were, and amplify rounding


class Contrast(nn.Module):
    """Each row's partner, among all of the mini-batch, by cosine; the temperature is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, ones: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        likeness = normalize(ones) @ normalize(others).T / self.temperature
        return cross_entropy(likeness, torch.arange(len(ones), device=ones.device))


def views(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rows + 0.1, rows.flip(1)


def on_the_whole(count: int, size: int) -> tuple[Tensors, list[float]]:
    """The reference: gradients of all steps, and then the weights; losses."""
    model, criterion = encoder(), Contrast()
    modules = nn.ModuleList([model, criterion])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, momentum=0.9)
    tensors, losses = [], []
    for rows in samples(count).split(size):
        optimizer.zero_grad()
        loss = criterion(*map(model, views(rows)))
        loss.backward()
        tensors += gradients_of(modules)
        losses.append(loss.item())
        optimizer.step()
    return tensors + values_of(modules), losses


def gathered(
    count: int, size: int, shards: int | None, loss_of: Callable[..., torch.Tensor] | None = None
) -> tuple[Tensors, list[float]]:
    with dl.join_world() as world:
        model, criterion = encoder(), Contrast()
        modules = nn.ModuleList([model, criterion])
        optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, momentum=0.9)
        batches = dl.Batches(samples(count), size, world, shards=shards, shuffle=False)
        tensors, losses = [], []
        for step in dl.Loop(batches, 1, state={"model": modules, "optimizer": optimizer}, progress=False):
            for rows in step:
                step.hold(*map(model, views(rows)))
            ones, others = step.gather()
            loss = criterion(ones, others) if loss_of is None else loss_of(criterion, ones, others)
            step.backward(loss, half=0.5)
            row = step.fold()
            assert row.metrics["half"].item() == pytest.approx(0.5, rel=BOUND)
            tensors += gradients_of(modules)
            losses.append(row.loss.item())
            optimizer.step()
        return tensors + values_of(modules), losses


SPLITS = [
    (1, None, 24, 6),
    (1, 4, 24, 6),
    (2, None, 24, 6),
    (3, None, 23, 7),
    (3, None, 10, 2),
    (4, 6, 24, 6),
    (2, 5, 9, 4),
]


@pytest.mark.parametrize(("ranks", "shards", "count", "size"), SPLITS)
@pytest.mark.quick_on_gpus
def test_a_loss_of_the_whole_mini_batch_is_that_of_one_process(
    ranks: int, shards: int | None, count: int, size: int, on_ranks: OnRanks
) -> None:
    expected, expected_losses = on_the_whole(count, size)
    results = on_ranks(ranks, gathered, count, size, shards)
    assert distance(same_on_all([tensors for tensors, _ in results]), expected) < BOUND
    for _, losses in results:
        assert losses == pytest.approx(expected_losses, rel=BOUND, abs=BOUND)


def test_one_shard_gives_the_bits_of_the_plain_loop(on_ranks: OnRanks) -> None:
    expected, expected_losses = on_the_whole(24, 6)
    tensors, losses = on_ranks(1, gathered, 24, 6, None)[0]
    assert losses == expected_losses
    assert all(map(torch.equal, tensors, expected))


def without_the_others(criterion: Contrast, ones: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return criterion(ones, others.detach())  # type: ignore[no-any-return]


def test_a_gather_without_gradients_is_off_by_far(on_ranks: OnRanks) -> None:
    expected, _ = on_the_whole(24, 6)
    assert distance(on_ranks(2, gathered, 24, 6, None, without_the_others)[0][0], expected) > 0.05


# -- what else belongs to a step ---------------------------------------------------------------------------


def train(scene: Callable[[dl.Step, nn.Module], torch.Tensor], build: Callable[[], nn.Module], shards: int) -> Tensors:
    """The weights and buffers after 4 steps of 12 samples."""
    with dl.join_world() as world:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(samples(48), MINI_BATCH, world, shards=shards, shuffle=False)
        rules: dict[str, Any] = {"model.scale": "mean"} if isinstance(model, Scaling) else {}
        state = {"model": model, "optimizer": optimizer}
        for step in dl.Loop(batches, 1, state=state, buffer_reduction=rules, progress=False):
            step.backward(scene(step, model))
            step.fold()
            optimizer.step()
        return [*values_of(model), *(buffer.clone() for buffer in model.buffers())]


def only_hold(step: dl.Step, model: nn.Module) -> torch.Tensor:
    for rows in step:
        step.hold(model(rows))
    return spread(step.gather())


def hold_recomputed(step: dl.Step, model: nn.Module) -> torch.Tensor:
    for rows in step:
        step.hold(checkpoint(model, rows, use_reentrant=False))
    return spread(step.gather())


def draw_behind(step: dl.Step, model: nn.Module) -> torch.Tensor:
    for rows in step:
        step.hold(model(rows))
    return spread(dropout(step.gather(), 0.3))


def with_labels(step: dl.Step, model: nn.Module) -> torch.Tensor:
    for rows in step:
        step.hold(model(rows), rows[:, 0] > 0, (rows[:, 1] * 10).long(), rows.bfloat16())
    outputs, signs, tens, rounded = step.gather()
    whole = samples(48)[MINI_BATCH * (step.iteration - 1) :][:MINI_BATCH]
    assert torch.equal(signs, whole[:, 0] > 0)
    assert torch.equal(tens, (whole[:, 1] * 10).long())
    assert torch.equal(rounded, whole.bfloat16())
    assert [one.requires_grad for one in (outputs, signs, tens, rounded)] == [True, False, False, False]
    return spread(outputs)


def longer_later(step: dl.Step, model: nn.Module) -> torch.Tensor:
    for rows in step:
        output = model(rows)
        step.hold(torch.cat([output] * step.iteration, dim=1))
    return spread(step.gather())


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.mark.parametrize("scene", [only_hold, hold_recomputed, draw_behind, with_labels, longer_later])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_and_not_ranks_say_what_comes_out(
    scene: Callable[..., torch.Tensor], ranks: int, on_ranks: OnRanks
) -> None:
    alone = on_ranks(1, train, scene, with_batch_norm, 3)[0]
    assert distance(same_on_all(on_ranks(ranks, train, scene, with_batch_norm, 3)), alone) < BOUND


def test_recomputation_in_backward_leaves_statistics_alone(on_ranks: OnRanks) -> None:
    plain, recomputed = (on_ranks(2, train, scene, with_batch_norm, 3)[0] for scene in (only_hold, hold_recomputed))
    assert distance(recomputed, plain) < BOUND


def by_hand() -> Tensors:
    """What `only_hold` must be: batch norm per shard of four samples, pooled statistics, one loss."""
    torch.manual_seed(0)
    model = with_batch_norm()
    norm = model[1]  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in samples(48).split(MINI_BATCH):
        before = [norm.running_mean.clone(), norm.running_var.clone()]
        inner = model[0](rows)  # type: ignore[index]
        optimizer.zero_grad()
        spread(torch.cat([model(part) for part in rows.split(4)])).backward()
        norm.running_mean.copy_(before[0].lerp(inner.detach().mean(0), 0.1))
        norm.running_var.copy_(before[1].lerp(inner.detach().var(0), 0.1))
        norm.num_batches_tracked -= 2
        optimizer.step()
    return [*values_of(model), *(buffer.clone() for buffer in model.buffers())]


def test_batch_norm_keeps_to_its_shards_and_pools_its_statistics(on_ranks: OnRanks) -> None:
    assert distance(on_ranks(2, train, only_hold, with_batch_norm, 3)[0], by_hand()) < BOUND


def twice_a_step() -> Tensors:
    with dl.join_world() as world:
        model = encoder()
        loop = loop_over(world, ".", model, run_dir=None, shards=3)
        tensors = []
        for step in loop:
            for _ in range(2):
                for rows in step:
                    step.hold(model(rows))
                step.backward(spread(step.gather()))
                step.fold()
                tensors += gradients_of(model)
            for rows in step:
                step.backward(model(rows).square().mean())
            step.fold()
            tensors += gradients_of(model)
        return tensors


def test_passes_with_and_without_a_gather_follow_each_other(on_ranks: OnRanks) -> None:
    alone, together = on_ranks(1, twice_a_step)[0], same_on_all(on_ranks(2, twice_a_step))
    assert distance(together, alone) < BOUND
    assert all(map(torch.equal, together[:4], together[4:8]))


def in_the_graph() -> nn.Module:
    return Scaling().double()


class Scaling(nn.Module):
    """A buffer that forward changes, and then uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.scale: torch.Tensor
        self.scale.mul_(0.9).add_(0.1 * rows.detach().abs().mean())
        return self.linear(rows) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [with_batch_norm, in_the_graph])
@pytest.mark.parametrize("scene", [only_hold, hold_recomputed])
def test_held_graphs_keep_the_buffers_they_used(
    scene: Callable[..., torch.Tensor], build: Callable[[], nn.Module], on_ranks: OnRanks
) -> None:
    plain_model = build_seeded(build)
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    for rows in samples(48).split(MINI_BATCH):
        optimizer.zero_grad()
        spread(plain_model(rows)).backward()
        optimizer.step()
    plain = [*values_of(plain_model), *(buffer.clone() for buffer in plain_model.buffers())]
    assert all(map(torch.equal, on_ranks(1, train, scene, build, 1)[0], plain))
    together = same_on_all(on_ranks(3, train, scene, build, 3))
    assert distance(together, on_ranks(1, train, scene, build, 3)[0]) < BOUND


def build_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def phases() -> nn.Module:
    return Phases()


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64).view(4, 2).to(torch.complex128))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows * (1 + 0.5j)) @ self.weight


def hold_complex(step: dl.Step, model: nn.Module) -> torch.Tensor:
    for rows in step:
        step.hold(model(rows))
    return distance_to_a_point(step.gather())


def distance_to_a_point(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs.mean(0) - (1 + 2j)).abs().pow(2).sum()


def test_complex_outputs_have_the_gradient_of_the_plain_loop(on_ranks: OnRanks) -> None:
    model = phases()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in samples(48).split(MINI_BATCH):
        optimizer.zero_grad()
        distance_to_a_point(model(rows)).backward()
        optimizer.step()
    for result in on_ranks(2, train, hold_complex, phases, 3):
        assert distance(result, values_of(model)) < BOUND


def without_a_gradient() -> list[float]:
    with dl.join_world() as world:
        model, criterion = network(), nn.Linear(4, 1).double()
        batches = dl.Batches(samples(12), 6, world, shards=3, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model, "criterion": criterion}, progress=False):
            for rows in step:
                step.hold(rows)
            step.backward(criterion(step.gather()).sum())
            step.fold()
        assert all(parameter.grad is None for parameter in model.parameters())
        return gradients_of(criterion)[0].flatten().tolist()


def test_a_loss_of_outputs_without_gradients_trains_its_own_parameters(on_ranks: OnRanks) -> None:
    expected = pytest.approx(samples(12)[6:].sum(0).tolist(), rel=BOUND)
    for ranks in (1, 3):
        assert on_ranks(ranks, without_a_gradient) == [expected] * ranks
