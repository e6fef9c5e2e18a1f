"""What the same bits cost: ordered folds, several shards a rank, deterministic blocks, evaluations, synced batch norm.

    python -m benchmarks order [--exchange NAME] [PART ...]

Each ratio is of two whole steps of `Loop` in one process group, which differ in the one thing that is named. The plain
accumulation is DDP's own, `no_sync` for all but the last piece, with the same pieces of the same mini-batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from benchmarks.measuring import Ratio, Step, compare, joined, print_table
from benchmarks.models import CLASSES, Transformer, mlp
from ddp_loop import networks

SAMPLES = 1280
MINI_BATCH = 128


@dataclass(frozen=True)
class Job:
    """A network, the shape of its inputs, and how long to measure it."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    pairs: int
    steps: int


JOBS = {
    "32-wide MLP": Job(lambda: mlp(32, 2), (32,), 100, 20),
    "digit network": Job(networks.digit_classifier, (1, 28, 28), 60, 2),
    "512-wide MLP": Job(lambda: mlp(512, 2), (32,), 100, 5),
    "transformer": Job(lambda: Transformer(4), (32, 16), 30, 1),
}


def make(job: Job, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = job.build().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def make_data(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, *job.shape, generator=generator)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def loop_step(
    job: Job,
    world: dl.World,
    ending: ExitStack,
    *,
    shards: int | None = None,
    ordered: bool | None = None,
    synced: bool = False,
    block: bool = False,
) -> Step:
    """A step of a Loop; `block`: inside a deterministic block."""
    model, optimizer = make(job, world.device)
    if synced:
        dl.sync_batch_norm(model, world)
    batches = dl.Batches(make_data(job), MINI_BATCH, world, shards=shards)
    folder = ending.enter_context(tempfile.TemporaryDirectory())
    state = {"model": model, "optimizer": optimizer}
    steps = iter(
        dl.Loop(batches, 10**6, state=state, run_dir=folder, save_every=10**9, progress=False, ordered=ordered)
    )

    def step() -> None:
        with dl.deterministic(seed=None) if block else nullcontext():
            step = next(steps)
            for inputs, labels in step:
                step.backward(cross_entropy(model(inputs), labels))
            step.fold()
            optimizer.step()

    return step


def accumulating_step(job: Job, world: dl.World, pieces: int, *, communicates: bool) -> Step:
    """An accumulation over `pieces` of this rank's part of the mini-batch.

    Args:
        communicates: DDP's own accumulation; else a plain loop on each rank.
    """
    model, optimizer = make(job, world.device)
    wrapped = DistributedDataParallel(model) if communicates else model
    without_sum = wrapped.no_sync if isinstance(wrapped, DistributedDataParallel) else nullcontext
    inputs, labels = make_data(job)
    state = {"order": torch.randperm(SAMPLES), "at": torch.tensor(0)}
    size = MINI_BATCH // world.size

    def step() -> None:
        start = int(state["at"]) + world.rank * size
        state["at"] = (state["at"] + MINI_BATCH) % SAMPLES
        mine = state["order"][start : start + size].chunk(pieces)
        optimizer.zero_grad()
        for number, indices in enumerate(mine):
            with without_sum() if number + 1 < pieces else nullcontext():
                loss = cross_entropy(wrapped(inputs.index_select(0, indices)), labels.index_select(0, indices))
                (loss / pieces).backward()
        optimizer.step()

    return step


def fold(name: str, ranks: int, exchange: str | None = None) -> dict[str, Ratio]:
    """The ordered fold of fixed shards against the fold of shards that are not, one shard per rank."""
    job = JOBS[name]
    with ExitStack() as ending, joined(exchange) as world:
        ordered, plain, again = (loop_step(job, world, ending, shards=shards) for shards in (ranks, None, None))
        pairs = job.pairs if ranks == 2 else job.pairs // 2
        return {
            f"{ranks} ranks: ordered / plain": compare(ordered, plain, pairs=pairs, steps=job.steps),
            f"{ranks} ranks: plain / plain": compare(again, plain, pairs=pairs // 2, steps=job.steps),
        }


def accumulate(name: str, exchange: str | None = None) -> dict[str, Ratio]:
    """Eight shards on two ranks against an accumulation of four pieces on each."""
    job = JOBS[name]
    with ExitStack() as ending, joined(exchange) as world:
        ordered = loop_step(job, world, ending, shards=8)
        plain = loop_step(job, world, ending, shards=8, ordered=False)
        by_ddp = accumulating_step(job, world, 4, communicates=True)
        return {
            "8 shards on 2 ranks, ordered / DDP's accumulation of 4": compare(
                ordered, by_ddp, pairs=job.pairs // 2, steps=job.steps
            ),
            "8 shards on 2 ranks, ordered / in place": compare(ordered, plain, pairs=job.pairs // 2, steps=job.steps),
        }


def further(name: str, shards: int, exchange: str | None = None) -> dict[str, Ratio]:
    """Many shards on two ranks against a plain accumulation of the same pieces."""
    job = JOBS[name]
    with ExitStack() as ending, joined(exchange) as world:
        pieces = shards // world.size
        ours = loop_step(job, world, ending, shards=shards)
        plain, again = (accumulating_step(job, world, pieces, communicates=False) for _ in range(2))
        steps = max(1, job.steps * 4 // shards)
        noise = compare(again, plain, pairs=job.pairs // 4, steps=steps, within_s=4)
        ratio = compare(ours, plain, pairs=job.pairs // 2, steps=steps, within_s=12)
        each_us = 1e3 * (ratio.one_ms - ratio.other_ms) / pieces
        return {
            f"{shards} shards on 2 ranks / plain accumulation, {each_us:.0f} us for each shard": ratio,
            f"{shards // 2} pieces, plain / plain": noise,
        }


def deterministic(name: str, exchange: str | None = None) -> dict[str, Ratio]:
    """A step in a deterministic block against one outside."""
    job = JOBS[name]
    with ExitStack() as ending, joined(exchange) as world:
        inside, outside = (loop_step(job, world, ending, block=one) for one in (True, False))
        return {"2 ranks: deterministic / not": compare(inside, outside, pairs=job.pairs // 2, steps=job.steps)}


def evaluation(name: str, ranks: int, exchange: str | None = None) -> dict[str, Ratio]:
    """`evaluate` with its 8 shards per mini-batch against one shard per rank, of which each has its own bits."""
    job = JOBS[name]
    with joined(exchange) as world:
        torch.manual_seed(0)
        model = job.build().to(world.device)
        in_eight, again, plain = (
            dl.Batches(make_data(job), MINI_BATCH, world, shuffle=False, shards=shards)
            for shards in (None, ranks, ranks)
        )

        def pass_over(batches: dl.Batches) -> Step:
            def evaluate() -> None:
                dl.evaluate(model, batches, loss=cross_entropy)

            return evaluate

        pairs = job.pairs // 2
        return {
            f"{ranks} ranks: evaluate / with a shard per rank": compare(
                pass_over(in_eight), pass_over(plain), pairs=pairs, steps=1
            ),
            f"{ranks} ranks: with a shard per rank / itself": compare(
                pass_over(again), pass_over(plain), pairs=pairs // 2, steps=1
            ),
        }


def synced(name: str, ranks: int, exchange: str | None = None) -> dict[str, Ratio]:
    """Synced batch norm against local."""
    job = JOBS[name]
    with ExitStack() as ending, joined(exchange) as world:
        one, other = (loop_step(job, world, ending, synced=synced) for synced in (True, False))
        ratio = compare(one, other, pairs=job.pairs // 2, steps=job.steps)
        return {f"{ranks} ranks: synced batch norm / local": ratio}


PARTS: dict[str, Callable[[str | None], Iterator[tuple[str, dict[str, Ratio]]]]] = {
    "fold": lambda exchange: (
        (name, dl.launch(fold, ranks, name, ranks, exchange)[0]) for ranks in (2, 3, 4) for name in JOBS
    ),
    "accumulation": lambda exchange: ((name, dl.launch(accumulate, 2, name, exchange)[0]) for name in JOBS),
    "shards": lambda exchange: (
        (name, dl.launch(further, 2, name, shards, exchange)[0])
        for name in ("32-wide MLP", "digit network")
        for shards in (32, 128)
    ),
    "deterministic": lambda exchange: ((name, dl.launch(deterministic, 2, name, exchange)[0]) for name in JOBS),
    "evaluation": lambda exchange: (
        (name, dl.launch(evaluation, ranks, name, ranks, exchange)[0]) for ranks in (1, 2) for name in JOBS
    ),
    "synced": lambda exchange: (
        (name, dl.launch(synced, ranks, name, ranks, exchange)[0]) for ranks in (2, 4) for name in ("digit network",)
    ),
}


def report(parts: Iterable[str], exchange: str | None = None) -> None:
    """Print the table of these parts, by default of all."""
    rows = (
        (name, what, *ratio.columns())
        for part in list(parts) or PARTS
        for name, ratios in PARTS[part](exchange)
        for what, ratio in ratios.items()
    )
    print_table("network | what | median | quartiles | ms | pairs", rows, words=2)
