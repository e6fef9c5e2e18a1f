"""The seam for collectives: how tensors travel between the ranks. One class for each way, in a file of its own.

[Note: A backend] `Collectives` starts the same operations in the same order and with the same sizes on every rank, and
knows who failed; a backend only moves and adds. An operation returns its `Work` at once, and its tensors stay untouched
until `wait`. The order in which a sum adds the ranks up is free, but must be one on every rank, so that all have the
same bits; sums in the order of a tree over the shards are made of an exchange and a gather. What fails raises
RuntimeError on the ranks that wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

LOOK_S = 0.5  # how often a wait checks whether it is in vain


class Work(Protocol):
    """An operation under way."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Wait for it."""


class Backend(Protocol):
    """A way for tensors to travel between the ranks. See [Note: A backend]. Every rank must call each `start_...`."""

    size: int

    def start_sum(self, tensor: torch.Tensor) -> Work:
        """Start to add `tensor` up over all ranks, in place."""

    def start_exchange(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Work:
        """Start to send each rank its rows of `sent`, (rows, K), and to receive what all send here, in rank order."""

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        """Start to put every rank's `part`, (K,), side by side into `whole`, (size * K,)."""

    def start_broadcast(self, tensor: torch.Tensor) -> Work:
        """Start to make `tensor` what it is on rank 0, in place."""

    def wait(self, work: Work, in_vain: Callable[[], bool]) -> None:
        """Wait for an operation until its values can be used on their device.

        Args:
            work: the operation.
            in_vain: whether a rank failed, is elsewhere, or takes too long; called every LOOK_S seconds.

        Raises:
            RuntimeError: it failed, or is waited for in vain.
        """

    def cut_off(self) -> None:
        """End what is under way here and on the ranks that wait for this one, which failed."""

    def leave(self, under_way: Collection[Work], *, failed: bool) -> None:
        """Give up what it holds.

        Args:
            under_way: operations that have not ended.
            failed: whether it was cut off.
        """


class TorchBackend:
    """A process group of torch, as it is with NCCL: it finds failures itself, and `wait` holds up the device alone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.size = group, group.size()

    def start_sum(self, tensor: torch.Tensor) -> Work:
        return self._group.allreduce([tensor])

    def start_exchange(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Work:
        return self._group.alltoall_base(received, sent, from_each, to_each)

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        return self._group._allgather_base(whole, part)

    def start_broadcast(self, tensor: torch.Tensor) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([tensor], options)

    def wait(self, work: Work, in_vain: Callable[[], bool]) -> None:
        work.wait()

    def cut_off(self) -> None:
        self._group.abort()

    def leave(self, under_way: Collection[Work], *, failed: bool) -> None:
        """Drop the group: its connections are closed with the last reference."""
        del self._group
