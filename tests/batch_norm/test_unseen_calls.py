"""Running statistics that move out of the hooks' sight: compiled code, buffers of the caller's.

Statistics are compared with 1e-12: float64, sums of some ten terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import ddp_loop as dl
from tests.support.comparing import Tensors, buffers_of, is_close
from tests.support.devices import CPU
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused, does_it, loop_over, samples

pytestmark = [pytest.mark.covers("D4", "J3"), pytest.mark.on_gpus_too]

Act = Callable[[dl.Step, torch.Tensor], object]


def network() -> nn.Sequential:
    """One linear layer comes before batch norm, so that all shards' statistics are those of one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def train(world: dl.World, model: nn.Module, act: Act, shards: int | None, count: int = 24) -> Tensors:
    """The buffers after an epoch in which `act` does what is done with a shard."""
    for step in loop_over(world, "", model, shards=shards, count=count, check_replicas_every=1):
        for rows in step:
            act(step, rows)
        step.fold()
    return buffers_of(model)


def backward_of(call: Callable[[torch.Tensor], torch.Tensor]) -> Act:
    def act(step: dl.Step, rows: torch.Tensor) -> None:
        step.backward(call(rows).mean())

    return act


# -- compiled ----------------------------------------------------------------------------------------------


def train_compiled(how: str) -> list[Tensors]:
    """The statistics after a Loop, another one over the same model, and a training forward behind them."""
    torch._dynamo.reset()
    count = 22 if how.endswith("any size") else 24  # the last shards are smaller
    with dl.join_world() as world:
        model = network()
        call: Any = model
        if how.startswith("model"):
            call = torch.compile(model, backend="eager", dynamic=how.endswith("any size") or None)
        elif how == "function":
            call = torch.compile(lambda rows: model(rows), backend="eager")  # type: ignore[misc]
        elif how == "in place":
            model.compile(backend="eager")
        start = buffers_of(model)
        call(samples(3))  # of the shards' size, so that nothing but the hooks asks for new code
        for buffer, value in zip(model.buffers(), start, strict=True):
            buffer.copy_(value)
        results = [train(world, model, backward_of(call), 2, count) for _ in range(2)]
        call(samples(3))
    torch._dynamo.reset()
    return [*results, buffers_of(model)]


@pytest.mark.covers("J12")
@pytest.mark.parametrize("how", ["model", "function", "in place", "model for any size"])
@pytest.mark.slow
def test_a_model_compiled_and_called_before_its_loop_moves_its_statistics_by_the_whole_mini_batch(
    how: str, on_ranks: OnRanks
) -> None:
    expected = on_ranks(2, train_compiled, "nothing for any size" if how.endswith("any size") else "nothing")[0]
    assert [int(tensors[2]) for tensors in expected] == [4, 8, 9]
    for found in on_ranks(2, train_compiled, how, timeout_s=120):
        assert all(map(is_close, found, expected))


def move_unseen(world: dl.World, folder: str, culprit: int) -> None:
    """F.batch_norm on the buffers of a layer that is not called."""
    model = network()
    norm = model[1]
    statistics = dict(norm.named_buffers())

    def call(rows: torch.Tensor) -> torch.Tensor:
        hidden = model[0](rows)
        if does_it(world, culprit):
            F.batch_norm(hidden, statistics["running_mean"], statistics["running_var"], training=True)
        return model[2:](norm(hidden))  # type: ignore[no-any-return]

    train(world, model, backward_of(call), None)


@pytest.mark.one_device(CPU, "a GPU's bits are not compared")
@pytest.mark.parametrize("culprit", [ALL, 1])
def test_statistics_that_something_else_moves_in_a_shard_are_an_error(culprit: int, refused: Refused) -> None:
    said = "Only the fold may update .* something else updated the statistics of one of model.1, "
    refused(2, move_unseen, culprit, kind="RuntimeError", said=said, by=culprit)


# -- buffers of the caller's -------------------------------------------------------------------------------


def call_functionally(which: str) -> tuple[Tensors, Tensors, Tensors]:
    """The module's buffers; the caller's that each forward was given besides; and torch's after these calls."""
    with dl.join_world() as world:
        model = network()
        plain = network()
        tensors: dict[str, torch.Tensor] = {
            "own buffers": dict(model.named_buffers()),
            "own parameters": {name: one.detach().clone() for name, one in model.named_parameters()},
        }.get(which, {name: buffer.clone() for name, buffer in model.named_buffers()})

        def act(step: dl.Step, rows: torch.Tensor) -> None:
            plain(rows)
            if which == "twice":
                model(rows)
            elif which:
                functional_call(model, tensors, (rows,))
            step.backward(model(rows).mean())

        buffers = train(world, model, act, 3)
        return buffers, [one.clone() for one in tensors.values()], buffers_of(plain)


@pytest.mark.parametrize(
    ("which", "same"), [("own buffers", "twice"), ("own parameters", "twice"), ("the caller's buffers", "")]
)
@pytest.mark.quick_on_gpus
def test_a_functional_call_moves_the_modules_buffers_or_the_callers(which: str, same: str, on_ranks: OnRanks) -> None:
    expected, _, _ = on_ranks(2, call_functionally, same)[0]
    assert int(expected[2]) == (8 if same else 4)  # once, or twice, in each step
    for found, given, plain in on_ranks(2, call_functionally, which):
        assert is_close(found, expected)
        if not same:  # they move at once, as torch's
            assert is_close(given, plain)


# -- called again ------------------------------------------------------------------------------------------


def call_after_backward(shards: int) -> Tensors:
    with dl.join_world() as world:
        model = network()

        def act(step: dl.Step, rows: torch.Tensor) -> None:
            step.backward(model(rows).mean())
            model(rows)

        return train(world, model, act, shards)


def test_a_call_after_a_shards_backward_counts_whatever_the_number_of_shards(on_ranks: OnRanks) -> None:
    expected = on_ranks(1, call_after_backward, 1)[0]
    assert int(expected[2]) == 8
    assert is_close(on_ranks(2, call_after_backward, 3)[0], expected)
