"""A switch between network namespaces, as a process: it delays packets and limits what a host sends in a second.

    python -m benchmarks.switch CONTROLS DESCRIPTOR ...

Linux has netem for this, a queueing discipline that many kernels are built without; this needs /dev/net/tun alone. Each
host has a TUN device, whose other end is one of the descriptors. A packet of n bytes leaves its host n / rate after the
one before it, and arrives `delay` later. Nothing is lost. It ends with its standard input. It imports no torch, since
it shares the cores with what is measured.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

MTU = 65000  # Python handles some 50,000 packets in a second, and 10 Gbit/s have 830,000 of 1,500 bytes
_SHAPE = struct.Struct("dd")  # one-way delay in seconds, bits in a second (0: without limit)
_COUNTS = struct.Struct("QQQQ")  # of a host: `Sent`
_PORT = struct.Struct("Q")
_BATCH = 16  # packets that are read before those due are sent
_VERSION, _TCP, _TARGET = 4, 6, 19  # of IPv4: the version, TCP's number, the place of the address's last byte
_SECOND = 1.0


class Controls:
    """What the switch does and what it has counted, in a file that it and the ranks map.

    Args:
        path: of the file.
        hosts: their number.
    """

    def __init__(self, path: Path, hosts: int) -> None:
        size = _SHAPE.size + _PORT.size + hosts * _COUNTS.size
        with path.open("a+b") as file:
            file.truncate(size)
            self._bytes = mmap.mmap(file.fileno(), size)
        self.hosts = hosts

    def shape(self, delay_s: float, bits_per_s: float) -> None:
        """Set the one-way delay, and the limit of what each host sends; 0 is none."""
        _SHAPE.pack_into(self._bytes, 0, delay_s, bits_per_s)

    def shape_now(self) -> tuple[float, float]:
        delay_s, bits_per_s = _SHAPE.unpack_from(self._bytes, 0)
        return delay_s, bits_per_s

    def count_apart(self, port: int) -> None:
        """Count what goes to or from a TCP port apart, that of the launcher's store."""
        _PORT.pack_into(self._bytes, _SHAPE.size, port)

    def port(self) -> int:
        return int(_PORT.unpack_from(self._bytes, _SHAPE.size)[0])

    def add(self, host: int, counts: Sequence[int]) -> None:
        place = _SHAPE.size + _PORT.size + host * _COUNTS.size
        _COUNTS.pack_into(self._bytes, place, *map(sum, zip(self.sent(host), counts, strict=True)))

    def sent(self, host: int) -> tuple[int, ...]:
        """TCP payload that a host sent so far: bytes and packets, and those of the store's port."""
        return _COUNTS.unpack_from(self._bytes, _SHAPE.size + _PORT.size + host * _COUNTS.size)


def payload_of(packet: bytes) -> tuple[int, int, int]:
    """Of an IPv4 packet: the bytes of TCP payload, and both ports; zeros for any other."""
    header = (packet[0] & 15) * 4
    if packet[0] >> 4 != _VERSION or packet[9] != _TCP:
        return 0, 0, 0
    source, target = struct.unpack_from("!HH", packet, header)
    return len(packet) - header - (packet[header + 12] >> 4) * 4, source, target


class Switch:
    """Carries packets between hosts; that of number k has an address that ends in k + 1.

    Args:
        devices: the other ends of the hosts' devices.
        controls: of the same number of hosts.
    """

    def __init__(self, devices: Sequence[int], controls: Controls) -> None:
        self._devices, self._controls = list(devices), controls
        self._free_at = [0.0] * len(devices)  # when each host has sent what it is limited in
        self._waiting: list[deque[tuple[float, int, bytes]]] = [deque() for _ in devices]  # of each sender
        for device in devices:
            os.set_blocking(device, False)

    def run(self, end: int) -> None:
        """Carry packets until the descriptor `end` can be read."""
        while True:
            pause = self._deliver() - time.monotonic()
            ready, _, _ = select.select([*self._devices, end], [], [], max(0.0, pause))
            if end in ready:
                return
            for device in ready:
                self._take(self._devices.index(device))

    def _deliver(self) -> float:
        """Deliver what is due; returns when more will be."""
        due = time.monotonic() + _SECOND
        for queue in self._waiting:
            while queue and queue[0][0] <= time.monotonic():
                _, target, packet = queue.popleft()
                with suppress(OSError):  # a host that is gone
                    os.write(self._devices[target], packet)
            if queue:
                due = min(due, queue[0][0])
        return due

    def _take(self, host: int) -> None:
        """Take a few packets of a host, count them, and let them wait until they are due."""
        (delay_s, bits_per_s), port = self._controls.shape_now(), self._controls.port()
        counts = [0, 0, 0, 0]
        for packet in self._packets(self._devices[host]):
            size, *ports = payload_of(packet)
            if size:
                place = 2 if port in ports else 0
                counts[place] += size
                counts[place + 1] += 1
            leaves = max(time.monotonic(), self._free_at[host])
            if bits_per_s:
                leaves += 8 * len(packet) / bits_per_s
                self._free_at[host] = leaves
            self._waiting[host].append((leaves + delay_s, packet[_TARGET] - 1, packet))
        self._controls.add(host, counts)

    def _packets(self, device: int) -> Iterator[bytes]:
        """A few packets to other hosts."""
        for _ in range(_BATCH):
            try:
                packet = os.read(device, 2**16)
            except BlockingIOError:
                return
            if packet[0] >> 4 == _VERSION and 1 <= packet[_TARGET] <= len(self._devices):
                yield packet


def main() -> None:
    devices = list(map(int, sys.argv[2:]))
    Path("/proc/self/timerslack_ns").write_text("1")
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    Switch(devices, Controls(Path(sys.argv[1]), len(devices))).run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
