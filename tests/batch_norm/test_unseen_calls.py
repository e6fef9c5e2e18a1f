"""Running statistics that move out of the hooks' sight: compiled code, buffers of the caller's, recomputation, kernels.

Statistics are compared with 1e-12: float64, sums of some ten terms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from ddp_loop.batch_norm import capture
from tests.support.comparing import is_close
from tests.support.devices import CPU
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused

pytestmark = pytest.mark.on_gpus_too

Tensors = list[torch.Tensor]
Call = Callable[[torch.Tensor], torch.Tensor]


def rows_of(count: int = 24) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def train(world: dl.World, model: nn.Module, call: Call, shards: int | None, epochs: int = 2) -> Tensors:
    batches = dl.Batches(rows_of(), 8, world, shards=shards)
    for step in dl.Loop(batches, epochs, state={"model": model}, progress=False, check_replicas_every=1):
        for rows in step:
            step.backward(call(rows).mean())
        step.fold()
    return [buffer.clone() for buffer in model.buffers()]


# -- compiled ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled_something", [True, False])
def test_hooks_make_torch_compile_forget_what_it_compiled(
    compiled_something: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[str] = []
    codes = SimpleNamespace(seen=["a code"] if compiled_something else [])
    monkeypatch.setitem(sys.modules, "torch._dynamo", SimpleNamespace(reset=lambda: resets.append("all")))
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", SimpleNamespace(input_codes=codes))
    capture._compile_anew()
    assert resets == ["all"] * compiled_something


def train_compiled(how: str, shards: int) -> list[Tensors]:
    """The statistics after a Loop, another one over the same model, and a training forward behind them."""
    torch._dynamo.reset()
    with dl.join_world(seed=0) as world:
        model = network()
        call: Any = model
        if how == "model":
            call = torch.compile(model, backend="eager")
        elif how == "function":

            def call_it(rows: torch.Tensor) -> Any:
                return model(rows)

            call = torch.compile(call_it, backend="eager")
        elif how == "in place":
            model.compile(backend="eager")
        if how != "plain":
            start = [buffer.clone() for buffer in model.buffers()]
            call(rows_of()[:2])  # of the shards' size, so that nothing but the hooks asks for new code
            for buffer, value in zip(model.buffers(), start, strict=True):
                buffer.copy_(value)
        results = [train(world, model, call, shards) for _ in range(2)]
        call(rows_of()[:2])
        results.append([buffer.clone() for buffer in model.buffers()])
    torch._dynamo.reset()
    return results


@pytest.mark.covers("D4", "J3")
@pytest.mark.parametrize("how", ["model", "function", "in place"])
@pytest.mark.slow
def test_a_model_compiled_and_called_before_its_loop_moves_its_statistics_by_the_whole_mini_batch(
    how: str, on_ranks: OnRanks
) -> None:
    expected = on_ranks(2, train_compiled, "plain", 4)[0]
    assert int(expected[0][2]) == 6
    for found in on_ranks(2, train_compiled, how, 4, timeout_s=120):
        assert all(map(is_close, found, expected))


def train_on_any_size(how: str, shards: int) -> Tensors:
    torch._dynamo.reset()
    with dl.join_world(seed=0) as world:
        model = network()
        call: Any = torch.compile(model, backend="eager", dynamic=True) if how == "compiled" else model
        found = train(world, model, call, shards)
    torch._dynamo.reset()
    return found


@pytest.mark.covers("D4", "J3", "J12")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_a_model_compiled_for_any_size_takes_shards_of_several_sizes(ranks: int, on_ranks: OnRanks) -> None:
    expected = on_ranks(1, train_on_any_size, "plain", 3)[0]  # 3, 3 and 2 of a mini-batch
    for found in on_ranks(ranks, train_on_any_size, "compiled", 3, timeout_s=120):
        assert is_close(found, expected)


def move_unseen(world: dl.World, folder: str, culprit: int) -> None:
    """F.batch_norm on the buffers of a layer that is not called."""
    model = network()
    norm = model[1]
    statistics = dict(norm.named_buffers())

    def call(rows: torch.Tensor) -> torch.Tensor:
        hidden = model[0](rows)
        if culprit in (ALL, world.rank):
            F.batch_norm(hidden, statistics["running_mean"], statistics["running_var"], training=True)
        return model[2:](norm(hidden))  # type: ignore[no-any-return]

    train(world, model, call, None)


@pytest.mark.one_device(CPU, "a GPU's bits are not compared")
@pytest.mark.covers("D4", "J3")
@pytest.mark.parametrize("culprit", [ALL, 1])
def test_statistics_that_something_else_moves_in_a_shard_are_an_error(culprit: int, refused: Refused) -> None:
    said = "Only the fold may update .* something else updated the statistics of one of model.1, "
    refused(2, move_unseen, culprit, kind="RuntimeError", said=said, by=culprit)


# -- buffers of the caller's -------------------------------------------------------------------------------


def train_functionally(shards: int, which: str) -> tuple[Tensors, Tensors]:
    """The module's buffers, and the caller's that each forward was given besides."""
    with dl.join_world(seed=0) as world:
        model = network()
        norm = model.get_submodule("1")
        given = {f"1.{name}": buffer.clone() for name, buffer in norm.named_buffers()}
        if which == "own":
            given = dict(model.named_buffers())
        elif which == "parameters":
            given = {name: one.detach().clone() for name, one in model.named_parameters()}

        def call(rows: torch.Tensor) -> torch.Tensor:
            if which == "nothing":
                model(rows)
            else:
                torch.func.functional_call(model, given, (rows,))
            return model(rows)  # type: ignore[no-any-return]

        buffers = train(world, model, call, shards, epochs=1)
        return buffers, [one.clone() for name, one in given.items() if name.startswith("1.") and "weight" not in name]


@pytest.mark.covers("D4", "J3")
def test_a_call_with_buffers_of_the_callers_moves_these_as_torch_does(on_ranks: OnRanks) -> None:
    found, given = on_ranks(1, train_functionally, 4, "caller's")[0]
    expected, seen = on_ranks(1, train_plainly, 4)[0]
    assert is_close(found, expected)
    mean = torch.zeros(4, dtype=torch.float64)
    for rows in seen:  # of 3 steps' 4 shards
        mean = 0.9 * mean + 0.1 * network()[0](rows).detach().mean(0)
    assert int(given[2]) == len(seen) == 12
    assert is_close([given[0]], [mean])


def train_plainly(shards: int) -> tuple[Tensors, Tensors]:
    """The buffers, and the shards in the order in which they came."""
    with dl.join_world(seed=0) as world:
        model, seen = network(), []

        def call(rows: torch.Tensor) -> torch.Tensor:
            seen.append(rows)
            return model(rows)  # type: ignore[no-any-return]

        return train(world, model, call, shards, epochs=1), seen


@pytest.mark.covers("D4", "J3")
@pytest.mark.parametrize("which", ["own", "parameters"])
@pytest.mark.quick_on_gpus
def test_a_functional_call_on_the_modules_own_buffers_is_one_of_the_module(which: str, on_ranks: OnRanks) -> None:
    expected, _ = on_ranks(2, train_functionally, 4, "nothing")[0]
    for found, _ in on_ranks(2, train_functionally, 4, which):
        assert int(found[2]) == 6
        if which == "own":
            assert is_close(found, expected)


# -- activation checkpointing ------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), norm, nn.Linear(4, 1)
        self.reentrant = reentrant

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        if isinstance(self.norm, nn.InstanceNorm1d):
            return self.norm(torch.stack([hidden, hidden.square()], dim=2)).sum(2)  # type: ignore[no-any-return]
        return self.norm(hidden)  # type: ignore[no-any-return]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.last(self.part(rows))  # type: ignore[no-any-return]
        rows = rows.detach().requires_grad_()
        return self.last(checkpoint(self.part, rows, use_reentrant=self.reentrant))  # type: ignore[no-any-return]


def train_checkpointed(reentrant: bool | None, shards: int | None, kind: str, more: bool = False) -> Tensors:
    with dl.join_world(seed=0) as world:
        norm = nn.InstanceNorm1d(4, track_running_stats=True) if kind == "instance" else nn.BatchNorm1d(4)
        model = Checkpointed(reentrant, norm).double()
        batches = dl.Batches(rows_of(), 8, world, shards=shards)
        for step in dl.Loop(batches, 2, state={"model": model}, progress=False, check_replicas_every=1):
            for rows in step:
                if more:
                    loss = model(rows).mean()
                    step.backward(loss, more_losses=True)
                step.backward(model(rows).mean())
            step.fold()
        return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.covers("D4", "J3")
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("kind", ["batch", "instance"])
@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (1, 4), (2, 1), (2, None)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_backward_leaves_running_statistics_alone(
    reentrant: bool, ranks: int, shards: int | None, kind: str, more: bool, on_ranks: OnRanks
) -> None:
    expected = on_ranks(ranks, train_checkpointed, None, shards, kind, more)[0]
    for found in on_ranks(ranks, train_checkpointed, reentrant, shards, kind, more):
        assert all(map(torch.equal, found, expected))


def call_after_backward(shards: int) -> Tensors:
    with dl.join_world(seed=0) as world:
        model = network()
        batches = dl.Batches(rows_of(), 8, world, shards=shards, shuffle=False)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            for rows in step:
                step.backward(model(rows).mean())
                model(rows)
            step.fold()
        return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.covers("D4", "J3")
def test_a_call_after_a_shards_backward_counts_whatever_the_number_of_shards(on_ranks: OnRanks) -> None:
    # One linear layer comes before batch norm, so that all shards' statistics are those of one.
    expected = on_ranks(1, call_after_backward, 1)[0]
    assert int(expected[2]) == 6
    assert is_close(on_ranks(2, call_after_backward, 4)[0], expected)
