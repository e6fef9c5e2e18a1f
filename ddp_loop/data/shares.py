"""The ranks' shares of each mini-batch, and the division into shards that follows from them.

[Note: Shares] Without fixed shards each rank has one shard, and the shard's size follows from the rank's share. With
fixed shards the sizes stay as they are, so the bits do too, and the number of shards that a rank carries follows from
its share. Both are rounded by `split_by_shares`, which for equal shares gives what `split_sizes` gives.

[Note: Evaluation] An evaluation adds up numbers, so it needs no shard per rank. It cuts each mini-batch into
`EVALUATED` shards on any number of ranks. Kernels choose the order of their additions by the shape, so equal shapes
give equal bits. Whole shards are dealt to the ranks. A mini-batch of 8 shards gives 3 ranks 3, 3 and 2 of them, and the
next ones give another rank the 2, so that the ranks are equally busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ddp_loop.data.shards import Shard, cut, split_sizes

MEASURED = "measured"
EVALUATED = 8  # shards of an evaluated mini-batch: up to 8 ranks need no more memory than with a shard per rank
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 spread evenly


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
        self._cuts: dict[int, tuple[tuple[int, ...], tuple[Shard, ...]]] = {}  # by samples
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
            self.shards *= 2
            self.give(self.shares)

    def _halves(self, samples: int) -> tuple[int, ...]:
        """The sizes of the halves of all shards; as elsewhere, only the last ones may be empty."""
        if self.shares is None or self._is_fixed:
            sizes = split_sizes(samples, self.shards // 2)
        else:
            sizes = split_by_shares(samples, self.shares)
        if 1 in sizes:
            return split_sizes(samples, self.shards)
        return tuple(half for size in sizes for half in split_sizes(size, 2))

    @property
    def is_unmeasured(self) -> bool:
        """Whether the shares are to be measured, and were not yet."""
        return self.asked == MEASURED and self.shares is None and self._ranks > 1

    def sizes(self, samples: int) -> tuple[int, ...]:
        """The number of samples in each of the S shards of a mini-batch of so many `samples`."""
        if self._is_halved:
            return self._halves(samples)
        if self.shares is None or self._is_fixed:
            return split_sizes(samples, self.shards)
        return split_by_shares(samples, self.shares)

    def cut(self, samples: int, position: int) -> tuple[tuple[int, ...], tuple[Shard, ...]]:
        """The sizes of all shards of a mini-batch, and this rank's shards that are not empty.

        Args:
            samples: the number of its samples.
            position: of the mini-batch in its epoch, counted from 0.
        """
        if self._deals:
            sizes = self.sizes(samples)
            return sizes, cut(sizes, self._dealt(min(samples, self.shards), position))
        if samples not in self._cuts:  # an epoch has mini-batches of two sizes at most
            sizes = self.sizes(samples)
            self._cuts[samples] = sizes, cut(sizes, self.mine)
        return self._cuts[samples]

    def _dealt(self, filled: int, position: int) -> range:
        """The numbers of this rank's shards in a mini-batch whose first `filled` shards are not empty."""
        ends = [self._end(rank, filled, position) for rank in (self._rank - 1, self._rank)]
        return range(*ends)

    def _end(self, rank: int, filled: int, position: int) -> int:
        """The number after the last shard of a rank: of their share, rounded up in some mini-batches."""
        if rank < 0 or rank == self._ranks - 1:
            return 0 if rank < 0 else filled
        if self.shares is None:
            return (filled * (rank + 1) + filled * position % self._ranks) // self._ranks
        share = sum(self.shares[: rank + 1]) / sum(self.shares)
        return math.floor(filled * share + position * _GOLDEN % 1)
