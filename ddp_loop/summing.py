"""What pieces of a sum go through to become one sum on every rank.

[Note: Two ways] Where the order does not matter, and for two pieces, one all-reduce. Else each rank takes a part of the
elements: it is sent that part of every piece, adds the pieces up in the tree's order, and its part of the whole goes to
all: an all-to-all and an all-gather, which carry as much as a ring's all-reduce where every rank has one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_loop.order import Order
from ddp_loop.world import World

Sum = TypeVar("Sum")
IDENTITY = -0.0  # x + -0.0 is x to the bit, also where x is -0.0


def merge(sums: list[Sum | None], times: int, add: Callable[[Sum, Sum], object]) -> list[Sum]:
    """Add the last two of `sums` up, the right one into the left one, so many times; None is an empty shard's.

    Returns:
        Those that are not needed any more.
    """
    freed: list[Sum] = []
    for _ in range(times):
        right = sums.pop()
        left = sums[-1]
        if left is None:
            sums[-1] = right
        elif right is not None:
            add(left, right)
            freed.append(right)
    return freed


def padded(length: int, order: Order) -> int:
    """The length of a row with room for `length` values, in a part for each rank where parts are sent."""
    ranks = len(order.pieces)
    return length if order.is_any else -(-length // ranks) * ranks


class Summing:
    """The way of one flat tensor over the ranks: `start`, `fold`, `finish`; again for each step.

    Args:
        world: from `join_world`.
        order: of the shards.
        length: of the rows; what `padded` gives.
        dtype, device: theirs.
    """

    def __init__(self, world: World, order: Order, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._world, self._order = world, order
        self._length, self._dtype, self._device = length, dtype, device
        self._pieces = [max(1, pieces) for pieces in order.pieces]  # without shards one of -0.0: the tail rides in it
        self._work: dist.Work | None = None
        self._flat: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._received: torch.Tensor | None = None

    @property
    def under_way(self) -> bool:
        """Whether it was started and is not finished."""
        return self._flat is not None

    def nothing(self) -> list[torch.Tensor]:
        """This rank's rows, new ones, that add nothing."""
        pieces = self._pieces[self._world.rank]
        return [torch.full((self._length,), IDENTITY, dtype=self._dtype, device=self._device) for _ in range(pieces)]

    def start(self, rows: Sequence[torch.Tensor]) -> None:
        """Send this rank's pieces; the sum will be in the first of `rows`. Every rank must call this."""
        self._flat = rows[0]
        if self._order.is_any:
            self._work = self._world.start_sum(rows[0])
            return
        ranks = self._world.size
        pieces = torch.stack(tuple(rows)) if len(rows) > 1 else rows[0]
        self._sent = pieces.view(len(rows), ranks, -1).transpose(0, 1).reshape(ranks * len(rows), -1)
        if self._received is None:
            self._received = rows[0].new_empty(sum(self._pieces), self._length // ranks)
        self._work = self._world.start_exchange(self._received, self._sent, self._pieces, [len(rows)] * ranks)

    def fold(self) -> None:
        """Add this rank's part of all pieces up, and send it to all. Every rank must call this."""
        if self._order.is_any or self._received is None or self._flat is None:
            return
        self._world.finish(self._work)
        rows, merges = iter(self._received), iter(self._order.last_merges)
        sums: list[torch.Tensor | None] = []
        others: list[torch.Tensor] = []  # of ranks without shards: their tails
        for pieces in self._order.pieces:
            if not pieces:
                others.append(next(rows))
            for _ in range(pieces):
                sums.append(next(rows))
                merge(sums, next(merges), torch.Tensor.add_)
        whole = self._received[0]  # that of rank 0, which has the first shard
        for row in others:
            whole.add_(row)
        self._work = self._world.start_gather(self._flat, whole)

    def finish(self) -> None:
        """Wait until the sum is there."""
        self._world.finish(self._work)
        self._work = self._flat = self._sent = None


def nothing() -> None:
    """What is done meanwhile where there is nothing to do."""


def finish_all(sums: Sequence[Summing], meanwhile: Callable[[], None] = nothing) -> None:
    """Fold and finish sums that have all been started; `meanwhile` is called first. Every rank must call this."""
    meanwhile()
    for one in sums:
        one.fold()
    for one in sums:
        one.finish()
