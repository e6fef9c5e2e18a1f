"""Workers of a sweep as jobs of Slurm, which submitit submits as an array.

[Note: A job that must leave] Before a job's time is over, Slurm sends it SIGUSR2, and submitit calls `checkpoint`:
the worker stops, which puts its trials back in line with their checkpoints, and submitit puts the job in line again.
A job that is preempted or cancelled gets SIGTERM instead, with all its processes, so that the worker stops by itself.
A preempted job is put in line again here if Slurm still has it as running; one that ends would count as completed.
SIGUSR2 reaches all processes of a job too, and would end those that do not handle it: the worker ignores it, and so do
its ranks, which inherit that.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddp_loop.elastic import program_name
from ddp_loop.sweeps.jobs import nearest

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

SLURM = "slurm"
LOCAL = "local"
INSTALL = "pip install 'ddp_loop[slurm]'"
JOBS = "slurm"  # the folder of the jobs' logs, below the sweep's
TIMEOUT_MIN = 24 * 60  # at most, unless it is given; a job whose time is over goes on in another one
MOST_JOBS = 1000  # the times that a job is put in line again
ASK_S = 60.0  # for an answer of Slurm
WORKED = (0, 1)  # exit codes of a worker: all trials are well, or some are not


@dataclass
class JobWorker:
    """A job: a worker of a sweep in a process of its own. See [Note: A job that must leave].

    Attributes:
        sweep: the folder of the sweep.
        slots: of the worker; None takes what Slurm gave the job.
        storage: the URL, where the sweep's folder does not have it.
        process_id: of the worker that runs.
    """

    sweep: str
    slots: int | None
    storage: str | None
    process_id: int | None = None

    def __call__(self) -> None:
        """Work until no trial is left.

        Raises:
            RuntimeError: the worker failed.
        """
        asked: list[int] = []

        def note(number: int, frame: FrameType | None) -> None:
            asked.append(number)
            if not is_slurm_job():  # else Slurm has sent it to the worker too, whose second one kills
                self._terminate()

        signal.signal(signal.SIGTERM, note)
        requeues = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the worker inherits this
        with subprocess.Popen(self.command()) as process:
            self.process_id = process.pid
            signal.signal(signal.SIGUSR2, requeues)
            try:
                self._wait()
            except BaseException:
                self._terminate()
                raise
            code = process.wait()
        if asked:
            requeue_if_preempted()
        elif code not in WORKED:
            raise RuntimeError(f"The worker of {self.sweep} ended with code {code}. Its output says why.")

    def command(self) -> list[str]:
        """The worker's command."""
        named = {"slots": self.slots or slots_here(), "storage": self.storage}
        options = [f"--{name}={value}" for name, value in named.items() if value is not None]
        return [sys.executable, "-m", "ddp_loop", "sweep", "work", self.sweep, *options]

    def checkpoint(self) -> DelayedSubmission:
        """Stop the worker, and return the job that goes on. submitit calls this."""
        from submitit.helpers import DelayedSubmission

        self._terminate()
        self._wait()
        return DelayedSubmission(JobWorker(self.sweep, self.slots, self.storage))

    def _terminate(self) -> None:
        if self.process_id is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGTERM)

    def _wait(self) -> None:
        """Wait until the worker has ended; unlike Popen's, this may be called in a signal's handler during itself."""
        if self.process_id is not None:
            os.waitid(os.P_PID, self.process_id, os.WEXITED | os.WNOWAIT)


def is_slurm_job() -> bool:
    """Whether this process is of a job of Slurm that submitit started there."""
    return os.environ.get("SUBMITIT_EXECUTOR") == SLURM


def requeue_if_preempted() -> None:
    """Put this job in line again, unless it was cancelled."""
    if not is_slurm_job():
        return
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    ask = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
    state = subprocess.run(ask, check=False, capture_output=True, text=True, timeout=ASK_S).stdout.strip()
    if state in ("RUNNING", "SIGNALING"):
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=ASK_S)


def slots_here() -> int | None:
    """The slots of a worker, from what Slurm gave this job: GPUs, or cores; None leaves it to the worker."""
    if gpus := [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]:
        return len(gpus)
    cores = os.environ.get("SLURM_CPUS_PER_TASK", os.environ.get("SLURM_CPUS_ON_NODE", ""))
    return int(cores) if cores.isdecimal() and is_slurm_job() else None


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Options for submitit from KEY=VALUE words; whole numbers become numbers.

    Raises:
        ValueError: a word is not KEY=VALUE.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            raise ValueError(f"An option for Slurm is written KEY=VALUE, such as partition=gpu. Got {word!r}.")
        options[name] = int(value) if value.isdecimal() else value
    return options


@dataclass(frozen=True)
class Jobs:
    """The jobs of a sweep's workers.

    Attributes:
        on: "slurm", or "local" for processes of this machine.
        workers: their number; each is a job.
        options: of submitit, such as partition, gpus_per_node, cpus_per_task, mem_gb or timeout_min.
    """

    on: str
    workers: int
    options: Mapping[str, Any] = field(default_factory=dict)


def submit_workers(folder: Path, jobs: Jobs, slots: int | None = None, storage: str | None = None) -> list[str]:
    """Submit workers of a sweep as one array of jobs that `check_jobs` allows, and return the jobs' ids.

    Args:
        folder: of the sweep.
        jobs: to submit.
        slots, storage: as in `JobWorker`.

    Raises:
        ValueError: Slurm refused the jobs, or an option has a wrong value.
    """
    import submitit

    folder = folder.absolute()
    often: dict[str, Any] = {f"{one}_max_num_timeout": MOST_JOBS for one in (SLURM, LOCAL)}
    executor = submitit.AutoExecutor(folder=folder / JOBS, cluster=jobs.on, **often)
    usual = {"name": folder.name, "timeout_min": TIMEOUT_MIN}
    if jobs.on == SLURM and not {"timeout_min", "time"} & set(jobs.options):
        usual["timeout_min"] = min(TIMEOUT_MIN, partition_limit_min(jobs.options.get("partition")))
    general = executor._valid_parameters()
    options: dict[str, Any] = {
        "slurm_array_parallelism": jobs.workers,
        "slurm_additional_parameters": {"requeue": True},
    }
    for name, value in {**usual, **jobs.options}.items():
        options[name if name in general else f"{SLURM}_{name}"] = value
    try:
        executor.update_parameters(**options)
    except (AssertionError, NameError, TypeError, ValueError) as error:
        raise ValueError(f"submitit refused an option. {error}") from error
    cores = jobs.options.get("cpus_per_task") if jobs.on == LOCAL else None
    worker = JobWorker(str(folder), slots or cores, storage)
    try:
        with executor.batch():
            submitted = [executor.submit(worker) for _ in range(jobs.workers)]
    except submitit.core.utils.FailedJobError as error:
        raise ValueError(f"Slurm refused the jobs. {error}") from error
    return [one.job_id for one in submitted]


def check_jobs(jobs: Jobs) -> None:
    """Check what can be checked before anything is written.

    Raises:
        ImportError: submitit is missing.
        ValueError: Slurm's commands are missing, or an option is unknown.
    """
    try:
        from submitit import AutoExecutor, SlurmExecutor
    except ImportError as error:
        raise ImportError(f"Workers as jobs need submitit. {error.name} is missing. Run {INSTALL}") from error
    if jobs.on == SLURM and (missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]):
        raise ValueError(
            f"Slurm's command {missing[0]} is not on the PATH. Start this on a machine from which jobs are submitted, "
            "or use --on local."
        )
    known = sorted(AutoExecutor._valid_parameters() | SlurmExecutor._valid_parameters())
    if unknown := [name for name in jobs.options if name not in known]:
        raise ValueError(
            f"The jobs have no option {unknown[0]!r}. {nearest(unknown[0], known)}They have {', '.join(known)}."
        )


def partition_limit_min(partition: str | None) -> int:
    """The time limit of a partition in minutes; a job that asks for more would wait forever.

    Args:
        partition: its name; None is the default one.
    """
    ask = ["sinfo", "--noheader", "--format=%P %l"]
    lines = subprocess.run(ask, check=False, capture_output=True, text=True, timeout=ASK_S).stdout.splitlines()
    for name, _, limit in (line.partition(" ") for line in lines):
        if name.endswith("*") if partition is None else name.rstrip("*") == partition:
            return minutes_of(limit.strip()) or TIMEOUT_MIN
    return TIMEOUT_MIN


def minutes_of(limit: str) -> int | None:
    """The whole minutes of a time as Slurm writes it, such as 2-12:00:00 or 30:00; None if it is infinite."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not (days or "0").isdecimal() or not all(part.isdecimal() for part in parts):
        return None
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 24 * 60 + seconds // 60


def how_to_go_on(folder: Path, jobs: Sequence[str], on: str) -> list[str]:
    """Lines of text: the jobs, and how to watch and to stop them."""
    lines = [
        f"Submitted {len(jobs)} {'worker' if len(jobs) == 1 else 'workers'} of {folder}: {', '.join(jobs)}.",
        f"Watch:  {program_name()} runs {folder} --watch, or {program_name()} monitor {folder}",
        f"Stop:   {program_name()} stop {folder}",
        f"Output: {folder / JOBS}",
    ]
    if on == SLURM:
        array = jobs[0].partition("_")[0]
        lines.insert(2, f"Jobs:   squeue --jobs={array}, and scancel {array} to end them")
    return lines
