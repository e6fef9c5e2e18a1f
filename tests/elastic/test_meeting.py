"""Machines of a job that come late, with other options, or never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from ddp_loop.elastic.agent import _why
from ddp_loop.elastic.loopback import LOOPBACK, serve_store
from ddp_loop.elastic.rendezvous import StaticRendezvous, listen_at, make_rendezvous
from tests.support.harness import held_ports, until
from tests.support.listeners import job_of, ports_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.covers("J6")

RUN_S = 120.0  # a launcher takes 3 s on an idle core


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start the launcher of one of two machines; the other one never comes."""
    (folder / "train.py").touch()
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_loop", "run", "--nnodes=2", f"--master-addr={LOOPBACK}", *options, "train.py"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_a_launcher_that_waits_for_other_machines(rank: int, tmp_path: Path) -> None:
    store = serve_store(listen_at(LOOPBACK, 0), LOOPBACK)
    ports = ExitStack()
    port = store.port if rank == 1 else ports.enter_context(held_ports(1))[0]
    process = start(tmp_path, f"--master-port={port}", f"--node-rank={rank}")
    try:
        until(
            lambda: (
                (store.check([f"none/machines/{rank}"]) if rank == 1 else bool(ports_of(job_of(process.pid))))
                or process.poll() is not None
            ),
            "it waits",
            RUN_S,
        )
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=RUN_S)
    finally:
        process.kill()
        process.communicate()
        ports.close()
    assert (process.returncode, said) == (130, "")


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_first_machine_that_does_not_listen_is_named_without_a_stack(
    backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with held_ports(1) as [port]:
        parameters = RendezvousParameters(backend, f"{LOOPBACK}:{port}", "job", 2, 2, is_host="false")
        parameters.config |= {"rank": 1, "timeout": 1, "read_timeout": 1}
        with pytest.raises(RendezvousConnectionError, match=r"nothing listened there within 1 s \(.*refused\)"):
            make_rendezvous(parameters).next_rendezvous()
    assert capfd.readouterr() == ("", "")


def test_a_machine_that_does_not_come_is_named() -> None:
    with pytest.raises(RendezvousConnectionError, match="--node-rank 1, 2 did not come within 1 s"):
        StaticRendezvous(LOOPBACK, 0, 0, 3, "job", 1).next_rendezvous()


@pytest.mark.parametrize("other", ["job", "another"])
def test_machines_meet_by_the_id_of_their_job(other: str) -> None:
    store = serve_store(listen_at(LOOPBACK, 0), LOOPBACK)
    last = StaticRendezvous(LOOPBACK, store.port, 2, 3, "job", 60 if other == "job" else 1)
    with ThreadPoolExecutor(1) as threads:
        comes = threads.submit(last.next_rendezvous)
        for rank in (0, 1):
            dist.PrefixStore(f"{other}/machines", store).set(str(rank), "")
        if other == "job":
            assert (comes.result().rank, comes.result().world_size) == (2, 3)
        else:
            with pytest.raises(RendezvousConnectionError, match="--rdzv-id=job, --node-rank 0, 1 did not come"):
                comes.result()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RendezvousTimeoutError(), "fewer than --nnodes came in time. Start `run` on every host"),
        (RendezvousClosedError(), "the job of this --rdzv-id has ended there. Pass another one."),
        (dist.DistStoreError("wait timeout\nframe #0: c10::Error"), "wait timeout. Start `run` on every host"),
    ],
)
def test_an_error_of_torch_is_a_line_with_the_remedy(error: Exception, said: str) -> None:
    assert _why(error).startswith(said)
    assert "\n" not in _why(error)


def test_the_cause_takes_the_place_of_an_error_that_only_refers_to_it() -> None:
    error = RendezvousConnectionError("See inner exception for details.")
    error.__cause__ = ConnectionResetError("the peer has ended.")
    assert _why(error).startswith("the peer has ended. Start `run`")
