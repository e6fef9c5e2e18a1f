"""How ranks agree on their devices, find the others of their machine, and agree on an exchange in memory.

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
from typing import Any

import torch
import torch.distributed as dist

from ddp_loop.accelerators import accelerator_of, shares_a_gpu
from ddp_loop.distributed.devices import RankEnv
from ddp_loop.distributed.failures import RankStatus
from ddp_loop.distributed.local_sockets import Header, Listener, LocalPeers, await_accepted, connect
from ddp_loop.distributed.meetings import ARENA_BYTES
from ddp_loop.distributed.memory import MemoryBackend
from ddp_loop.distributed.shared_memory import Segment

_KEY = "ddp_loop/exchange"
_CONNECT_S = 10.0  # for ranks that have all published where they listen
_ARENA = Header(0)


class NoSharedMemory(Exception):
    """Why the ranks do not exchange values in memory, the same on every rank.

    Attributes:
        is_needed: whether a rank was asked for exchange="memory".
    """

    is_needed = False


def describe_all(
    store: dist.Store, place: RankEnv, device: torch.device | None, timeout_s: float, problem: str = ""
) -> tuple[list[str], list[str]]:
    """The identities of all ranks' devices, and the ranks' hosts, in rank order. Every rank must call this.

    A host is given as " on host node7 (10.0.0.7)". On one machine there is none.

    Args:
        store: with keys of this world alone.
        place, device: of this rank; None where it has no device.
        timeout_s: for all ranks to come, in seconds.
        problem: why this rank has no device.

    Raises:
        ValueError: a rank has no device, or another kind of device, or the GPU of another rank; on every rank.
        RuntimeError: a rank did not come in time.
    """
    said: dict[str, str | bool] = {"problem": problem, "machine": machine_of(place), "host": _own_host()}
    if device is not None:
        own = accelerator_of(device)
        said |= {"kind": own.kind, "device": str(device), "identity": own.identity()}
        said |= {"shares": place.shares_gpu and own.can_be_shared, "can share": own.can_be_shared}
    every = [json.loads(word) for word in _told_by_all(store, "device", place, json.dumps(said), timeout_s)]
    if refusal := _refusal_of_devices(every):
        with suppress(RuntimeError):  # rank 0 may have the store, and must not end while others read
            _told_by_all(store, "refused", place, "", timeout_s)
        raise ValueError(problem or refusal)
    hosts = [one["host"] for one in every] if len({one["machine"] for one in every}) > 1 else []
    return [one["identity"] for one in every], hosts


def _refusal_of_devices(every: list[dict[str, Any]]) -> str:
    """Why the ranks cannot have these devices, the same on every rank; empty where they can."""
    for rank, one in enumerate(every):
        if one["problem"]:
            return f"Rank {rank}{one['host']} has no device: {one['problem']}"
    for rank, one in enumerate(every):
        if one["kind"] != every[0]["kind"]:
            return (
                "All ranks must compute on the same kind of device. "
                f"Rank 0 has {every[0]['device']}, rank {rank} has {one['device']}. Start each rank where its GPU is "
                'visible (CUDA_VISIBLE_DEVICES), or pass join_world device="cpu" on all of them.'
            )
    for rank, one in enumerate(every):
        for other, before in enumerate(every[:rank]):
            if shares_a_gpu(one["identity"], before["identity"]) and not (one["shares"] and before["shares"]):
                fact = (
                    f"Each rank must have a GPU of its own. Ranks {other} and {rank}{one['host']} both have "
                    f"{one['identity']}. Start no more ranks on a machine than GPUs (--ranks gpu)"
                )
                if not one["can share"]:
                    return f"{fact}. Ranks cannot share {one['kind']} devices: gloo takes no such tensors."
                return (
                    f"{fact}, let CUDA_VISIBLE_DEVICES show each rank another one, or pass join_world share_gpus=True: "
                    "sums then go over gloo."
                )
    return ""


def _own_host() -> str:
    """Where this rank is, by name and by the address from which it reaches the launcher's store."""
    name = socket.gethostname()
    address = ""
    with suppress(OSError, ValueError):
        target = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", ""))
        family, kind, *_, end = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as one:
            one.connect(end)  # chooses the route, and sends nothing
            address = one.getsockname()[0]
    return f" on host {name}" + (f" ({address})" if address else "")


def meet_in_memory(
    store: dist.Store,
    place: RankEnv,
    exchange: str,
    timeout_s: float,
    *,
    where: Callable[[], RankStatus],
    in_vain: Callable[[], bool],
) -> tuple[MemoryBackend, list[range]]:
    """The exchange in memory with the ranks of this machine, and the ranks of each machine. Every rank must call this.

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
    listener, why = _listen(place.rank, exchange)
    said = {"machine": machine_of(place), "why": why, "exchange": exchange}
    if listener is not None:
        said |= {"name": listener.name, "token": listener.token}
    peers: LocalPeers | None = None
    try:
        every: list[dict[str, str]] = [
            json.loads(word) for word in _told_by_all(store, "here", place, json.dumps(said), timeout_s)
        ]
        _refuse([one["why"] for one in every])
        machines = _machines([one["machine"] for one in every])
        ranks = next(one for one in machines if place.rank in one)
        try:
            if listener is None:
                raise NoSharedMemory(why)  # as every rank does
            deadline = time.monotonic() + min(timeout_s, _CONNECT_S)
            peers = LocalPeers(_connected(listener, every, place.rank, ranks, deadline))
            arenas = _arenas(peers, place.rank - ranks.start, len(ranks), deadline)
        except (OSError, ValueError) as error:
            why = f"Rank {place.rank} does not reach the others in memory ({error})."
        _refuse(_told_by_all(store, "ready", place, why, timeout_s))
    except BaseException as error:
        if peers is not None:
            peers.close()
        if isinstance(error, NoSharedMemory):
            error.is_needed = any(one["exchange"] == "memory" for one in every)
        raise
    finally:
        if listener is not None:
            listener.close()
    if peers is None:
        raise NoSharedMemory(why)  # as every rank does
    return MemoryBackend(place.rank - ranks.start, peers, arenas, ranks.start, where, in_vain), machines


def _listen(rank: int, exchange: str) -> tuple[Listener | None, str]:
    """Where the other ranks of the machine connect; None with the reason."""
    if exchange == "gloo":
        return None, 'exchange="gloo" was asked for.'
    try:
        Segment.make(1).close()
        return Listener(), ""
    except (OSError, AttributeError) as error:
        return None, f"Rank {rank} has no shared memory ({error})."


def machine_of(place: RankEnv) -> str:
    """What ranks that can share memory have in common: the machine, its network namespace, the launcher's node."""
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    return f"{boot or socket.gethostname()} {namespace} {place.rank - place.local_rank}"


def _machines(every: list[str]) -> list[range]:
    """The ranks of each machine, in order.

    Raises:
        NoSharedMemory: none has two ranks, or a machine's ranks are not neighbours.
    """
    starts = [rank for rank, one in enumerate(every) if rank == 0 or one != every[rank - 1]]
    machines = [range(start, end) for start, end in zip(starts, [*starts[1:], len(every)], strict=True)]
    if len(machines) == len(every):
        raise NoSharedMemory("Each rank is on a machine, or in a network namespace, of its own.")
    if len(machines) > len(set(every)):
        raise NoSharedMemory("The ranks of a machine do not follow each other.")
    return machines


def _told_by_all(store: dist.Store, what: str, place: RankEnv, own: str, timeout_s: float) -> list[str]:
    """What every rank publishes under `what`, in rank order."""
    store.set(f"{_KEY}/{what}/{place.rank}", own)
    keys = [f"{_KEY}/{what}/{rank}" for rank in range(place.size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing: list[int] = []
        with suppress(RuntimeError):  # the store is gone with the launcher
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(f"{f'Nothing came from ranks {missing}. ' if missing else ''}{error}") from error
    return [word.decode() for word in store.multi_get(keys)]


def _refuse(whys: list[str]) -> None:
    for why in filter(None, whys):
        raise NoSharedMemory(why)


def _connected(
    listener: Listener, every: list[dict[str, str]], rank: int, ranks: range, deadline: float
) -> dict[int, socket.socket]:
    """The connections to the other `ranks` of this machine, counted on it.

    Those to the lower ones are made by `connect`, those from the higher ones by `accept`.
    """
    found: dict[int, socket.socket] = {}
    try:
        own = rank - ranks.start
        for number, lower_rank in enumerate(range(ranks.start, rank)):
            found[number] = connect(every[lower_rank]["name"], every[lower_rank]["token"], own, deadline)
        lower = list(found.values())
        found |= listener.accept(range(own + 1, len(ranks)), deadline)
        for one in lower:
            await_accepted(one, deadline)
    except BaseException:
        for one in found.values():
            one.close()
        raise
    return found


def _arenas(peers: LocalPeers, own_rank: int, size: int, deadline: float) -> list[Segment]:
    """The arenas of all ranks of the machine, in rank order."""
    others = [rank for rank in range(size) if rank != own_rank]
    found: dict[int, Segment] = {}
    try:
        own = found[own_rank] = Segment.make(ARENA_BYTES)
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
    return [found[rank] for rank in range(size)]
