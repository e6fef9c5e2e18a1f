"""The job of this folder under torchrun, with Ctrl-C as a terminal gives it; and what is left of a job's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.faults.job import Job
from tests.support.harness import until
from tests.support.paths import ROOT

_TAG = "DDP_LOOP_FAULTS_OF"
_TRACKER = "multiprocessing.resource_tracker"  # one for each process that ever had workers, for as long as it lives
_GONE_S = 3.0  # a worker of a DataLoader learns of its parent's end from the kernel, or by a look


def start_torchrun(job: Job, ranks: int, log: Path, *options: str) -> subprocess.Popen[bytes]:
    """The job under torchrun, in a session of its own; all that it starts is recognised by the marks' folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *options]
    keywords = [f"--epochs={job.epochs}", f"--workers={job.workers}", f"--evaluate_s={job.evaluate_s}"]
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / "tests/faults/job.py"), job.run, job.marks, *keywords],
            stdout=out, stderr=out, start_new_session=True, preexec_fn=hear_ctrl_c, env=variables(job.marks),
        )  # fmt: skip


def hear_ctrl_c() -> None:
    """What is started in the background of a shell ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def variables(tag: str) -> dict[str, str]:
    """The environment of a job's processes."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _TAG: tag}


def left_of(tag: str) -> list[str]:
    """The processes of a job that are still there when they had a moment to end."""
    return _left(lambda: _tagged(tag))


def left_below(processes: tuple[int, ...]) -> list[str]:
    """The children of these processes that are still there when they had a moment to end."""
    return _left(lambda: [one for process in processes for one in _children(process)])


def _left(look: Callable[[], list[str]]) -> list[str]:
    with suppress(AssertionError):  # what is left is the answer
        until(lambda: not look(), "they end", _GONE_S)
    return look()


def _tagged(tag: str) -> list[str]:
    said = f"{_TAG}={tag}".encode()
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if said in _read(path).split(b"\0")]


def _children(process: int) -> list[str]:
    found = b" ".join(_read(path) for path in Path(f"/proc/{process}/task").glob("*/children"))
    return [line for one in found.split() if _TRACKER not in (line := f"{one.decode()}: {_command(int(one))}")]


def _command(process: int) -> str:
    return _read(Path(f"/proc/{process}/cmdline")).replace(b"\0", b" ").decode(errors="replace").strip()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has ended, or is another user's
