"""The whole step of `Loop`, as a user gets it, over that of torch's DDP as people write it, on CPU ranks.

    python -m benchmarks steps [NETWORK ...]

Both take the same kernels, dtype, memory format, threads and input tensors. Ours writes rows.jsonl, folds
statistics and metrics and draws its own random streams. DDP's has default buffers and buckets and reduces
loss and accuracy for the log; "tuned" shares its gradients' memory with the buckets, does not broadcast
buffers and reduces loss and accuracy in one. DDP against itself shows the noise.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from benchmarks.measuring import RANKS, Ratio, Step, compare, print_table
from ddp_loop import networks

MINI_BATCH = 128
SAMPLES = 1280


@dataclass(frozen=True)
class Job:
    """A network, the shape of its inputs, how long to measure it, and the ratio to stay under."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    pairs: int
    steps: int
    goal: float


def mlp(width: int, hidden: int, inputs: int = 32) -> nn.Module:
    """`hidden` hidden layers of `width`."""
    layers: list[nn.Module] = []
    for number in range(hidden):
        layers += [nn.Linear(width if number else inputs, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


JOBS = {
    "32-wide MLP": Job(lambda: mlp(32, 2), (32,), 200, 40, 0.65),
    "20-layer MLP": Job(lambda: mlp(32, 19), (32,), 200, 5, 0.85),
    "digit network": Job(networks.digit_classifier, (1, 28, 28), 100, 2, 0.95),
    "512-wide MLP": Job(lambda: mlp(512, 2), (32,), 200, 5, 0.95),
    "25 M parameters": Job(lambda: mlp(2800, 4, 512), (512,), 40, 1, 1.00),
}


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


def make(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = job.build()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_data(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, *job.shape, generator=generator)
    return inputs, torch.randint(10, (SAMPLES,), generator=generator)


def our_step(job: Job, world: dl.World, data: tuple[torch.Tensor, ...], folder: str, **options: Any) -> Step:
    model, optimizer = make(job)
    batches, state = dl.Batches(data, MINI_BATCH, world), {"model": model, "optimizer": optimizer}
    return steps_of(
        dl.Loop(batches, 10**6, state=state, run_dir=folder, save_every=10**9, progress=False, **options),
        model,
        optimizer,
    )


def steps_of(loop: dl.Loop, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A loop's next step, with loss and accuracy."""
    steps = iter(loop)

    def step() -> None:
        step = next(steps)
        for inputs, labels in step:
            logits = model(inputs)
            step.backward(cross_entropy(logits, labels), accuracy=hits(logits, labels))
        step.fold()
        optimizer.step()

    return step


def mine(world: dl.World, data: tuple[torch.Tensor, ...]) -> Callable[[], list[torch.Tensor]]:
    """This rank's part of mini-batch after mini-batch, in another order each epoch."""
    size = MINI_BATCH // world.size
    state: dict[str, Any] = {"order": torch.randperm(SAMPLES), "at": 0}

    def take() -> list[torch.Tensor]:
        if state["at"] + MINI_BATCH > SAMPLES:
            state.update(order=torch.randperm(SAMPLES), at=0)
        start = state["at"] + world.rank * size
        state["at"] += MINI_BATCH
        indices = state["order"][start : start + size]
        return [tensor.index_select(0, indices) for tensor in data]

    return take


def ddp_step(job: Job, world: dl.World, data: tuple[torch.Tensor, ...], *, tuned: bool) -> Step:
    model, optimizer = make(job)
    options: dict[str, Any] = {}
    if tuned:
        known = inspect.signature(DistributedDataParallel).parameters  # torch 2.13 renamed the first of these
        quiet = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options = {"gradient_as_bucket_view": True, quiet: False}
    wrapped = DistributedDataParallel(model, **options) if world.size > 1 else model
    take = mine(world, data)

    def step() -> None:
        inputs, labels = take()
        optimizer.zero_grad()
        logits = wrapped(inputs)
        loss = cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        logged = [loss.detach(), hits(logits, labels).float().mean()]
        for value in [torch.stack(logged)] if tuned else logged:
            dist.all_reduce(value)
            value /= world.size

    return step


def local_step(job: Job, world: dl.World, data: tuple[torch.Tensor, ...]) -> Step:
    """The same step without communication, on this rank's part."""
    model, optimizer = make(job)
    take = mine(world, data)

    def step() -> None:
        inputs, labels = take()
        optimizer.zero_grad()
        logits = model(inputs)
        loss = cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        hits(logits, labels).float().mean()

    return step


def measure(name: str) -> dict[str, Ratio]:
    """The ratios of one network, on every rank; run by `launch`."""
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as folder, dl.join_world(seed=0) as world:
        data = make_data(job)
        ours, ddp = our_step(job, world, data, folder), ddp_step(job, world, data, tuned=False)
        tuned, again = ddp_step(job, world, data, tuned=True), ddp_step(job, world, data, tuned=False)
        local = local_step(job, world, data)
        few = max(job.pairs // 2, 10)
        return {
            "ours / DDP": compare(ours, ddp, pairs=job.pairs, steps=job.steps),
            "ours / tuned DDP": compare(ours, tuned, pairs=few, steps=job.steps),
            "DDP / DDP": compare(again, ddp, pairs=few, steps=job.steps),
            "ours / no communication": compare(ours, local, pairs=few, steps=job.steps),
        }


def report(names: Iterable[str]) -> None:
    """Print the table of these networks, by default of all."""
    names = list(names) or list(JOBS)
    head = "network | what | median | quartiles | ms | pairs | goal"
    print_table(head, (row for name in names for row in _rows(name)), words=2)


def _rows(name: str) -> Iterator[tuple[object, ...]]:
    for what, ratio in dl.launch(measure, RANKS, name)[0].items():
        goal = f"{JOBS[name].goal:.2f}" if what == "ours / DDP" else ""
        yield name, what, *ratio.columns(), goal
