"""Sweeps on Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.guard import descendants
from tests.support.harness import until
from tests.support.paths import ROOT
from tests.support.slurm import Slurm

STARTS_SLURM = """
import sys
from tests.support.slurm import running_slurm
with running_slurm() as slurm:
    slurm.run("sbatch", "--wrap", "sleep 600")
    print(slurm.folder, flush=True)
    sys.stdin.readline()
"""


def jobs_of(slurm: Slurm) -> str:
    return slurm.run("squeue", "--noheader", "--format=%i %T")


@pytest.mark.slow
def test_slurm_runs_a_command_and_an_array_and_cancels(slurm: Slurm, tmp_path: Path) -> None:
    assert slurm.run("srun", "echo", "hello") == "hello\n"
    slurm.run(
        "sbatch", "--wait", "--array=0-2", "--output=%a.out", "--wrap", "echo $SLURM_ARRAY_TASK_ID", folder=tmp_path
    )
    assert [(tmp_path / f"{task}.out").read_text() for task in range(3)] == ["0\n", "1\n", "2\n"]
    job = slurm.run("sbatch", "--parsable", "--output=long.out", "--wrap", "sleep 600", folder=tmp_path).strip()
    until(lambda: jobs_of(slurm) == f"{job} RUNNING\n", "the job runs")
    slurm.run("scancel", job)
    until(lambda: jobs_of(slurm) == "", "the job is cancelled")


@pytest.mark.slow
def test_slurm_and_its_jobs_end_with_the_process_that_started_them(slurm: Slurm) -> None:
    command, pipe = [sys.executable, "-c", STARTS_SLURM], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as starter:
        assert starter.stdout is not None
        folder = Path(starter.stdout.readline().strip())
        known = [pid for pid in descendants(starter.pid) if pid != starter.pid]
        assert len(known) > 4, "the guard, three daemons and the job's"
        os.kill(starter.pid, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in known), "Slurm has ended")
    shutil.rmtree(folder)
