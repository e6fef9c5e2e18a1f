"""A sweep's folder for its workers, the command line and the page: who works on it, and what it is asked to do."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ddp_loop.checkpoint import STOP, is_locked, write_atomic, write_text_atomic

SWEEP = "sweep.json"
TRIALS = "trials"
SWEEP_LOCK = "lock"
AGAIN = "again"
WORKERS = "workers"
FAILED_TRIAL = ("failed", "killed", "not finite", "timed out", "stopped")  # what runs again if it is asked for


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (folder / SWEEP).is_file()


def trial_folder(sweep: Path, trial: int) -> Path:
    """The run folder of a trial."""
    return sweep / TRIALS / f"{trial:04d}"


def has_workers(folder: Path) -> bool | None:
    """Whether a process runs the sweep or works on it; None on a file system without locks."""
    locks = [folder / SWEEP_LOCK]
    with suppress(OSError):
        locks += (folder / WORKERS).iterdir()
    held = [is_locked(path) for path in locks]
    return True if True in held else None if None in held else False


def ask_sweep_to_stop(folder: Path, why: str) -> None:
    """Ask a sweep's workers to stop all trials, with checkpoints.

    Raises:
        OSError: the folder cannot be written.
        ValueError: the sweep has no worker.
    """
    if has_workers(folder) is False:
        raise ValueError(f"No worker runs the sweep in {folder}. Pass the folder of a sweep that runs.")
    write_text_atomic(folder / STOP, why)


def ask_for(folder: Path, trials: Iterable[int]) -> None:
    """Ask the workers of a sweep, now or later, to run trials again.

    Raises:
        OSError: the folder cannot be written.
    """
    (folder / AGAIN).mkdir(exist_ok=True)
    write_atomic(folder / AGAIN / f"{secrets.token_hex(6)}.json", {"trials": sorted(set(trials))})
