"""The process groups of a world: one for the sums of steps, one for all else.

[Note: Two groups] gloo aborts the process when ranks meet in sums of different sizes. The sums of a step have sizes
that all ranks agreed on; everything else begins with a header of fixed size, in a group of its own. So where one rank
evaluates and the others fold, all wait, and an error names the rank. The order of all collectives is still the same on
every rank.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed.rendezvous import rendezvous

from ddp_loop.accelerators import accelerator_of
from ddp_loop.distributed.backend import Backend, TorchBackend, Work
from ddp_loop.distributed.devices import RankEnv
from ddp_loop.distributed.failures import PeerFailed
from ddp_loop.distributed.gloo import GlooBackend, accepted, cut, free_kept, open_sockets
from ddp_loop.distributed.store import own_keys


class ProcessGroups:
    """Joins the ranks of a launcher, or takes the process group that the script made.

    Args:
        place: numbers of this rank.
        device: of this rank.
        timeout_s: of each collective, in seconds.

    Attributes:
        steps: the backend of the steps' sums, on the default group.
        others: the backend of all other collectives, over the CPU.
        backends: torch's description of the default group, such as "cpu:gloo,cuda:nccl".
        store: the launcher's, with keys of this world alone.

    Raises:
        PeerFailed: not all ranks joined.
        ValueError: the script's group is not that of the launcher, or has no backend for the CPU.
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
                f"The process group must match the launcher's RANK and WORLD_SIZE. It has rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, the environment has {place.rank} of {place.size}. Leave the group to "
                "join_world."
            )
        steps = dist.distributed_c10d._get_default_group()
        self._require_cpu_sums(steps)
        self.backends = str(dist.get_backend_config(steps))
        self.store = own_keys(dist.distributed_c10d._get_default_store(), place.rank)
        self._others = self._make_others(place, timeout_s)
        waits_itself = steps._get_backend(device).name() == "nccl"
        self.steps: Backend = TorchBackend(steps) if waits_itself else GlooBackend(steps)
        self.others: Backend = GlooBackend(self._others)
        self.connections = {number: name for number, name in open_sockets().items() if self._before.get(number) != name}

    def store_aside(self) -> dist.Store:
        """The same store through another connection."""
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
                "The process group needs a backend for the CPU too. This one has "
                f'{dist.get_backend_config(group)}. Use init_process_group("cpu:gloo,cuda:nccl"), or leave the group '
                "to join_world."
            ) from error

    def _start(self, place: RankEnv, device: torch.device, timeout_s: float) -> None:
        try:
            store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=self._timeout))
            store.set_timeout(self._timeout)
            self._before = open_sockets()  # without the store's, from which the others read why rank 0 failed
            dist.init_process_group(
                accelerator_of(device).backends(place.local_size),
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
        """Cut the connections of this rank, which failed, so that no peer waits for the timeout."""
        cut(self.connections)
        if dist.is_initialized():
            for backend in (self.others, self.steps) if self._owns else (self.others,):
                backend.cut_off()

    def leave(self, under_way: Collection[Work], *, failed: bool) -> None:
        """Give the groups up; as `Backend.leave`."""
        cut(accepted(self.connections))  # gloo needs up to 10 ms to close an open connection
        self.others.leave((), failed=False)
        self.steps.leave(under_way, failed=failed and self._owns)
        if dist.is_initialized():
            dist.destroy_process_group(None if self._owns else self._others)
        del self._others


def _not_all_came(place: RankEnv, timeout_s: float, error: RuntimeError) -> PeerFailed:
    return PeerFailed(
        f"All {place.size} ranks must join within timeout_s={timeout_s:g}. Rank {place.rank} did not reach them all. "
        f"Read what the others printed, and check MASTER_ADDR and MASTER_PORT. The cause: {error}"
    )
