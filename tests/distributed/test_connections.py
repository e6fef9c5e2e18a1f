"""Which connections a world makes and leaves: none that others can use, and none that outlasts its sums."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddp_loop as dl
from ddp_loop.distributed import Pool
from ddp_loop.distributed.gloo import accepted, free_kept, keeps_a_group
from ddp_loop.distributed.store import own_keys
from tests.support.harness import OnRanks, let_ranks_meet, until
from tests.support.listeners import Port, ports_of

pytestmark = pytest.mark.covers("D10")

SUM_S = 5.0  # the timeout of a sum that is not woken, and of joining, which a busy machine holds up


def threads() -> int:
    """Those of the system."""
    return len(os.listdir("/proc/self/task"))


def no_group_is_kept() -> bool:
    free_kept()  # the next world of this process does this
    return not keeps_a_group()


def leave_a_sum_behind(wait: bool) -> bool:
    """Rank 0 fails while a sum of its own is under way and is not woken, as happens now and then.

    Returns:
        Whether its group is still kept when the sum has ended, with `wait`, or else at once.
    """
    let_ranks_meet(exchange="gloo")
    store, before = None, threads()
    with suppress(LookupError), dl.join_world(timeout_s=SUM_S, exchange="gloo") as world:
        store = dist.distributed_c10d._get_default_store()
        assert world._groups is not None
        world._groups.connections = {}  # nothing is shut down
        if world.rank == 0:
            world.start_sum(torch.ones(()))
        else:
            assert world._watchdog is not None
            world._watchdog.leaving(failed=True)  # so it is not interrupted
            store.wait(["left"], timedelta(seconds=20))  # its connection stays open until then
        raise LookupError
    if world.rank == 0:
        assert keeps_a_group()
        if wait:
            until(no_group_is_kept, "the sum has ended")
            until(lambda: threads() <= before, "its threads have ended")
    assert store is not None
    store.set("left", "")
    return keeps_a_group()


@pytest.mark.slow
def test_a_group_whose_sum_was_not_woken_is_kept_until_it_is(on_ranks: OnRanks) -> None:
    assert on_ranks(2, leave_a_sum_behind, True) == [False, False]


@pytest.mark.slow
def test_a_worker_that_keeps_a_group_is_replaced(pool: Pool) -> None:
    first = pool.run(os.getpid, 2)
    assert pool.run(leave_a_sum_behind, 2, False) == [True, False]
    second = pool.run(os.getpid, 2)
    assert second[0] != first[0]
    assert second[1] == first[1]


joined = partial(dl.join_world, exchange="gloo")


def leave_while_another_thread_has_a_connection() -> tuple[bytes, int]:
    """What comes through a connection that was opened while the ranks joined, and how many sockets all ranks shut."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # there before: it is nothing that joining opened
        opened: list[socket.socket] = []

        def connect_meanwhile(store: dist.Store, rank: int) -> dist.Store:
            if not opened:
                opened.append(socket.create_connection(server.getsockname()))
            return own_keys(store, rank)

        with mock.patch("ddp_loop.distributed.process_group.own_keys", connect_meanwhile), joined() as world:
            assert world._groups is not None
            ends = sum(world.gather(len(accepted(world._groups.connections))))  # of all, before any of them leaves
        with opened[0] as one, server.accept()[0] as other:
            one.sendall(b"still there")
            return other.recv(100), ends


def test_leaving_shuts_one_end_of_each_connection_and_no_other_socket(on_ranks: OnRanks) -> None:
    told = on_ranks(3, leave_while_another_thread_has_a_connection)
    assert told == [(b"still there", 3 * 3)] * 3  # three groups with three pairs each


def listens_at() -> set[Port]:
    """Where this rank can be connected to, while it is in a world."""
    with dl.join_world(exchange="gloo") as world:
        found = ports_of([os.getpid()])
        world.sum(torch.ones(()))
        return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux, which lists sockets")
def test_under_launch_no_other_machine_can_connect_to_a_rank(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, listens_at):
        assert found
        assert all(port.is_loopback for port in found)
