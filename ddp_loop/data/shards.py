"""The shard: a piece of a mini-batch, and the unit of arithmetic.

[Note: Shards] `split_sizes` divides the B samples of a mini-batch into S shards, and the S shards over N ranks.
Everything that depends on the size of a piece follows from it: remainders, empty ranks, accumulation, another number
of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index
from typing import Any, Protocol


def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """The sizes of `parts` pieces of `total` items: floor(total / parts), plus 1 for the first total mod parts.

    For example::

        split_sizes(128, 7)  # (19, 19, 18, 18, 18, 18, 18)
        split_sizes(2, 3)    # (1, 1, 0)

    Args:
        total: the number of items, 0 or more.
        parts: the number of pieces, 1 or more.

    Raises:
        ValueError: `total` is negative, or `parts` is less than 1.
        TypeError: one of them is not a whole number.
    """
    total = index(total)
    parts = index(parts)
    if parts < 1 or total < 0:
        raise ValueError(f"split_sizes divides 0 or more items into 1 or more parts. Got {total} into {parts}.")
    size, remainder = divmod(total, parts)
    return (size + 1,) * remainder + (size,) * (parts - remainder)


def split_range(total: int, parts: int, part: int) -> range:
    """The items in piece number `part`, where `split_sizes` divides `total` items into `parts` pieces.

    For example::

        split_range(10, 3, 1)  # range(4, 7)

    Args:
        total: the number of items, 0 or more.
        parts: the number of pieces, 1 or more.
        part: the number of a piece, 0 .. parts - 1.

    Raises:
        ValueError: `total` is negative, or `parts` is less than 1.
        TypeError: one of them is not a whole number.
    """
    sizes = split_sizes(total, parts)
    start = sum(sizes[:part])
    return range(start, start + sizes[part])


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of a mini-batch.

    Attributes:
        number: the shard's place in the mini-batch, 0 .. S - 1, the same on any number of ranks.
        start: the position of its first sample in the mini-batch.
        samples: the number of its samples, never 0: an empty shard is not handed out.
    """

    number: int
    start: int
    samples: int


class Announcement(Protocol):
    """Numbers that each rank announces in a step, in the control word, where ranks have streams of their own.

    Attributes:
        values: this rank's, as many on every rank; 1 on rank 0 and 0 on the others is nothing new.
        is_new: whether one of them is another.
    """

    @property
    def values(self) -> tuple[int, ...]: ...

    @property
    def is_new(self) -> bool: ...

    def learn(self, sums: Sequence[float]) -> None:
        """Take the sums of the values over all ranks."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The samples of one step over all ranks, and this rank's shards of them.

    Attributes:
        epoch: counted from 1.
        position: the mini-batch's place in the epoch, counted from 0.
        start: the number of samples before it in the epoch.
        samples: R, the number of its samples over all ranks.
        sizes: the number of samples in each of its S shards; some may be 0.
        shards: this rank's shards that are not empty, in order.
        is_last: whether it is the last of an epoch whose end is known ahead.
        ends_stream: whether the data are a stream that ends here; it must end here on all ranks.
        first: the first sample of a stream's mini-batch, which must be the same on all ranks.
        digest: 32 bits of `first`.
        announcement: where each rank reads a stream of its own.
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
    announcement: Announcement | None = field(default=None, compare=False, repr=False)

    @property
    def own_samples(self) -> range:
        """The positions in the mini-batch of the samples of this rank's shards, which are neighbors."""
        shards = self.shards
        return range(shards[0].start, shards[-1].start + shards[-1].samples) if shards else range(0)


def cut(sizes: tuple[int, ...], mine: range) -> tuple[Shard, ...]:
    """The shards with a number in `mine` that are not empty; `sizes` has the samples of all shards."""
    bounds = (0, *accumulate(sizes))
    return tuple(Shard(number, bounds[number], sizes[number]) for number in mine if sizes[number])
