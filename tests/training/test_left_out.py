"""Parameters that get no gradient are left out of the sums until they get one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddp_loop as dl
from tests.support.comparing import Tensors, is_close, is_same, values_of
from tests.support.harness import OnRanks, in_world
from tests.support.refusals import BOUND, Refused, loop_over, loss_of, network, samples
from tests.support.training import loop_on, sgd, train, train_in

pytestmark = pytest.mark.on_gpus_too

Gradients = list[torch.Tensor | None]

COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "frozen": lambda model: copy.deepcopy(model).requires_grad_(False),
    "averaged": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
}


def train_with_a_copy(kind: str | None, shards: int | None) -> tuple[Tensors, list[list[int]], list[int]]:
    """The model, the length of each bucket in each step, and the sums begun before the fold."""
    lengths: list[list[int]] = []
    begun: list[int] = []
    with dl.join_world() as world:
        model = network()
        optimizer = sgd(model, 0.9)
        copies = [] if kind is None else [COPIES[kind](model)]
        options: dict[str, Any] = {"bucket_cap_mib": 1e-6, "check_replicas_every": 1}
        loop = loop_over(world, "", model, optimizer, *copies, shards=shards, **options)
        for step in loop:
            for rows in step:
                step.backward(loss_of(model, rows))
            begun.append(loop.fold.gradients.current.next)
            lengths.append([bucket.length for bucket in loop.fold.gradients.buckets])
            step.fold()
            assert all(one.grad is None for other in copies for one in other.parameters())
            optimizer.step()
            for other in copies:
                if isinstance(other, AveragedModel):
                    other.update_parameters(model)
    return values_of(model), lengths, begun


@pytest.mark.quick_on_gpus
@pytest.mark.parametrize(("ranks", "shards"), [(1, None), (3, 4)])
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_the_model_is_not_in_the_sums(kind: str, ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    """Buckets of some bytes: each has one parameter, and their order is that of backward."""
    first = 1 if kind == "deepcopy" else 0  # that is known only after the first fold
    found, wanted = (on_ranks(ranks, train_with_a_copy, one, shards)[0] for one in (kind, None))
    assert is_same(found[0], wanted[0])
    assert found[1][first:] == wanted[1][first:]
    assert found[2][first:] == wanted[2][first:]


def gradients_of(*modules: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for module in modules for p in module.parameters()]


def is_like(found: Gradients, wanted: Gradients, bound: float = 0.0) -> bool:
    return all(
        one is other if one is None or other is None else torch.allclose(one, other, rtol=bound, atol=bound)
        for one, other in zip(found, wanted, strict=True)
    )


def distill_from_an_average(detached: bool) -> list[Gradients]:
    """The gradients of the model and of its average, through which the loss goes too unless it is detached."""
    model = network()
    average = AveragedModel(model)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        aim = average(rows).detach() if detached else average(rows)
        return loss_of(model, rows) + mse_loss(model(rows), 2 * aim)

    optimizer = sgd(model)
    return train(
        model, loss, optimizer=optimizer, state={"average": average},
        after_fold=lambda step, result: gradients_of(model, average),
    )  # fmt: skip


def test_what_a_loss_gives_an_averaged_model_is_dropped(on_ranks: OnRanks) -> None:
    found, *_ = on_ranks(2, distill_from_an_average, False)
    wanted, *_ = on_ranks(2, distill_from_an_average, True)
    assert all(map(is_like, found, wanted))
    assert [one is None for one in wanted[-1]] == [False] * 4 + [True] * 4


def train_the_average(in_state: bool) -> bool:
    """Whether all parameters of an averaged model move where that is the model that is trained."""
    model = AveragedModel(network())
    before = values_of(model)
    optimizer = sgd(model)
    train(model, optimizer=optimizer if in_state else None)
    optimizer.step()
    return not any(map(torch.equal, before, values_of(model)))


def test_an_averaged_model_that_is_trained_is_not_left_out(on_ranks: OnRanks) -> None:
    assert on_ranks(2, train_the_average, True) == on_ranks(2, train_the_average, False) == [True, True]


# -- what gets its first gradient later --------------------------------------------------------------------


def body_and_heads() -> nn.ModuleList:
    heads = nn.ModuleList([nn.Linear(6, 1).double() for _ in range(3)])
    for one in heads.parameters():
        nn.init.constant_(one, 0.5)
    return nn.ModuleList([network()[0], heads])


def give_a_first_gradient_that_is_infinite(world: dl.World, folder: str) -> None:
    """Of a square root at 0, where the loss is finite."""
    model = network()
    late = nn.ParameterList([torch.zeros(2, dtype=torch.float64)])
    for step in loop_over(world, folder, model, late):
        for rows in step:
            loss = loss_of(model, rows)
            step.backward(loss + late[0].sqrt().sum() if step.iteration == 2 and world.rank == 0 else loss)
        step.fold()


def test_a_first_gradient_that_is_not_finite_is_found(refused: Refused) -> None:
    said = r"other 0\.0|A gradient in step 2 is not finite"  # a GPU's host does not know which
    refused(2, give_a_first_gradient_that_is_infinite, kind="FloatingPointError", said=said)


def plans_of_heads_by_turns() -> list[int]:
    """How often the sums were laid out anew, up to each step; the heads are used by turns, from the second step on."""
    plans: list[int] = []
    with dl.join_world() as world:
        model = body_and_heads()
        heads: Any = model[1]
        loop = loop_over(world, "", model, count=36)
        seen: list[object] = []
        for step in loop:
            for rows in step:
                step.backward(heads[max(0, step.iteration - 2) % 2](torch.tanh(model[0](rows))).square().mean())
            step.fold()
            if not any(loop.fold.gradients.buckets is one for one in seen):
                seen.append(loop.fold.gradients.buckets)
            plans.append(len(seen))
    return plans


def test_what_got_a_gradient_once_stays_in_the_plan(on_ranks: OnRanks) -> None:
    """Only the first fold, and the first step of the second head, lead to another plan."""
    assert on_ranks(2, plans_of_heads_by_turns) == [[1, 1, 2, 2, 2, 2]] * 2


def give_it_a_gradient_of_the_scripts_own(world: dl.World, folder: str) -> None:
    model = network()
    spare = nn.Linear(4, 1).double()
    for step in loop_over(world, folder, model, spare):
        for rows in step:
            if step.iteration == 2:
                spare(rows).mean().backward()
            step.backward(loss_of(model, rows))
        step.fold()


def test_a_left_out_parameter_takes_no_gradient_of_another_backward(refused: Refused) -> None:
    said = "step.backward alone makes gradients. other 0.weight got one from another backward"
    refused(1, give_it_a_gradient_of_the_scripts_own, kind="RuntimeError", said=said, by=None)


# -- what is unfrozen in a shard ---------------------------------------------------------------------------


def adversarial_losses(nets: Any, rows: torch.Tensor, trains_critic: bool) -> torch.Tensor:
    """As in pix2pix, the network that is not trained now is frozen where its loss is computed."""
    maker, critic = nets
    critic.requires_grad_(trains_critic)
    made: torch.Tensor = maker(rows)
    losses: torch.Tensor = critic(made.detach()).exp() if trains_critic else -critic(made).tanh()
    return losses.mean()


def adversaries() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
    nets = nn.ModuleList([nn.Linear(4, 4).double(), network()])
    for one in nets[0].parameters():
        nn.init.constant_(one, 0.2)
    return nets, sgd(nets)


def train_adversaries(world: dl.World, folder: str, shards: int | None, count: int = 24, size: int = 6) -> Tensors:
    nets, optimizer = adversaries()
    batches = dl.Batches(samples(count), size, world, shards=shards, shuffle=False)
    for step in loop_on(batches, nets, optimizer, run_dir=folder or None):
        for trains_critic in (False, True):
            for rows in step:
                step.backward(adversarial_losses(nets, rows, trains_critic))
            step.fold()
            optimizer.step()
    return values_of(nets)


@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (3, 6)])
def test_a_network_may_be_frozen_and_unfrozen_in_the_shards(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    with torch.random.fork_rng():
        nets, optimizer = adversaries()
    for rows in samples(24).split(6):
        for trains_critic in (False, True):
            optimizer.zero_grad()
            adversarial_losses(nets, rows, trains_critic).backward()
            optimizer.step()
    for found in on_ranks(ranks, in_world, train_adversaries, "", shards):
        assert is_close(found, values_of(nets))


def test_ranks_of_which_one_does_not_run_the_toggle_get_one_error(refused: Refused) -> None:
    said = r"The same parameters must want a gradient on every rank\..*model\.1\.0\.weight"
    refused(3, train_adversaries, None, 8, 2, kind="ValueError", said=said)


def unfreeze_in_a_shard(shards: int | None) -> list[Gradients]:
    """The first layer is unfrozen in the second step's shards, weighted by their tokens; after it on all ranks."""
    found = []
    with dl.join_world() as world:
        model = network()
        model[0].requires_grad_(False)
        batches = dl.Batches(samples(8), 2, world, shards=shards, shuffle=False)
        for step in loop_on(batches, model, check_replicas_every=0):
            for rows in step:
                if step.iteration == 2:
                    model[0].requires_grad_(True)
                step.backward(loss_of(model, rows), weight=3.0)
            step.fold()
            model[0].requires_grad_(step.iteration >= 2)
            found.append(gradients_of(model))
    return found


@pytest.mark.parametrize(("ranks", "shards"), [(1, 2), (3, None)])
def test_what_is_unfrozen_in_a_shard_counts_in_that_step(ranks: int, shards: int | None, on_ranks: OnRanks) -> None:
    """Also on a rank without samples, which does not unfreeze it."""
    wanted: list[Gradients] = []
    with torch.random.fork_rng():
        model = network()
    for number, rows in enumerate(samples(8).split(2)):
        model.zero_grad()
        loss_of(model, rows).backward()
        if number == 0:
            model[0].zero_grad()
        wanted.append(gradients_of(model))
    for found in on_ranks(ranks, unfreeze_in_a_shard, shards):
        assert all(is_like(one, other, BOUND) for one, other in zip(found, wanted, strict=True))


# -- what only shards of weight 0 use ----------------------------------------------------------------------


def decay_by_turns(is_plain: bool) -> Tensors:
    """By AdamW, which decays what has a gradient of 0; the second head is used by rows that count for nothing alone."""
    model: Any = body_and_heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    counts = (torch.arange(24) % 6 < 2).double()

    def errors(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        body, heads = model
        hidden = torch.tanh(body(rows))
        return torch.where(counts > 0, heads[0](hidden)[:, 0], heads[1](hidden)[:, 0]).square()

    if is_plain:
        for rows, kept in zip(samples(24).split(6), counts.split(6), strict=True):
            optimizer.zero_grad()
            ((errors(rows, kept) * kept).sum() / kept.sum()).backward()
            optimizer.step()
        return values_of(model)
    with dl.join_world() as world:
        batches = dl.Batches((samples(24), counts), 6, world, shuffle=False)
        for step in loop_on(batches, model, optimizer):
            for rows, kept in step:
                total = kept.sum()
                step.backward((errors(rows, kept) * kept).sum() / total.clamp(min=1), weight=float(total))
            step.fold()
            optimizer.step()
    return values_of(model)


def look_for_anomalies() -> bool:
    """Whether only the second rank's shard makes gradients; the first shard's mean is 0 / 0."""

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        is_kept = world.rank > 0
        return torch.sum(model(rows).square() * is_kept) / (len(rows) * is_kept)

    with dl.join_world() as world, torch.autograd.set_detect_anomaly(True):
        model = network()
        train_in(world, model, loss, samples(4), 4, weight=lambda step: 2.0 * (world.rank > 0))
        found = gradients_of(model)
        model.zero_grad()
        model(samples(4)[2:]).square().mean().backward()
        return is_like(found, gradients_of(model), BOUND) and torch.is_anomaly_enabled()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_mean_over_nothing_is_no_anomaly(on_ranks: OnRanks) -> None:
    assert on_ranks(2, look_for_anomalies) == [True, True]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_only_shards_of_weight_0_use_gets_zeros_as_on_one_device(ranks: int, on_ranks: OnRanks) -> None:
    with torch.random.fork_rng():
        wanted = decay_by_turns(is_plain=True)
    for found in on_ranks(ranks, decay_by_turns, False):
        assert all(torch.allclose(one, other, rtol=0.0, atol=BOUND) for one, other in zip(found, wanted, strict=True))
