"""Connections between ranks: whether each reaches each other one, and how fast hosts exchange bytes.

[Note: The ports] gloo listens on a free port of the interface GLOO_SOCKET_IFNAME, by default of the address that the
host's name has, and each rank connects to each other one. So does this check, on sockets of its own: a firewall that
lets the launcher's port through, and no other one, blocks both.

Every wait has a limit. A connection that does not belong to this check is closed: it does not know the token.
"""

from __future__ import annotations

import fcntl
import os
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface
CONNECT_S = 5.0  # for a connection
_ANSWER_S = 15.0  # for an answer on one
_ROUND_TRIPS = 20
_PROBE = 2**18
_MOST = 2**28
_LEAST_S = 0.3  # bytes of a first try, most bytes, and seconds to send
_BLOCK = bytes(2**18)
_SIZES = struct.Struct("!QQ")  # of what follows, and of what is asked for
_TIME = struct.Struct("!d")
_HELLO = struct.Struct("!32sI")


@dataclass(frozen=True)
class Link:
    """A measured connection from one rank to another.

    Attributes:
        round_trip_s: the shortest one, in seconds.
        bits_per_s: to the other rank.
        bits_per_s_back: from it.
        clock_s: how many seconds its clock is ahead, up to half a round trip.
    """

    round_trip_s: float
    bits_per_s: float
    bits_per_s_back: float
    clock_s: float


def own_address() -> str:
    """The address on which gloo listens. See [Note: The ports].

    Raises:
        OSError: there is no such interface, or it has no address.
    """
    if name := os.environ.get(_INTERFACE, "").split(",")[0]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            try:
                found = fcntl.ioctl(one, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError as error:
                raise OSError(f"{_INTERFACE}={name} is no interface with an address: {error.strerror}") from error
        return socket.inet_ntoa(found[20:24])
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket() as one:
            one.bind((address, 0))
        return address
    return "127.0.0.1"


class _Answers(socketserver.BaseRequestHandler):
    """Answers another rank on one connection, until that rank closes it."""

    server: Listener

    def handle(self) -> None:
        connection: socket.socket = self.request
        with suppress(OSError, struct.error):
            connection.settimeout(CONNECT_S)
            if _receive(connection, _HELLO.size) != self.server.hello:
                return
            connection.sendall(self.server.hello)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                there, back = _SIZES.unpack(_receive(connection, _SIZES.size))
                _discard(connection, there)
                _send(connection, back)
                connection.sendall(_TIME.pack(time.time()))


class Listener(socketserver.ThreadingTCPServer):
    """Accepts connections of the other ranks and answers each in a thread, until `close`.

    Args:
        rank: of this process.
        token: of this check, the same on all ranks: 32 letters.

    Attributes:
        hello: the word with which another rank begins, and which it gets back.
        address: where it listens.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, rank: int, token: str) -> None:
        super().__init__((own_address(), 0), _Answers)
        self.hello = _HELLO.pack(token.encode(), rank)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        threading.Thread(target=self.serve_forever, args=[0.05], daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self.shutdown()
        self.server_close()


def connect(address: tuple[str, int], rank: int, token: str) -> socket.socket:
    """A connection to a rank that listens at an address.

    Raises:
        OSError: it does not come, or another process listens there.
    """
    connection = socket.create_connection(address, CONNECT_S)
    try:
        hello = _HELLO.pack(token.encode(), rank)
        connection.sendall(hello)
        if _receive(connection, len(hello)) != hello:
            raise ConnectionError("another process listens there")
        connection.settimeout(_ANSWER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except BaseException:
        connection.close()
        raise


def connect_all(addresses: dict[int, tuple[str, int]], token: str) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """Connect to ranks at the same time.

    Returns:
        The connections by rank; and by rank why there is none.
    """
    with ThreadPoolExecutor(64) as threads:
        tries = {rank: threads.submit(connect, address, rank, token) for rank, address in addresses.items()}
    connections = {}
    why = {}
    for rank, tried in tries.items():
        try:
            connections[rank] = tried.result()
        except OSError as error:
            why[rank] = error.strerror or str(error)
    return connections, why


def measure(connection: socket.socket) -> Link:
    """Measure a connection made by `connect`; some 0.7 s, more only if it carries less than 7 Mbit/s.

    Raises:
        OSError, struct.error: it ended, or carries less than 0.1 Mbit/s.
    """
    trips = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        began_at = time.time()
        other_at = _ask(connection)
        trip_s = time.perf_counter() - began
        trips.append((trip_s, other_at - began_at - trip_s / 2))
    trip_s, clock_s = min(trips)
    return Link(trip_s, _rate(connection, "there", trip_s), _rate(connection, "back", trip_s), clock_s)


def _rate(connection: socket.socket, way: str, trip_s: float) -> float:
    """Bits in a second, by a first try, or by enough bytes to take 0.3 s."""

    def timed(size: int) -> float:
        began = time.perf_counter()
        _ask(connection, **{way: size})
        return 8 * size / max(time.perf_counter() - began - trip_s, 1e-6)

    first = timed(_PROBE)
    enough = int(first / 8 * _LEAST_S)
    return timed(min(enough, _MOST)) if enough > _PROBE else first


def _ask(connection: socket.socket, there: int = 0, back: int = 0) -> float:
    """Send some bytes and ask for others; returns the other rank's time after it sent them."""
    connection.sendall(_SIZES.pack(there, back))
    _send(connection, there)
    _discard(connection, back)
    at: float = _TIME.unpack(_receive(connection, _TIME.size))[0]
    return at


def _send(connection: socket.socket, size: int) -> None:
    for at in range(0, size, len(_BLOCK)):
        connection.sendall(_BLOCK[: size - at])


def _discard(connection: socket.socket, size: int) -> None:
    room = memoryview(bytearray(len(_BLOCK)))
    while size:
        found = connection.recv_into(room[: min(size, len(room))])
        if not found:
            raise ConnectionAbortedError("the other rank has ended")
        size -= found


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if it ended."""
    found = b""
    while len(found) < size and (part := connection.recv(size - len(found))):
        found += part
    return found


def rounds_of(ranks: list[int]) -> list[list[tuple[int, int]]]:
    """All pairs of ranks, in rounds in which no rank is in two pairs: the circle method."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def measure_rounds(
    rank: int, ranks: list[int], connections: dict[int, socket.socket], meet: Callable[[str], object]
) -> dict[int, Link]:
    """Measure the links from this rank to higher ones, while no other pair uses one of both.

    Args:
        rank: this one.
        ranks: those between which links are measured, one of each host.
        connections: from this rank.
        meet: waits until all ranks come to the end of a round, given by its name, up to a limit.

    Returns:
        The links by rank. One that ended, or is too slow to be measured, carries 0 bits in a second.
    """
    found = {}
    for number, pairs in enumerate(rounds_of(ranks)):
        for one, other in pairs:
            if one == rank and other in connections:
                try:
                    found[other] = measure(connections[other])
                except (OSError, struct.error):
                    found[other] = Link(0.0, 0.0, 0.0, 0.0)
        meet(f"round/{number}")
    return found
