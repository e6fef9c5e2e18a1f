"""Models that cannot be captured: one line gives the reason, nothing of the attempt remains, and calls run eagerly.

The graphs are those of `tests.support.graphs`, which replay a list of operations on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same
from tests.support.graphs import cpu_graphs
from tests.support.harness import OnRanks

pytestmark = [
    pytest.mark.both_modes,
    pytest.mark.one_mode("asynchronous", "graphs are those of a GPU"),
    pytest.mark.covers("J12"),
]

CALLS = 8


@pytest.fixture(autouse=True)
def graphs() -> Iterator[None]:
    with cpu_graphs():
        yield


class Network(nn.Module):
    """Dropout, running statistics, a buffer and an attribute for a function to replace, and a branch to turn on."""

    offset: torch.Tensor
    calls: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.out, self.more = nn.Linear(8, 1), nn.Linear(8, 1)
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.into(rows).tanh())))  # type: ignore[no-any-return]


class Job:
    """A network, its optimizer, and what its training by some function leaves."""

    def __init__(self, capturable: bool = True) -> None:
        torch.manual_seed(2)
        self.model = Network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, fused=True, capturable=capturable)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.calls = 0

    def update(self, loss: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, call: Callable[..., torch.Tensor], *, updates: bool) -> Tensors:
        torch.manual_seed(3)
        random.seed(3)
        losses = []
        for _ in range(CALLS):
            found: Any = call(torch.randn(5, 6))
            loss = found[0] if isinstance(found, tuple) else getattr(found, "loss", found)
            if not updates:
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            losses.append(loss.detach())
        kept = [one for each in self.optimizer.state.values() for one in each.values()]
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        return [*losses, *self.model.state_dict().values(), *kept, *gradients, torch.rand(1)]


Function = Callable[[Job, torch.Tensor], torch.Tensor]


ELSEWHERE = nn.Linear(1, 1)


class ReadsInBackward(torch.autograd.Function):
    """Reads a value in its backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * float(gradient.sum().item() >= 0 or 1.0)


def reads_in_an_update(job: Job, rows: torch.Tensor) -> torch.Tensor:
    loss = job.update(job.model(rows).square().mean())
    return loss if loss.item() >= 0 else -loss


def reads_in_a_forward(job: Job, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = job.model(rows).square().mean()
    return loss if loss.item() >= 0 else -loss


def reads_in_a_backward(job: Job, rows: torch.Tensor) -> torch.Tensor:
    return ReadsInBackward.apply(job.model(rows)).square().mean()  # type: ignore[no-any-return, no-untyped-call]


def depends_on_values(job: Job, rows: torch.Tensor) -> torch.Tensor:
    job.model.calls = (*job.model.calls, 1)
    if len(job.model.calls) == 4:  # the call that is to be captured
        job.model.offset = job.model.offset + 1
    noise = random.random() + rows.nonzero().sum() * 0
    return job.update(job.model(rows).square().mean() * noise)


def depends_on_values_in_a_forward(job: Job, rows: torch.Tensor) -> torch.Tensor:
    return job.model(rows).square().mean() + rows.nonzero().sum() * 0  # type: ignore[no-any-return]


def turns_a_branch_on(job: Job, rows: torch.Tensor) -> torch.Tensor:
    job.calls += 1
    hidden = job.model.into(rows).tanh()
    more = job.model.more(hidden).mean() if job.calls > 3 else 0.0
    return job.update(job.model.out(hidden).square().mean() + more)


def returns_two(job: Job, rows: torch.Tensor) -> Any:
    outputs = job.model(rows)
    return outputs.square().mean(), outputs


def uses_another_module(job: Job, rows: torch.Tensor) -> torch.Tensor:
    return ELSEWHERE(job.model(rows)).square().mean()  # type: ignore[no-any-return]


@dataclass
class Wrapped:
    """A loss in a class that torch does not look into."""

    loss: torch.Tensor


def returns_an_object(job: Job, rows: torch.Tensor) -> Any:
    return Wrapped(job.model(rows).square().mean())


def writes_its_input(job: Job, rows: torch.Tensor) -> torch.Tensor:
    return job.model(rows.mul_(2)).square().mean()  # type: ignore[no-any-return]


def has_a_hook(job: Job, rows: torch.Tensor) -> torch.Tensor:
    if not job.calls:
        job.calls = 1
        job.model.out.weight.register_hook(lambda gradient: 2 * gradient)
    return job.model(rows).square().mean()  # type: ignore[no-any-return]


def repeats_its_forward(job: Job, rows: torch.Tensor) -> torch.Tensor:
    hidden = checkpoint(lambda one: job.model.norm(job.model.into(one)), rows, use_reentrant=False)
    return job.model.out(hidden).square().mean()  # type: ignore[no-any-return]


UPDATES = (reads_in_an_update, depends_on_values, turns_a_branch_on)
READS = r"The host waits for the device in it \(test_fallbacks.py, line \d+\), to read a value or to copy one. Keep"
FAILED = "Capturing it failed: RuntimeError: CUDA error: operation not permitted when stream is capturing"
REASONS: dict[str, tuple[Function, str]] = {
    "a host read in an update": (reads_in_an_update, READS),
    "a host read in a forward": (reads_in_a_forward, READS),
    "a host read in a backward": (reads_in_a_backward, READS),
    "a shape that depends on values, in an update": (depends_on_values, FAILED),
    "a shape that depends on values, in a forward": (depends_on_values_in_a_forward, FAILED),
    "new state of the optimizer": (turns_a_branch_on, "An optimizer made new state while it was captured"),
    "two outputs with a graph": (returns_two, "It returns 2 tensors that need a gradient. Return one loss"),
    "a module that is not in the state": (uses_another_module, "It uses parameters that are not in state="),
    "an object as output": (returns_an_object, "It returns a Wrapped. Return tensors and plain numbers"),
    "an input that is written": (writes_its_input, "It writes an input, and a graph reads copies. Write a clone."),
    "a hook on a parameter": (has_a_hook, "A parameter has a hook on its gradient, which would run twice"),
    "activation checkpointing": (repeats_its_forward, "The backward writes buffers"),
}


@pytest.mark.parametrize("what", REASONS)
def test_a_function_that_cannot_be_captured_leaves_the_bits_of_the_eager_one(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    function, said = REASONS[what]
    found = []
    with dl.join_world(device="cpu", seed=0) as world:
        for captured in (False, True):
            job = Job()

            def step(rows: torch.Tensor, job: Job = job) -> torch.Tensor:
                return function(job, rows)

            call: Any = dl.capture(step, world, state=job.state) if captured else step
            found.append(job.train(call, updates=function in UPDATES))
    assert is_same(*found)
    assert (call.replays, call.eager_calls) == (0, CALLS)
    with pytest.raises(ValueError, match=said):
        raise ValueError(call.reason)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"ddp_loop: step is not captured and runs eagerly. {call.reason}"]


def test_an_optimizer_that_is_not_capturable_is_named_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with dl.join_world(device="cpu", seed=0) as world:
        job = Job(capturable=False)
        call = dl.capture(lambda rows: job.update(job.model(rows).mean()), world, state=job.state)
        job.train(call, updates=True)
    assert call.reason == "The optimizer is not capturable. Use Adam(capturable=True)."
    assert capsys.readouterr().out == f"ddp_loop: <lambda> is not captured and runs eagerly. {call.reason}\n"


def test_an_optimizer_that_is_not_in_the_state_is_named() -> None:
    with dl.join_world(device="cpu", seed=0) as world:
        job = Job()
        call = dl.capture(lambda rows: job.update(job.model(rows).mean()), world, state={"model": job.model})
        job.train(call, updates=True)
    assert call.reason == "It steps an optimizer of type Adam that is not in state=. Add it there."


def test_a_device_without_graphs_runs_the_function_eagerly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with dl.join_world(device="cpu", seed=0) as world:
        monkeypatch.setattr(type(world.accelerator), "graph_recorder", lambda accelerator: None)
        job = Job()
        call = dl.capture(lambda rows: job.update(job.model(rows).mean()), world, state=job.state)
        for _ in range(5):
            assert not call(torch.ones(5, 6)).requires_grad  # detached, as that of a captured one
        assert (call.replays, call.eager_calls) == (0, 5)
    said = "ddp_loop: <lambda> is not captured and runs eagerly. A device of the kind cpu has no graphs.\n"
    assert capsys.readouterr().out == said


def test_other_shapes_run_eagerly_and_three_of_them_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    with dl.join_world(device="cpu", seed=0) as world:
        for captured in (False, True):
            job = Job()
            call: Any = lambda rows, job=job: job.update(job.model(rows).mean())  # noqa: E731
            call = dl.capture(call, world, state=job.state) if captured else call
            torch.manual_seed(4)
            for rows in (5, 5, 5, 5, 7, 5, 6, 7, 5, 4, 3, 2, 5):
                loss = call(torch.randn(rows, 6)).detach()
            found.append([loss, *job.model.state_dict().values()])
        assert is_same(*found)
        assert (call.replays, call.eager_calls, call.reason) == (4, 9, None)
    said = "runs eagerly for inputs of other shapes than the captured ones, and got 3 such shapes. Pad the inputs"
    assert capsys.readouterr().out.count(said) == 1


def test_inputs_of_ever_new_shapes_end_the_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    with dl.join_world(device="cpu", seed=0) as world:
        job = Job()
        call = dl.capture(lambda rows: job.model(rows).mean(), world, state=job.state)
        for rows in range(2, 70):
            call(torch.ones(rows, 6)).backward()
    assert call.reason == "Its inputs came in 64 shapes, and in none of them 3 times. Pad the inputs."
    assert (call.replays, call.eager_calls) == (0, 68)
    assert capsys.readouterr().out.count(call.reason) == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (torch.ones(5, 6, requires_grad=True), "An input needs a gradient"),
        (torch.ones(5, 6).to_sparse(), "An input is sparse"),
        (torch.ones(5, 6, device="meta"), "An input is on meta, and a graph reads cpu. Move it before the call."),
        ({1}, "An input is of type set. Pass tensors and plain numbers."),
    ],
)
def test_an_input_that_a_graph_cannot_read_is_reported(bad: Any, said: str) -> None:
    with dl.join_world(device="cpu", seed=0) as world:
        job = Job()
        call = dl.capture(lambda rows, more: job.model(rows).mean(), world, state=job.state)
        for _ in range(2):
            call(torch.ones(5, 6), bad).backward()
        assert call.reason is not None
        assert call.reason.startswith(said)


def test_plain_inputs_are_part_of_what_is_captured() -> None:
    with dl.join_world(device="cpu", seed=0) as world:
        rows, job = torch.ones(3), nn.Linear(3, 1)
        call = dl.capture(lambda rows, *, scale: scale * job(rows).sum(), world, state={"model": job})
        for scale in (1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1):
            assert call(rows, scale=scale) == scale * job(rows).sum()
        assert call.replays == 2  # 1 is no float


def test_without_gradients_the_function_itself_runs() -> None:
    with dl.join_world(device="cpu", seed=0) as world:
        job = Job()
        call = dl.capture(lambda rows: job.model(rows).mean(), world, state=job.state)
        for _ in range(6):
            call(torch.ones(5, 6)).backward()
        with torch.no_grad():
            assert not call(torch.ones(5, 6)).requires_grad
        assert (call.replays, call.eager_calls, call.reason) == (3, 4, None)


def update_on_ranks() -> tuple[str | None, int]:
    with cpu_graphs(), dl.join_world(device="cpu", seed=0) as world:
        job = Job()
        call = dl.capture(lambda rows: job.update(job.model(rows).mean()), world, state=job.state)
        job.train(call, updates=True)
        return call.reason, call.replays


def synced_on_ranks() -> str | None:
    with cpu_graphs(), dl.join_world(device="cpu", seed=0) as world:
        job = Job()
        dl.sync_batch_norm(job.model, world)
        return dl.capture(lambda rows: job.model(rows).mean(), world, state=job.state).reason


def test_an_update_on_several_ranks_is_not_captured(on_ranks: OnRanks) -> None:
    reason = (
        "It updates parameters, and 2 ranks must do that together. Return the loss, and call step.backward, step.fold "
        "and optimizer.step outside of it."
    )
    assert on_ranks(2, update_on_ranks) == [(reason, 0)] * 2


def test_synced_batch_norm_on_several_ranks_is_not_captured(on_ranks: OnRanks) -> None:
    said = "Synced batch norm communicates in the forward. Leave sync_batch_norm out to capture it."
    assert on_ranks(2, synced_on_ranks) == [said] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state": {"loop": 1}}, "state must have the modules and optimizers that the function uses"),
        ({"warm_up": 1}, "warm_up must be a whole number, 2 or more. Got 1."),
        ({"graphs": 0}, "graphs must be a whole number, 1 or more. Got 0."),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with dl.join_world(device="cpu", seed=0) as world, pytest.raises(ValueError, match=said):
        dl.capture(nullcontext, world, **{"state": {"model": nn.Linear(1, 1)}, **options})
