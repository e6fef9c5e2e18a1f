"""The order of a step's sum: a binary tree over the shards that does not depend on the ranks.

[Note: The tree] Floating-point sums depend on their order, so a fold over S shards has the bits of one order. A node
stands for the shards first .. end-1. It is the sum of its left half, which is the larger one, and its right half. A
rank adds up the largest whole nodes inside its range of shards. Only these *pieces* travel, and all ranks add them up
to the root. The tree is halved as shards are cut over two ranks, so each of 2, 4 or 8 ranks has one piece where they
divide S. An empty shard adds -0.0, which also leaves the sign of a zero alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

from ddp_loop.data import split_sizes
from ddp_loop.distributed import PieceOrder, SumNode, merges_of, nodes_inside


@dataclass(frozen=True, slots=True)
class ReductionOrder(PieceOrder):
    """How one rank adds up its shards, and how the pieces of all ranks are added up.

    Attributes:
        pieces, last_merges, is_any: as in `PieceOrder`; any order of two pieces gives the same bits (a + b is b + a).
        merges: for each of the rank's shards, how often the last two sums are added up after it.
        in_place: whether the rank's shards are added one after another into the same tensors.
        mine: the numbers of the rank's shards.
    """

    merges: tuple[int, ...]
    in_place: bool = False
    mine: range = range(0)


@lru_cache(maxsize=64)
def tree_order(shards: int, ranks: int, rank: int, carried: tuple[int, ...] | None = None) -> ReductionOrder:
    """The order of the tree over `shards`, for one of the `ranks`. See [Note: The tree].

    Args:
        shards, ranks, rank: S; the number of ranks, and the one.
        carried: the number of shards of each rank; by default `split_sizes(shards, ranks)`.
    """
    tree = _halved(0, shards)
    ranges = _ranges(carried or split_sizes(shards, ranks))
    pieces = [list(nodes_inside(tree, mine.start, mine.stop)) for mine in ranges]
    counts = tuple(map(len, pieces))
    return ReductionOrder(
        counts,
        tuple(merges_of(tree, set(chain(*pieces)))),
        is_any=sum(counts) <= 2 and max(counts) == 1,
        merges=tuple(chain(*(merges_of(node, ()) for node in pieces[rank]))),
        in_place=len(ranges[rank]) <= 1,  # there is nothing to add up
        mine=ranges[rank],
    )


@lru_cache(maxsize=64)
def rank_order(shards: int, ranks: int, rank: int, carried: tuple[int, ...] | None = None) -> ReductionOrder:
    """Each rank's shards one after another, then the ranks in any order. Args as for `tree_order`."""
    mine = _ranges(carried or split_sizes(shards, ranks))[rank]
    merges = (0, *(1,) * (len(mine) - 1))[: len(mine)]
    one_by_one = (0, *(1,) * (ranks - 1))
    return ReductionOrder((1,) * ranks, one_by_one, is_any=True, merges=merges, in_place=True, mine=mine)


def _ranges(counts: tuple[int, ...]) -> list[range]:
    """The shards of each rank, which are neighbors."""
    return [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


def _halved(first: int, end: int) -> SumNode:
    """The tree over neighbouring shards; see [Note: The tree]."""
    if end - first <= 1:
        return SumNode(first, end)
    middle = first + (end - first + 1) // 2
    return SumNode(first, end, (_halved(first, middle), _halved(middle, end)))
