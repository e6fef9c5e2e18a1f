"""`hosts` under torchrun on machines that are network namespaces, with faults of the network itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import DEVICE, NoHosts, address, ip, switched, torchrun, wired
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.covers("C4", "J14")]
LIMIT_S = 120.0
OTHER = "10.78.0"  # a network without a connection


@pytest.fixture
def network() -> Iterator[ExitStack]:
    with ExitStack() as ending:
        yield ending


def made(network: ExitStack, hosts: AbstractContextManager[Any]) -> Any:
    """Hosts until the end of the test; skips it where there can be none."""
    try:
        return network.enter_context(hosts)
    except NoHosts as no:
        pytest.skip(f"no network namespaces can be made here: {no}")


def check(names: list[str], *arguments: str, interface: str = DEVICE) -> tuple[list[int], list[str]]:
    """Run `hosts` with one rank on each machine; returns the exit codes and what was printed.

    Args:
        names: of the network namespaces.
        arguments: of `hosts`.
        interface: gloo's.
    """
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for command in torchrun(names, "-m", "ddp_loop", "hosts", *arguments)
    ]  # fmt: skip
    try:
        printed = [one.communicate(timeout=LIMIT_S)[0] for one in started]
        return [one.returncode for one in started], "".join(printed).splitlines()
    finally:
        for one in started:
            one.terminate()
            one.communicate()


def test_two_machines_are_ready(network: ExitStack, tmp_path: Path) -> None:
    codes, said = check(
        made(network, wired()).names, "--run-dir", str(tmp_path / "run"), "--data", str(ROOT / "launch")
    )
    assert codes == [0, 0], "\n".join(said)
    assert said[-1] == "READY: 2 hosts are ready for 2 ranks."
    assert any(address(0) in line for line in said)
    assert any(address(1) in line for line in said)
    assert not (tmp_path / "run").exists()


def test_a_slow_link_is_found(network: ExitStack) -> None:
    names, _, controls = made(network, switched(2))
    controls.shape(0.010, 50e6)
    codes, said = check(names)
    assert codes == [1, 1], "\n".join(said)
    assert any("Gbit/s, less than 0.5." in line for line in said)
    assert any("has a round trip of 2" in line for line in said)
    rate = float(next(line for line in said if "carries" in line).split("carries ")[1].split()[0])
    assert 0.025 < rate < 0.055


@pytest.mark.parametrize("interface", ["lo", "other"])
def test_data_ports_that_are_blocked_are_found_where_the_launchers_port_is_open(
    interface: str, network: ExitStack
) -> None:
    """gloo's interface does not connect the machines, but their rendezvous works."""
    names = made(network, wired()).names
    for number, name in enumerate(names):
        ip("-n", name, "link", "add", "other", "type", "veth", "peer", "name", "end")
        ip("-n", name, "addr", "add", f"{OTHER}.{number + 1}/32", "dev", "other")
        ip("-n", name, "link", "set", "other", "up")
    codes, said = check(names, interface=interface)
    assert codes == [1, 1], "\n".join(said)
    for rank, other in ((0, 1), (1, 0)):
        assert any(f"Rank {rank} on " in line and f"does not reach rank {other} on " in line for line in said)
    assert any("GLOO_SOCKET_IFNAME" in line for line in said)
