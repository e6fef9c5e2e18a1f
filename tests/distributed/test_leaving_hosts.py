"""A rank waits for no store that is cut off, and ends with the code that its own host's torchrun must see."""

from __future__ import annotations

import os
import socket
from unittest import mock

import pytest

import ddp_loop as dl
from ddp_loop.distributed import stops
from ddp_loop.distributed.gloo import _opened, open_sockets
from ddp_loop.distributed.process_group import _new_sockets
from tests.support.exchanges import on_machines
from tests.support.harness import OnRanks
from tests.support.runs import ask, endless

pytestmark = pytest.mark.covers("C4", "H7", "J15")


def silent_limits() -> list[int]:
    """The milliseconds after which a connection to the store ends that confirms nothing."""
    before = open_sockets()
    with dl.join_world(timeout_s=37.0):
        return [
            one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            for _, one in _opened(_new_sockets(before))  # without those that another thread closes meanwhile
            if one.family in (socket.AF_INET, socket.AF_INET6)
        ]


def test_a_store_that_is_cut_off_is_not_waited_for_beyond_the_timeout(on_ranks: OnRanks) -> None:
    for limits in on_ranks(2, silent_limits):
        assert limits.count(37_000) >= 2, "the main thread's connection, and the watchdog's"


def stop(kind: str, machines: tuple[int, ...], signalled: tuple[int, ...], elastic: bool) -> object:
    """The code with which a rank ends its script."""
    variables = {"TORCHELASTIC_RUN_ID": "job"} if elastic else {}
    with mock.patch.dict(os.environ, variables), mock.patch.object(stops, "_LAUNCHER_S", 1.0):
        try:
            with on_machines(*machines), dl.join_world(timeout_s=20.0) as world:
                loop, make = endless(world)
                for step in loop:
                    if step.iteration == 2 and world.rank in signalled:
                        ask(kind, "", loop)
                    make(step)
        except dl.Stopped as error:
            return error.code
    return None


@pytest.mark.parametrize(
    ("kind", "machines", "signalled", "elastic", "codes"),
    [
        ("SIGTERM", (1, 2), (0,), True, [0, 75, 75]),  # the host of rank 0 leaves
        ("SIGTERM", (2, 1), (0,), True, [0, 0, 75]),  # rank 1 need not wait for its own
        ("SIGTERM", (1, 1, 1), (0, 1, 2), True, [0, 0, 0]),  # all hosts, or a host that joins
        ("SIGTERM", (1, 2), (0,), False, [0, 0, 0]),  # no torchrun
        ("SIGTERM", (3,), (0,), True, [0, 0, 0]),  # one host
        ("SIGINT", (1, 2), (0,), True, [0, 0, 0]),  # a user
        ("call", (1, 2), (0,), True, [0, 0, 0]),
    ],
)
@pytest.mark.slow
def test_only_a_host_that_torchrun_ended_is_done_after_sigterm(
    kind: str,
    machines: tuple[int, ...],
    signalled: tuple[int, ...],
    elastic: bool,
    codes: list[int],
    on_ranks: OnRanks,
) -> None:
    assert on_ranks(3, stop, kind, machines, signalled, elastic) == codes
