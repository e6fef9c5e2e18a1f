"""Workers of a sweep as Slurm jobs, and as local jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.sweeps.slurm import (
    Jobs,
    check_jobs,
    how_to_go_on,
    minutes_of,
    read_options,
    slots_here,
    submit_workers,
)
from tests.support.guard import descendants
from tests.support.harness import until
from tests.support.paths import ROOT
from tests.support.slurm import CORES, Slurm
from tests.support.sweep_jobs import REACHED, check_alone, train
from tests.support.trials import trial

RATES = [0.1, 0.07, 0.05, 0.03]
STANDS = RATES[0]
SWEEP = f"""
function = "{ROOT}/tests/support/sweep_jobs.py:train"
folder = "sweep"
heartbeat_s = 1
[keywords]
stands = {STANDS}
[space]
rate = {RATES}
"""
SWEEP_S = 120.0


def jobs_of(slurm: Slurm) -> str:
    return slurm.run("squeue", "--noheader", "--format=%i %T")


def task_of(slurm: Slurm, process: int) -> str:
    """The task of an array, such as 1_0, that a process belongs to."""
    listed = [line.split() for line in slurm.run("scontrol", "listpids").splitlines()[1:]]
    tasks = dict(line.split() for line in slurm.run("squeue", "--noheader", "--format=%A %i").splitlines())
    return next(tasks[job] for pid, job, *_ in listed if int(pid) == process)


def submit(folder: Path, *options: str, workers: int = 2) -> str:
    """Begin the sweep of this file with workers; returns what the command printed."""
    (folder / "sweep.toml").write_text(SWEEP)
    command = [sys.executable, "-m", "ddp_loop", "sweep", str(folder / "sweep.toml"), f"--workers={workers}", *options]
    with (folder / "printed").open("w") as printed:  # no pipe, which local jobs would hold open
        subprocess.run(command, check=True, stdout=printed, stderr=printed, timeout=SWEEP_S, cwd=ROOT)
    return (folder / "printed").read_text()


def are_done(folder: Path) -> bool:
    return all(trial(folder / "sweep", number)["status"] == "done" for number in range(len(RATES)))


def check_results(folder: Path, on_one_rank: Any) -> None:
    """All trials are in order, each with the bits of a run alone, and only the first one was interrupted."""
    check_alone(folder / "sweep", RATES, on_one_rank)
    assert [len(trial(folder / "sweep", number)["attempts"]) for number in range(len(RATES))] == [2, 1, 1, 1]


@pytest.fixture
def on_one_rank(on_ranks: Any) -> Any:
    """A trial alone, on a rank of the tests."""
    return lambda rate, folder: on_ranks(1, train, rate, folder)[0]


@pytest.mark.slow
@pytest.mark.covers("F4")
@pytest.mark.parametrize("why", ["its time is over", "another job goes first", "it is cancelled"])
def test_the_trial_of_a_job_that_must_leave_resumes_later_or_in_another_job(
    why: str, slurm: Slurm, tmp_path: Path, on_one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    workers = 2 if why == "it is cancelled" else 1
    partition = ["--slurm=partition=main"] * (workers - 1)
    printed = submit(tmp_path, "--on=slurm", *partition, "--slurm=cpus_per_task=1", workers=workers)
    job = printed.partition("squeue --jobs=")[2].partition(",")[0]
    until((tmp_path / "sweep/trials/0000" / REACHED).exists, f"a trial stands still{slurm.logs()}", SWEEP_S / 2)
    if why == "its time is over":
        slurm.run("scancel", "--signal=USR2", job)
    elif why == "another job goes first":
        urgent = ["--partition=urgent", f"--cpus-per-task={CORES}", "--output=/dev/null", "--wrap", "true"]
        slurm.run("sbatch", *urgent)
    else:
        assert f": {job}_0, {job}_1." in printed
        slurm.run("scancel", task_of(slurm, trial(tmp_path / "sweep", 0)["attempts"][0]["process"]))
    until(lambda: are_done(tmp_path), "all trials are done", SWEEP_S)
    until(lambda: jobs_of(slurm) == "", "the jobs have ended", SWEEP_S)
    outputs = [path.read_text() for path in (tmp_path / "sweep/slurm").glob("*_log.out")]
    assert sum(text.count("Starting with JobEnvironment") for text in outputs) == 2
    check_results(tmp_path, on_one_rank)


@pytest.mark.slow
@pytest.mark.covers("F4")
def test_jobs_of_this_machine_share_a_sweep(tmp_path: Path, on_one_rank: Any) -> None:
    printed = submit(tmp_path, "--on=local", "--slurm=cpus_per_task=1")
    controllers = [int(job) for job in printed.splitlines()[0].rstrip(".").partition(": ")[2].split(", ")]
    try:
        until((tmp_path / "sweep/trials/0000" / REACHED).exists, "the first trial stands still", SWEEP_S)
        held = trial(tmp_path / "sweep", 0)["attempts"][0]["process"]
        [ends] = [controller for controller in controllers if held in descendants(controller)]
        os.kill(ends, signal.SIGTERM)
        until(lambda: are_done(tmp_path), "all trials are done", SWEEP_S)
        until(lambda: not any(Path(f"/proc/{one}").exists() for one in controllers), "the jobs have ended", SWEEP_S)
    finally:
        for process in [process for controller in controllers for process in descendants(controller)]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    check_results(tmp_path, on_one_rank)


def test_options_are_read() -> None:
    assert read_options(["partition=gpu", "timeout_min=60"]) == {"partition": "gpu", "timeout_min": 60}


def test_jobs_that_cannot_be_submitted_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs the extra slurm")
    with pytest.raises(ValueError, match="is written KEY=VALUE"):
        read_options(["partition"])
    with pytest.raises(ValueError, match="Did you mean 'partition'"):
        check_jobs(Jobs("local", 1, {"partitio": "gpu"}))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"sbatch is not on the PATH.*--on local"):
        check_jobs(Jobs("slurm", 1))
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match=r"pip install 'ddp_loop\[slurm\]'"):
        check_jobs(Jobs("local", 1))


@pytest.mark.covers("F4")
def test_workers_are_handed_to_slurm_as_one_array(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The arguments of sbatch; the slow tests pass them to a real Slurm."""
    pytest.importorskip("submitit", reason="needs the extra slurm")
    answers = {"sbatch": 'cp "$1" handed; echo Submitted batch job 7', "srun": "", "sinfo": "echo 'gpu* 2:00:00'"}
    for name, answer in answers.items():
        (command := tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{answer}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (folder := tmp_path / "sweep").mkdir()
    jobs = submit_workers(folder, Jobs("slurm", 3, {"partition": "gpu", "gpus_per_node": 2}))
    assert jobs == ["7_0", "7_1", "7_2"]
    lines = (tmp_path / "handed").read_text().splitlines()
    asked = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")}
    expected = {"array=0-2%3", "partition=gpu", "gpus-per-node=2", "time=120", "requeue", "job-name=sweep"}
    assert expected <= asked
    assert any(line.startswith("srun ") and "submitit" in line for line in lines)
    assert "squeue --jobs=7" in "\n".join(how_to_go_on(folder, jobs, "slurm"))


@pytest.mark.parametrize(
    ("environment", "slots"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_CPUS_ON_NODE": "8", "SUBMITIT_EXECUTOR": "slurm"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_CPUS_ON_NODE": "8", "SUBMITIT_EXECUTOR": "slurm"}, 8),
        ({"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "8", "SUBMITIT_EXECUTOR": "slurm"}, 3),
        ({"SLURM_CPUS_ON_NODE": "8", "SUBMITIT_EXECUTOR": "local"}, None),
    ],
)
def test_a_worker_has_the_slots_that_slurm_gave_it(
    environment: dict[str, str], slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert slots_here() == slots


@pytest.mark.parametrize(
    ("limit", "minutes"), [("infinite", None), ("10:00", 10), ("2:00:00", 120), ("1-12:30:00", 2190), ("n/a", None)]
)
def test_the_limit_of_a_partition_is_read(limit: str, minutes: int | None) -> None:
    assert minutes_of(limit) == minutes
