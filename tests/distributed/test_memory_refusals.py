"""Where ranks cannot share memory: all of them take gloo, with the reason, or raise one error; the bits stay."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddp_loop as dl
from ddp_loop.distributed import machine, padded
from ddp_loop.distributed.meetings import ARENA_BYTES
from ddp_loop.training.ordered_sum import tree_order
from tests.support.exchanges import CPU, digest, make_flat_sum
from tests.support.harness import OnRanks, caught

pytestmark = pytest.mark.covers("D10")

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
usual_from_file, usual_memfd = torch.from_file, os.memfd_create


def refuse(number: int) -> Any:
    def refused(*arguments: Any, **keywords: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refused


@contextmanager
def without_memfd() -> Iterator[None]:
    del os.memfd_create
    try:
        yield
    finally:
        os.memfd_create = usual_memfd


def map_no_arena(*arguments: Any, **keywords: Any) -> torch.Tensor:
    """Only small segments can be mapped."""
    if keywords["size"] >= ARENA_BYTES:
        raise RuntimeError("unable to mmap: Cannot allocate memory")
    return usual_from_file(*arguments, **keywords)


@contextmanager
def another_network() -> Iterator[None]:
    """A network namespace of its own, while the ranks set up the exchange in memory."""
    libc, usual = ctypes.CDLL(None, use_errno=True), machine.meet_in_memory

    def meet(*arguments: Any, **keywords: Any) -> Any:
        with open("/proc/self/ns/net") as here:
            if libc.unshare(NEW_NETWORK) != 0:
                raise AssertionError(os.strerror(ctypes.get_errno()))
            try:
                return usual(*arguments, **keywords)
            finally:
                assert libc.setns(here.fileno(), NEW_NETWORK) == 0

    with mock.patch("ddp_loop.distributed.process_group.meet_in_memory", meet):
        yield


def obstacle(kind: str) -> AbstractContextManager[Any]:
    match kind:
        case "no memory":
            return mock.patch.object(os, "memfd_create", refuse(errno.ENOMEM))
        case "no room":
            return mock.patch.object(os, "posix_fallocate", refuse(errno.ENOSPC))
        case "no memfd":
            return without_memfd()
        case "nothing is mapped":
            return mock.patch.object(torch, "from_file", mock.Mock(side_effect=RuntimeError("unable to mmap")))
        case "no arena is mapped":
            return mock.patch.object(torch, "from_file", map_no_arena)
        case "another network" | "another network that looks alike":
            return another_network()
    return nullcontext()


WHYS = {
    "no memory": r"Rank 1 has no shared memory \(.*Cannot allocate memory\)\.",
    "no room": r"Rank 1 has no shared memory \(.*No space left on device\)\.",
    "no memfd": r"Rank 1 has no shared memory \(.*the system has no memfd_create\)\.",
    "nothing is mapped": r"Rank 1 has no shared memory \(.*a segment cannot be mapped: unable to mmap\)\.",
    "no arena is mapped": r"Rank \d does not reach the others in memory \(.*\)\.",
    "another network": r"Each rank is on a machine, or in a network namespace, of its own\.",
    "another network that looks alike": r"Rank \d does not reach the others in memory \(.*\)\.",
}


def join_with(kind: str, exchange: str) -> tuple[str, str, float]:
    """Join where rank 1 has an obstacle; what is used, why, and a sum."""
    here = obstacle(kind) if os.environ["RANK"] == "1" else obstacle("")
    alike = mock.patch.object(machine, "machine_of", return_value="one machine") if "alike" in kind else nullcontext()
    soon = mock.patch.object(machine, "_CONNECT_S", 1.0)
    with here, alike, soon, dl.join_world(timeout_s=20.0, exchange=exchange) as world:
        return world.exchange, world.why_gloo, world.sum(torch.tensor(1.0 + world.rank)).item()


def can_unshare() -> bool:
    child = os.fork()
    if not child:
        os._exit(int(ctypes.CDLL(None).unshare(NEW_NETWORK) != 0))
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kind", WHYS)
@pytest.mark.slow
def test_all_ranks_take_gloo_where_one_cannot_share_memory(kind: str, on_ranks: OnRanks) -> None:
    if "network" in kind and not can_unshare():
        pytest.skip("no network namespaces can be made here")
    told = on_ranks(2, join_with, kind, "auto")
    assert told[0] == told[1]
    exchange, why, total = told[0]
    assert (exchange, total) == ("gloo", 3.0)
    assert re.fullmatch(WHYS[kind], why), why


def join_in_vain(kind: str, mine: tuple[str, ...]) -> tuple[str, str, bool, float]:
    """What joining raises, whether a process group is left, and the sum of the next world."""
    kind_, text, _ = caught(join_with, kind, mine[int(os.environ["RANK"])])
    left = dist.is_initialized()
    with dl.join_world() as world:
        return kind_, text, left, world.sum(torch.ones(())).item()


@pytest.mark.parametrize(
    ("kind", "exchanges"),
    [("no memory", ("memory", "memory")), ("", ("gloo", "memory")), ("no memory", ("memory", "auto"))],
)
def test_all_ranks_raise_where_memory_is_a_must(kind: str, exchanges: tuple[str, ...], on_ranks: OnRanks) -> None:
    for name, text, left, total in on_ranks(2, join_in_vain, kind, exchanges):
        assert name == "RuntimeError", text
        assert text.startswith('exchange="memory" needs shared memory between all ranks. ')
        assert text.endswith(' Pass exchange="auto".')
        assert not left
        assert total == 2.0


def join_by_variable(word: str, exchange: str) -> str:
    with mock.patch.dict(os.environ, {"DDP_LOOP_EXCHANGE": word}), dl.join_world(exchange=exchange) as world:
        return world.exchange


@pytest.mark.parametrize(
    ("word", "exchange", "used"), [("gloo", "auto", "gloo"), ("", "auto", "memory"), ("gloo", "memory", "memory")]
)
def test_the_variable_replaces_auto_alone(word: str, exchange: str, used: str, on_ranks: OnRanks) -> None:
    assert on_ranks(2, join_by_variable, word, exchange) == [used] * 2


def test_an_unknown_exchange_is_refused() -> None:
    message = "must be one of 'auto', 'memory', 'gloo'. Got 'tcp'."
    with pytest.raises(ValueError, match=message):
        dl.join_world(exchange="tcp")
    with mock.patch.dict(os.environ, {"DDP_LOOP_EXCHANGE": "tcp"}), pytest.raises(ValueError, match=message):
        dl.join_world()


@pytest.mark.parametrize("seconds", ["600", None, 0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match=rf"timeout_s must be a finite number .* Got timeout_s={seconds!r}\."):
        dl.join_world(timeout_s=seconds)


# -- in mid-run --------------------------------------------------------------------------------------------


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def sum_with(kind: str, shards: int, gloo: bool) -> tuple[str, str]:
    """The digest of sums of three buckets, of which the second one has an obstacle on rank 1."""
    with dl.join_world(timeout_s=20.0, exchange="gloo" if gloo else "memory") as world:
        found = []
        for bucket in range(3):
            order = tree_order(shards, world.size, world.rank)
            here: AbstractContextManager[Any] = nullcontext()
            if (bucket, world.rank) == (1, 1):
                here = no_more_files() if kind == "no more files" else obstacle(kind)
            with here:
                found += make_flat_sum(world, order, padded(200_000, order), torch.float32, 2)
        return world.exchange, digest(found)


@pytest.mark.parametrize(
    ("kind", "shards"), [("no memory", 2), ("nothing is mapped", 5), ("no more files", 5), ("no memfd", 2)]
)
@pytest.mark.slow
def test_a_bucket_without_memory_has_the_same_bits(kind: str, shards: int, on_ranks: OnRanks) -> None:
    told = on_ranks(2, sum_with, kind, shards, gloo=False)
    whole = on_ranks(2, sum_with, "", shards, gloo=True)
    assert [one for one, _ in told] == ["memory"] * 2
    assert {one for _, one in told} == {one for _, one in whole}


def map_in_vain(limit: bool) -> str:
    """A bucket for whose memory there is no address space on rank 1."""
    with dl.join_world(timeout_s=20.0, exchange="memory") as world:
        order = tree_order(4, world.size, world.rank)
        whole = world.flat_sum(order, padded(4_000_000, order), torch.float32, CPU)
        assert whole is not None
        row = torch.full((padded(4_000_000, order),), 1.0 + world.rank)
        mine = row if world.rank == 1 else whole.empty().copy_(row)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if limit and world.rank == 1:
            gc.collect()  # what it frees later would be room for the segment
            pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**22, hard))
        try:
            world.finish(world.start(lambda _: whole.arrive([mine]), CPU))
            world.finish(world.start(lambda _: whole.reduce(), CPU))
            whole.collect()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        return digest([mine])


def test_a_segment_that_one_rank_has_no_addresses_for_goes_another_way(on_ranks: OnRanks) -> None:
    wanted = digest([torch.full((4_000_000,), 3.0)])
    assert on_ranks(2, map_in_vain, limit=True) == [wanted] * 2
