"""Two machines, each a network namespace with an address of its own: one script, and one machine may be lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.hosts import DEVICE, PORT, NoHosts, address, wired
from ddp_loop.distributed import Pool
from tests.faults.job import FINAL, Job
from tests.faults.kill_workers import make_job, rows_problem
from tests.support.harness import until
from tests.support.paths import ROOT

EPOCHS, BEGUN = 3, 8
WAIT_S = 90.0


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two namespaces, wired: 10.77.0.1 and 10.77.0.2."""
    with ExitStack() as ending:
        try:
            names = ending.enter_context(wired())
        except NoHosts as no:
            pytest.skip(f"no network namespaces can be made here: {no}")
        yield names


def start(job: Job, machine: str, number: int, folder: Path) -> subprocess.Popen[bytes]:
    """The job on one machine, under a torchrun that goes on with the machines that are left."""
    meeting = (
        f"is_host={int(number == 1)},timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
    )
    launcher = [
        "--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job",
        f"--rdzv-endpoint={address(0)}:{PORT}", f"--local-addr={address(number - 1)}", f"--rdzv-conf={meeting}",
    ]  # fmt: skip
    script = [str(ROOT / "tests/faults/job.py"), job.run, job.marks, f"--epochs={job.epochs}"]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
    with (folder / f"machine-{number}.log").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", machine, sys.executable, "-m", "torch.distributed.run", *launcher, *script],
            stdout=log, stderr=log, env={**os.environ, **variables},
        )  # fmt: skip


def rows_of(job: Job) -> int:
    rows = Path(job.run, "rows.jsonl")
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


@pytest.mark.slow
@pytest.mark.covers("C4", "H7")
def test_a_job_on_two_machines_goes_on_when_one_is_lost(machines: list[str], pool: Pool, tmp_path: Path) -> None:
    (_, expected), *_ = pool.run(make_job(tmp_path, "undisturbed", epochs=EPOCHS), 3)
    job = make_job(tmp_path, "elastic", epochs=EPOCHS)
    one, other = (start(job, machine, number, tmp_path) for number, machine in enumerate(machines, 1))
    try:
        until(lambda: rows_of(job) >= BEGUN or one.poll() is not None, "both machines have begun", WAIT_S)
        logs = [(tmp_path / f"machine-{number}.log").read_text(errors="replace")[-3000:] for number in (1, 2)]
        assert rows_of(job) >= BEGUN, "\n".join(logs)
        assert json.loads(Path(job.run, "status.json").read_text())["ranks"] == 2
        os.kill(other.pid, signal.SIGKILL)  # its worker ends with it
        assert one.wait(timeout=WAIT_S) == 0, (tmp_path / "machine-1.log").read_text(errors="replace")[-3000:]
    finally:
        for launcher in (one, other):
            launcher.kill()
            launcher.wait()
    assert json.loads(Path(job.run, "status.json").read_text())["ranks"] == 1
    assert json.loads(Path(job.run, FINAL).read_text()) == {"iteration": 10 * EPOCHS, "digest": expected}
    assert rows_problem(Path(job.run), whole=True) is None
