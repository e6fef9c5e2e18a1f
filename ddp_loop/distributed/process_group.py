"""The process groups of a world, and the backends of its collectives.

[Note: Groups] The default group is the script's own, as torchrun scripts expect it; none of ours runs on it. Over gloo
the steps' sums have a group, and everything else another one: gloo aborts the process when ranks meet in sums of
different sizes, so what is not of a step begins with a header of fixed size. The order of all collectives is still the
same on every rank. In memory there is one order and no group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed.rendezvous import rendezvous

from ddp_loop.accelerators import accelerator_of, has_own_backend
from ddp_loop.determinism import require_pinned
from ddp_loop.distributed.backend import Backend, Work
from ddp_loop.distributed.collectives import Backends
from ddp_loop.distributed.devices import RankEnv
from ddp_loop.distributed.failures import PeerFailed, RankStatus
from ddp_loop.distributed.gloo import GlooBackend, accepted, cut, end_silent, free_kept, has_closed_one, open_sockets
from ddp_loop.distributed.machine import NoSharedMemory, describe_all, meet_in_memory
from ddp_loop.distributed.memory import MemoryBackend
from ddp_loop.distributed.store import RankStore, own_keys
from ddp_loop.distributed.torch_backend import TorchBackend
from ddp_loop.distributed.two_levels import TwoLevelBackend


class ProcessGroups:
    """Joins the ranks of a launcher, or takes the process group that the script made.

    Args:
        place: numbers of this rank.
        device: of this rank.
        timeout_s: of each collective, in seconds.
        exchange: "auto", "memory" or "gloo", as in `join_world`.
        where: where this rank is.
        in_vain: whether a wait is in vain.

    Attributes:
        backends: of the collectives.
        memory: the one in memory among them; None without it.
        why_gloo: why not in memory; empty where nothing prevents it.
        store: the launcher's, with keys of this world alone.
        connections: by which this rank sees that a peer has ended.
        count_on_default: returns how many collectives torch's default group made so far: the script's own, and over
            NCCL the world's as well.

    Raises:
        PeerFailed: not all ranks joined.
        ValueError: the script's group is not the launcher's, or has no backend for the CPU; or a rank has
            another kind of device.
        RuntimeError: the exchange in memory was asked for, and cannot be had.
    """

    def __init__(
        self,
        place: RankEnv,
        device: torch.device,
        timeout_s: float,
        exchange: str,
        *,
        where: Callable[[], RankStatus],
        in_vain: Callable[[], bool],
    ) -> None:
        self._place = place
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._in_vain = in_vain
        self._hosts: list[str] = []
        self._owns = not dist.is_initialized()
        self._made: list[dist.ProcessGroup] = []
        self.connections: dict[int, str] = {}
        self.memory: MemoryBackend | None = None
        self.why_gloo = ""
        bound: torch.device | None = None  # the device of a backend of its own
        free_kept()
        self._before = open_sockets()
        if self._owns:
            bound = self._start()
        elif (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
            raise ValueError(
                f"The process group must match the launcher's RANK and WORLD_SIZE. It has rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, the environment has {place.rank} of {place.size}. Leave the group to "
                "join_world."
            )
        default = dist.distributed_c10d._get_default_group()
        self._require_sums(default, device)
        require_pinned(self.description)
        self.store = own_keys(dist.distributed_c10d._get_default_store(), place.rank)
        self.count_on_default = _counter(default, device)
        try:
            self.backends = self._make_backends(self._meet(exchange, where))
            self.connections = _new_sockets(self._before)  # NCCL, which closes some of its own at will, has none yet
            if bound is not None:
                with self._joining():
                    accelerator_of(bound).connect(default, self._timeout)
        except BaseException:
            if self.memory is not None:
                self.memory.cut_off()
            if self._owns:
                dist.destroy_process_group()
            raise

    @property
    def description(self) -> str:
        """What torch calls the default group, such as "cpu:gloo,cuda:nccl"."""
        return str(dist.get_backend_config(dist.distributed_c10d._get_default_group()))

    @contextmanager
    def _joining(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            place = self._place
            raise PeerFailed(
                f"All {place.size} ranks must join within timeout_s={self._timeout.total_seconds():g}. Rank "
                f"{place.rank} did not reach them all. Read what the others printed, and check MASTER_ADDR and "
                f"MASTER_PORT. The cause: {error}"
            ) from error

    def _meet(self, exchange: str, where: Callable[[], RankStatus]) -> list[range]:
        """Exchange in memory, if that can be had; returns the ranks of each machine. Every rank must call this."""
        timeout_s = self._timeout.total_seconds()
        machines: list[range] = []
        try:
            with self._joining():
                if not self._owns:
                    _, self._hosts = describe_all(self.store, self._place, self._device, timeout_s)
                self.memory, machines = meet_in_memory(
                    self.store, self._place, exchange, timeout_s, where=where, in_vain=self._in_vain
                )
        except NoSharedMemory as no:
            if no.is_needed:
                raise RuntimeError(
                    f'exchange="memory" needs shared memory between all ranks. {no} Pass exchange="auto".'
                ) from no
            self.why_gloo = str(no)
        return machines

    def _make_backends(self, machines: list[range]) -> Backends:
        default = dist.distributed_c10d._get_default_group()
        accelerator = accelerator_of(self._device)
        has_own = has_own_backend(accelerator) and default._get_backend(self._device).name() == accelerator.backend
        host = self._make_backend(machines)
        others = self._make_backend(machines)
        if has_own:
            return Backends(host, TorchBackend(default), others)
        if accelerator.is_host or self.memory is None:
            return Backends(host, host, others)
        return Backends(host, GlooBackend(self._make_group(), self._in_vain), others)

    def _make_backend(self, machines: list[range]) -> Backend:
        """A backend for what lies on the host."""
        if self.memory is None:
            return GlooBackend(self._make_group(), self._in_vain)
        if len(machines) == 1:
            return self.memory
        starts = [ranks.start for ranks in machines]
        leaders = GlooBackend(self._make_part(starts), self._in_vain) if self._place.rank in starts else None
        return TwoLevelBackend(self.memory, leaders, machines, self._place.rank)

    def rank_store(self, *, aside: bool = False) -> RankStore:
        """The messages between the ranks.

        Args:
            aside: through another connection, if the store has one to give.
        """
        store = self.store
        if aside and hasattr(store, "clone"):
            before = open_sockets()
            store = store.clone()
            end_silent(_new_sockets(before), self._timeout)
        return RankStore(store, self._place.rank, self._place.size, self._hosts)

    @staticmethod
    def _require_sums(group: dist.ProcessGroup, device: torch.device) -> None:
        """Refuse a group of the script that cannot sum what lies on the CPU, or on the device."""
        own = accelerator_of(device)
        usual = "cuda:nccl" if own.is_host else f"{own.kind}:{own.backend}"
        for name, one in (("CPU", torch.device("cpu")), (own.kind, device)):
            try:
                group._get_backend(one)
            except RuntimeError as error:
                raise ValueError(
                    f"The process group needs a backend for the {name} too. This one has "
                    f'{dist.get_backend_config(group)}. Use init_process_group("cpu:gloo,{usual}"), or leave the group '
                    "to join_world."
                ) from error

    def _start(self) -> torch.device | None:
        """Start the default group; returns the device to which it is bound."""
        place = self._place
        with self._joining():
            store = launcher_store(place, self._timeout)
            end_silent(_new_sockets(self._before), self._timeout)
            self._before = open_sockets()  # without the store's, from which the others read why rank 0 failed
            identities, self._hosts = describe_all(store, place, self._device, self._timeout.total_seconds())
        backends, bound = accelerator_of(self._device).process_group(identities)
        require_pinned(backends)
        forget_failed_starts()
        with self._joining():
            dist.init_process_group(
                backends, timeout=self._timeout, store=store, rank=place.rank, world_size=place.size
            )
        return bound

    def _make_group(self) -> dist.ProcessGroup:
        """A new group of all ranks. Each of them must call this."""
        with self._joining():
            group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._timeout)
        self._made.append(group)
        return group

    def _make_part(self, ranks: list[int]) -> Any:
        """A new group of these ranks, which torch does not know. Each of them must call this, and no other one.

        torch would name it by its ranks and the number of groups here. In a script's own group a second world
        would find the addresses of the first one's. Where the default group is bound to a GPU, `new_group` hangs.
        """
        store = own_keys(self.store, self._place.rank)
        with self._joining():
            return dist.ProcessGroupGloo(store, ranks.index(self._place.rank), len(ranks), self._timeout)

    def has_lost_a_peer(self) -> bool:
        """Whether a connection has ended, since a rank was killed or has left."""
        return has_closed_one(self.connections)

    def cut_off(self) -> None:
        """Cut the connections of this rank, which failed, so that no peer waits for the timeout."""
        cut(self.connections)
        if dist.is_initialized():
            for backend in self.backends.each():
                backend.cut_off()
            if self._owns:
                dist.distributed_c10d._get_default_group().abort()

    def leave(self, under_way: Mapping[Work, Backend], *, failed: bool) -> None:
        """Give the groups up.

        Args:
            under_way: operations that have not ended, each with its backend.
            failed: whether they were cut off.
        """
        cut(accepted(self.connections))  # gloo needs up to 10 ms to close an open connection
        for backend in self.backends.each():
            backend.leave([work for work, its in under_way.items() if failed and its is backend])
        if dist.is_initialized():
            if self._owns:
                dist.destroy_process_group()
            else:
                for group in self._made:
                    dist.destroy_process_group(group)
        self._made.clear()
        del self.backends, self.count_on_default


def _counter(group: dist.ProcessGroup, device: torch.device) -> Callable[[], int]:
    """Counts the collectives of a group on a device, in 0.2 microseconds; always 0 where its backend does not."""
    count: Callable[[], int] = getattr(group._get_backend(device), "_get_sequence_number_for_group", lambda: 0)
    try:
        count()
    except RuntimeError:
        return lambda: 0
    return count


def _new_sockets(before: Mapping[int, str]) -> dict[int, str]:
    return {number: name for number, name in open_sockets().items() if before.get(number) != name}


def forget_failed_starts() -> None:
    """Have this rank's next default group meet the others'.

    torch numbers the groups of a process, and the number is part of their keys in the store. A start that failed on
    this rank alone counts too, until a default group is destroyed.
    """
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def launcher_store(place: RankEnv, timeout: timedelta) -> dist.Store:
    """The launcher's store, with keys of this world alone.

    Raises:
        ValueError: MASTER_ADDR or MASTER_PORT is missing, or is none.
    """
    try:
        store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    except ValueError as error:
        raise ValueError(
            "RANK and WORLD_SIZE need MASTER_ADDR and MASTER_PORT, an address and a free port of rank 0's machine. "
            f"{error}. Start with torchrun, or set them."
        ) from None
    store.set_timeout(timeout)
    return own_keys(store, place.rank)


def raise_on_all(problem: ValueError, place: RankEnv, timeout_s: float) -> NoReturn:
    """Raise on every rank since this one has no device; the others are in, or come to, `ProcessGroups`.

    Args:
        problem: why it has none.
        place: of this rank.
        timeout_s: for the others to come, in seconds; after that it is raised on this rank alone.
    """
    if place.size > 1:
        with suppress(RuntimeError):  # the other ranks did not come
            if dist.is_initialized():
                store = own_keys(dist.distributed_c10d._get_default_store(), place.rank)
            else:
                store = launcher_store(place, timedelta(seconds=timeout_s))
            describe_all(store, place, None, timeout_s, problem=str(problem))
    raise problem
