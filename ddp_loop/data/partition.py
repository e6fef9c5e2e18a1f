"""Data whose samples belong to shards: each shard takes its samples from a part of its own.

[Note: Parts] An epoch has an order of all samples that it uses, mini-batch after mini-batch and in each shard after
shard. With `partition="global"` that order is a permutation of the data. Here it is woven from one permutation per
part. So a reader of "samples k to k + n of the epoch" does not know about parts, and everything follows from the
shards: a fixed number of them gives the same mini-batches on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ddp_loop.data.shards import MiniBatch, Shard, cut, split_sizes
from ddp_loop.determinism import next_key, permutation

PARTITIONS = ("global", "local", "own")
UNTIL = ("all", "first")


class Unused(NamedTuple):
    """The samples of an epoch that are in none of its mini-batches; as text "3 samples" or "at least 3 samples".

    Attributes:
        samples: their number, over all ranks.
        is_exact: whether there are no more: a stream that was not read to its end may have more.
    """

    samples: int
    is_exact: bool = True

    def __str__(self) -> str:
        return f"{'' if self.is_exact else 'at least '}{self.samples} sample{'' if self.samples == 1 else 's'}"


def check_partition(
    partition: str,
    until: str,
    shards: int | None,
    shares: object,
    ranks: int,
    length: int | None,
    *,
    is_stream: bool,
) -> None:
    """Raise ValueError unless both are known and fit the data.

    Args:
        partition, until, shards: as given.
        shares: as given.
        ranks: their number.
        length: of the data; None without one.
        is_stream: whether each rank reads a stream of its own.
    """
    for name, value, allowed in (("partition", partition, PARTITIONS), ("until", until, UNTIL)):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}. Got {value!r}.")
    if partition == "global" and until != "all":
        raise ValueError(
            f'until="{until}" is for data in parts, which end at different mini-batches. Got partition="global". Pass '
            'partition="local" or "own", or remove until=.'
        )
    if partition != "global" and length is None and not is_stream:
        raise ValueError(
            f'partition="{partition}" needs data with a length, or a stream. These have none. Pass length=, or a data '
            "set with a length."
        )
    is_own = partition == "own" or is_stream
    if is_own and shares is not None:
        raise ValueError(
            f"Each rank reads all samples of its own data, so they follow no shares. Got shares={shares!r}. Remove "
            "shares=."
        )
    if partition != "global" and shards is None and shares is not None:
        raise ValueError(
            f"The shares of data in parts are numbers of shards, each with its part. Got shares={shares!r} and "
            f'partition="{partition}" without shards. Pass shards=, or remove shares=.'
        )
    if is_own and shards not in (None, ranks):
        raise ValueError(
            f"Data that each rank has of its own make one shard per rank. Got shards={shards} on {ranks} ranks. Remove "
            "shards=."
        )


def piece_sizes(batch_size: int, parts: int) -> tuple[int, ...]:
    """The number of samples that a mini-batch takes from each part.

    Raises:
        ValueError: a part gives none.
    """
    if batch_size < parts:
        raise ValueError(
            f"A mini-batch takes samples from each part of the data. Got batch_size={batch_size} for {parts} parts, "
            "one per shard. Use a larger batch_size, or fewer shards."
        )
    return split_sizes(batch_size, parts)


class Parts:
    """The mini-batches of data in parts. See [Note: Parts].

    Mini-batch p has samples p b_s .. (p + 1) b_s - 1 of the order of each part s, fewer where the part ends, then none.

    Args:
        sizes: n_s, the number of samples in each part; part s follows part s - 1 in the data.
        batch_size: of which b_s = split_sizes(batch_size, S)[s] are from part s. None takes all of each part.
        until: whether an epoch ends when "all" parts are done, or the "first".
        drop_last: whether each part leaves out its last piece if that is smaller.

    Attributes:
        sizes: as given.
        steps: the number of mini-batches in an epoch.
        samples: the number of samples in them.

    Raises:
        ValueError: a part gives no sample to a mini-batch, or an epoch has no mini-batch.
    """

    def __init__(self, sizes: Sequence[int], batch_size: int | None, until: str, *, drop_last: bool) -> None:
        self.sizes = tuple(sizes)
        of_parts = np.array(sizes)
        self._pieces = np.maximum(1, of_parts) if batch_size is None else np.array(piece_sizes(batch_size, len(sizes)))
        numbers = of_parts // self._pieces if drop_last else -(-of_parts // self._pieces)
        self.steps = int(numbers.min() if until == "first" else numbers.max())
        if self.steps == 0 and any(sizes):
            raise ValueError(
                f"An epoch must have a mini-batch. Parts of {list(sizes)} samples with batch_size={batch_size}, "
                f'drop_last={drop_last} and until="{until}" give none. Use a smaller batch_size, drop_last=False or '
                'until="all".'
            )
        self._used = np.minimum(of_parts, np.minimum(numbers, self.steps) * self._pieces)
        self.samples = int(self._used.sum())

    def mini_batch(self, epoch: int, position: int, mine: range) -> MiniBatch:
        """That mini-batch of an epoch, counted from 1, with the shards whose numbers are in `mine`."""
        before = np.minimum(self._used, position * self._pieces)
        sizes = tuple(np.minimum(self._pieces, self._used - before).tolist())
        place = epoch, position, int(before.sum()), sum(sizes), sizes
        return MiniBatch(*place, cut(sizes, mine), is_last=position + 1 == self.steps)

    @property
    def positions_of_sizes(self) -> list[int]:
        """The positions of mini-batches that together have all sizes of shards of an epoch."""
        ends = set(((self._used - 1) // self._pieces)[self._used > 0].tolist())
        return sorted({0} | {at for end in ends for at in (end, end + 1) if at < self.steps})

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> torch.Tensor:
        """The positions in the data of an epoch's samples, (samples,) int64 on the CPU.

        Args:
            seed: of the order; each part has a permutation of its own.
            epoch: counted from 0.
            shuffle: whether a part's samples come in another order in each epoch.
        """
        offset = 0
        taken = []
        position = []  # of the mini-batch of each sample
        pieces = self._pieces.tolist()
        for part, (size, used, piece) in enumerate(zip(self.sizes, self._used.tolist(), pieces, strict=True)):
            place = torch.arange(used, device="cpu")
            taken.append((permutation(next_key(seed, part), epoch, size)[:used] if shuffle else place) + offset)
            position.append(place // piece)
            offset += size
        return torch.cat(taken)[torch.cat(position).argsort(stable=True)]


@dataclass(frozen=True)
class OwnPieces:
    """The mini-batches of an evaluation of data of which each rank has its own: a rank's pieces, of one shard each.

    The ranks' data count as one after the other, and so do their pieces. So their numbers do not depend on the ranks,
    where the data of each rank but the last make whole pieces.

    Args:
        sizes: the number of samples of each rank.
        piece: the number of samples of a piece.
        rank: of this process.
    """

    sizes: tuple[int, ...]
    piece: int
    rank: int

    @property
    def steps(self) -> int:
        """The number of this rank's pieces."""
        return -(-self.sizes[self.rank] // self.piece)

    def mini_batch(self, epoch: int, position: int, mine: range) -> MiniBatch:
        """This rank's piece number `position`, counted from 0; an epoch is counted from 1."""
        others = self.sizes[: self.rank]
        start = position * self.piece
        samples = min(self.piece, self.sizes[self.rank] - start)
        place = epoch, sum(-(-size // self.piece) for size in others) + position, sum(others) + start, samples
        return MiniBatch(*place, (samples,), (Shard(0, 0, samples),), is_last=position + 1 == self.steps)
