"""Loops that are unusual, and right: what a script does beside the step changes no bit, or is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import chain
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ddp_loop as dl
from tests.support.comparing import Tensors, gradients_of, is_close, is_same, same_on_all, state_of, values_of
from tests.support.harness import OnRanks, in_world
from tests.support.refusals import ALL, Refused, does_it, loop_over, loss_of, mean_of, network, samples
from tests.support.training import sgd, take, train_in

pytestmark = pytest.mark.on_gpus_too

FIRST, BACKWARD, FOLD, FOLDED, LAST = (
    "before the shards",
    "before a backward",
    "before fold",
    "after fold",
    "after the step",
)
Act = Callable[[dl.World, nn.Module], object]


def norm_network() -> nn.Sequential:
    model = network()
    return nn.Sequential(model[0], nn.BatchNorm1d(6).double(), model[1], model[2])


def act_in_a_loop(
    world: dl.World, folder: str | None, act: Act, place: str, is_synced: bool = False, **keywords: Any
) -> Tensors:
    model = norm_network()
    if is_synced:
        dl.sync_batch_norm(model, world)
    optimizer = sgd(model, 0.9)

    def reach(here: str) -> None:
        if here == place:
            act(world, model)

    for step in loop_over(world, folder, model, optimizer, bucket_cap_mib=1e-5, **keywords):
        reach(FIRST)
        for rows in step:
            reach(BACKWARD)
            step.backward(loss_of(model, rows))
        reach(FOLD)
        step.fold()
        reach(FOLDED)
        optimizer.step()
        reach(LAST)
    return state_of(model)


def nothing(world: dl.World, model: nn.Module) -> None:
    pass


def clear(world: dl.World, model: nn.Module) -> None:
    """By both ways of torch."""
    first, *others = model.children()
    first.zero_grad(set_to_none=False)
    for other in others:
        other.zero_grad()


def check_copy(model: nn.Module, other: nn.Module) -> None:
    """A copy is an ordinary module: in training its statistics move as torch moves them."""
    plain = norm_network()
    plain.load_state_dict(model.state_dict())
    for one in (other, plain):
        one.train()
        one(samples(5))
    assert all(map(torch.equal, state_of(other), state_of(plain)))


def deepcopy(world: dl.World, model: nn.Module) -> None:
    check_copy(model, copy.deepcopy(model))
    check_copy(model, torch.optim.swa_utils.AveragedModel(model).module)


def unpickle(world: dl.World, model: nn.Module) -> None:
    check_copy(model, pickle.loads(pickle.dumps(model)))


def fail_in_forward(world: dl.World, model: nn.Module) -> None:
    """The script catches the error of a call."""
    norm: Any = model.get_submodule("1")
    before = (norm.running_mean, norm.running_var, norm.momentum)
    with pytest.raises((RuntimeError, ValueError)):
        norm(torch.ones(2, 7, dtype=torch.float64))
    after = (norm.running_mean, norm.running_var, norm.momentum)
    assert all(one is other for one, other in zip(after, before, strict=True))


def move(world: dl.World, model: nn.Module) -> None:
    model.to(world.device).double().train()


def load(world: dl.World, model: nn.Module) -> None:
    state = model.state_dict()
    assert state.keys() == norm_network().state_dict().keys()
    model.load_state_dict({name: value.clone() for name, value in state.items()})


def evaluate(world: dl.World, model: nn.Module) -> None:
    dl.evaluate(model, dl.Batches(samples(5), 2, world, shuffle=False), mean=mean_of)


def infer_on_one_rank(world: dl.World, model: nn.Module) -> None:
    if world.rank == 1:
        model.eval()
        with torch.no_grad():
            model(samples(5))
        model.train()


def differentiate(world: dl.World, model: nn.Module) -> None:
    """By the inputs, as in a penalty, and through a network that the loop does not have."""
    inputs = samples(5).requires_grad_()
    torch.autograd.grad(network()(inputs).sum(), inputs)
    nn.Linear(4, 1).double()(inputs).sum().backward()


CHANGES_NOTHING = [
    (clear, FIRST, {"shards": 3}),
    (clear, BACKWARD, {}),  # of the only shard
    (deepcopy, BACKWARD, {}),
    (fail_in_forward, BACKWARD, {}),
    (move, LAST, {}),
    (load, LAST, {}),
    (evaluate, FOLDED, {}),
    (infer_on_one_rank, LAST, {"is_synced": True}),
    (differentiate, BACKWARD, {"shards": 3}),
]


@pytest.mark.parametrize(("act", "place", "how"), CHANGES_NOTHING)
@pytest.mark.quick_on_gpus
def test_what_is_no_part_of_the_step_changes_no_bit(
    act: Act, place: str, how: dict[str, Any], on_ranks: OnRanks
) -> None:
    wanted = same_on_all(on_ranks(2, in_world, act_in_a_loop, None, nothing, "", **how))
    assert is_same(same_on_all(on_ranks(2, in_world, act_in_a_loop, None, act, place, **how)), wanted)


@pytest.mark.one_device("cpu", "the fake GPU's tensors cannot be pickled")
def test_pickling_the_model_in_mid_run_changes_no_bit(on_ranks: OnRanks) -> None:
    wanted = on_ranks(2, in_world, act_in_a_loop, None, nothing, "")
    assert is_same(same_on_all(on_ranks(2, in_world, act_in_a_loop, None, unpickle, BACKWARD)), wanted[0])


def fail(slope: torch.Tensor) -> NoReturn:
    raise ArithmeticError("planted")


def train_after_an_error(fails: bool) -> Tensors:
    """The gradients of a loop; one before it over the same model ended in an error of a backward, on all ranks."""

    def spoiled(model: Any, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = model[:2](rows)
        hidden.register_hook(fail)
        return model[2](hidden).mean()  # type: ignore[no-any-return]

    model = network()
    with dl.join_world() as world:
        if fails:
            with pytest.raises(ArithmeticError, match="planted"):
                train_in(world, model, spoiled)
        train_in(world, model, data=samples(6))
    return gradients_of(model)


def test_a_new_loop_after_an_error_of_backward_is_as_any_other(on_ranks: OnRanks) -> None:
    results = [*on_ranks(3, train_after_an_error, True), *on_ranks(3, train_after_an_error, False)]
    assert float(same_on_all(results)[0].abs().sum()) > 0


# -- a group that is added in mid-run ----------------------------------------------------------------------


def head_of(value: float) -> nn.Module:
    head = nn.Linear(4, 1).double()
    for parameter in head.parameters():
        nn.init.constant_(parameter, value)
    return head


def add_a_group(world: dl.World, folder: str, place: str, adder: int = ALL, differing: bool = False) -> Tensors:
    """In the second step, or right before it; its layer takes part from then on."""
    model = network()
    head = head_of(0.5 if differing and world.rank > 0 else 0.25)
    optimizer = sgd(model)
    for step in loop_over(world, folder, model, optimizer):
        if (step.iteration, place) == (2, FIRST) and does_it(world, adder):
            optimizer.add_param_group({"params": list(head.parameters())})
        for rows in step:
            added = head(rows) if step.iteration > 1 else 0.0
            step.backward(mse_loss(model(rows) + added, rows.sum(1, keepdim=True)))
        step.fold()
        optimizer.step()
        if (step.iteration, place) == (1, LAST) and does_it(world, adder):
            optimizer.add_param_group({"params": list(head.parameters())})
    return values_of(model, head)


def add_plainly() -> Tensors:
    model = network()
    head = head_of(0.25)
    optimizer = sgd(model)
    for number, rows in enumerate(samples(24).split(6), 1):
        if number == 2:
            optimizer.add_param_group({"params": list(head.parameters())})
        optimizer.zero_grad()
        added = head(rows) if number > 1 else 0.0
        mse_loss(model(rows) + added, rows.sum(1, keepdim=True)).backward()
        optimizer.step()
    return values_of(model, head)


@pytest.mark.parametrize(("place", "differing"), [(LAST, True), (FIRST, False)])
def test_a_group_added_in_mid_run_is_trained_as_in_the_plain_loop_from_rank_0s_values(
    place: str, differing: bool, on_ranks: OnRanks
) -> None:
    assert is_close(same_on_all(on_ranks(3, in_world, add_a_group, "", place, differing=differing)), add_plainly())


@pytest.mark.slow
def test_a_group_added_on_one_rank_alone_is_refused(refused: Refused) -> None:
    said = "rank 1 is at a gather of modules and parameters that are new in state"
    refused(2, add_a_group, LAST, 1, kind="Parted", said=said, by=None)


# -- two loops ---------------------------------------------------------------------------------------------

ORDERS: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "one after the other": lambda mini_batches: mini_batches * 2,
    "one model": lambda mini_batches: [rows for rows in mini_batches for _ in range(2)],
    "two models": lambda mini_batches: mini_batches,
}


def run_two_loops(how: str) -> Tensors:
    with dl.join_world() as world:
        first = norm_network()
        models = [first, norm_network() if how == "two models" else first]
        loops = (loop_over(world, "", model, bucket_cap_mib=1e-5) for model in models)  # made when reached
        if how == "one after the other":
            for step in chain.from_iterable(loops):
                make(step, first)
        else:
            for steps in zip(*loops, strict=True):
                for step, model in zip(steps, models, strict=True):
                    make(step, model)
        return state_of(first)


def make(step: dl.Step, model: nn.Module) -> None:
    take(step, model)
    sgd(model).step()


@pytest.mark.parametrize("how", ORDERS)
def test_two_loops_do_not_disturb_each_other(how: str, on_ranks: OnRanks) -> None:
    model = norm_network()
    for rows in ORDERS[how](list(samples(24).split(6))):
        model.zero_grad()
        loss_of(model, rows).backward()
        sgd(model).step()
    (alone,) = on_ranks(1, run_two_loops, how)  # one shard in all: batch norm sees the whole mini-batch
    assert is_same(alone, state_of(model))
    assert not is_same(same_on_all(on_ranks(2, run_two_loops, how)), alone)
