"""The part "reads" of `python -m benchmarks gpu`: how often a step makes the host wait for the GPU, by line."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_loop as dl
from benchmarks import steps
from benchmarks.gpu_machine import Machine, Sheet, group_of_one
from benchmarks.jobs import ddp_tuning
from benchmarks.measuring import Step, joined
from ddp_loop.accelerators import accelerator_of

ROOT = Path(__file__).resolve().parents[1]
STEP_LINES = 3  # at most so many places of host synchronisations in a row


@dataclass(frozen=True)
class Case:
    """A step whose host synchronisations are counted.

    Attributes:
        reads: whether it reads its loss, which must be counted.
        on_host: whether the data stay in the host's memory: as tensors that the script copies, or "samples" of a data
            set.
        weighted: whether each shard comes with a weight of its own, on the device.
    """

    shards: int | None = None
    synced: bool = False
    reads: bool = False
    on_host: str = ""
    weighted: bool = False
    options: tuple[tuple[str, str], ...] = ()


CASES = {
    "as it is": Case(),
    "4 fixed shards": Case(shards=4),
    "4 shards, weights on the device": Case(shards=4, weighted=True),
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
            weight = (labels > 0).sum() if case.weighted else None
            step.backward(loss, weight=weight, accuracy=steps.hits(logits, labels))
        step.fold()
        optimizer.step()

    return step


def place_of(file: str, line: int) -> str:
    """The innermost line of ours that is being executed, or what was noted if there is none."""
    mine = {__file__, sys.modules[accelerator_of.__module__].__file__}
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "support" not in path.parts and "site-packages" not in path.parts:
            if frame.name in ("place_of", "note", "see", "host_reads") and frame.filename in mine:
                continue
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return f"{Path(file).name}:{line}"


def count_reads(step: Step, steps_: int, device: torch.device) -> Counter[str]:
    """The places at which so many steps make the host wait, after as many of warm-up."""
    for _ in range(steps_):
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


def measure_reads(sheet: Sheet, device: str, backends: str, mini_batch: int) -> list[str]:
    """Write a row for each case and for DDP; returns the cases that are not as they must be."""
    job = replace(steps.JOBS["32-wide MLP, batch norm"], mini_batch=mini_batch)
    epoch, wrong = -(-steps.SAMPLES // mini_batch), []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder, group_of_one(backends), joined(None, device) as world:
            places = count_reads(our_case(case, job, world, folder), epoch, world.device)
            sheet.row(f"ours: {name}", *said(places, epoch))
            if case.reads and places.total() < epoch:
                wrong.append(name)
    with group_of_one(backends), joined(None, device) as world:
        data = steps.make_data(job, world.device)
        for what, tuned in (("DDP", False), ("tuned DDP", True)):
            model, optimizer = steps.make(job, world.device, fused=True)
            wrapped = DistributedDataParallel(model, **ddp_tuning() if tuned else {})
            take = steps.mine(world, data, mini_batch)

            def step(
                wrapped: nn.Module = wrapped, optimizer: torch.optim.Optimizer = optimizer, take: Any = take
            ) -> None:
                inputs, labels = take()
                optimizer.zero_grad()
                loss = cross_entropy(wrapped(inputs), labels)
                loss.backward()
                optimizer.step()

            sheet.row(f"{what}, without a log", *said(count_reads(step, epoch, world.device), epoch))
    return wrong


def report_reads(machine: Machine, sheet: Sheet) -> int:
    """On one rank with a process group."""
    sheet.head("step | in a step | places, and how often in a step")
    mini_batch = steps.MINI_BATCH if machine.gpus else steps.SAMPLES // 4
    with dl.Pool(1) as pool:
        (wrong,) = machine.run(pool, 1, measure_reads, sheet, machine.device, machine.backends, mini_batch)
    for name in wrong:
        sheet.line(f"\nNot counted: {name}.")
    return len(wrong)
