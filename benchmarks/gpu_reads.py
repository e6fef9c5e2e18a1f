"""The part "reads" of `python -m benchmarks gpu`: how often a call makes the host wait for the GPU, by line."""

from __future__ import annotations

import math
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from benchmarks import steps
from benchmarks.gpu_machine import OWN_BACKENDS, Machine, Sheet, group_of_one
from benchmarks.jobs import ddp_tuning
from benchmarks.measuring import Step
from ddp_loop.accelerators import accelerator_of

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 13
STEP_LINES = 3  # at most so many places of host synchronisations in a row


@dataclass(frozen=True)
class Case:
    """A step whose host synchronisations are counted. It must have none, unless it reads its loss.

    Attributes:
        reads: whether it reads its loss, which must be counted.
        on_host: whether the data stay in the host's memory: as tensors that the script copies, or "samples" of a data
            set.
        weight: of each shard: "tensor" on the device, or "number" on the host.
    """

    shards: int | None = None
    synced: bool = False
    reads: bool = False
    on_host: str = ""
    weight: str = ""
    options: tuple[tuple[str, str], ...] = ()


CASES = {
    "as it is": Case(),
    "4 fixed shards": Case(shards=4),
    "4 shards, weights on the device": Case(shards=4, weight="tensor"),
    "4 shards, a number as weight": Case(shards=4, weight="number"),
    "synced batch norm": Case(synced=True),
    'on_nonfinite="skip"': Case(options=(("on_nonfinite", "skip"),)),
    "tensors in the host's memory": Case(on_host="tensors"),
    "samples of a data set": Case(on_host="samples"),
    "a script that reads its loss": Case(reads=True),
}


def our_case(case: Case, job: steps.Job, world: dl.World, folder: str) -> Step:
    """A step of a `Loop` with rows, metrics and a run folder."""
    model, optimizer = steps.make(job, world.device, fused=True)
    if case.synced:
        dl.sync_batch_norm(model, world)
    data: Any = steps.make_data(job)
    if case.on_host == "samples":
        data = list(zip(*data, strict=True))
    devices = "cpu" if case.on_host == "tensors" else None
    batches = dl.Batches(data, job.mini_batch, world, shards=case.shards, devices=devices)
    state = {"model": model, "optimizer": optimizer}
    options: dict[str, Any] = dict(case.options)
    loop = iter(dl.Loop(batches, 10**6, state=state, run_dir=folder, save_every=10**9, progress=False, **options))

    def step() -> None:
        step = next(loop)
        for inputs, labels in step:
            inputs, labels = (part.to(world.device, non_blocking=True) for part in (inputs, labels))
            logits = model(inputs)
            loss = cross_entropy(logits, labels)
            if case.reads:
                loss.item()
            weight = {"tensor": (labels > 0).sum(), "number": len(labels)}.get(case.weight)
            step.backward(loss, weight=weight, accuracy=steps.hits(logits, labels))
        step.fold()
        optimizer.step()

    return step


def place_of(file: str, line: int) -> str:
    """The innermost line of ours that is being executed, or what was noted if there is none."""
    mine = {__file__, sys.modules[accelerator_of.__module__].__file__}
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and not {"support", "fake_cuda", "site-packages"} & set(path.parts):
            if frame.name in ("place_of", "note", "see", "host_reads") and frame.filename in mine:
                continue
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return f"{Path(file).name}:{line}"


def count_reads(step: Step, steps_: int, device: torch.device) -> Counter[str]:
    """The places at which so many steps make the host wait, after as many of warm-up, 13 or more.

    The first steps of a loop have checks that read values.
    """
    for _ in range(max(steps_, WARM_UP)):
        step()
    places = Counter[str]()

    def note(file: str, line: int) -> None:
        places[place_of(file, line)] += 1

    with accelerator_of(device).host_reads(note):
        for _ in range(steps_):
            step()
    return places


def said(places: Counter[str], steps_: int) -> tuple[str, str]:
    """The number in a step, and the places with most of them."""
    most = [f"`{place}` {number / steps_:g}" for place, number in places.most_common(STEP_LINES)]
    return f"{places.total() / steps_:g}", ", ".join(most)


def evaluations(world: dl.World, job: steps.Job) -> dict[str, tuple[Step, int]]:
    """A call of each over ten mini-batches, and how often it may wait, whatever the number of mini-batches.

    `evaluate` reads its results once.
    """
    model, _ = steps.make(job, world.device)
    batches = dl.Batches(steps.make_data(job), steps.SAMPLES // 10, world, shuffle=False)

    def evaluate() -> None:
        dl.evaluate(model, batches, loss=cross_entropy, hits=steps.hits, number=lambda *shard: 1.0)

    def predict() -> None:
        dl.predict(model, batches)

    def update_bn() -> None:
        dl.update_bn(model, batches)

    return {"evaluate": (evaluate, 1), "predict": (predict, 0), "update_bn": (update_bn, 0)}


def ddp_step(job: steps.Job, world: dl.World, *, tuned: bool) -> Step:
    """A step of DDP, which keeps no log."""
    model, optimizer = steps.make(job, world.device, fused=True)
    wrapped = DistributedDataParallel(model, **ddp_tuning() if tuned else {})
    take = steps.mine(world, steps.make_data(job, world.device), job.mini_batch)

    def step() -> None:
        inputs, labels = take()
        optimizer.zero_grad()
        cross_entropy(wrapped(inputs), labels).backward()
        optimizer.step()

    return step


def measure_reads(sheet: Sheet, backends: str, mini_batch: int, with_ddp: bool) -> None:
    """Write a row for each case, each evaluation, and perhaps for DDP. Every rank must call this.

    Args:
        backends: of a process group of one, which the script makes; empty where there are several ranks.
    """
    job = replace(steps.JOBS["32-wide MLP, batch norm"], mini_batch=mini_batch)
    epoch = -(-steps.SAMPLES // mini_batch)

    def write(world: dl.World, name: str, step: Step, calls: int, most: float, least: int = 0) -> None:
        places = count_reads(step, calls, world.device)
        number, where = said(places, calls)
        if world.rank == 0:
            sheet.row(name, number, where)
        limit = f"at most {most:g}" if least == 0 else f"at least {least}"
        is_right = least <= places.total() / calls <= most
        sheet.judge(name, "" if is_right else f"{number} waits on rank {world.rank}, must be {limit}: {where}")

    with group_of_one(backends) if backends else nullcontext():
        for name, case in CASES.items():
            with tempfile.TemporaryDirectory() as folder, on_gpu() as world:
                least = int(case.reads)
                write(world, f"ours: {name}", our_case(case, job, world, folder), epoch, least, least)
        with on_gpu() as world:
            for name, (call, most) in evaluations(world, job).items():
                write(world, f"ours: {name}", call, 2, most)
        if not with_ddp:
            return
        with on_gpu() as world:
            for name, tuned in (("DDP", False), ("tuned DDP", True)):
                write(world, f"{name}, without a log", ddp_step(job, world, tuned=tuned), epoch, math.inf)


def on_gpu() -> dl.World:
    return dl.join_world(device="gpu", share_gpus=True, seed=0)


def report_reads(machine: Machine, sheet: Sheet) -> None:
    """On one rank with a process group, and on two. Wrong: another number of waits than is said here."""
    mini_batch = steps.SAMPLES // 4 if machine.rehearsed else steps.MINI_BATCH
    with dl.Pool(2) as pool:
        for ranks in (1, 2):
            sheet.head(f"{machine.sharing(ranks)} | in a call | places, and how often in a call")
            backends = OWN_BACKENDS if ranks == 1 else ""
            pool.run(measure_reads, ranks, sheet, backends, mini_batch, ranks <= machine.gpus)
