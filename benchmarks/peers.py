"""The same job with ddp_loop, torch's DDP, Accelerate and Fabric: whole epochs, steps, start, memory, lines, meaning.

The job and its scripts are in benchmarks/jobs. Epochs and steps of all are timed in one process group, A B B A; start
and memory in fresh processes under torchrun. All start from the same weights, on the same tensors in memory; each
takes its own order, by its own loader. In an epoch each adds loss and accuracy up by the cheapest way it has: ours
with every step, the others once. In a step, where loss and accuracy of the mini-batch are wanted, all reduce each time.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import astuple

import torch
from torch.utils.data import TensorDataset

import ddp_loop as dl
from benchmarks.jobs import NETWORKS, Job, Material, make_material
from benchmarks.jobs.ours import Ours
from benchmarks.jobs.variants import installed, mean_over_ranks, set_up, set_up_peer
from benchmarks.meaning import WEIGHTED, meaning
from benchmarks.measuring import RANKS, Ratio, Step, compare, joined, print_table
from benchmarks.scripts import lines_of_code, peak_memory, start_up
from benchmarks.steps import JOBS, SAMPLES, ddp_step, make, mine, our_step

KERNELS: dict[str, dict[str, bool]] = {
    "ours, channels_last": {"channels_last": True},
    "ours, bf16, channels_last": {"channels_last": True, "bf16": True},
}

# -- in one process group ----------------------------------------------------------------------------------


def epoch_of(job: Job) -> Step:
    def step() -> None:
        job.epoch()

    return step


def measure_epochs(names: list[str], pairs: int, samples: int | None = None) -> dict[str, Ratio]:
    """Epochs of ours over those of each other, on every rank; run by `launch`. Fewer samples for a trial."""
    with joined() as world:
        with world.rank_zero_first():  # drawn and cached once
            whole = make_material("digits")
        material = Material(whole.model, TensorDataset(*whole.train[:samples]), whole.test)
        ours, ddp, again = (epoch_of(set_up(name, world, material)) for name in ("ours", "DDP", "DDP"))
        others = {name: epoch_of(set_up(name, world, material)) for name in names if name not in ("ours", "DDP")}
        ratios = {
            f"ours / {name}": compare(ours, other, pairs=pairs, steps=1)
            for name, other in {"DDP": ddp, **others}.items()
        }
        return {**ratios, "DDP / DDP": compare(again, ddp, pairs=pairs, steps=1)}


def measure_kernels(name: str, pairs: int, samples: int | None = None) -> Ratio:
    """Epochs of ours with other kernels over those of DDP's script, on every rank; run by `launch`."""
    with joined() as world:
        with world.rank_zero_first():
            whole = make_material("digits")
        train, model = TensorDataset(*whole.train[:samples]), copy.deepcopy(whole.model)
        ddp = epoch_of(set_up("DDP", world, Material(whole.model, train, whole.test)))
        ours = epoch_of(Ours(world, model, train, whole.test, 10**6, **KERNELS[name]))
        return compare(ours, ddp, pairs=pairs, steps=1)


def logged_step(name: str, world: dl.World, material: Material) -> Step:
    """A step of another library's job on the next mini-batch, its loss and accuracy reduced in one for the log."""
    job = set_up_peer(name, material)
    take = mine(world, material.train.tensors)

    def step() -> None:
        images, labels = take()
        loss, right = job.step(images, labels)
        mean_over_ranks(job, torch.stack([loss, right / len(labels)]))

    return step


def measure_steps(names: list[str], pairs: int, steps: int) -> dict[str, Ratio]:
    """Steps of ours over those of each other, on the same tensors, on every rank; run by `launch`."""
    job = JOBS["digit network"]
    with joined() as world, tempfile.TemporaryDirectory() as folder:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(SAMPLES, *job.shape, generator=generator)
        data = inputs, torch.randint(10, (SAMPLES,), generator=generator)
        ours = our_step(job, world, data, folder)
        others: dict[str, Step] = {}
        for name in names:
            if name.startswith("DDP"):
                others[name] = ddp_step(job, world, data, tuned="tuned" in name)
            elif name != "ours":
                model, rows = make(job, world.device)[0], TensorDataset(*data)
                others[name] = logged_step(name, world, Material(model, rows, rows))
        return {f"ours / {name}": compare(ours, other, pairs=pairs, steps=steps) for name, other in others.items()}


# -- the report --------------------------------------------------------------------------------------------


def print_ratios(ratios: dict[str, Ratio], unit: str) -> None:
    print_table(
        f"{unit} | median | quartiles | ms | pairs", ((what, *ratio.columns()) for what, ratio in ratios.items())
    )


def report_epochs() -> None:
    print_ratios(dl.launch(measure_epochs, RANKS, installed(), 8)[0], "epoch")


def report_kernels() -> None:
    print_ratios({f"{name} / DDP": dl.launch(measure_kernels, RANKS, name, 8)[0] for name in KERNELS}, "epoch")


def report_steps() -> None:
    print_ratios(dl.launch(measure_steps, RANKS, installed(), 100, 2)[0], "step")


def report_start() -> None:
    print_ratios({"ours / DDP": start_up(), "DDP / DDP": start_up("DDP", "DDP")}, "start")


def report_memory() -> None:
    for network in NETWORKS:
        peaks = peak_memory(installed(), network)
        rows = ((name, *(f"{f(runs):.0f}" for f in (statistics.median, min, max))) for name, runs in peaks.items())
        print_table(f"peak MiB, {network} | median | min | max", rows)


def report_lines() -> None:
    print_table("script | lines", lines_of_code().items())


def report_meaning() -> None:
    head = "errors | loss of rank 0 | mean of the ranks' losses | loss by counts | gradient | running mean"
    found = meaning([*installed(), WEIGHTED])
    print_table(
        f"{head} | running variance | trained of 100 | evaluated of 1000 | accuracy",
        ((name, *map(said, flat(astuple(numbers)))) for name, numbers in found.items()),
    )


def flat(values: Iterable[object]) -> Iterable[object]:
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def said(value: object) -> str:
    """An error with two digits, 0 if it is below 1e-12, which is rounding; a count as it is."""
    if isinstance(value, float):
        return "0" if abs(value) < 1e-12 else f"{value:.1e}"
    return str(value)


PARTS: dict[str, Callable[[], None]] = {
    "epochs": report_epochs,
    "kernels": report_kernels,
    "steps": report_steps,
    "start": report_start,
    "memory": report_memory,
    "lines": report_lines,
    "meaning": report_meaning,
}


def report(names: Iterable[str]) -> None:
    """Print the tables of these parts for docs/benchmarks, by default all."""
    for name in names or PARTS:
        PARTS[name]()
