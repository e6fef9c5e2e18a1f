"""Measured shares against equal shares, where one rank is half as fast.

    python -m benchmarks shares [--exchange NAME] [PART ...]

Both loops run in one process group. The slow rank waits after each shard for as long as it computed, so its time per
sample doubles and it takes nothing from the other rank's core, as a slower machine would. A ratio is that of two whole
steps, so its inverse is the gain in steps per second.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import ExitStack, redirect_stdout
from io import StringIO

from torch.nn.functional import cross_entropy

import ddp_loop as dl
from benchmarks.measuring import Ratio, Step, compare, joined, print_table
from benchmarks.models import mlp
from benchmarks.order import Job, make, make_data
from ddp_loop import networks

MINI_BATCH = 128
FIRST_STEPS = 14  # after these the measured shares are fixed
JOBS = {
    "digit network": Job(networks.digit_classifier, (1, 28, 28), 16, 2),
    "512-wide MLP": Job(lambda: mlp(512, 2), (32,), 40, 5),
}
PARTS = tuple(JOBS)


def loop_step(job: Job, world: dl.World, ending: ExitStack, shares: str | None, slow: int | None) -> Step:
    """A step of a Loop in which rank `slow` is half as fast."""
    model, optimizer = make(job, world.device)
    batches = dl.Batches(make_data(job), MINI_BATCH, world, shares=shares)
    loop = dl.Loop(batches, 10**6, state={"model": model, "optimizer": optimizer}, progress=False)
    ending.callback(loop.close)
    steps = iter(loop)

    def step() -> None:
        step = next(steps)
        for inputs, labels in step:
            since = time.perf_counter()
            step.backward(cross_entropy(model(inputs), labels))
            if world.rank == slow:
                time.sleep(time.perf_counter() - since)
        step.fold()
        optimizer.step()

    with redirect_stdout(StringIO()):  # the line about the shares
        for _ in range(FIRST_STEPS):
            step()
    if shares is not None:
        found = [round(share, 2) for share in batches.shares or ()]
        world.print(f"{job.shape}: rank {slow} is half as fast; measured shares {found}\n")
    return step


def part(name: str, exchange: str | None = None) -> dict[str, Ratio]:
    """Whole steps with measured and with equal shares, with a slow rank and without one."""
    job = JOBS[name]
    with ExitStack() as ending, joined(exchange) as world:
        measured, equal = (loop_step(job, world, ending, shares, slow=1) for shares in ("measured", None))
        again = loop_step(job, world, ending, None, slow=1)
        return {
            "measured / equal": compare(measured, equal, pairs=job.pairs, steps=job.steps),
            "equal / equal": compare(again, equal, pairs=job.pairs // 2, steps=job.steps),
        }


def report(parts: Collection[str] = PARTS, exchange: str | None = None) -> None:
    rows = []
    for name in parts or PARTS:
        for what, ratio in dl.launch(part, 2, name, exchange)[0].items():
            rows.append((name, what, *ratio.columns()))
    print_table("network | what | ratio | quartiles | ms | pairs", rows, 2)
