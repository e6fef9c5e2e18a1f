"""Only the other ranks may connect to a rank of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from unittest import mock

import pytest
import torch

import ddp_loop as dl
from ddp_loop.distributed import machine
from ddp_loop.distributed.local_sockets import (
    _GREETING,
    _MAGIC,
    Header,
    Listener,
    LocalPeers,
    _address,
    await_accepted,
    connect,
)
from tests.support.harness import MOMENT_S, OnRanks

pytestmark = pytest.mark.covers("D10")

OTHER_USER, FLOOD = 65534, 500


def stranger(name: str, *messages: bytes) -> socket.socket:
    """A connection that sends something else than a rank does."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.connect(_address(name))
    one.settimeout(MOMENT_S)
    for message in messages:
        one.send(message)
    return one


def token_of(listener: Listener) -> bytes:
    return bytes.fromhex(listener.token)


GREETINGS: dict[str, Callable[[Listener], bytes]] = {
    "a wrong token": lambda one: _GREETING.pack(_MAGIC, bytes(16), 1),
    "another program's": lambda one: _GREETING.pack(b"ddp_LOOP", token_of(one), 1),
    "truncated": lambda one: _GREETING.pack(_MAGIC, token_of(one), 1)[:-1],
    "over-long": lambda one: _GREETING.pack(_MAGIC, token_of(one), 1) + b"\0",
    "much too long": lambda one: _GREETING.pack(_MAGIC, token_of(one), 1) * 1000,
    "empty": lambda one: b"",
    "its own rank": lambda one: _GREETING.pack(_MAGIC, token_of(one), 0),
    "a rank that is not there": lambda one: _GREETING.pack(_MAGIC, token_of(one), 2**32 - 1),
}


def accept_beside(listener: Listener, disturb: Callable[[], None]) -> None:
    """Rank 1 joins rank 0, which listens, after something else happened; they exchange a message."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + MOMENT_S
    thread = threading.Thread(target=lambda: found.update(listener.accept([1], deadline)))
    thread.start()
    try:
        disturb()
        one = connect(listener.name, listener.token, 1, deadline)
        with one:
            await_accepted(one, deadline)
            one.send(b"from rank 1")
            thread.join(MOMENT_S)
            assert found[1].recv(20) == b"from rank 1"
    finally:
        thread.join(MOMENT_S)
        listener.close()
        for one in found.values():
            one.close()


def test_a_wrong_greeting_is_refused_and_the_rank_still_joins() -> None:
    listener = Listener()

    def disturb() -> None:
        for kind, greeting in GREETINGS.items():
            with stranger(listener.name, greeting(listener)) as one, suppress(ConnectionResetError):
                assert one.recv(20) == b"", kind

    accept_beside(listener, disturb)


def test_a_rank_joins_once() -> None:
    listener, deadline = Listener(), time.monotonic() + MOMENT_S
    one = connect(listener.name, listener.token, 1, deadline)
    again = connect(listener.name, listener.token, 1, deadline)
    other = connect(listener.name, listener.token, 2, deadline)
    found = listener.accept([1, 2], deadline)
    listener.close()
    await_accepted(one, deadline)
    await_accepted(other, deadline)
    with pytest.raises((ConnectionResetError, ConnectionRefusedError)):
        await_accepted(again, deadline)
    for each in (one, again, other, *found.values()):
        each.close()


def test_a_rank_joins_with_descriptors_above_those_of_select() -> None:
    with ExitStack() as opened:
        while (one := opened.enter_context(open(os.devnull))).fileno() < 1100:
            assert one.fileno() >= 0
        accept_beside(Listener(), lambda: None)


CONNECT_AS_ANOTHER = """
import os, socket, sys
os.setgroups([]); os.setgid({user}); os.setuid({user})
one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
one.settimeout(5)
one.connect(chr(0) + "ddp_loop/" + sys.argv[1])
try:
    one.send(bytes.fromhex(sys.argv[2]))
    print("answer", one.recv(20))
except OSError:
    print("answer", b"")
"""


def test_another_users_process_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to start a process of another user")
    listener = Listener()
    greeting = _GREETING.pack(_MAGIC, token_of(listener), 1)

    def disturb() -> None:
        script = CONNECT_AS_ANOTHER.format(user=OTHER_USER)
        told = subprocess.run(
            [sys.executable, "-S", "-c", script, listener.name, greeting.hex()],
            check=False, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        assert told.stdout == "answer b''\n", told.stderr

    accept_beside(listener, disturb)


def test_a_listener_of_another_user_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to listen as another user")
    with closing(Listener()) as listener:
        os.seteuid(OTHER_USER)
        try:
            with pytest.raises(PermissionError, match="belongs to another user"):
                connect(listener.name, listener.token, 1, time.monotonic() + MOMENT_S)
        finally:
            os.seteuid(0)


def test_a_rank_that_does_not_come_is_named() -> None:
    with closing(Listener()) as listener, pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not connect"):
        listener.accept([1, 2], time.monotonic() + 0.1)


def test_what_a_rank_sent_before_it_ended_can_be_read() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (one, other):
        each.setblocking(False)
    here, there = LocalPeers({1: one}), LocalPeers({0: other})
    note = Header(0, 0, 2, 3, 0, 5, 6, 7, -9)
    here.send(note, [1])  # it is not read, so the end of the connection is an error
    there.send(note, [0], b"the last words")
    there.close()
    assert here.wait(MOMENT_S) == [1]
    message = here.receive(1)
    assert message is not None
    assert message == (note, b"the last words", [])
    assert here.gone == set()
    assert here.receive(1) is None
    assert here.gone == {1}
    here.close()


# -- in a world --------------------------------------------------------------------------------------------


def join_in_a_flood() -> tuple[str, float]:
    """Strangers connect to every rank's listener as soon as it is there."""
    with ExitStack() as opened:

        class Besieged(Listener):
            def __init__(self) -> None:
                super().__init__()
                thread = threading.Thread(target=self._besiege)
                thread.start()
                opened.callback(thread.join)

            def _besiege(self) -> None:
                for number in range(FLOOD):
                    with suppress(OSError):  # it is closed once all ranks are there
                        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                        opened.callback(one.close)
                        one.settimeout(0.05)
                        one.connect(_address(self.name))
                        if number % 2:  # the others say nothing
                            one.send(b"?" * (number % 40))

        with mock.patch.object(machine, "Listener", Besieged), dl.join_world(timeout_s=30.0) as world:
            total = world.sum(torch.ones(()) * world.rank).item()
            return world.exchange, total


def test_ranks_join_in_memory_in_spite_of_a_flood(on_ranks: OnRanks) -> None:
    assert on_ranks(3, join_in_a_flood) == [("memory", 3.0)] * 3


def sum_with_a_signal_that_ends() -> float:
    """A rank that closes its connection ends no other one, also where SIGPIPE would."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with suppress(LookupError, dl.PeerFailed), dl.join_world(timeout_s=20.0) as world:
            world.sum(torch.ones(()))
            if world.rank == 0:
                raise LookupError
            while True:
                world.start_sum(torch.ones(()))
        return 1.0
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_a_closed_connection_does_not_end_the_process(on_ranks: OnRanks) -> None:
    assert on_ranks(2, sum_with_a_signal_that_ends) == [1.0, 1.0]
