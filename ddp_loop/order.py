"""The order in which a mini-batch's shards are added up: a binary tree that does not know the ranks.

[Note: The tree] Floating-point sums depend on their order, so the bits of a fold over S shards are those of one order.
A node stands for the shards first .. end-1; it is the sum of its left half, the larger one where they are unequal, and
its right half. A rank that has the shards of a range adds up the largest whole nodes inside it; only these *pieces*
travel, and are then added up to the root. Since the tree is halved as shards are cut over two ranks, each of 2, 4, 8
ranks has one piece where they divide S. An empty shard adds nothing: -0.0, which leaves also a zero's sign alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ddp_loop.shards import split_range

Node = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Order:
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
def tree_order(shards: int, ranks: int, rank: int) -> Order:
    """The order of the tree over `shards`, for one of the `ranks`. See [Note: The tree]."""
    siblings = dict(_pairs((0, shards)))
    ranges = [split_range(shards, ranks, number) for number in range(ranks)]
    added = [_added_up([(shard, shard + 1) for shard in mine], siblings) for mine in ranges]
    merges, _ = added[rank]
    pieces = [left for _, left in added]
    last_merges, _ = _added_up([node for left in pieces for node in left], siblings)
    counts = tuple(map(len, pieces))
    return Order(tuple(merges), counts, tuple(last_merges), is_any=sum(counts) <= 2 and max(counts) == 1)


@lru_cache(maxsize=64)
def open_order(shards: int, ranks: int, rank: int) -> Order:
    """Each rank's shards one after another, then the ranks in whatever order their sum takes."""
    mine = len(split_range(shards, ranks, rank))
    return Order((0, *(1,) * (mine - 1))[:mine], (1,) * ranks, (0,) * ranks, is_any=True, in_place=True)


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
