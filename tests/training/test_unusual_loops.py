"""Loops that are unusual, and right: within 1e-12 of a plain loop in float64.

No sum here has more than some hundred terms, each rounded at 1.1e-16.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import values_of
from tests.support.harness import OnRanks
from tests.support.refusals import (
    BOUND,
    Refused,
    loop_over,
    loss_of,
    mean_of,
    network,
    samples,
)

pytestmark = pytest.mark.on_gpus_too

Trained = dict[str, list[float]]


def plain_steps(model: nn.Module, count: int = 24) -> Iterator[torch.Tensor]:
    """The plain loop's mini-batches, with the gradients of `model` in place."""
    for rows in samples(count).split(6):
        model.zero_grad()
        loss_of(model, rows).backward()
        yield rows


def assert_close(results: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> None:
    for rank, result in enumerate(results):
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            assert (one - other).abs().max() <= BOUND * max(1.0, float(other.abs().max())), f"rank {rank}"


def train_usually(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in plain_steps(model):
        optimizer.step()
    return values_of(model)


def zero_gradients(where: str, shards: int | None) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in loop_over(world, "", model, optimizer, shards=shards, run_dir=None):
            if where == "before the shards":
                optimizer.zero_grad()
            for rows in step:
                if where == "before each backward":
                    optimizer.zero_grad()
                step.backward(loss_of(model, rows))
            if where == "before fold":
                optimizer.zero_grad(set_to_none=step.iteration % 2 == 0)
            step.fold()
            optimizer.step()
            if where == "after the step":
                optimizer.zero_grad(set_to_none=step.iteration % 2 == 0)
        return values_of(model)


@pytest.mark.parametrize("shards", [None, 6])
@pytest.mark.parametrize("where", ["before the shards", "after the step"])
@pytest.mark.quick_on_gpus
def test_zero_grad_between_the_steps_changes_nothing(where: str, shards: int | None, on_ranks: OnRanks) -> None:
    assert_close(on_ranks(2, zero_gradients, where, shards), train_usually(network()))


def test_zero_grad_before_the_only_shards_backward_changes_nothing(on_ranks: OnRanks) -> None:
    assert_close(on_ranks(2, zero_gradients, "before each backward", None), train_usually(network()))


def zero_in_the_step(world: dl.World, folder: str, where: str) -> None:
    model = network()
    for step in loop_over(world, folder, model, shards=6):
        for rows in step:
            if where == "before each backward":
                model.zero_grad()
            step.backward(loss_of(model, rows))
        if where == "before fold":
            model.zero_grad()
        step.fold()


@pytest.mark.parametrize("where", ["before each backward", "before fold"])
def test_zero_grad_that_loses_a_shards_gradient_is_refused(where: str, refused: Refused) -> None:
    refused(2, zero_in_the_step, where, kind="RuntimeError", said="zero_grad")


def clip() -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in loop_over(world, "", model, optimizer, run_dir=None):
            for rows in step:
                step.backward(loss_of(model, rows))
            norm = step.fold().gradient_norm
            clipped = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert abs(float(norm - clipped)) <= BOUND * float(norm)
            optimizer.step()
        return values_of(model)


def test_clipping_after_fold_clips_the_whole_mini_batchs_gradient(on_ranks: OnRanks) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in plain_steps(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert_close(on_ranks(3, clip), values_of(model))


def add_a_group(where: str, differing: bool) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model, head = network(), nn.Linear(4, 1).double()
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.fill_(0.5 if differing and world.rank > 0 else 0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in loop_over(world, "", model, optimizer, run_dir=None):
            if step.iteration == 2 and where == "before the shards":
                optimizer.add_param_group({"params": list(head.parameters())})
            for rows in step:
                added = head(rows) if len(optimizer.param_groups) == 2 else 0.0
                step.backward(mse_loss(model(rows) + added, rows.sum(1, keepdim=True)))
            step.fold()
            optimizer.step()
            if step.iteration == 1 and where == "after the step":
                optimizer.add_param_group({"params": list(head.parameters())})
        return values_of(model, head)


def plain_with_a_group() -> list[torch.Tensor]:
    model, head = network(), nn.Linear(4, 1).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, rows in enumerate(samples(24).split(6), 1):
        if number == 2:
            optimizer.add_param_group({"params": list(head.parameters())})
        optimizer.zero_grad()
        added = head(rows) if len(optimizer.param_groups) == 2 else 0.0
        mse_loss(model(rows) + added, rows.sum(1, keepdim=True)).backward()
        optimizer.step()
    return values_of(model, head)


@pytest.mark.parametrize("where", ["after the step", "before the shards"])
def test_a_group_added_in_mid_run_is_trained_as_in_the_plain_loop(where: str, on_ranks: OnRanks) -> None:
    assert_close(on_ranks(3, add_a_group, where, False), plain_with_a_group())


@pytest.mark.parametrize("where", ["after the step", "before the shards"])
def test_a_group_that_is_added_with_other_values_on_each_rank_becomes_rank_0s(where: str, on_ranks: OnRanks) -> None:
    first, *others = on_ranks(3, add_a_group, where, True)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def add_a_group_on_one(world: dl.World, folder: str, where: str) -> None:
    model, head = network(), nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in loop_over(world, folder, model, optimizer):
        if step.iteration == 2 and world.rank == 1 and where == "before the shards":
            optimizer.add_param_group({"params": list(head.parameters())})
        for rows in step:
            step.backward(mse_loss(model(rows) + head(rows), rows.sum(1, keepdim=True)))
        step.fold()
        if step.iteration == 1 and world.rank == 1 and where == "after the step":
            optimizer.add_param_group({"params": list(head.parameters())})


@pytest.mark.parametrize("where", ["after the step", "before the shards"])
@pytest.mark.slow
def test_a_group_added_on_one_rank_alone_is_refused(where: str, refused: Refused) -> None:
    said = "rank 1 is at a gather of modules and parameters that are new in state"
    refused(2, add_a_group_on_one, where, kind="Parted", said=said)


def norm_network() -> nn.Sequential:
    model = network()
    return nn.Sequential(model[0], nn.BatchNorm1d(6).double(), model[1], model[2])


def check_copy(model: nn.Module) -> None:
    """A copy is an ordinary module: in training its statistics move as torch moves them."""
    plain = norm_network()
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        one.train()
        one(samples(5))
    for (name, value), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(value, other), f"{name} of the copy"


def copy_and_move(what: str) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = norm_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        copies: list[nn.Module] = []
        for step in loop_over(world, "", model, optimizer, run_dir=None):
            for number, rows in enumerate(step):
                if what == "deepcopy in the shard" and number == 0:
                    copies.append(copy.deepcopy(model))
                step.backward(loss_of(model, rows))
            if what == "deepcopy before fold":
                copies.append(copy.deepcopy(model))
            step.fold()
            optimizer.step()
            if what == "deepcopy":
                copies.append(copy.deepcopy(model))
                copies.append(torch.optim.swa_utils.AveragedModel(model))
            if what == "pickle":
                copies.append(pickle.loads(pickle.dumps(model)))
            if what == "to the same device":
                model.to(world.device).double().train()
            if what == "load_state_dict":
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        for other in copies:
            check_copy(other.module if isinstance(other, torch.optim.swa_utils.AveragedModel) else other)
        return [*values_of(model), model.get_buffer("1.running_mean"), model.get_buffer("1.running_var")]


@pytest.mark.parametrize(
    "what",
    ["deepcopy", "pickle", "deepcopy in the shard", "deepcopy before fold", "to the same device", "load_state_dict"],
)
@pytest.mark.one_device("cpu", "the fake GPU's tensors cannot be pickled")
def test_copying_or_moving_the_model_in_mid_run_changes_nothing(what: str, on_ranks: OnRanks) -> None:
    expected = on_ranks(2, copy_and_move, "nothing")
    assert_close(on_ranks(2, copy_and_move, what), expected[0])


def save_and_load() -> bool:
    with dl.join_world() as world:
        model = norm_network()
        for step in loop_over(world, "", model, run_dir=None):
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            saved = copy.deepcopy(model.state_dict())
            norm_network().load_state_dict(saved)
        return all("ddp" not in name for name in saved)


def test_the_models_state_dict_is_a_plain_one(on_ranks: OnRanks) -> None:
    assert on_ranks(2, save_and_load) == [True, True]


def share_a_graph(how: str) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in loop_over(world, "", model, optimizer, run_dir=None, shards=4):
            for rows in step:
                if how == "one trunk":
                    output = model(rows)
                    half = mse_loss(output, rows.sum(1, keepdim=True)) / 2
                    step.backward(half, more_losses=True)
                    step.backward(mse_loss(output, rows.sum(1, keepdim=True)) / 2)
                else:
                    step.backward(loss_of(model, rows) / 2, more_losses=True)
                    step.backward(loss_of(model, rows) / 2)
            step.fold()
            optimizer.step()
        return values_of(model)


@pytest.mark.parametrize("how", ["two forwards", "one trunk"])
def test_several_losses_of_a_shard_add_up(how: str, on_ranks: OnRanks) -> None:
    assert_close(on_ranks(2, share_a_graph, how), train_usually(network()))


def two_loops(how: str) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model, other = norm_network(), norm_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        second = model if how in ("one model", "one after the other") else other
        inner_optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
        outer = loop_over(world, "", model, optimizer, run_dir=None)
        if how == "one after the other":
            train_in(outer, model, optimizer)
            train_in(loop_over(world, "", model, inner_optimizer, run_dir=None), model, inner_optimizer)
            return [*values_of(model), model.get_buffer("1.running_mean")]
        inner = iter(loop_over(world, "", second, inner_optimizer, run_dir=None))
        for step in outer:
            for network_, optimizer_, one in ((model, optimizer, step), (second, inner_optimizer, next(inner))):
                for rows in one:
                    one.backward(loss_of(network_, rows))
                one.fold()
                optimizer_.step()
        assert next(inner, None) is None
        return [*values_of(model), model.get_buffer("1.running_mean")]


def train_in(loop: dl.Loop, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in loop:
        for rows in step:
            step.backward(loss_of(model, rows))
        step.fold()
        optimizer.step()


def plain_norm(rounds: int, again: int) -> list[torch.Tensor]:
    model = norm_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(rounds):
        for rows in samples(24).split(6):
            for _ in range(again):
                optimizer.zero_grad()
                loss_of(model, rows).backward()
                optimizer.step()
    return [*values_of(model), model.get_buffer("1.running_mean")]


@pytest.mark.parametrize(
    ("how", "rounds", "again"), [("one after the other", 2, 1), ("two models", 1, 1), ("one model", 1, 2)]
)
def test_two_loops_do_not_disturb_each_other(how: str, rounds: int, again: int, on_ranks: OnRanks) -> None:
    # one shard in all, so that batch norm sees the whole mini-batch as in the plain loop
    assert_close(on_ranks(1, two_loops, how), plain_norm(rounds, again))


@pytest.mark.parametrize("how", ["one after the other", "two models", "one model"])
def test_two_loops_on_two_ranks_agree(how: str, on_ranks: OnRanks) -> None:
    first, second = on_ranks(2, two_loops, how)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def own_backward_beside() -> list[torch.Tensor]:
    with dl.join_world() as world:
        model, critic = network(), nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in loop_over(world, "", model, optimizer, run_dir=None):
            for rows in step:
                inputs = rows.clone().requires_grad_(True)
                torch.autograd.grad(model(inputs).sum(), inputs)  # a gradient by the inputs, as in a penalty
                critic(rows).sum().backward()
                step.backward(loss_of(model, rows))
            step.fold()
            optimizer.step()
        return values_of(model)


def test_gradients_that_are_not_the_steps_are_left_alone(on_ranks: OnRanks) -> None:
    assert_close(on_ranks(2, own_backward_beside), train_usually(network()))


def evaluate_between(where: str) -> list[torch.Tensor]:
    with dl.join_world() as world:
        model = norm_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        test = dl.Batches(samples(5), 2, world, shuffle=False)
        for step in loop_over(world, "", model, optimizer, run_dir=None, bucket_cap_mib=1e-5):
            if where == "before the step":
                dl.evaluate(model, test, mean=mean_of)
            for rows in step:
                step.backward(loss_of(model, rows))
            step.fold()
            if where == "after fold":
                dl.evaluate(model, test, mean=mean_of)
            optimizer.step()
        return [*values_of(model), model.get_buffer("1.running_mean")]


@pytest.mark.parametrize("where", ["before the step", "after fold"])
def test_evaluation_between_steps_changes_nothing(where: str, on_ranks: OnRanks) -> None:
    expected = on_ranks(3, evaluate_between, "nowhere")
    assert_close(on_ranks(3, evaluate_between, where), expected[0])
