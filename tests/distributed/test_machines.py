"""Hosts, each a network namespace with its own address, that are cut off briefly or for good, join and leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from benchmarks.hosts import DEVICE, PORT, NoHosts, Wired, address, wired
from ddp_loop.distributed import Pool
from tests.faults.job import FINAL, SLOW, Job
from tests.faults.kill_workers import make_job, rows_problem
from tests.support.harness import until
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.covers("C4", "H7", "J15")]

EPOCHS, LONG, BEGUN = 3, 10, 8
WAIT_S = 90.0
CUT_S, TIMEOUT_S = 5.0, 4.0
REPORT_S = 15.0  # added to the timeout: a roll call takes 2 s, and other processes share the cores


@dataclass
class Hosts:
    """Runs a job under one launcher on each host, with the c10d rendezvous. Its updates are by hand: cheap starts.

    Attributes:
        wires: between the hosts.
        folder: of the logs.
        started: the launchers by host, the newest last.
        module: of the launcher; torchrun by default.
    """

    wires: Wired
    folder: Path
    started: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    module: Sequence[str] = ("torch.distributed.run",)

    def start(self, job: Job, host: int, nodes: str, restarts: int = 3) -> None:
        """Start the job's launcher on a host."""
        times = "timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10"
        launcher = [
            f"--nnodes={nodes}", "--nproc_per_node=1", f"--max-restarts={restarts}", "--rdzv-backend=c10d",
            "--rdzv-id=job", f"--rdzv-endpoint={address(0)}:{PORT}", f"--local-addr={address(host)}",
            f"--rdzv-conf=is_host={int(host == 0)},{times}",
        ]  # fmt: skip
        script = [str(ROOT / "tests/faults/job.py"), job.run, job.marks]
        options = [f"--epochs={job.epochs}", f"--timeout_s={job.timeout_s}", "--by_hand"]
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
        if ":" in nodes:
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as in launch/elastic.sh, which explains it
        command = [sys.executable, "-m", *self.module, *launcher, *script, *options]
        with self._log(host).open("ab") as log:
            self.started[host] = subprocess.Popen(
                ["ip", "netns", "exec", self.wires.names[host], *command],
                stdout=log, stderr=log, env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip

    def _log(self, host: int) -> Path:
        return self.folder / f"host-{host}.log"

    def text(self, host: int) -> str:
        """What the job printed on a host."""
        return self._log(host).read_text(errors="replace")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds, while all launchers run."""
        until(lambda: holds() or any(one.poll() for one in self.started.values()), what, WAIT_S)
        logs = "\n".join(f"--- host {host}\n{self.text(host)[-3000:]}" for host in self.started)
        assert holds(), f"{what} did not come:\n{logs}"

    def wait(self, host: int, timeout_s: float = WAIT_S) -> int:
        """The exit code of a launcher."""
        try:
            return self.started[host].wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"host {host} does not end:\n{self.text(host)[-3000:]}") from None

    def end(self) -> None:
        """End what still runs; the ranks end with their launchers."""
        for launcher in self.started.values():
            launcher.kill()
            launcher.wait()


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    """Connected namespaces: 10.77.0.1, 10.77.0.2, ..."""
    with ExitStack() as ending:

        def make(number: int) -> Hosts:
            try:
                hosts = Hosts(ending.enter_context(wired(number)), tmp_path)
            except NoHosts as no:
                pytest.skip(f"no network namespaces can be made here: {no}")
            ending.callback(hosts.end)
            return hosts

        yield make


MakeHosts = Callable[[int], Hosts]


def begun(hosts: Hosts, job: Job, number: int, nodes: str, restarts: int = 3) -> None:
    """Start a job on all hosts, and wait until it has made some steps."""
    for host in range(number):
        hosts.start(job, host, nodes, restarts)
    hosts.until(lambda: rows_of(job) >= BEGUN and ranks_of(job) == number, "all hosts have begun")


def on_one_host(pool: Pool, folder: Path, epochs: int = EPOCHS) -> str:
    """The digest of the undisturbed job's weights."""
    return pool.run(make_job(folder, "one host", epochs=epochs, by_hand=True), 3)[0][1]


def rows_of(job: Job) -> int:
    rows = Path(job.run, "rows.jsonl")
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


def ranks_of(job: Job) -> int:
    """The number of ranks of the run now; 0 before it has begun."""
    status = Path(job.run, "status.json")
    return int(json.loads(status.read_text())["ranks"]) if status.exists() else 0


def require_whole(job: Job, expected: str) -> None:
    """The run has ended with these bits, and each step is once in its rows."""
    end = json.loads(Path(job.run, FINAL).read_text())
    assert end == {"iteration": 10 * job.epochs, "digest": expected}
    assert rows_problem(Path(job.run), whole=True) is None


def test_a_job_with_one_host_cut_off_for_5_s_has_the_bits_of_one_host(
    make_hosts: MakeHosts, pool: Pool, tmp_path: Path
) -> None:
    hosts, expected = make_hosts(3), on_one_host(pool, tmp_path)
    job = make_job(tmp_path, "hosts", epochs=EPOCHS)
    begun(hosts, job, 3, "3", restarts=0)
    hosts.wires.set_port(2, "down")
    before = rows_of(job)
    time.sleep(CUT_S)  # how long the link is down is what is tested
    assert rows_of(job) <= before + 2, "the link is not cut"
    hosts.wires.set_port(2, "up")
    assert [hosts.wait(host) for host in range(3)] == [0] * 3, hosts.text(0)[-3000:]
    require_whole(job, expected)


def test_a_host_that_is_cut_off_for_good_is_named_and_the_others_continue(
    make_hosts: MakeHosts, pool: Pool, tmp_path: Path
) -> None:
    hosts, expected = make_hosts(2), on_one_host(pool, tmp_path)
    job = make_job(tmp_path, "hosts", epochs=EPOCHS, timeout_s=TIMEOUT_S)
    begun(hosts, job, 2, "1:2")
    hosts.wires.set_port(1, "down")
    lost = rf"Rank \d on host \S+ \({re.escape(address(1))}\) does not "
    for host, what in enumerate(("answer", "reach the launcher's store")):
        until(partial(lambda host, said: re.search(said, hosts.text(host)), host, lost + what),
              f"host {host} names the one that was lost", TIMEOUT_S + REPORT_S)  # fmt: skip
    assert hosts.wait(0) == 0, hosts.text(0)[-3000:]
    assert ranks_of(job) == 1
    require_whole(job, expected)


def test_hosts_that_join_and_leave_keep_the_bits(make_hosts: MakeHosts, pool: Pool, tmp_path: Path) -> None:
    hosts, expected = make_hosts(2), on_one_host(pool, tmp_path, LONG)
    job = make_job(tmp_path, "hosts", epochs=LONG, save_every=1000)
    hosts.start(job, 0, "1:2")
    hosts.until(lambda: rows_of(job) >= BEGUN and ranks_of(job) == 1, "the first host has begun")
    slow = Path(job.marks, SLOW)
    slow.touch()
    hosts.start(job, 1, "1:2")
    hosts.until(lambda: ranks_of(job) == 2, "the second host has joined")
    joined_at = rows_of(job)
    assert joined_at >= BEGUN, "the first host did not save its work when the second one came"
    hosts.until(lambda: rows_of(job) >= joined_at + BEGUN, "both hosts have gone on")
    hosts.started[1].send_signal(signal.SIGTERM)
    assert hosts.wait(1) != 0  # torchrun exits so when it is terminated
    slow.unlink()
    assert hosts.wait(0) == 0, hosts.text(0)[-3000:]
    assert "Another host was ended (SIGTERM at rank" in hosts.text(0)
    assert ranks_of(job) == 1
    require_whole(job, expected)


@pytest.mark.covers("J6")
@pytest.mark.parametrize("asked", [0, 1])
def test_ctrl_c_on_one_host_ends_the_launchers_of_both_with_code_0(
    make_hosts: MakeHosts, asked: int, tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    hosts.module = ("ddp_loop", "run")
    job = make_job(tmp_path, "hosts", epochs=10**6)
    begun(hosts, job, 2, "2", restarts=0)
    hosts.started[asked].send_signal(signal.SIGINT)
    # torch's agent of the other host would wait 300 s for the one that was asked.
    assert [hosts.wait(host) for host in range(2)] == [0, 0], hosts.text(0)[-3000:]
    assert "Traceback" not in hosts.text(0) + hosts.text(1)


def test_a_job_continues_when_a_host_is_lost(make_hosts: MakeHosts, pool: Pool, tmp_path: Path) -> None:
    hosts, expected = make_hosts(2), on_one_host(pool, tmp_path)
    job = make_job(tmp_path, "hosts", epochs=EPOCHS)
    begun(hosts, job, 2, "1:2")
    os.kill(hosts.started[1].pid, signal.SIGKILL)  # its rank ends with it
    assert hosts.wait(0) == 0, hosts.text(0)[-3000:]
    assert ranks_of(job) == 1
    require_whole(job, expected)
