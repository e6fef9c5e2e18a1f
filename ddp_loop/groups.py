"""The process groups of a world: one for the sums of steps, one for all else, so that the two never meet.

[Note: Two groups] gloo ends the process when ranks meet in sums of different sizes. The sums of a step have sizes
that all ranks agreed on; everything else begins with a header of one size, in a group of its own. So a rank that
evaluates where others fold waits, as they do, and is named; nobody dies. The order of all collectives is still one and
the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist

# The default group is a default argument there. Imported later (the first optimizer does, by way of
# torch._dynamo), it would hold the group for ever: then the connections of a rank that failed stay open, and
# its peers wait for the timeout instead of 0.1 s.
import torch.distributed.nn.functional
from torch.distributed.rendezvous import rendezvous

from ddp_loop.connections import accepted, cut, free_kept, keep_while_busy, open_sockets
from ddp_loop.devices import Place
from ddp_loop.words import PeerFailed, own_keys


class Groups:
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

    def __init__(self, place: Place, device: torch.device, timeout_s: float) -> None:
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
        self._demand_cpu_sums(self.steps)
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
    def _demand_cpu_sums(group: dist.ProcessGroup) -> None:
        try:
            group._get_backend(torch.device("cpu"))
        except RuntimeError as error:
            raise ValueError(
                "the process group must have a backend for the CPU too, over which the ranks agree; this one has "
                f'{dist.get_backend_config(group)}: init_process_group("cpu:gloo,cuda:nccl"), or leave it out: '
                "join_world makes a group"
            ) from error

    def _start(self, place: Place, device: torch.device, timeout_s: float) -> None:
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

    def _make_others(self, place: Place, timeout_s: float) -> dist.ProcessGroup:
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


def _not_all_came(place: Place, timeout_s: float, error: RuntimeError) -> PeerFailed:
    return PeerFailed(
        f"all {place.size} ranks must join within timeout_s={timeout_s:g}; rank {place.rank} did not "
        f"meet them all: look at what the others printed, and at MASTER_ADDR and MASTER_PORT: {error}"
    )
