"""Stops at awkward places: after the last fold, in the body of a step, with one loop inside another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.runs import ask, checkpoints_of, digests, status_of
from tests.support.training import mean, take

pytestmark = pytest.mark.covers("E5", "J5")

EPOCHS, STEPS = 3, 4
LAST = EPOCHS * STEPS


@dataclass
class Job:
    """A small job, in which the script asks for a stop once; `said` is what it did outside of steps."""

    world: dl.World
    folder: str
    kind: str
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.8)
        self.state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.rows = torch.randn(24, 3)
        self.loop = self.make_loop(self.state, run_dir=self.folder or None, save_every=100)

    def make_loop(self, state: dict[str, object], epochs: int = EPOCHS, **keywords: object) -> dl.Loop:
        batches = dl.Batches(self.rows, 6, self.world, shards=3)
        return dl.Loop(batches, epochs, state=state, progress=False, **keywords)  # type: ignore[arg-type]

    def make(self, step: dl.Step) -> None:
        for rows in step:
            step.backward(self.model(rows).square().mean())
        step.fold()
        self.optimizer.step()

    def ask(self) -> None:
        if self.kind and (self.kind != "call" or self.world.rank == 1):
            ask(self.kind, self.folder, self.loop)
        self.world.sum(torch.ones(()))  # the others may follow it from here on

    def evaluate(self) -> None:
        held_out = dl.Batches(self.rows, 4, self.world, shuffle=False, shards=3)
        dl.evaluate(self.model, held_out, square=lambda output, rows: output.square().mean())
        self.said.append(f"evaluated after step {self.loop.iteration}")

    def make_inner(self, *, asks_in: int = 0) -> None:
        """Train another model in a loop of its own."""
        model = nn.Linear(3, 1)
        for step in self.make_loop({"model": model}, 1):
            if step.iteration == asks_in:
                self.ask()
            take(step, model, mean)
            with torch.no_grad():
                model.weight.mul_(0.9)
        self.said.append("the inner loop has ended")


def last_step(job: Job) -> None:
    for step in job.loop:
        job.make(step)
        if step.iteration == LAST:
            job.ask()
    job.evaluate()


def last_epoch(job: Job) -> None:
    for epoch in job.loop.epochs():
        for step in epoch:
            job.make(step)
        job.schedule.step()
        if epoch.number == EPOCHS:
            job.ask()
    job.evaluate()


def before_a_break(job: Job) -> None:
    for epoch in job.loop.epochs():
        for step in epoch:
            job.make(step)
        job.schedule.step()
        if epoch.number == 2:
            job.ask()
            break
    job.evaluate()


def evaluation_in_a_step(job: Job) -> None:
    for step in job.loop:
        job.make(step)
        if step.iteration == 6:
            job.ask()
            job.evaluate()
            job.schedule.step()


def evaluation_after_an_epoch(job: Job) -> None:
    for epoch in job.loop.epochs():
        for step in epoch:
            job.make(step)
            if step.iteration == STEPS:
                job.ask()
        job.evaluate()
        job.schedule.step()


def after_an_inner_loop(job: Job) -> None:
    for step in job.loop:
        job.make(step)
        if step.iteration == 2:
            job.make_inner()
        if step.iteration == 3:
            job.ask()


def in_an_inner_loop(job: Job) -> None:
    for epoch in job.loop.epochs():
        for step in epoch:
            job.make(step)
        if epoch.number == 1:
            job.make_inner(asks_in=2)
        job.schedule.step()


def in_a_loop_inside_a_step(job: Job) -> None:
    for epoch in job.loop.epochs():
        for step in epoch:
            job.make(step)
            if step.iteration == STEPS + 2:
                job.make_inner(asks_in=2)
                job.schedule.step()
        job.schedule.step()


Script = Callable[[Job], None]


def run(script: Script, folder: str, kind: str = "") -> tuple[list[str], int, dict[str, str]]:
    """What a script said, the last step of its loop, and the state that it ends with."""
    try:
        with dl.join_world(seed=1) as world:
            script(job := Job(world, folder, kind))
        job.said.append("ended")
    except dl.Stopped:
        job.said.append("stopped")
    return job.said, job.loop.iteration, digests(job.state)


# The place, what the script does until it ends, the step at which it stops, the checkpoint, how the run ended.
PLACES = [
    (last_step, [], LAST, LAST, "stopped"),
    (last_epoch, [], LAST, LAST, "stopped"),
    (before_a_break, [], 2 * STEPS, STEPS, "left"),
    (evaluation_in_a_step, ["evaluated after step 6"], 7, 7, "stopped"),
    (evaluation_after_an_epoch, [], STEPS, STEPS, "stopped"),
    (after_an_inner_loop, ["the inner loop has ended"], 4, 4, "stopped"),
    (in_an_inner_loop, [], STEPS, STEPS, "stopped"),
    (in_a_loop_inside_a_step, [], STEPS + 2, 0, "stopped"),
]


@pytest.mark.parametrize("kind", ["SIGTERM", "call"])
@pytest.mark.parametrize(
    ("script", "said", "at", "saved", "status"), PLACES, ids=[place[0].__name__ for place in PLACES]
)
@pytest.mark.slow
def test_a_stop_is_followed_wherever_it_comes_and_the_run_resumes_to_the_same_bits(
    script: Script, said: list[str], at: int, saved: int, status: str, kind: str, on_ranks: OnRanks, tmp_path: Path
) -> None:
    assert on_ranks(2, run, script, str(tmp_path), kind)[1][:2] == ([*said, "stopped"], at)
    assert status_of(tmp_path)["status"] == status
    if status == "stopped":
        assert checkpoints_of(tmp_path)[-1:] == ([saved] if saved else [])
    (_, _, whole), (words, iteration, state) = (
        on_ranks(1, run, script, "")[0],
        on_ranks(3, run, script, str(tmp_path))[0],
    )
    assert (words[-1], iteration) == ("ended", 2 * STEPS if script is before_a_break else LAST)
    assert [name for name, bits in whole.items() if state[name] != bits] == []
