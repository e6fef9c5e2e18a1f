"""Sums in one order: a binary tree over the shards that does not know the ranks, and the collectives that add along it.

[Note: The tree] Floating-point sums depend on their order, so the bits of a fold over S shards are those of one order.
A node stands for the shards first .. end-1; it is the sum of its left half, the larger one where they are unequal, and
its right half. A rank that has the shards of a range adds up the largest whole nodes inside it; only these *pieces*
travel, and are then added up to the root. Since the tree is halved as shards are cut over two ranks, each of 2, 4, 8
ranks has one piece where they divide S. An empty shard adds nothing: -0.0, which leaves also a zero's sign alone.

[Note: Two ways] Where the order does not matter, and for two pieces, one all-reduce. Else each rank takes a part of the
elements: it is sent that part of every piece, adds the pieces up in the tree's order, and its part of the whole goes to
all: an all-to-all and an all-gather, which carry as much as a ring's all-reduce where every rank has one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch

from ddp_loop.data import split_range
from ddp_loop.distributed import Work, World, as_real

Node = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ReductionOrder:
    """How one rank adds its shards up, and what comes of all ranks.

    Attributes:
        merges: for each of the rank's shards, how often the last two sums are added up once it is there.
        pieces: of each rank: how many sums it is left with, to be sent; 0 for a rank without a shard.
        last_merges: the same as `merges` for all ranks' pieces, in their order.
        is_any: whether any order gives the same bits: two pieces at most on different ranks, since a + b is b + a; or
            the order was left open.
        in_place: whether the rank's shards are added one after another into the same tensors.
    """

    merges: tuple[int, ...]
    pieces: tuple[int, ...]
    last_merges: tuple[int, ...]
    is_any: bool
    in_place: bool = field(default=False)


@lru_cache(maxsize=64)
def tree_order(shards: int, ranks: int, rank: int) -> ReductionOrder:
    """The order of the tree over `shards`, for one of the `ranks`. See [Note: The tree]."""
    siblings = dict(_pairs((0, shards)))
    ranges = [split_range(shards, ranks, number) for number in range(ranks)]
    added = [_added_up([(shard, shard + 1) for shard in mine], siblings) for mine in ranges]
    merges, _ = added[rank]
    pieces = [left for _, left in added]
    last_merges, _ = _added_up([node for left in pieces for node in left], siblings)
    counts = tuple(map(len, pieces))
    return ReductionOrder(tuple(merges), counts, tuple(last_merges), is_any=sum(counts) <= 2 and max(counts) == 1)


@lru_cache(maxsize=64)
def rank_order(shards: int, ranks: int, rank: int) -> ReductionOrder:
    """Each rank's shards one after another, then the ranks in whatever order their sum takes."""
    mine = len(split_range(shards, ranks, rank))
    return ReductionOrder((0, *(1,) * (mine - 1))[:mine], (1,) * ranks, (0,) * ranks, is_any=True, in_place=True)


def _pairs(node: Node) -> Iterator[tuple[tuple[Node, Node], Node]]:
    """Each two siblings below a node, with their parent."""
    first, end = node
    if end - first > 1:
        middle = first + (end - first + 1) // 2
        yield ((first, middle), (middle, end)), node
        yield from _pairs((first, middle))
        yield from _pairs((middle, end))


def _added_up(nodes: Sequence[Node], siblings: dict[tuple[Node, Node], Node]) -> tuple[list[int], list[Node]]:
    """Add up neighbouring nodes as they come: how often after each, and what is left."""
    merges, left = [], []
    for node in nodes:
        left.append(node)
        merges.append(0)
        while len(left) > 1 and (parent := siblings.get((left[-2], left[-1]))) is not None:
            left[-2:] = [parent]
            merges[-1] += 1
    return merges, left


Sum = TypeVar("Sum")
IDENTITY = -0.0  # x + -0.0 is x to the bit, also where x is -0.0


def fill_identity(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor one that adds nothing, and return it; of a complex one both parts."""
    as_real(tensor).fill_(IDENTITY)
    return tensor


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


def padded(length: int, order: ReductionOrder) -> int:
    """The length of a row with room for `length` values, in a part for each rank where parts are sent."""
    ranks = len(order.pieces)
    return length if order.is_any else -(-length // ranks) * ranks


class FlatAllReduce:
    """The way of one flat tensor over the ranks: `start`, `fold`, `finish`; again for each step.

    Args:
        world: from `join_world`.
        order: of the shards.
        length: of the rows; what `padded` gives.
        dtype, device: theirs.
    """

    def __init__(
        self, world: World, order: ReductionOrder, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._world, self._order = world, order
        self._length, self._dtype, self._device = length, dtype, device
        self._pieces = [max(1, pieces) for pieces in order.pieces]  # without shards one of -0.0: the tail rides in it
        self._work: Work | None = None
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
        return [fill_identity(torch.empty(self._length, dtype=self._dtype, device=self._device)) for _ in range(pieces)]

    def start(self, rows: Sequence[torch.Tensor]) -> None:
        """Send this rank's pieces; the sum will be in the first of `rows`. Every rank must call this."""
        rows = [as_real(row).reshape(-1) for row in rows]  # no backend adds complex numbers up
        self._flat = rows[0]
        if self._order.is_any:
            self._work = self._world.start_sum(rows[0])
            return
        ranks = self._world.size
        pieces = torch.stack(tuple(rows)) if len(rows) > 1 else rows[0]
        self._sent = pieces.view(len(rows), ranks, -1).transpose(0, 1).reshape(ranks * len(rows), -1)
        if self._received is None:
            self._received = rows[0].new_empty(sum(self._pieces), len(rows[0]) // ranks)
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


def finish_all(sums: Sequence[FlatAllReduce], meanwhile: Callable[[], None] = nothing) -> None:
    """Fold and finish sums that have all been started; `meanwhile` is called first. Every rank must call this."""
    meanwhile()
    for one in sums:
        one.fold()
    for one in sums:
        one.finish()
