"""The part "saves" of `python -m benchmarks gpu`: checkpoints of GPUs, a run that is killed, and what a save costs."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from benchmarks.gpu_machine import Machine, Sheet
from ddp_loop.determinism import digest

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 200  # a weight of 40,000 words, 160 KB: a piece of a checksum has 64 KB
HALF, WHOLE = 4, 8  # steps
MOST_STALL_MS = 1000.0  # of a save of 1 GB
SECONDS = 120.0  # for the digit job, to its kill and from there to its end


def train(folder: str, steps: int) -> tuple[int, str]:
    """The number of steps that this call made, and a digest of the weights."""
    made = 0
    with dl.deterministic(seed=None), dl.join_world(device="gpu", share_gpus=True, seed=0) as world:
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(96, WIDTH, generator=generator), torch.randint(4, (96,), generator=generator)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 4)).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        state = {"model": model, "optimizer": optimizer}
        batches = dl.Batches(data, 48, world, shards=2 * max(2, world.size))
        for step in dl.Loop(batches, steps=steps, state=state, run_dir=folder, save_every=2, progress=False):
            made += 1
            for rows, labels in step:
                step.backward(cross_entropy(model(rows), labels))
            step.fold()
            optimizer.step()
        return made, digest(nn.utils.parameters_to_vector(model.parameters()))


def resume(ranks: int) -> str:
    """What is wrong with a run that is saved half way and resumed in a new world; empty if nothing is."""
    with tempfile.TemporaryDirectory() as folder, dl.Pool(ranks) as pool:
        try:
            calls = (("whole", WHOLE), ("parts", HALF), ("parts", WHOLE))
            found = [pool.run(train, ranks, f"{folder}/{name}", steps)[0] for name, steps in calls]
        except dl.RankFailed as error:
            return str(error).splitlines()[0]
    (_, whole), _, (made, resumed) = found
    if made != WHOLE - HALF:
        return f"it made {made} steps after {HALF} of {WHOLE}"
    return "" if resumed == whole else "other bits than a run that was not interrupted"


def stall(folder: str, words: int) -> tuple[float, float]:
    """Milliseconds of a step that saves a state of so many float32, and of the others, to the device's end."""
    with dl.join_world(device="gpu", seed=0) as world:
        model = nn.ParameterList([nn.Parameter(torch.zeros(words // 4)) for _ in range(4)]).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        batches = dl.Batches((torch.ones(60),), 2, world)
        state = {"model": model, "optimizer": optimizer}
        loop = dl.Loop(batches, steps=12, state=state, run_dir=folder, save_every=6, progress=False)
        took = []
        began = time.perf_counter()
        for step in loop:
            for (rows,) in step:
                step.backward(sum(parameter[0] for parameter in model) * rows.mean())
            step.fold()
            optimizer.step()
            torch.cuda.synchronize(world.device)
            took.append(1e3 * (time.perf_counter() - began))  # with what the loop did after the step before
            began = time.perf_counter()
        return max(took[6:8]), statistics.median(took[8:])


def kill_and_resume(ranks: int, folder: Path, data: str) -> str:
    """What is wrong with the digit job, killed after its first checkpoint and started again; empty if nothing is."""
    script = str(ROOT / "examples" / "digits" / "train.py")
    command = [sys.executable, "-m", "ddp_loop", "run", "--ranks", str(ranks), script]
    command += ["--device", "gpu", "--data", data, "--epochs", "2", "--batch-size", "512", "--run-dir", str(folder)]
    began = time.monotonic()
    with (folder.parent / "first.txt").open("wb") as output:
        first = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        while (
            not list(folder.glob("checkpoints/step-*")) and first.poll() is None and time.monotonic() - began < SECONDS
        ):
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    if not list(folder.glob("checkpoints/step-*")):
        return f"no checkpoint in {SECONDS:.0f} s: {_last_line((folder.parent / 'first.txt').read_text())}"
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"it did not end in {SECONDS:.0f} s after the kill"
    if done.returncode:
        return f"exit code {done.returncode} after the kill: {_last_line(done.stderr)}"
    return "" if "resumes after step" in done.stdout + done.stderr else f"it did not resume: {_last_line(done.stdout)}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def report_saves(machine: Machine, sheet: Sheet) -> None:
    """Wrong: a run that does not go on with the same bits, a job that does not, and a save that takes longer."""
    sheet.head("what | on | result", words=2)
    for ranks in dict.fromkeys((1, machine.gpus)):
        problem = resume(ranks)
        name = f"save and resume, a tensor of {WIDTH**2 * 4 // 1000} KB"
        sheet.row(name, machine.sharing(ranks), problem or "the same bits")
        sheet.judge(f"{name}, {machine.sharing(ranks)}", problem)
    with tempfile.TemporaryDirectory() as folder:
        problem = kill_and_resume(machine.gpus, Path(folder, "run"), "handwritten" if machine.rehearsed else "digits")
        sheet.row(
            "the digit job, killed with SIGKILL and started again", machine.sharing(machine.gpus), problem or "resumed"
        )
        sheet.judge("the digit job", problem)
    words = 2**18 if machine.rehearsed else 2**28
    with tempfile.TemporaryDirectory() as folder, dl.Pool(1) as pool:
        ((saving, other),) = pool.run(stall, 1, folder, words)
    name = f"a step that saves {words * 4 / 2**30:.3g} GiB"
    sheet.row(name, machine.sharing(1), f"{saving:.0f} ms, others {other:.0f} ms")
    is_slow = saving - other > MOST_STALL_MS and not machine.rehearsed
    sheet.judge(name, f"it stalls for more than {MOST_STALL_MS:.0f} ms" if is_slow else "")
