"""Unix sockets between the ranks of one machine: who may connect, messages of one header each, file descriptors.

[Note: Who may connect] Each rank listens under a random name in the abstract namespace, which has no file and ends with
the process, and publishes name and token in the launcher's store. A connection counts if the kernel says that it comes
from the same user, and its first message holds the token and the number of a rank that is missing. Everything else is
closed. The listener is closed once all ranks are connected.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import ClassVar, NamedTuple

_GREETING = struct.Struct("<8s16sI")  # magic, token, rank
_MAGIC = b"ddp_loop"
_ACCEPTED = b"accepted"
_PENDING = 64  # connections without a first message; the oldest ones are closed
_BACKLOG = 128
_LOOK_S = 0.05
_RETRY_S = 0.002
_UID = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
TEXT_BYTES = 4096
_NO_ROOM = frozenset((errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))  # for a message now

_FORM = struct.Struct("<BHIQQQIQq")


class Header(NamedTuple):
    """The content of a message.

    Attributes:
        stage: which meeting of an operation it is, or another of the message's purposes.
        segments: how many file descriptors come with it.
        digest: of what must be the same on all ranks, such as the length and the layout of a sum.
        sequence: of the operation, the same on every rank.
        offset: of this rank's values in its arena, in bytes.
        done: the last operation that its sender completed, with all before it.
        at, step: where its sender is: the number of its stage, and its iteration.
        number: of the operation's own.
    """

    stage: int
    segments: int = 0
    digest: int = 0
    sequence: int = 0
    offset: int = 0
    done: int = 0
    at: int = 0
    step: int = 0
    number: int = 0


class Listener:
    """Where the other ranks of this machine connect. See [Note: Who may connect].

    Attributes:
        name, token: to publish in the store, in hexadecimal digits.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self.token = secrets.token_hex(16)
        self._socket = _new_socket()
        self._socket.bind(_address(self.name))
        self._socket.listen(_BACKLOG)

    def close(self) -> None:
        self._socket.close()

    def accept(self, ranks: Iterable[int], deadline: float) -> dict[int, socket.socket]:
        """The connections of these ranks; all others are closed.

        Raises:
            TimeoutError: a rank does not connect before the deadline, on time.monotonic().
        """
        missing = set(ranks)
        found = dict[int, socket.socket]()
        pending = list[socket.socket]()
        try:
            while missing:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"ranks {sorted(missing)} did not connect")
                if self._socket in wait([self._socket, *pending], min(left, _LOOK_S)):
                    one = self._socket.accept()[0]
                    one.setblocking(False)  # an accepted one blocks, or has the process's default timeout
                    pending.append(one)
                for one in [*pending]:
                    rank = self._greeting(one, missing)
                    if rank is None and len(pending) <= _PENDING:
                        continue
                    pending.remove(one)
                    if rank is None or rank < 0:
                        one.close()
                    else:
                        found[rank] = one
                        missing.discard(rank)
        except BaseException:
            _close_all(found.values())
            raise
        finally:
            _close_all(pending)
        return found

    def _greeting(self, one: socket.socket, missing: set[int]) -> int | None:
        """The rank that sent the greeting; -1 for a wrong one, None before it has come."""
        try:
            if not _is_same_user(one):
                return -1
            word = one.recv(_GREETING.size + 1)
            if len(word) != _GREETING.size:
                return -1
            magic, token, rank = _GREETING.unpack(word)
            if magic != _MAGIC or not hmac.compare_digest(token, bytes.fromhex(self.token)) or rank not in missing:
                return -1
            one.send(_ACCEPTED, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return None
        except OSError:
            return -1
        return int(rank)


def connect(name: str, token: str, rank: int, deadline: float) -> socket.socket:
    """Connect to a rank's listener as `rank`; `await_accepted` follows.

    Raises:
        OSError: no process listens there, such as in another network namespace, or a process of another user does.
    """
    one = _new_socket()
    try:
        while True:
            try:
                one.connect(_address(name))
                break
            except BlockingIOError:  # too many connect at once
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
        if not _is_same_user(one):
            raise PermissionError("the listener belongs to another user")
        one.send(_GREETING.pack(_MAGIC, bytes.fromhex(token), rank), socket.MSG_NOSIGNAL)
    except BaseException:
        one.close()
        raise
    return one


def await_accepted(one: socket.socket, deadline: float) -> None:
    """Wait until the listener has accepted this connection.

    Raises:
        OSError: it has not, in time.
    """
    if not wait([one], max(deadline - time.monotonic(), 0.0)) or one.recv(len(_ACCEPTED)) != _ACCEPTED:
        raise ConnectionRefusedError("the connection was refused")


def _new_socket() -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    return one


def _address(name: str) -> str:
    return f"\0ddp_loop/{name}"


def _is_same_user(one: socket.socket) -> bool:
    _, uid, _ = _UID.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UID.size))
    return bool(uid == os.geteuid())


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


class LocalPeers:
    """Messages to and from the other ranks of this machine.

    A forked process, such as a DataLoader's worker, closes its copies, so that a rank that is killed is noticed.

    Args:
        sockets: of the other ranks, by rank.

    Attributes:
        gone: the ranks whose connection has ended.
    """

    _open: ClassVar[weakref.WeakSet[LocalPeers]] = weakref.WeakSet()

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        self._ranks = {one.fileno(): rank for rank, one in sockets.items()}
        self._poll = select.poll()
        for descriptor in self._ranks:
            self._poll.register(descriptor, select.POLLIN)
        self._buffer = bytearray(_FORM.size + TEXT_BYTES)
        self._room = socket.CMSG_SPACE(8 * 4)  # for descriptors
        self.gone: set[int] = set()
        LocalPeers._open.add(self)

    def send(self, header: Header, to: Iterable[int], text: bytes = b"", descriptors: Sequence[int] = ()) -> set[int]:
        """Send a message; returns the ranks that have no room for it now."""
        word = _FORM.pack(*header) + text
        full = set()
        for rank in to:
            try:
                if descriptors:
                    socket.send_fds(self._sockets[rank], [word], list(descriptors), socket.MSG_NOSIGNAL)
                else:
                    self._sockets[rank].send(word, socket.MSG_NOSIGNAL)  # the script may have SIGPIPE end it
            except OSError as error:
                if error.errno in _NO_ROOM:
                    full.add(rank)  # otherwise it has ended; what it sent before can still be read
        return full

    def watch(self, descriptor: int) -> None:
        """Let `wait` return also when this descriptor can be read."""
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float) -> list[int]:
        """The ranks from which something can be read, or whose connection ended; waits for the first one."""
        return [self._ranks[one] for one, _ in self._poll.poll(1e3 * timeout_s) if one in self._ranks]

    def receive(self, rank: int) -> tuple[Header, bytes, list[int]] | None:
        """The next message of a rank, its text, and its file descriptors; None if there is none, or none will come."""
        one = self._sockets[rank]
        try:
            try:
                size, attached, _, _ = one.recvmsg_into([self._buffer], self._room, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:  # once, where it ended with unread messages; what it sent can still be read
                size, attached, _, _ = one.recvmsg_into([self._buffer], self._room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError:
            size = 0
            attached = []
        descriptors = [number for _, _, data in attached for number in memoryview(data).cast("i")]
        if size < _FORM.size:
            for number in descriptors:
                os.close(number)
            if rank not in self.gone:
                self.gone.add(rank)
                with suppress(KeyError, ValueError):
                    self._poll.unregister(one.fileno())
            return None
        header = Header._make(_FORM.unpack_from(self._buffer))
        return header, bytes(self._buffer[_FORM.size : size]), descriptors

    def close(self) -> None:
        """End all connections."""
        LocalPeers._open.discard(self)
        self.gone.update(self._sockets)
        _close_all(self._sockets.values())

    @classmethod
    def close_in_child(cls) -> None:
        """Close the copies in a forked process."""
        for one in list(cls._open):
            _close_all(one._sockets.values())


os.register_at_fork(after_in_child=LocalPeers.close_in_child)
