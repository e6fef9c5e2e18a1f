"""The part "endings" of `python -m benchmarks gpu`: runs of GPUs that end well after a pause, and ranks that fail.

    python -m ddp_loop run --ranks N -m benchmarks.gpu_endings HOW [PAUSE_S]

trains for some steps, in which rank 1 fails so, or all ranks do nothing for a while.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from benchmarks.gpu_machine import Machine, Sheet

ROOT = Path(__file__).resolve().parents[1]
IDLE_S = 92.0  # NCCL closes connections that had nothing to do for 60 s
CYCLES = 2_400_000_000  # more than a second of any GPU
TIMEOUT_S = 10.0  # of a world whose rank hangs
LIMIT_S, REHEARSED_LIMIT_S = 60.0, 200.0  # for a run to end after a failure, or after its pause
CULPRIT, AT = 1, 3  # the rank that fails, and the step


@dataclass(frozen=True)
class Failure:
    """What rank 1 does, and what the others must say of it."""

    how: str
    says: str


FAILURES = [
    Failure("oom", "rank 1 failed in forward of step 3"),
    Failure("kill", "rank 1 was killed by SIGKILL"),
    Failure("hang", "Rank 1 is still in forward of step 3"),
]


# -- on the ranks ------------------------------------------------------------------------------------------------


def act(how: str, device: torch.device) -> None:
    """The failure, in a forward."""
    match how:
        case "oom":
            torch.empty(2**46, dtype=torch.uint8, device=device)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(600)


@torch.no_grad()
def update(model: nn.Module) -> None:
    """Descend by hand: a process's first optimizer imports torch's compiler, nearly half of what its start takes."""
    for one in model.parameters():
        if one.grad is not None:
            one.sub_(0.1 * one.grad)


def train(how: str, pause_s: float) -> None:
    """Six steps; `how` is "pause", or what rank 1 does."""
    timeout_s = pause_s if how == "hang" else 60.0
    with dl.join_world(device="gpu", share_gpus=True, seed=0, timeout_s=timeout_s) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(world.device)
        batches = dl.Batches((torch.randn(96, 8), torch.randint(4, (96,))), 16, world)
        for step in dl.Loop(batches, 1, state={"model": model}, progress=False):
            fails = world.rank == CULPRIT and step.iteration == AT
            if how == "pause" and step.iteration == AT:
                time.sleep(pause_s)
            for rows, labels in step:
                if fails:
                    act(how, world.device)
                if how == "pause":
                    torch.cuda._sleep(CYCLES)
                step.backward(cross_entropy(model(rows), labels))
            step.fold()
            update(model)


# -- from outside ------------------------------------------------------------------------------------------------


def start(ranks: int, how: str, pause_s: float) -> subprocess.Popen[str]:
    words = ["--ranks", str(ranks), "-m", "benchmarks.gpu_endings", how, str(pause_s)]
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_loop", "run", *words],
        cwd=ROOT,
        env={**os.environ, "NCCL_DEBUG": "WARN"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str], limit_s: float) -> tuple[str, int | None]:
    """The output of a run and its exit code; None where it had to be ended."""
    try:
        return process.communicate(timeout=limit_s)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()  # its ranks end with it
        return process.communicate()[0], None


def problem_of(failure: Failure, code: int | None, said: str) -> str:
    """What is wrong with the end of a run whose rank 1 has failed."""
    if not code:
        return "it did not end in time" if code is None else "exit code 0"
    return "" if failure.says in said else f"no line names rank 1: {shown(said)}"


def shown(said: str) -> str:
    """The last line of an output, or the one that names a culprit."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"[Rr]ank \d.*(failed|killed|still in)", line)]
    return (named or lines[-1:] or ["nothing"])[0][:200].replace("|", "/")


def report_failures(machine: Machine, sheet: Sheet) -> None:
    """Each failure on two ranks. Wrong: an end with code 0, after its limit, or without the culprit's name."""
    limit_s = REHEARSED_LIMIT_S if machine.rehearsed else LIMIT_S
    sheet.head("rank 1 of 2 | on | what is printed | seconds from start to end", words=3)
    for failure in FAILURES:
        began = time.monotonic()
        said, code = end(start(2, failure.how, TIMEOUT_S), limit_s)
        problem = problem_of(failure, code, said)
        sheet.row(failure.how, machine.sharing(2), shown(said), f"{time.monotonic() - began:.1f}")
        sheet.judge(failure.how, problem)


def report_endings(machine: Machine, sheet: Sheet) -> None:
    """The failures while another run pauses. Wrong: that this one fails, or NCCL warns of anything."""
    pause_s = 2.0 if machine.rehearsed else IDLE_S
    pausing = start(machine.ranks, "pause", pause_s)
    report_failures(machine, sheet)
    said, code = end(pausing, pause_s + (REHEARSED_LIMIT_S if machine.rehearsed else LIMIT_S))
    name = f"steps of more than 1 s and a pause of {pause_s:.0f} s"
    warnings = [line for line in said.splitlines() if "NCCL WARN" in line]
    sheet.head("run | on | exit code | NCCL warnings", words=2)
    sheet.row(name, machine.sharing(machine.ranks), code, len(warnings))
    sheet.judge(name, "" if code == 0 else f"exit code {code}: {shown(said)}")
    sheet.judge("NCCL_DEBUG=WARN", warnings[0] if warnings else "")


def main(words: Sequence[str]) -> None:
    how, pause_s = words
    train(how, float(pause_s))


if __name__ == "__main__":
    main(sys.argv[1:])
