"""What it costs that nothing hangs and nothing is lost: the control word, the guards, the watcher; checkpoints.

    python -m benchmarks faults [PART ...]

The steps are those of `steps`, against the same steps without: the control word's values are constant there and no code
reads them, gradients are not looked at, replicas are not compared. A save is held against a copy of the state in
memory, for how long it stalls training, and against `torch.save` into one file with an fsync, for how long it takes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from benchmarks.measuring import RANKS, Ratio, Step, compare, print_table
from benchmarks.models import mlp
from benchmarks.steps import JOBS, MINI_BATCH, SAMPLES, make_data, our_step
from ddp_loop.checkpoint import Checkpointer, CheckpointPolicy
from ddp_loop.training.step import CONTROL_LENGTH, ControlDecision, ControlWord, control_tensor

GOALS = {"digit network": 1.02, "32-wide MLP": 1.05}
SAVES = 12  # pairs
STEPS = 20  # beside a save


NOTHING = ControlDecision(
    problem=False, new=False, ends=0, stop=False, save=False, at_different_batches=False, mixed=False, is_unusual=False
)


def write_given(
    word: ControlWord, extras: torch.Tensor, mini_batch: object, given: Sequence[bool], *others: object, **more: object
) -> None:
    """Write a word without values, but for which parameters have a gradient."""
    values = (*(0,) * CONTROL_LENGTH, *given)
    word._summed = extras[: len(values)].copy_(control_tensor(values, extras.dtype))


def read_given(word: ControlWord, announcement: object) -> tuple[ControlDecision, list[bool]]:
    """Read which parameters have a gradient."""
    return NOTHING, list(map(bool, word._summed.tolist()[CONTROL_LENGTH:]))


def unguarded(step: Step) -> Step:
    """The step without a writer and a reader of the control word."""

    usual = {name: getattr(ControlWord, name) for name in ("write", "read")}

    def bare() -> None:
        setattr(ControlWord, "write", write_given)  # noqa: B010  # mypy sees other arguments
        setattr(ControlWord, "read", read_given)  # noqa: B010
        try:
            step()
        finally:
            for name, method in usual.items():
                setattr(ControlWord, name, method)

    return bare


def guard(name: str) -> dict[str, Ratio]:
    """A step with all guards over one without, on every rank; run by `launch`."""
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as folder, dl.join_world(seed=0) as world:
        data = make_data(job)
        guarded, again = (our_step(job, world, data, str(Path(folder, one))) for one in ("1", "2"))
        off: dict[str, Any] = {"on_nonfinite": "allow", "check_replicas_every": 0}
        bare = unguarded(our_step(job, world, data, str(Path(folder, "3")), **off))
        pairs, steps, own = job.pairs, job.steps, time.thread_time
        return {
            "guarded / not": compare(guarded, bare, pairs=2 * pairs, steps=steps),
            "guarded / guarded": compare(again, guarded, pairs=pairs, steps=steps),
            "guarded / not, processor time": compare(guarded, bare, pairs=pairs, steps=steps, clock=own),
            "guarded / guarded, processor time": compare(again, guarded, pairs=pairs, steps=steps, clock=own),
        }


STATES: dict[str, Callable[[], nn.Module]] = {
    "digit network": JOBS["digit network"].build,
    "25 M parameters": lambda: mlp(2200, 4),
}


def alternate(one: Step, other: Step, ready: Step, pairs: int) -> Ratio:
    """As `compare`, a step a block, with `ready` before each, which is not measured."""
    ones: list[float] = []
    others: list[float] = []
    for number in range(-1, pairs):
        for step, times in ((one, ones), (other, others))[:: 1 if number % 2 == 0 else -1]:
            ready()
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    return Ratio.of(ones[1:], others[1:])


class Saved:
    """A training job of a network with Adam, and its saver."""

    def __init__(self, name: str, world: dl.World, folder: Path) -> None:
        self.model, self.world, self.folder = STATES[name](), world, folder
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        shape = JOBS["digit network"].shape if name == "digit network" else (32,)
        data = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(0))
        state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer}
        self.steps = iter(dl.Loop(dl.Batches(data, MINI_BATCH, world), 10**6, state=state, progress=False))
        self.train()
        self.saver = Checkpointer(folder / "run", world, state, CheckpointPolicy(keep_last=1))
        self.saver.open({}, None, {}, None, lambda position: False)
        self.iteration = 0

    def train(self) -> None:
        step = next(self.steps)
        for inputs in step:
            step.backward(self.model(inputs).square().mean())
        step.fold()
        self.optimizer.step()

    def begin(self) -> None:
        self.iteration += 1
        self.saver.save({"iteration": self.iteration, "epoch": 0, "position": self.iteration})

    def save(self) -> None:
        self.begin()
        self.saver.wait()

    def copy(self) -> None:
        states = self.model.state_dict(), *self.optimizer.state.values()
        copies = [value.clone() for one in states for value in one.values()]
        del copies

    def save_by_torch(self) -> None:
        if self.world.rank == 0:
            with (self.folder / "torch").open("wb") as file:
                torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())

    def with_steps(self, begin: Step) -> Step:
        def run() -> None:
            begin()
            for _ in range(STEPS):
                self.train()
            self.saver.wait()

        return run


def save(name: str) -> dict[str, Ratio]:
    """How long a save stalls, and takes; rank 0's times are those that count. Run by `launch`."""
    with tempfile.TemporaryDirectory() as folder, dl.join_world(seed=0) as world:
        job = Saved(name, world, Path(folder))
        both = f"a save and {STEPS} steps / torch.save and {STEPS} steps"
        return {
            "a save's stall / a copy": alternate(job.begin, job.copy, job.saver.wait, SAVES),
            "a save / torch.save": alternate(job.save, job.save_by_torch, job.saver.wait, SAVES),
            both: alternate(job.with_steps(job.begin), job.with_steps(job.save_by_torch), job.saver.wait, SAVES),
        }


def look() -> tuple[float, float]:
    """Seconds that a look of the watcher takes, and every how many it looks; run by `launch`."""
    from ddp_loop.distributed.watchdog import _LOOK_S, Watchdog

    with dl.join_world(seed=0) as world:
        watcher = Watchdog(world.store, world.stops, lambda: world.where)
        times = []
        for _ in range(500):
            began = time.perf_counter()
            watcher._poll()
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2], _LOOK_S


def _guards() -> Iterator[tuple[object, ...]]:
    for name, goal in GOALS.items():
        for what, ratio in dl.launch(guard, RANKS, name)[0].items():
            yield name, what, *ratio.columns(), f"{goal:.2f}" if what.startswith("guarded / not") else ""


def _saves() -> Iterator[tuple[object, ...]]:
    for name in STATES:
        for what, ratio in dl.launch(save, RANKS, name)[0].items():
            yield name, what, *ratio.columns(), "1.00" if "stall" in what else "1.30"


PARTS = {"guards": _guards, "saves": _saves}


def report(parts: Iterable[str]) -> None:
    """Print the table of these parts, by default of all."""
    rows = (row for part in list(parts) or PARTS for row in PARTS[part]())
    print_table("network | what | median | quartiles | ms | pairs | goal", rows, words=2)
    took_s, every_s = dl.launch(look, RANKS)[0]
    print(
        f"A look of the watcher takes {1e6 * took_s:.0f} microseconds, every {every_s:g} s: {took_s / every_s:.2%}.\n"
    )
