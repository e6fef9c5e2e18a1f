"""The process groups of a world, one for the sums of steps and one for all else; and how gloo's connections are cut.

gloo closes a connection only when nothing refers to the group any more, and a sum that is still under way in one of
its threads does. A socket that is shut down wakes the peers that wait for this rank.

To destroy a group waits for its sums, and now and then one is not woken before its timeout: another sum ended with an
error between the head and the body of a message, and gloo reads that connection no further, but looks at it without
a pause. Until the timeout such a group is kept; a worker of a pool ends, and the pool starts another one.

[Note: Two groups] gloo ends the process when ranks meet in sums of different sizes. The sums of a step have sizes
that all ranks agreed on; everything else begins with a header of one size, in a group of its own. So a rank that
evaluates where others fold waits, as they do, and is named; nobody dies. The order of all collectives is still one and
the same on every rank.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed.rendezvous import rendezvous

from ddp_loop.distributed.devices import RankEnv
from ddp_loop.distributed.failures import PeerFailed
from ddp_loop.distributed.store import own_keys

_DESCRIPTORS = Path("/proc/self/fd")  # elsewhere than on Linux none are found, and a peer waits for its timeout
_END_S = 0.5  # for the sums of a failed group: nearly all are woken at once
_LOOK_S = 0.005
_kept: list[tuple[dist.ProcessGroup, Collection[dist.Work]]] = []


def open_sockets() -> dict[int, str]:
    """This process's sockets now: the kernel's name of each, by file descriptor."""
    found: dict[int, str] = {}
    if _DESCRIPTORS.is_dir():
        for entry in os.listdir(_DESCRIPTORS):
            name = _name(int(entry))
            if name.startswith("socket:"):
                found[int(entry)] = name
    return found


def cut(sockets: dict[int, str]) -> None:
    """Shut these sockets down, but those that are closed already; their owner closes them."""
    for _, one in _opened(sockets):
        with suppress(OSError):
            if not _listens(one):  # gloo's listener would end the process
                one.shutdown(socket.SHUT_RDWR)


def accepted(sockets: dict[int, str]) -> dict[int, str]:
    """Those that a listener among them took: one end of each of gloo's connections, and none that others opened.

    gloo closes one connection after the other, each at its thread's next look, and looks every 10 ms. Where one end is
    shut down the threads of both look at once.
    """
    ports = {_port(one) for _, one in _opened(sockets) if _listens(one)}
    return {
        number: sockets[number]
        for number, one in _opened(sockets)
        if not _listens(one) and _port(one) in ports - {None}
    }


def _opened(sockets: dict[int, str]) -> Iterator[tuple[int, socket.socket]]:
    """Those that are open still."""
    for descriptor, name in sockets.items():
        if _name(descriptor) == name:  # the number may belong to another file by now
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                yield descriptor, one


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(one: socket.socket) -> int | None:
    """Of this end; None where there are no ports."""
    name = one.getsockname()
    return name[1] if isinstance(name, tuple) and one.family in (socket.AF_INET, socket.AF_INET6) else None


def keep_while_busy(group: dist.ProcessGroup, sums: Collection[dist.Work]) -> None:
    """Keep a failed group from being destroyed, also at exit, if one of its sums does not end soon."""
    deadline = time.monotonic() + _END_S
    while not _ended(sums):
        if time.monotonic() > deadline:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # the list alone would let it go at exit
            _kept.append((group, sums))
            return
        time.sleep(_LOOK_S)


def free_kept() -> None:
    """Let those kept groups go whose sums have ended since."""
    for one in [one for one in _kept if _ended(one[1])]:
        _kept.remove(one)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(one[0]))


def keeps_a_group() -> bool:
    """Whether a failed group is kept."""
    return bool(_kept)


def _ended(sums: Collection[dist.Work]) -> bool:
    return all(work.is_completed() for work in sums)


def _name(descriptor: int) -> str:
    try:
        return os.readlink(_DESCRIPTORS / str(descriptor))
    except OSError:
        return ""


class ProcessGroups:
    """Joins the ranks of a launcher, or takes the process group that the user made.

    Args:
        place: this rank's.
        device: where it computes.
        timeout_s: of each collective, in seconds.

    Attributes:
        steps: the group of the steps' sums; the default one.
        others: the group of all else, over the CPU.
        store: where the ranks leave words, with keys of this world's own.

    Raises:
        PeerFailed: not all ranks came.
        ValueError: the user's group is not that of the launcher, or has nothing for the CPU.
    """

    def __init__(self, place: RankEnv, device: torch.device, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._owns = not dist.is_initialized()
        self.connections: dict[int, str] = {}
        free_kept()
        self._before = open_sockets()
        if self._owns:
            self._start(place, device, timeout_s)
        elif (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
            raise ValueError(
                f"the process group must be that of the launcher; it has rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, the environment says {place.rank} of {place.size}"
            )
        self.steps = dist.distributed_c10d._get_default_group()
        self._require_cpu_sums(self.steps)
        self.store = own_keys(dist.distributed_c10d._get_default_store(), place.rank)
        self.others = self._make_others(place, timeout_s)
        self.connections = {number: name for number, name in open_sockets().items() if self._before.get(number) != name}

    @property
    def backends(self) -> str:
        """Those of the steps' sums, as torch says it."""
        return str(dist.get_backend_config(self.steps))

    def store_aside(self) -> dist.Store:
        """The same store, through a connection of its own."""
        if not hasattr(self.store, "clone"):
            return self.store
        aside: dist.Store = self.store.clone()
        return aside

    @staticmethod
    def _require_cpu_sums(group: dist.ProcessGroup) -> None:
        try:
            group._get_backend(torch.device("cpu"))
        except RuntimeError as error:
            raise ValueError(
                "the process group must have a backend for the CPU too, over which the ranks agree; this one has "
                f'{dist.get_backend_config(group)}: init_process_group("cpu:gloo,cuda:nccl"), or leave it out: '
                "join_world makes a group"
            ) from error

    def _start(self, place: RankEnv, device: torch.device, timeout_s: float) -> None:
        own_gpu = device.type == "cuda" and place.local_size <= torch.cuda.device_count()
        try:
            store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=self._timeout))
            store.set_timeout(self._timeout)
            self._before = open_sockets()  # where rank 0 hosts the store, the others read there why it failed
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
                timeout=self._timeout,
                store=own_keys(store, place.rank),
                rank=place.rank,
                world_size=place.size,
            )
        except RuntimeError as error:
            raise _not_all_came(place, timeout_s, error) from error

    def _make_others(self, place: RankEnv, timeout_s: float) -> dist.ProcessGroup:
        try:
            others: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._timeout)
        except RuntimeError as error:
            raise _not_all_came(place, timeout_s, error) from error
        return others

    def cut_off(self) -> None:
        """Cut the connections, so that no peer waits for this rank until the timeout: it failed."""
        cut(self.connections)
        if dist.is_initialized():
            for group in (self.others, self.steps) if self._owns else (self.others,):
                group.abort()

    def leave(self, sums: Collection[dist.Work], *, failed: bool) -> None:
        """Give the groups up.

        Args:
            sums: those of the steps that are still under way.
            failed: whether the ranks were cut off.
        """
        steps, others = self.steps, self.others
        cut(accepted(self.connections))  # a connection that is open takes gloo up to 10 ms to close
        del self.steps, self.others  # gloo closes the connections with the last reference
        if failed and self._owns:
            keep_while_busy(steps, sums)
        del steps
        if dist.is_initialized():
            dist.destroy_process_group(None if self._owns else others)


def _not_all_came(place: RankEnv, timeout_s: float, error: RuntimeError) -> PeerFailed:
    return PeerFailed(
        f"all {place.size} ranks must join within timeout_s={timeout_s:g}; rank {place.rank} did not "
        f"meet them all: look at what the others printed, and at MASTER_ADDR and MASTER_PORT: {error}"
    )
