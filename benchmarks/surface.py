"""Steps of the example `examples/surface`, on the CPU and, where there is one, on a GPU.

    python -m benchmarks surface [PART ...]

"plain loop": the example's step over that of a plain PyTorch loop with the data resident and the same optimizer, with
the same number of threads, each in processes of its own. "reading": resident data over `DataLoader`. "sizes": grids of
100 to 1,000,000 points on both devices. "compile": start-up and first step apart from the others. "rounding": how far
two trainings from the same weights lie apart after 1, 10 and 2,000 steps. What needs a GPU is left out without one, and
the report says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from subprocess import PIPE

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import ddp_loop as dl
from benchmarks.measuring import RANKS, Ratio, Step, compare, joined, print_table
from ddp_loop import networks
from ddp_loop.accelerators import accelerator_of
from examples.surface.train import Trained, grid, largest_differences, read_arguments, train

SIDE = 200
SIDES = (10, 32, 100, 200, 316, 1000)
LEFT_OUT = "left out: torch sees no GPU"
RATIO = "what | median | quartiles | ms | pairs"
COMPARED = (1, 10, 2000)  # the steps that the example keeps weights of


Job = tuple[nn.Module, torch.optim.Optimizer]


def make_job(device: torch.device) -> Job:
    """The example's network and optimizer, always with the same start weights."""
    torch.manual_seed(0)
    model = networks.surface_network().to(device)
    return model, torch.optim.Adam(model.parameters(), lr=0.08, fused=True, capturable=True)


def our_step(world: dl.World, side: int | None = None) -> Step:
    """A step of the example's loop."""
    model, optimizer = make_job(world.device)
    data, state = grid(side or SIDE), {"model": model, "optimizer": optimizer}
    batches = dl.Batches(data, len(data[0]), world, shuffle=False)

    def steps() -> Iterator[None]:
        for step in dl.Loop(batches, 10**9, state=state, progress=False):
            for points, heights in step:
                step.backward(mse_loss(model(points), heights))
            step.fold()
            optimizer.step()
            yield

    following = steps()
    return lambda: next(following)


def plain_step(job: Job, device: torch.device, loader: Iterable[Sequence[torch.Tensor]]) -> Step:
    """An epoch of a plain loop over a loader."""
    model, optimizer = job

    def step() -> None:
        for points, heights in loader:
            optimizer.zero_grad()
            mse_loss(model(points.to(device)), heights.to(device)).backward()
            optimizer.step()

    return step


def resident_step(device: torch.device, side: int, job: Job | None = None) -> Step:
    """A step of a plain loop over tensors that stay on the device."""
    return plain_step(job or make_job(device), device, [[part.to(device) for part in grid(side)]])


def completed(step: Step, device: torch.device, times: int = 10) -> Step:
    """Several steps, and the wait until the device has done them."""

    def steps() -> None:
        for _ in range(times):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return steps


# -- what is measured, each run by `launch` ----------------------------------------------------------------


@contextmanager
def process_of(way: str, threads: int = 1) -> Iterator[Step]:
    """A step of a way in a process of its own, which waits in between; see `serve`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "benchmarks.surface", way, str(threads)]
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as process:
        pipe_in, pipe_out = process.stdin, process.stdout
        if pipe_in is None or pipe_out is None:
            raise ValueError("The process must have pipes.")

        def step() -> None:
            pipe_in.write("step\n")
            pipe_in.flush()
            if pipe_out.readline() != "done\n":
                raise RuntimeError(f"The process of {way} ended.")

        try:
            yield step
        finally:
            pipe_in.close()


def serve(way: str, threads: int) -> None:
    """Make a step for each line of standard input, and write a line after each."""
    if way == "plain":
        torch.set_num_threads(threads)
        step = resident_step(torch.device("cpu"), SIDE)
    else:
        step = our_step(dl.join_world(device="cpu", threads=threads, keep_memory=way == "ours"))
    for _ in sys.stdin:
        step()
        print("done", flush=True)


ALONE = {"ours": "ours", "ours, keep_memory=False": "returning", "plain": "plain"}


def measure_alone() -> Iterator[tuple[str, Ratio]]:
    """Our step over a plain one, each in a process of one thread."""
    for name, way in ALONE.items():
        with process_of("plain") as plain, process_of(way) as step:
            ratio = compare(step, plain, pairs=100, steps=5, within_s=10)
        yield f"1 process of 1 thread: {name} / plain", ratio


def measure_together() -> dict[str, Ratio]:
    """Our step on ranks of one thread over a plain one in one process of as many threads."""
    with joined() as world, ExitStack() as ending:
        accelerator_of(world.device).keep_memory()
        plain = again = lambda: None
        if world.rank == 0:
            plain, again = (ending.enter_context(process_of("plain", world.size)) for _ in range(2))
        what = f"{world.size} ranks of 1 thread: ours / plain, 1 process of {world.size} threads"
        return {
            what: compare(our_step(world), plain, pairs=60, steps=10, within_s=12),
            f"1 process of {world.size} threads: plain / plain": compare(again, plain, pairs=60, steps=10, within_s=8),
        }


def measure_reading() -> dict[str, Ratio]:
    """Our step over that of a plain loop that reads the same mini-batch from a DataLoader."""
    with dl.join_world() as world:
        rows = TensorDataset(*grid(SIDE))
        whole = BatchSampler(SequentialSampler(rows), len(rows), drop_last=False)
        loaders = {
            "DataLoader": DataLoader(rows, len(rows)),
            "DataLoader by a batch sampler": DataLoader(rows, sampler=whole, batch_size=None),
        }
        ours = completed(our_step(world), world.device, 1)
        return {
            f"{world.device.type}: resident / {name}": compare(
                ours,
                completed(plain_step(make_job(world.device), world.device, loader), world.device, 1),
                pairs=20,
                steps=1,
            )
            for name, loader in loaders.items()
        }


# -- the report --------------------------------------------------------------------------------------------


def _ratios(measure: Callable[[], dict[str, Ratio]], ranks: int = 1) -> Iterator[tuple[str, ...]]:
    for what, ratio in dl.launch(measure, ranks)[0].items():
        yield what, *ratio.columns()


def report_plain_loop() -> None:
    alone = ((what, *ratio.columns()) for what, ratio in measure_alone())
    print_table(RATIO, chain(alone, _ratios(measure_together, RANKS)))


def report_reading() -> None:
    print_table(RATIO, _ratios(measure_reading))


def trainings(*options: str) -> dict[str, Trained]:
    """The example's training with these options, on the CPU and on a GPU if there is one."""
    devices = {"CPU": "cpu", "GPU": "gpu"} if torch.cuda.is_available() else {"CPU": "cpu"}
    return {name: train(device, read_arguments(list(options))) for name, device in devices.items()}


def report_sizes() -> None:
    """Print a step's time at each size on both devices, and from which size on the GPU is faster."""
    rows = []
    for side in SIDES:
        found = trainings("--side", str(side), "--steps", "30" if side > SIDE else "300")
        cpu, gpu = found["CPU"].step_s, found["GPU"].step_s if "GPU" in found else None
        other = (LEFT_OUT, "") if gpu is None else (f"{1e3 * gpu:.3f}", f"{cpu / gpu:.2f}")
        rows.append((f"{side**2:,}", f"{1e3 * cpu:.3f}", *other))
    print_table("points | CPU, 1 thread: ms a step | GPU: ms a step | CPU / GPU", rows)


def report_compile() -> None:
    rows = (
        (
            f"{name}, {'compiled' if options else 'eager'}",
            f"{one.start_s:.2f}",
            f"{one.first_s:.2f}",
            f"{1e3 * one.step_s:.3f}",
        )
        for options in ((), ("--compile",))
        for name, one in trainings("--steps", "300", *options).items()
    )
    print_table("device | start-up: s | first step: s | each further step: ms", rows)


def report_rounding() -> None:
    """Print the largest differences of two trainings from the same weights: of the devices, and of other shards."""
    found, halves = trainings(), train("cpu", read_arguments(["--shards", "2"]))
    pairs = {"CPU: 1 shard, 2 shards": (found["CPU"], halves)}
    rows: list[tuple[str, ...]] = []
    if "GPU" in found:
        pairs["CPU, GPU"] = found["CPU"], found["GPU"]
    else:
        rows.append(("CPU, GPU", LEFT_OUT, *["" for _ in COMPARED]))
    for what, (one, other) in pairs.items():
        differences = [f"{value:.3g}" for value in largest_differences(one, other).values()]
        rows.append((what, *differences, f"{one.error:.4f} / {other.error:.4f}"))
    print_table(f"trainings | {' | '.join(f'step {step:,}' for step in COMPARED)} | errors at the end", rows)


PARTS = {
    "plain loop": report_plain_loop,
    "reading": report_reading,
    "sizes": report_sizes,
    "compile": report_compile,
    "rounding": report_rounding,
}


def report(parts: Iterable[str]) -> None:
    """Print the tables of these parts, by default of all."""
    for part in list(parts) or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
