"""Where the ranks of one machine listen: on the loopback alone, and what a stranger writes there runs nothing."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, _NodeDesc, _RendezvousState

from ddp_loop.elastic.rendezvous import CheckedBackend, listen_at, make_rendezvous
from tests.support.harness import until
from tests.support.listeners import Call, Port, attack, job_of, ports_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.covers("J6")

RUN_S = 120.0  # two ranks take 6 s on two idle cores
RUN = ("-m", "ddp_loop", "run", "--ranks=2")
SCRIPT = """
import os, sys, threading
from pathlib import Path
import torch
import ddp_loop as dl

def train(exchange):
    with dl.join_world(device="cpu", exchange=exchange) as world:
        world.sum(torch.ones(1))
        Path(f"begun-{world.rank}").write_text(os.environ.get("TORCHELASTIC_RUN_ID", "none"))
        while not Path("go").exists():
            threading.Event().wait(0.02)
        return float(world.sum(torch.ones(1)))

if __name__ == "__main__":
    totals = dl.launch(train, 2, sys.argv[2]) if sys.argv[1] == "launch" else [train(sys.argv[2])]
    print(set(totals))
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env={**variables, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["memory", "gloo"])
@pytest.mark.parametrize(
    "words",
    [
        (*RUN, "train.py", "run"),
        (*RUN, "--standalone", "train.py", "run"),
        (*RUN, "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "train.py", "run"),
        ("train.py", "launch"),
    ],
    ids=["run", "standalone", "c10d", "launch"],
)
def test_ranks_of_one_machine_listen_on_the_loopback_and_a_hostile_pickle_runs_nothing(
    words: tuple[str, ...], exchange: str, lab: Path
) -> None:
    process = start(lab, *words, exchange)
    try:
        begun = [lab / "begun-0", lab / "begun-1"]
        until(
            lambda: all(one.exists() and one.read_text() for one in begun) or process.poll() is not None,
            "the ranks have begun",
            RUN_S,
        )
        ports = ports_of(job_of(process.pid))
        assert ports, process.communicate()[0] if process.poll() is not None else "nothing listens"
        assert [port for port in ports if not port.is_loopback] == []
        stores = [port for port in ports if attack(port, begun[0].read_text(), lab / "hostile")]
        assert stores
        (lab / "go").touch()
        said, _ = process.communicate(timeout=RUN_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    assert "{2.0}" in said
    assert not (lab / "hostile").exists()


def test_ports_are_found_as_the_kernel_lists_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_server(("", 0)) as everywhere:
        found = ports_of(job_of(os.getpid()))
        number = everywhere.getsockname()[1]
        assert Port("127.0.0.1", own.getsockname()[1]) in found
        assert Port("0.0.0.0", number) in found
    assert not Port("::", 1).is_loopback
    assert not Port("0.0.0.0", 1).is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_of_several_machines_listens_at_the_address_that_was_given(host: str) -> None:
    with listen_at(host, 0) as listener:
        assert Port(*listener.getsockname()[:2]).is_loopback
    parameters = RendezvousParameters("c10d", f"{host}:0", "job", 1, 2, is_host="true", last_call_timeout=1)
    handler = make_rendezvous(parameters)
    own = ports_of([os.getpid()])
    assert own
    assert all(port.is_loopback for port in own)
    handler.shutdown()


def test_an_address_that_is_not_the_machine_s_own_is_served_on_all_interfaces() -> None:
    with listen_at("192.0.2.1", 0) as listener:  # kept for documents, so no machine has it
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


def test_a_port_that_is_taken_is_refused() -> None:
    with listen_at("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", listener.getsockname()[1])


class Kept(RendezvousBackend):
    """A backend where anybody may write."""

    name = "kept"

    def __init__(self, state: bytes) -> None:
        self.state = state

    def get_state(self) -> tuple[bytes, int]:
        return self.state, 1

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, int, bool]:
        return self.state, 1, False


def test_a_state_of_the_rendezvous_that_calls_anything_is_refused_before_it_is_unpickled(tmp_path: Path) -> None:
    state = _RendezvousState()
    node = _NodeDesc("node7", 1, 0)
    state.participants[node] = 0
    state.wait_list.add(node)
    state.last_heartbeats[node] = datetime.now(timezone(timedelta(hours=1)))
    state.deadline = datetime.now(UTC)
    good = pickle.dumps(state)
    assert CheckedBackend(Kept(good)).get_state() == (good, 1)
    assert CheckedBackend(Kept(good)).set_state(good) == (good, 1, False)
    for bad in (pickle.dumps(Call(os.mkdir, str(tmp_path / "hostile"))), b"\x80nonsense", b""):
        with pytest.raises(RendezvousStateError, match="what no launcher wrote"):
            CheckedBackend(Kept(bad)).get_state()
        with pytest.raises(RendezvousStateError, match="inside a network that you trust"):
            CheckedBackend(Kept(bad)).set_state(good)
    assert not (tmp_path / "hostile").exists()
