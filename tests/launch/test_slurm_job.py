"""`launch/slurm.sbatch` on a real Slurm: a preempted job resumes later, a cancelled one does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_loop.checkpoint import ask_to_stop
from tests.support.harness import until
from tests.support.paths import ROOT
from tests.support.slurm import CORES, Slurm

RANKS, WAIT_S = 2, 240.0
DIGITS = ["examples/digits/train.py", "--device=cpu", "--epochs=1", f"--shards={RANKS}"]


def rows_of(run: Path) -> list[int]:
    """The steps of a run's rows."""
    rows = run / "rows.jsonl"
    return [json.loads(line)["iteration"] for line in rows.read_text().splitlines()] if rows.exists() else []


def weights_of(run: Path) -> dict[str, int]:
    """The checksums of all parameters and buffers in the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    found: dict[str, int] = json.loads((newest / "manifest.json").read_text())["facts"]["checksums"]
    return found


def submit(slurm: Slurm, folder: Path) -> str:
    """The digit example as a job of two ranks; returns its id."""
    own = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = ["--parsable", f"--cpus-per-task={RANKS}", f"--chdir={ROOT}", f"--output={folder}/job.log"]
    export = f"--export=PATH={own},PYTHONPATH={ROOT},HOME={os.environ.get('HOME', folder)},OMP_NUM_THREADS=1"
    command = ["sbatch", *options, export, str(ROOT / "launch/slurm.sbatch"), *DIGITS, f"--run-dir={folder}/run"]
    return slurm.run(*command, folder=folder).strip()


def state_of(slurm: Slurm, job: str) -> str:
    return slurm.run("squeue", "--noheader", "--format=%T", f"--jobs={job}", "--states=all").strip()


def has_ended(slurm: Slurm, job: str) -> bool:
    return state_of(slurm, job) in ("COMPLETED", "CANCELLED", "FAILED", "")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same job under torchrun alone."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run([*command, *DIGITS, f"--run-dir={run}"], check=True, cwd=ROOT, timeout=WAIT_S, capture_output=True)
    return run


@pytest.mark.slow
@pytest.mark.covers("C4", "J16")
@pytest.mark.parametrize("why", ["another job goes first", "its time is over"])
def test_a_preempted_job_resumes_with_the_same_bits(why: str, slurm: Slurm, undisturbed: Path, tmp_path: Path) -> None:
    job, run, log = submit(slurm, tmp_path), tmp_path / "run", tmp_path / "job.log"
    until(lambda: len(rows_of(run)) > 2, f"rows{slurm.logs()}", WAIT_S)
    if why == "another job goes first":
        whole = f"--cpus-per-task={CORES}"
        slurm.run("sbatch", "--partition=urgent", whole, "--output=/dev/null", "--wrap", "true", folder=tmp_path)
    else:
        slurm.run("scancel", "--batch", "--signal=USR1", job)
    until(lambda: f"Job {job} goes on later." in log.read_text(), "the job leaves", WAIT_S)
    before = rows_of(run)[-1]
    until(lambda: has_ended(slurm, job), f"the job has ended{slurm.logs()}", WAIT_S)
    assert state_of(slurm, job) in ("COMPLETED", ""), log.read_text()
    assert before < rows_of(undisturbed)[-1]
    assert rows_of(run) == rows_of(undisturbed)
    assert weights_of(run) == weights_of(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scancel", "stop"])
def test_a_job_that_is_cancelled_or_stopped_is_not_queued_again(how: str, slurm: Slurm, tmp_path: Path) -> None:
    job, run, log = submit(slurm, tmp_path), tmp_path / "run", tmp_path / "job.log"
    until(lambda: len(rows_of(run)) > 2, f"rows{slurm.logs()}", WAIT_S)
    if how == "scancel":
        slurm.run("scancel", job)
    else:
        ask_to_stop(run, "the test")
    until(lambda: has_ended(slurm, job), f"the job has ended{slurm.logs()}", WAIT_S)
    assert state_of(slurm, job) in (("CANCELLED",) if how == "scancel" else ("COMPLETED",)), log.read_text()
    assert "goes on later" not in log.read_text()
