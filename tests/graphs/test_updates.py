"""A captured update, with its backward and its optimizer, in a loop of one's own: the bits of the eager function.

The graphs are those of `tests.support.graphs`, which replay a list of operations on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same
from tests.support.graphs import cpu_graphs

pytestmark = [
    pytest.mark.both_modes,
    pytest.mark.one_mode("asynchronous", "graphs are those of a GPU"),
    pytest.mark.covers("J12"),
]

Make = Callable[[list[nn.Parameter]], Optimizer]
STEPS = 14
OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05, fused=True, capturable=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True, capturable=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1),
    "SGD, a loop over parameters": lambda parameters: torch.optim.SGD(parameters, lr=0.05, foreach=False),
}


@pytest.fixture(autouse=True)
def graphs() -> Iterator[None]:
    with cpu_graphs():
        yield


class Job:
    """A small training by a function that makes a whole update."""

    def __init__(self, make: Make, world: dl.World, *, captured: bool, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
        )  # fmt: skip
        self.optimizer = make(list(self.model.parameters()))
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.zeroes = True
        self.captured: Any = dl.capture(self.update, world, state=self.state, **options) if captured else None
        self.call: Callable[..., torch.Tensor] = self.captured or self.update
        self.losses: Tensors = []

    def update(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.zeroes:
            self.optimizer.zero_grad()
        loss = cross_entropy(self.model(rows), labels)
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, first: int = 0, last: int = STEPS, each: Callable[[int], None] = lambda step: None) -> None:
        """Steps `first` to `last`, of 10 rows; each fifth has 6."""
        for step in range(first, last):
            torch.manual_seed(step)
            rows = 6 if step % 5 == 4 else 10
            each(step)
            self.losses.append(self.call(torch.randn(rows, 8), torch.randint(0, 4, (rows,))).detach())

    def tensors(self) -> Tensors:
        kept = [one for each in self.optimizer.state.values() for one in each.values() if isinstance(one, torch.Tensor)]
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        return [one.detach().clone() for one in (*self.model.state_dict().values(), *kept, *gradients, *self.losses)]


def pair(make: Make = OPTIMIZERS["Adam"], **options: Any) -> tuple[Job, Job]:
    """The same job, captured and eager."""
    with dl.join_world(device="cpu", seed=0) as world:
        return Job(make, world, captured=True, **options), Job(make, world, captured=False)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_has_the_bits_of_the_eager_function(name: str) -> None:
    captured, eager = pair(OPTIMIZERS[name])
    for job in captured, eager:
        job.train()
    assert is_same(captured.tensors(), eager.tensors())
    assert (captured.captured.replays, captured.captured.eager_calls) == (9, 5)  # 3 to warm up, 2 of other shapes
    assert captured.captured.reason is None


def test_a_warm_up_is_made_of_real_calls_and_its_length_can_be_chosen() -> None:
    captured, eager = pair(warm_up=2)
    for job in captured, eager:
        job.train(last=3)
        assert is_same(captured.tensors(), eager.tensors()) or job is captured
    assert captured.captured.replays == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_may_be_zeroed_before_the_call(in_place: bool) -> None:
    captured, eager = pair()
    for job in captured, eager:
        job.zeroes = False

        def zero(step: int, job: Job = job) -> None:
            job.optimizer.zero_grad(set_to_none=not in_place)

        job.train(each=zero)
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.replays == 9


def test_gradients_that_are_never_zeroed_add_up() -> None:
    captured, eager = pair()
    for job in captured, eager:
        job.zeroes = False
        job.train()
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.replays == 9


def test_a_gradient_that_was_taken_away_has_the_call_run_eagerly() -> None:
    captured, eager = pair()
    for job in captured, eager:
        job.zeroes = False

        def take(step: int, job: Job = job) -> None:
            if step == 8:
                job.model.zero_grad()

        job.train(each=take)
    assert is_same(captured.tensors(), eager.tensors())
    assert 3 <= captured.captured.replays < 9


def test_a_loaded_checkpoint_has_the_update_captured_anew() -> None:
    captured, eager = pair()
    for job in captured, eager:
        job.train(last=8)
        kept = copy.deepcopy({name: one.state_dict() for name, one in job.state.items()})
        job.train(first=8, last=11)
        for name, one in job.state.items():
            one.load_state_dict(kept[name])
        job.train(first=8)
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.replays == 4 + 2 + 3  # of steps 3 to 7, 8 to 10, and 11 to 13, after two to warm up again
    assert captured.captured.reason is None


def test_a_replaced_parameter_has_the_update_captured_anew() -> None:
    captured, eager = pair(OPTIMIZERS["SGD"])
    for job in captured, eager:
        job.train(last=7)
        last: Any = job.model[4]
        last.weight.data = last.weight.data * 2
        job.train(first=7)
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.replays == 3 + 4


def test_a_setting_of_a_module_that_changes_counts() -> None:
    captured, eager = pair()
    for job in captured, eager:

        def change(step: int, job: Job = job) -> None:
            dropout: Any = job.model[3]
            dropout.p = 0.2 if step < 7 else 0.5
            job.model[1].train(step < 10)

        job.train(each=change)
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.reason is None


def test_a_replaced_layer_has_the_update_captured_anew() -> None:
    captured, eager = pair(OPTIMIZERS["SGD"])
    for job in captured, eager:
        job.train(last=7)
        job.model[2] = nn.Tanh()
        job.train(first=7)
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.replays == 3 + 4


def test_a_setting_that_is_written_again_with_the_same_value_changes_nothing() -> None:
    captured, _ = pair()

    def write(step: int) -> None:
        dropout: Any = captured.model[3]
        dropout.p = float("0.2")
        captured.optimizer.param_groups[0]["lr"] = float("0.05")

    captured.train(each=write)
    assert captured.captured.replays == 9


def schedule(job: Job) -> None:
    """Train with a learning rate that changes in each step."""
    rates = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.8)
    job.train(each=lambda step: rates.step() if step else None)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05), fused=True, capturable=True),
        lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.05), momentum=0.9, fused=True),
    ],
)
def test_a_schedule_writes_a_learning_rate_on_the_device(make: Make) -> None:
    captured, eager = pair(make)
    for job in captured, eager:
        schedule(job)
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.replays == 9


def test_a_learning_rate_on_the_device_that_the_optimizer_reads_on_the_host_is_refused() -> None:
    captured, eager = pair(lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.05), momentum=0.9))
    for job in captured, eager:
        schedule(job)
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.replays == 0
    assert captured.captured.reason.startswith("The host waits for the device in it (test_updates.py, line ")


def test_a_learning_rate_that_is_a_number_and_changes_in_each_step_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    captured, eager = pair()
    for job in captured, eager:
        schedule(job)
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.replays == 0
    assert captured.captured.reason == (
        "optimizer.lr changes from call to call, and a graph keeps it. Pass lr=torch.tensor(...) on the device, which "
        "schedulers write in place."
    )
    assert capsys.readouterr().out.count("update is not captured and runs eagerly. optimizer.lr changes") == 1


def test_a_learning_rate_that_is_a_number_and_changes_once_has_the_update_captured_anew() -> None:
    captured, eager = pair()
    for job in captured, eager:

        def change(step: int, job: Job = job) -> None:
            job.optimizer.param_groups[0]["lr"] = 0.05 if step < 7 else 0.01

        job.train(each=change)
    assert is_same(captured.tensors(), eager.tensors())
    assert captured.captured.replays == 3 + 4


def test_autocast_around_the_calls_casts_the_weights_of_each() -> None:
    captured, eager = pair()
    for job in captured, eager:
        with torch.autocast("cpu", torch.bfloat16):
            job.train(each=lambda step: torch.clear_autocast_cache())
        assert torch.is_autocast_cache_enabled()
    assert captured.captured.replays == 9
    assert is_same(captured.tensors(), eager.tensors())


def test_a_call_outside_of_the_autocast_that_was_captured_runs_eagerly() -> None:
    captured, eager = pair()
    for job in captured, eager:
        with torch.autocast("cpu", torch.bfloat16):
            job.train(last=6, each=lambda step: torch.clear_autocast_cache())
        job.train(first=6)
    assert captured.captured.replays == 2
    assert is_same(captured.tensors(), eager.tensors())


def test_a_captured_update_returns_detached_tensors_eagerly_too() -> None:
    captured, _ = pair()
    for _ in range(5):
        assert not captured.call(torch.randn(10, 8), torch.randint(0, 4, (10,))).requires_grad
