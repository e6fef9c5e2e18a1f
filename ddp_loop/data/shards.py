"""The shard: a piece of a mini-batch, the unit of arithmetic.

[Note: Shards] A mini-batch of B samples is cut over S shards, and the S shards over N ranks, by one and
the same rule. Everything that depends on how many samples a piece has, remainders, empty ranks,
accumulation, another number of ranks, follows from `split_sizes`; no other module divides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import index
from typing import Any


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """The sizes of `parts` pieces of `total` things: floor(total / parts), and one more for the first ones.

    `split_sizes(128, 7)` is `(19, 19, 18, 18, 18, 18, 18)` and `split_sizes(2, 3)` is `(1, 1, 0)`.

    Raises:
        ValueError: `total` is negative or `parts` is less than 1.
        TypeError: one of them is no whole number.
    """
    total, parts = index(total), index(parts)
    if parts < 1 or total < 0:
        raise ValueError(
            f"a whole number of things (0 or more) is split over 1 or more parts; got {total} over {parts}"
        )
    size, remainder = divmod(total, parts)
    return (size + 1,) * remainder + (size,) * (parts - remainder)


def split_range(total: int, parts: int, part: int) -> range:
    """Which of `total` things lie in piece number `part`, by `split_sizes`.

    `split_range(10, 3, 1)` is `range(4, 7)`.
    """
    sizes = split_sizes(total, parts)
    start = sum(sizes[:part])
    return range(start, start + sizes[part])


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a mini-batch.

    Attributes:
        number: its place among the mini-batch's shards, 0 .. S-1; the same on any number of ranks.
        start: the first of its samples, counted within the mini-batch.
        samples: how many it has; never 0 (an empty shard is not handed out).
    """

    number: int
    start: int
    samples: int


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One step's samples, over all ranks, and the shards of it that this rank carries.

    Attributes:
        epoch: counted from 0.
        position: the mini-batch's place in the epoch, counted from 0.
        start: the epoch's samples before it.
        samples: R, how many it has over all ranks.
        sizes: the samples of each of its S shards; some may be 0.
        shards: those of this rank that are not empty, in order.
        is_last: whether it is the last of an epoch of known length.
        ends_stream: whether the data are a stream that ends here, as all ranks' must.
        first: of a stream, its first sample as it was read, which all ranks must have alike;
        digest: and 32 bits of it.
    """

    epoch: int
    position: int
    start: int
    samples: int
    sizes: tuple[int, ...]
    shards: tuple[Shard, ...]
    ends_stream: bool = False
    first: Any = field(default=None, compare=False, repr=False)
    digest: int = 0
    is_last: bool = False


def cut(sizes: tuple[int, ...], mine: range) -> tuple[Shard, ...]:
    """Of the shards that have `sizes`, those numbered in `mine` that are not empty."""
    bounds = (0, *accumulate(sizes))
    return tuple(Shard(number, bounds[number], sizes[number]) for number in mine if sizes[number])
