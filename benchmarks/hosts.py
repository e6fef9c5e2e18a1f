"""Hosts on one machine: network namespaces with an address each, for what several machines do. It needs root."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks.switch import MTU, Controls

DEVICE = "wire"  # of each host
PORT = 29400  # of the launcher's store, in a namespace of its own
_TUN, _TUNSETIFF, _FLAGS = Path("/dev/net/tun"), 0x400454CA, 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
_SUBNET = "10.77.0.0/24"
_BUFFER, _WINDOW = 2**26, "1000"  # TCP's buffers in bytes, its first windows in packets: no slow start is measured


class NoHosts(Exception):
    """Why no network namespaces can be made here."""


def ip(*command: str) -> None:
    """Run iproute2's `ip`.

    Raises:
        NoHosts: it failed.
    """
    done = subprocess.run(["ip", *command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoHosts(f"`ip {' '.join(command)}` failed: {done.stderr.strip()}")


def address(number: int) -> str:
    """Of a host, counted from 0."""
    return f"10.77.0.{number + 1}"


@contextmanager
def namespaces(number: int) -> Iterator[list[str]]:
    """New network namespaces, by name, each with a device `lo` that is up; removed at the end.

    Raises:
        NoHosts: they cannot be made.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoHosts("Network namespaces need root and iproute2.")
    names = [f"ddp-{os.getpid()}-{host}" for host in range(number)]
    usual = signal.signal(signal.SIGTERM, _exit)
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with suppress(NoHosts):
                ip("netns", "del", name)
        signal.signal(signal.SIGTERM, usual)


def _exit(number: int, frame: FrameType | None) -> None:
    """End by an exception, so that the namespaces are removed."""
    raise SystemExit(128 + number)


def connect(name: str, number: int) -> None:
    """Give the device of host `number`, which is in its namespace, its address, and set it up."""
    ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", DEVICE)
    ip("-n", name, "link", "set", DEVICE, "up")


@dataclass(frozen=True)
class Wired:
    """Hosts and the bridge between them, each a namespace.

    Attributes:
        names: of the hosts.
        bridge: of the bridge, which has a port for each host.
    """

    names: list[str]
    bridge: str

    def set_port(self, host: int, state: str) -> None:
        """Set the bridge's port of a host "up" or "down": the host then loses all packets, and keeps its address."""
        ip("-n", self.bridge, "link", "set", f"port{host}", state)


@contextmanager
def wired(number: int = 2) -> Iterator[Wired]:
    """Hosts that are joined by a bridge of the kernel. Raises as `namespaces`."""
    with namespaces(number + 1) as (*names, bridge):
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        wires = Wired(names, bridge)
        for host, name in enumerate(names):
            ends = DEVICE, "netns", name, "type", "veth", "peer", "name", f"port{host}", "netns", bridge
            ip("link", "add", *ends)
            ip("-n", bridge, "link", "set", f"port{host}", "master", "bridge")
            wires.set_port(host, "up")
            connect(name, host)
        yield wires


@contextmanager
def switched(number: int) -> Iterator[tuple[list[str], Path, Controls]]:
    """Hosts that are joined by `benchmarks.switch`; with the file of its controls. Raises as `namespaces`."""
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        names = ending.enter_context(namespaces(number))
        devices = []
        for host, name in enumerate(names):
            devices.append(_make_device(f"d{os.getpid() % 10**6}-{host}", name))
            ending.callback(os.close, devices[-1])
            ip("-n", name, "link", "set", DEVICE, "mtu", str(MTU))
            connect(name, host)
            for buffer in ("rmem", "wmem"):
                _set(name, f"net.ipv4.tcp_{buffer}", f"4096 {_BUFFER // 2} {_BUFFER}")
            _set(name, "net.ipv4.tcp_slow_start_after_idle", "0")
            ip("-n", name, "route", "replace", _SUBNET, "dev", DEVICE, "initcwnd", _WINDOW, "initrwnd", _WINDOW)
        path = folder / "controls"
        controls = Controls(path, number)
        command = [sys.executable, "-m", "benchmarks.switch", str(path), *map(str, devices)]
        switch = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=devices)
        try:
            yield names, path, controls
        finally:
            switch.communicate()


def _make_device(name: str, namespace: str) -> int:
    """A TUN device that is moved into a namespace, where it is called DEVICE; returns its other end."""
    try:
        end = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _FLAGS))
    except OSError as error:
        raise NoHosts(f"No TUN device can be made ({error}).") from error
    ip("link", "set", name, "netns", namespace, "name", DEVICE)
    return end


def _set(name: str, key: str, value: str) -> None:
    command = ["ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/{key.replace('.', '/')}"]
    subprocess.run(command, check=False, capture_output=True)


def torchrun(names: Sequence[str], *job: str) -> list[list[str]]:
    """The command for each host that starts one rank of a job there under torchrun, which takes one by default."""
    launcher = "-m", "torch.distributed.run", f"--nnodes={len(names)}", f"--master-addr={address(0)}"
    return [
        ["ip", "netns", "exec", name, sys.executable, *launcher, f"--master-port={PORT}", f"--node-rank={host}", *job]
        for host, name in enumerate(names)
    ]


def run_all(commands: Sequence[Sequence[str]], timeout_s: float) -> str:
    """Run a command on each host at the same time; returns what the first one printed.

    Raises:
        RuntimeError: one of them failed, or took too long.
    """
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
    with ExitStack() as ending:
        outputs = [ending.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        started = [
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables})
            for command, output in zip(commands, outputs, strict=True)
        ]
        deadline = time.monotonic() + timeout_s
        try:
            codes = [one.wait(max(0.0, deadline - time.monotonic())) for one in started]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for one in started:
                if one.poll() is None:
                    one.terminate()  # torchrun ends its ranks
                    one.wait()
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
        if any(codes):
            raise RuntimeError(f"A host failed (exit codes {codes}).\n" + "\n".join(text[-2000:] for text in texts))
        return texts[0]
