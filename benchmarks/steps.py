"""The whole step of `Loop`, as a user gets it, over that of torch's DDP as people write it, on CPU ranks.

    python -m benchmarks steps [--ranks N] [--exchange NAME] [NETWORK ...]

Both take the same kernels, fused optimizer, dtype, memory format, threads and input tensors. Ours writes rows.jsonl,
folds statistics and metrics and draws its own random streams. DDP's has default buffers and buckets and reduces loss
and accuracy for the log; "tuned" shares its gradients' memory with the buckets, does not broadcast buffers, reduces
loss and accuracy in one, and has a static graph where that is faster. DDP is on the default process group over gloo,
also where ours has another exchange. DDP against itself shows the noise.

On one rank it is the plain loop over the same samples that ours is compared with.

A row takes about 10 s and a network half a minute; all of them on 2 ranks take 8 minutes at most.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from benchmarks.gpu_machine import group_of_one
from benchmarks.jobs import ddp_tuning
from benchmarks.measuring import RANKS, Ratio, Step, compare, joined, print_table, synchronized
from benchmarks.models import CLASSES, Residual, Transformer, mlp, resnet18
from ddp_loop import networks

MINI_BATCH = 128
SAMPLES = 1280
HOST = torch.device("cpu")
GOAL_S, OTHER_S, GRAPH_S = 9.0, 5.0, 3.0  # for a row that has a goal, another row, and the choice of a graph


@dataclass(frozen=True)
class Job:
    """A network, the shape of its inputs, the pairs of blocks to measure, the steps of a block, and the goals.

    Attributes:
        goal: for the ratio to DDP, tuned or not.
        goal_alone: for the ratio to no communication.
        mini_batch: of all ranks together.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    pairs: int
    steps: int
    goal: float
    goal_alone: float | None = field(default=None, kw_only=True)
    mini_batch: int = field(default=MINI_BATCH, kw_only=True)


def _normed(width: int, hidden: int) -> Callable[[], nn.Module]:
    return lambda: mlp(width, hidden, 784, batch_norm=True)


JOBS = {
    "32-wide MLP": Job(lambda: mlp(32, 2), (32,), 200, 40, 0.50, goal_alone=1.8),
    "32-wide MLP, batch norm": Job(_normed(32, 3), (784,), 200, 20, 0.50, goal_alone=1.8),
    "20-layer MLP": Job(lambda: mlp(32, 19), (32,), 200, 5, 0.70),
    "20-layer MLP, batch norm": Job(_normed(64, 21), (784,), 200, 5, 0.70),
    "512-wide MLP": Job(lambda: mlp(512, 2), (32,), 200, 5, 0.62),
    "512-wide MLP, batch norm": Job(_normed(512, 5), (784,), 200, 5, 0.62),
    "1,000 tensors": Job(lambda: Residual(500), (32,), 100, 2, 0.90),
    "25 M parameters": Job(lambda: mlp(2800, 4, 512), (512,), 40, 1, 0.82, goal_alone=1.4),
    "25 M parameters, batch norm": Job(_normed(2048, 7), (784,), 40, 1, 0.82, goal_alone=1.4),
    "digit network": Job(networks.digit_classifier, (1, 28, 28), 100, 2, 0.98),
    "ResNet-18": Job(resnet18, (3, 32, 32), 40, 1, 1.0, mini_batch=16),
    "30 batch norms of 256": Job(_normed(256, 30), (784,), 100, 2, 0.90),
    "6-layer transformer": Job(lambda: Transformer(6), (32, 16), 100, 1, 0.95, mini_batch=32),
}


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == labels


def make(job: Job, device: torch.device, *, fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = job.build().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)


def make_data(job: Job, device: torch.device = HOST) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, *job.shape, generator=generator)
    return inputs.to(device), torch.randint(CLASSES, (SAMPLES,), generator=generator).to(device)


def our_step(
    job: Job, world: dl.World, data: tuple[torch.Tensor, ...], folder: str, *, fused: bool = False, **options: Any
) -> Step:
    model, optimizer = make(job, world.device, fused=fused)
    batches, state = dl.Batches(data, job.mini_batch, world), {"model": model, "optimizer": optimizer}
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


def mine(
    world: dl.World, data: tuple[torch.Tensor, ...], mini_batch: int = MINI_BATCH
) -> Callable[[], list[torch.Tensor]]:
    """This rank's part of mini-batch after mini-batch, in another order each epoch."""
    part, device = dl.split_range(mini_batch, world.size, world.rank), data[0].device
    state: dict[str, Any] = {"order": torch.randperm(SAMPLES, device=device), "at": 0}

    def take() -> list[torch.Tensor]:
        if state["at"] + mini_batch > SAMPLES:
            state.update(order=torch.randperm(SAMPLES, device=device), at=0)
        start = state["at"] + part.start
        state["at"] += mini_batch
        indices = state["order"][start : start + len(part)]
        return [tensor.index_select(0, indices) for tensor in data]

    return take


def ddp_step(
    job: Job,
    world: dl.World,
    data: tuple[torch.Tensor, ...],
    *,
    tuned: bool,
    static_graph: bool = False,
    fused: bool = False,
    **options: Any,
) -> Step:
    model, optimizer = make(job, world.device, fused=fused)
    options |= ddp_tuning() if tuned else {}
    wraps = world.size > 1 or world.device.type != "cpu"  # a script for GPUs wraps its model on one of them too
    wrapped = DistributedDataParallel(model, static_graph=static_graph, **options) if wraps else model
    take = mine(world, data, job.mini_batch)

    def step() -> None:
        inputs, labels = take()
        optimizer.zero_grad()
        logits = wrapped(inputs)
        loss = cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        logged = [loss.detach(), hits(logits, labels).float().mean()]
        for value in [torch.stack(logged)] if tuned else logged:
            if world.size > 1:
                dist.all_reduce(value)
            value /= world.size

    return step


def local_step(job: Job, world: dl.World, data: tuple[torch.Tensor, ...], *, fused: bool = False) -> Step:
    """The same step without communication, on this rank's part."""
    model, optimizer = make(job, world.device, fused=fused)
    take = mine(world, data, job.mini_batch)

    def step() -> None:
        inputs, labels = take()
        optimizer.zero_grad()
        logits = model(inputs)
        loss = cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        hits(logits, labels).float().mean()

    return step


def measure(name: str, exchange: str | None = None, device: str = "cpu", scale: float = 1.0) -> dict[str, Ratio]:
    """The ratios of one network, on every rank; run by `launch`.

    Args:
        name: one of JOBS.
        exchange: of `joined`.
        device: in `join_world`'s words.
        scale: of the time that a row takes.
    """
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as folder, joined(exchange, device) as world:
        data, wait = make_data(job, world.device), synchronized(world.device)

        def ratio(one: Step, other: Step, within_s: float) -> Ratio:
            return compare(one, other, pairs=job.pairs, steps=job.steps, within_s=scale * within_s, wait=wait)

        ours = our_step(job, world, data, folder, fused=True)
        if world.size == 1:
            plain, other = (local_step(job, world, data, fused=True) for _ in range(2))
            found = {
                "ours / plain loop": ratio(ours, plain, GOAL_S),
                "plain loop / plain loop": ratio(other, plain, OTHER_S),
            }
            if world.device.type != "cpu":
                with group_of_one("cpu:gloo,cuda:nccl"):
                    ddp = ddp_step(job, world, data, tuned=True, fused=True)
                    found["ours / tuned DDP"] = ratio(ours, ddp, GOAL_S)
            return found
        ddp, again = (ddp_step(job, world, data, tuned=False, fused=True) for _ in range(2))
        static, tuned = (
            ddp_step(job, world, data, tuned=True, static_graph=static, fused=True) for static in (True, False)
        )
        graphs = ratio(static, tuned, GRAPH_S)
        faster = static if world.gather(graphs.median)[0] < 1 else tuned
        local = local_step(job, world, data, fused=True)
        return {
            "tuned DDP, static graph / tuned DDP": graphs,
            "ours / tuned DDP": ratio(ours, faster, GOAL_S),
            "ours / DDP": ratio(ours, ddp, GOAL_S),
            "DDP / DDP": ratio(again, ddp, OTHER_S),
            "ours / no communication": ratio(ours, local, OTHER_S),
        }


def report(names: Iterable[str], ranks: int = RANKS, exchange: str | None = None) -> None:
    """Print the table of these networks, by default of all."""
    names = list(names) or list(JOBS)
    head = "network | what | median | quartiles | ms | pairs | goal"
    print_table(head, (row for name in names for row in _rows(name, ranks, exchange)), words=2)


def _rows(name: str, ranks: int, exchange: str | None) -> Iterator[tuple[object, ...]]:
    job = JOBS[name]
    goals = {"ours / tuned DDP": job.goal, "ours / DDP": job.goal, "ours / no communication": job.goal_alone}
    for what, ratio in dl.launch(measure, ranks, name, exchange)[0].items():
        goal = goals.get(what)
        yield name, what, *ratio.columns(), "" if goal is None else f"{goal:.2f}"
