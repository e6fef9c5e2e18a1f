"""How the ranks of one machine find each other, and agree on whether they exchange values in memory.

Each rank publishes in the launcher's store where it is and where it listens. Then it connects to the others, and sends
them its arena. At last each publishes whether all that worked. So all ranks take the same way: in memory, or, with the
reason of the first one that cannot, over gloo.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ddp_loop.distributed.devices import RankEnv
from ddp_loop.distributed.failures import RankStatus
from ddp_loop.distributed.local_sockets import Header, Listener, LocalPeers, await_accepted, connect
from ddp_loop.distributed.meetings import ARENA_BYTES
from ddp_loop.distributed.memory import MemoryBackend
from ddp_loop.distributed.shared_memory import Segment

_KEY = "ddp_loop/exchange"
_CONNECT_S = 10.0  # for ranks that have all published where they listen
_ARENA = Header(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ())


class NoSharedMemory(Exception):
    """Why the ranks do not exchange values in memory, the same on every rank."""


def meet_in_memory(
    store: dist.Store,
    place: RankEnv,
    exchange: str,
    timeout_s: float,
    *,
    where: Callable[[], RankStatus],
    in_vain: Callable[[], bool],
) -> MemoryBackend:
    """The exchange in memory. Every rank must call this.

    Args:
        store: with keys of this world alone.
        place: numbers of this rank.
        exchange: "auto", "memory" or "gloo".
        timeout_s: for all ranks to come, in seconds.
        where, in_vain: as in `Meetings`.

    Raises:
        NoSharedMemory: a rank cannot, or is not to; on every rank.
        RuntimeError: a rank did not come in time.
    """
    listener, why = None, "" if exchange != "gloo" else 'exchange="gloo" was asked for.'
    if not why:
        try:
            Segment.make(1).close()
            listener = Listener()
        except (OSError, AttributeError) as error:
            why = f"Rank {place.rank} has no shared memory ({error})."
    said = {"machine": machine_of(place), "why": why}
    if listener is not None:
        said |= {"name": listener.name, "token": listener.token}
    peers: LocalPeers | None = None
    try:
        every = [json.loads(word) for word in _told_by_all(store, "here", place, json.dumps(said), timeout_s)]
        _refuse([one["why"] for one in every])
        if len({one["machine"] for one in every}) > 1:
            raise NoSharedMemory("The ranks are on several machines.")
        arenas: list[Segment] = []
        try:
            assert listener is not None
            deadline = time.monotonic() + min(timeout_s, _CONNECT_S)
            peers = LocalPeers(_connected(listener, every, place, deadline))
            arenas = _arenas(peers, place, deadline)
        except (OSError, ValueError) as error:
            why = f"Rank {place.rank} does not reach the others in memory ({error})."
        _refuse(_told_by_all(store, "ready", place, why, timeout_s))
    except BaseException:
        if peers is not None:
            peers.close()
        raise
    finally:
        if listener is not None:
            listener.close()
    assert peers is not None  # otherwise this rank had a reason
    return MemoryBackend(place.rank, peers, arenas, where, in_vain)


def machine_of(place: RankEnv) -> str:
    """What ranks that can share memory have in common: the machine, its network namespace, the launcher's node."""
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    return f"{boot or socket.gethostname()} {namespace} {place.rank - place.local_rank}"


def _told_by_all(store: dist.Store, what: str, place: RankEnv, own: str, timeout_s: float) -> list[str]:
    """What every rank publishes under `what`, in rank order."""
    store.set(f"{_KEY}/{what}/{place.rank}", own)
    keys = [f"{_KEY}/{what}/{rank}" for rank in range(place.size)]
    store.wait(keys, timedelta(seconds=timeout_s))
    return [word.decode() for word in store.multi_get(keys)]


def _refuse(whys: list[str]) -> None:
    for why in whys:
        if why:
            raise NoSharedMemory(why)


def _connected(
    listener: Listener, every: list[dict[str, str]], place: RankEnv, deadline: float
) -> dict[int, socket.socket]:
    """The connections to all other ranks: to the lower ones by `connect`, from the higher ones by `accept`."""
    found: dict[int, socket.socket] = {}
    try:
        for rank in range(place.rank):
            found[rank] = connect(every[rank]["name"], every[rank]["token"], place.rank, deadline)
        lower = list(found.values())
        found |= listener.accept(range(place.rank + 1, place.size), deadline)
        for one in lower:
            await_accepted(one, deadline)
    except BaseException:
        for one in found.values():
            one.close()
        raise
    return found


def _arenas(peers: LocalPeers, place: RankEnv, deadline: float) -> list[Segment]:
    """The arenas of all ranks, in rank order."""
    others = [rank for rank in range(place.size) if rank != place.rank]
    found: dict[int, Segment] = {}
    try:
        own = found[place.rank] = Segment.make(ARENA_BYTES)
    except OSError:
        peers.send(_ARENA, others)
        raise
    peers.send(_ARENA, others, descriptors=[own.descriptor])
    own.close()
    while missing := [rank for rank in others if rank not in found]:
        ready = peers.wait(max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise TimeoutError(f"the arenas of ranks {missing} did not come")
        for rank in ready:
            _, _, descriptors = peers.receive(rank) or (None, b"", [])
            if not descriptors:
                raise ConnectionError(f"rank {rank} has no arena")
            found[rank] = Segment(descriptors[0])
            found[rank].close()
            if len(found[rank].bytes) != ARENA_BYTES:
                raise ConnectionError(f"the arena of rank {rank} has another size")
    return [found[rank] for rank in range(place.size)]
