"""Faults under torchrun: what it says, its exit code, and whether a process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.harness import FAULT_S, until
from tests.support.paths import ROOT

START_S = 60.0  # two ranks that import torch take 5 s on two idle cores
END_S = 60.0
LOOK_S = 0.02

SCRIPT = """
import os
import sys
import time
from pathlib import Path

import torch
import ddp_loop as dl

folder, how = Path(sys.argv[1]), sys.argv[2]
with dl.join_world(seed=0) as world:
    model = torch.nn.Linear(4, 1)
    batches = dl.Batches(torch.ones(8, 4), 8, world)
    (folder / f"pid-{world.rank}.new").write_text(str(os.getpid()))
    for step in dl.Loop(batches, 10**6, state=dict(model=model), progress=False):
        for rows in step:
            if how == "raise" and world.rank == 1 and step.iteration == 5:
                (folder / "began").write_text(str(time.monotonic()))
                raise LookupError("the fault of this rank")
            step.backward(model(rows).mean())
        step.fold()
        if step.iteration == 4:
            os.rename(folder / f"pid-{world.rank}.new", folder / f"pid-{world.rank}")
"""


@dataclass(frozen=True)
class Ended:
    """How a job under torchrun ended.

    Attributes:
        problems: what is not as it should be.
        took_s: from the fault to the end of the last process.
    """

    what: str
    problems: list[str]
    took_s: float


@dataclass(frozen=True)
class Job:
    """A job that has begun to train, on two ranks."""

    launcher: subprocess.Popen[bytes]
    workers: list[int]
    said: Path
    folder: Path

    def wait_for_all(self) -> float:
        """The time at which nothing of it was left, or the patience ended."""
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and (self.launcher.poll() is None or any(map(lives, self.workers))):
            time.sleep(LOOK_S)
        return time.monotonic()

    def end(self) -> None:
        """Leave nothing behind."""
        for process_id in (self.launcher.pid, *self.workers):
            if self.launcher.poll() is None or (process_id != self.launcher.pid and lives(process_id)):
                os.kill(process_id, signal.SIGKILL)
        self.launcher.wait()


def lives(process_id: int) -> bool:
    """Whether it runs; a zombie that no process waited for does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(folder: Path, how: str) -> Job:
    """Start it, and wait until both ranks have made some steps."""
    folder = folder / f"torchrun {how}"
    folder.mkdir()
    script, said = folder / "train.py", folder / "said"
    script.write_text(SCRIPT)
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with said.open("wb") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script),
             str(folder), how],
            stdout=file, stderr=file, env={**os.environ, **variables},
        )  # fmt: skip
    files = [folder / f"pid-{rank}" for rank in range(2)]
    deadline = time.monotonic() + START_S
    while not all(file.is_file() for file in files) and time.monotonic() < deadline and launcher.poll() is None:
        time.sleep(LOOK_S)
    return Job(launcher, [int(file.read_text()) for file in files if file.is_file()], said, folder)


def judged(what: str, job: Job, began: float, expected: list[str], limit_s: float) -> Ended:
    """Wait for its end."""
    took_s = job.wait_for_all() - began
    said = job.said.read_text(errors="replace")
    problems = [f"{one!r} was not said: {said[-2000:]}" for one in expected if one not in said]
    if job.launcher.poll() in (None, 0):
        problems.append(f"exit code {job.launcher.poll()}")
    problems += [f"{process_id} lives" for process_id in job.workers if lives(process_id)]
    if len(job.workers) < 2 or took_s > limit_s:
        problems.append(f"took {took_s:.1f} s, with {len(job.workers)} ranks")
    job.end()
    return Ended(what, problems, took_s)


def raise_in_a_worker(folder: Path) -> Ended:
    """Rank 1 raises."""
    job = start(folder, "raise")
    try:
        until(lambda: (job.folder / "began").is_file() or job.launcher.poll() is not None, "rank 1 raises", START_S)
    except AssertionError:
        job.end()
        raise
    began = float((job.folder / "began").read_text())
    return judged("raises", job, began, ["LookupError: the fault of this rank"], FAULT_S)


def kill_a_worker(folder: Path) -> Ended:
    """Rank 1 is killed."""
    job = start(folder, "kill")
    began = time.monotonic()
    os.kill(job.workers[1], signal.SIGKILL)
    return judged("is killed (-9)", job, began, ["exitcode  : -9", "rank      : 1 (local_rank: 1)"], FAULT_S)


def kill_torchrun(folder: Path) -> Ended:
    """Torchrun is killed."""
    job = start(folder, "kill torchrun")
    began = time.monotonic()
    job.launcher.kill()
    return judged("torchrun is killed (-9)", job, began, [], FAULT_S)
