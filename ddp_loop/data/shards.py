"""The shard: a piece of a mini-batch, and the unit of arithmetic.

[Note: Shards] `split_sizes` divides the B samples of a mini-batch into S shards, and the S shards over N ranks.
Everything that depends on the size of a piece follows from it: remainders, empty ranks, accumulation, another number
of ranks.

[Note: Shares] Without fixed shards each rank has one shard, and the shard's size follows from the rank's share. With
fixed shards the sizes stay as they are, so the bits do too, and the number of shards that a rank carries follows from
its share. Both are rounded by `split_by_shares`, which for equal shares gives the sizes of `split_sizes`.

[Note: Evaluation] An evaluation adds up numbers, so it needs no shard per rank. It cuts each mini-batch into
`EVALUATED` shards on any number of ranks. Kernels choose the order of their additions by the shape, so equal shapes
give equal bits. Whole shards are dealt to the ranks. A mini-batch of 8 shards gives 3 ranks 3, 3 and 2 of them, and the
next ones give another rank the 2, so that the ranks are equally busy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from operator import index
from typing import Any, Literal

Cut = Literal["halves", "whole", "singles"]  # of the shards, of a mini-batch: one shard, or one for each sample
MEASURED = "measured"
EVALUATED = 8  # shards of an evaluated mini-batch: up to 8 ranks need no more memory than with a shard per rank
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 spread evenly


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


@dataclass(frozen=True, slots=True)
class Announcement:
    """Numbers that each rank announces in a step, in the control word, where ranks have streams of their own.

    Attributes:
        values: this rank's, as many on every rank; 1 on rank 0 and 0 on the others is nothing new.
        is_new: whether one of them is another.
        learn: takes the sums of the values over all ranks.
    """

    values: tuple[int, ...]
    is_new: bool
    learn: Callable[[Sequence[float]], None]


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


def cut(sizes: tuple[int, ...], mine: range) -> tuple[Shard, ...]:
    """The shards with a number in `mine` that are not empty; `sizes` has the samples of all shards."""
    bounds = (0, *accumulate(sizes))
    return tuple(Shard(number, bounds[number], sizes[number]) for number in mine if sizes[number])


def split_by_shares(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """The sizes of pieces of `total` items in proportion to `shares`, by the method of largest remainders.

    Piece r has floor(total s_r / sum(s)) items. The items that are left go to the pieces with the largest remainders,
    the first of equal ones. A share of 0 gives no item. For example::

        split_by_shares(10, (1, 1, 1, 0, 1))  # (3, 3, 2, 0, 2)

    Args:
        total: the number of items, 0 or more.
        shares: of the pieces, each a finite number of 0 or more, and not all 0.
    """
    exact = [Fraction(share) for share in shares]
    whole = sum(exact)
    quotas = [total * share / whole for share in exact]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(sizes)), key=lambda piece: (sizes[piece] - quotas[piece], piece))
    for piece in by_remainder[: total - sum(sizes)]:
        sizes[piece] += 1
    return tuple(sizes)


def check_shares(shares: Any, ranks: int) -> tuple[float, ...]:
    """The shares as floats.

    Args:
        shares: as `Batches` was given them.
        ranks: their number.

    Raises:
        ValueError: they are not one number of 0 or more for each rank, or all are 0.
    """
    if not isinstance(shares, Iterable) or isinstance(shares, str | bytes | Mapping | set | frozenset):
        raise ValueError(
            f'shares must be one number per rank, such as (3, 1), or "measured". Got {shares!r}. Remove shares= for '
            "equal shares."
        )
    numbers = [_as_float(share) for share in shares]
    if len(numbers) != ranks:
        raise ValueError(
            f"shares must have one number per rank. Got {len(numbers)} for {ranks} ranks. Pass {ranks} numbers, or "
            "remove shares=."
        )
    for rank, (number, given) in enumerate(zip(numbers, shares, strict=True)):
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(
                f"Each share must be a finite number of 0 or more. Got {given!r} for rank {rank}. Pass 0 for a rank "
                "that is to idle."
            )
    if not any(numbers):
        raise ValueError(f"At least one rank must have a share. Got {shares!r}. Pass more than 0 for one of them.")
    return tuple(numbers)


def _as_float(share: Any) -> float:
    """A share as a float; NaN if it is no number."""
    try:
        return math.nan if isinstance(share, str | bytes | bool) else float(share)
    except (TypeError, ValueError, OverflowError):
        return math.nan


class Division:
    """The division of mini-batches into shards, and of the shards over the ranks. See [Note: Shares].

    Args:
        shards: S; None for one per rank.
        ranks, rank: of the world.
        shares: one number per rank, "measured", or None for equal shares.
        deals: whether the numbers of a rank's shards change with the mini-batch. See [Note: Evaluation].

    Attributes:
        shards: S.
        shares: of the ranks; None for equal ones.
        asked: the shares as given: numbers, "measured" or None.
        carried: the number of shards of each rank.
        mine: the numbers of this rank's shards.
        cuts: the results of `cut`, by the number of samples, where they do not change with the position.

    Raises:
        ValueError: the shares are no shares (see `check_shares`), or there are fewer shards than ranks with a share.
    """

    def __init__(self, shards: int | None, ranks: int, rank: int, shares: Any = None, *, deals: bool = False) -> None:
        self._is_fixed = shards is not None
        self._ranks = ranks
        self._rank = rank
        self._deals = deals
        self.shards = ranks if shards is None else shards
        is_measured = isinstance(shares, str) and shares == MEASURED
        given = None if shares is None or is_measured else check_shares(shares, ranks)
        self.asked: tuple[float, ...] | str | None = MEASURED if is_measured else given
        with_share = ranks if is_measured else sum(share > 0 for share in given or ())
        if self.shards < with_share:
            raise ValueError(
                f"Each rank with a share needs a shard. Got shares for {with_share} ranks and shards={self.shards}. "
                f"Pass shards={with_share} or more, or a share of 0 for the other ranks."
            )
        self._is_halved = False
        self.give(given)

    def give(self, shares: Sequence[float] | None) -> None:
        """Divide by these shares from now on; every rank must be given the same.

        Args:
            shares: one number per rank; None for equal shares.
        """
        self.shares = None if shares is None else tuple(shares)
        self.cuts: dict[int, tuple[tuple[int, ...], tuple[Shard, ...]]] = {}
        if self.shares is None or not self._is_fixed:
            self.carried = split_sizes(self.shards, self._ranks)
        else:
            self.carried = split_by_shares(self.shards, self.shares)
        first = sum(self.carried[: self._rank])
        self.mine = range(first, first + self.carried[self._rank])

    def halve(self) -> None:
        """Cut each shard into two from now on, where all have two samples; a second call changes nothing."""
        if not self._is_halved:
            self._is_halved = True
            self.use_shards(2 * self.shards)

    def use_shards(self, shards: int) -> None:
        """Cut mini-batches into so many shards from now on."""
        self.shards = shards
        self.give(self.shares)

    @property
    def is_unmeasured(self) -> bool:
        """Whether the shares are to be measured, and were not yet."""
        return self.asked == MEASURED and self.shares is None and self._ranks > 1

    def sizes(self, samples: int) -> tuple[int, ...]:
        """The number of samples in each of the S shards of a mini-batch of so many `samples`."""
        shards = self.shards // 2 if self._is_halved else self.shards
        if self.shares is None or self._is_fixed:
            sizes = split_sizes(samples, shards)
        else:
            sizes = split_by_shares(samples, self.shares)
        if not self._is_halved:
            return sizes
        if 1 in sizes:  # as elsewhere, only the last ones may be empty
            return split_sizes(samples, self.shards)
        return tuple(half for size in sizes for half in split_sizes(size, 2))

    def cut(self, samples: int, position: int) -> tuple[tuple[int, ...], tuple[Shard, ...]]:
        """The sizes of all shards of a mini-batch, and this rank's shards that are not empty.

        Args:
            samples: the number of its samples.
            position: of the mini-batch in its epoch, counted from 0.
        """
        sizes = self.sizes(samples)
        if self._deals:
            return sizes, cut(sizes, self._dealt(min(samples, self.shards), position))
        found = self.cuts[samples] = sizes, cut(sizes, self.mine)
        return found

    def _dealt(self, filled: int, position: int) -> range:
        """The numbers of this rank's shards in a mini-batch whose first `filled` shards are not empty.

        Each rank has its share of them, rounded up in some mini-batches.
        """
        if self.shares is None:
            ends = [(filled * rank + filled * position % self._ranks) // self._ranks for rank in range(1, self._ranks)]
        else:
            parts = [part / sum(self.shares) for part in accumulate(self.shares[:-1])]
            ends = [math.floor(filled * part + position * _GOLDEN % 1) for part in parts]
        return range(*[0, *ends, filled][self._rank : self._rank + 2])
