"""Streams of which each rank reads its own, of unknown and unequal length.

[Note: Sizes ahead] A rank reads `AHEAD` pieces ahead, and announces the size of the last of them in the control word of
each step. So at the start of a step all ranks know the sizes of all its shards, and whether the epoch ends with it,
without a collective of their own. A step's next mini-batch is made while its word is on the way, from the words before
it: this is why one piece ahead is not enough. An announced value that says nothing new is 1 in the sum over the ranks,
as for the gradients that a word lists, so that a GPU's host reads only the words that say something.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from ddp_loop.data.partition import Unused, piece_sizes
from ddp_loop.data.shards import MiniBatch, Shard, cut, split_range
from ddp_loop.data.streams import ReadSoFar, StreamBatch, StreamBatcher
from ddp_loop.determinism import preserved_streams
from ddp_loop.distributed import World

AHEAD = 3  # pieces
ANNOUNCED = 2  # values beside the ranks' sizes: the samples that are not used, and the ranks that have more of them


def pieces_ahead(source: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[tuple[list[Any], ReadSoFar]]:
    """Lists of `size` samples, the last one perhaps shorter, each with what was read beyond it; at the end [] once."""
    waiting: deque[list[Any]] = deque()
    left = 0
    is_all = False
    while True:
        while len(waiting) <= AHEAD and not is_all:
            piece = list(islice(source, size))
            is_all = len(piece) < size
            if piece and not (is_all and drop_last):
                waiting.append(piece)
            else:
                left = len(piece)
        piece = waiting.popleft() if waiting else []
        sizes = *map(len, waiting), *(0,) * (AHEAD - len(waiting))
        yield piece, ReadSoFar(sizes, sum(sizes) + left, is_all)
        if not piece:
            return


@dataclass
class OwnStreamBatcher(StreamBatcher):
    """A rank's own stream, in the pieces that are its shard of each mini-batch: `batch_size` is that of a piece."""

    def __iter__(self) -> Generator[StreamBatch, None, None]:
        pieces = pieces_ahead(iter(self.source), self.batch_size, drop_last=self.drop_last)
        for position, (samples, beyond) in enumerate(pieces):
            shards = (Shard(self.division.mine.start, 0, len(samples)),) if samples else ()
            with preserved_streams(self.device):  # the generators for reading are apart from those of collate_fn
                data = tuple(self._shard(position, shard, samples) for shard in shards)
            yield StreamBatch(len(samples), None, 0, not beyond.sizes[0], shards, data, beyond)


class SizesAhead:
    """The sizes of the ranks' pieces in an epoch, as far as all ranks know them. See [Note: Sizes ahead].

    Args:
        world: from `join_world`.
        until: whether the epoch ends when "all" streams have ended, or the "first".

    Attributes:
        unused: the samples that are in no mini-batch; None before the epoch's last step.
    """

    def __init__(self, world: World, until: str) -> None:
        self._world = world
        self._ends = any if until == "first" else all
        self._sizes: dict[int, tuple[int, ...]] = {}  # of the shards, by position
        self.unused: Unused | None = None

    def begin(self, position: int, own: Sequence[int]) -> None:
        """Exchange the sizes of the first `AHEAD` pieces from `position` on. Every rank must call this.

        Raises:
            ValueError: the epoch has no mini-batch.
        """
        sizes = self._world.gather(tuple(own), "the sizes of the ranks' own streams")
        self._sizes = dict(enumerate(zip(*sizes, strict=True), position))
        if position == 0 and self.is_over(0):
            empty = [rank for rank, one in enumerate(self._sizes[0]) if not one]
            said = "None of them does" if len(empty) == self._world.size else f"That of rank {empty[0]} does not"
            raise ValueError(
                f"The ranks' own streams must give an epoch a mini-batch. {said}. Pass objects whose __iter__ restarts"
                + ("." if len(empty) == self._world.size else ', or until="all".')
            )

    def is_over(self, position: int) -> bool:
        """Whether the epoch has no mini-batch at this position."""
        return self._ends(not size for size in self._sizes[position])

    def at(self, position: int) -> tuple[int, ...]:
        """The sizes of the shards at this position."""
        return self._sizes[position]

    def announce(self, position: int, own: Sequence[int], beyond: ReadSoFar) -> SizesNews:
        """This rank's news in the step at `position`: the last two sizes of `own`, and what it has read `beyond`."""
        base = 1 if self._world.rank == 0 else 0
        values = [base] * (self._world.size + ANNOUNCED)
        values[self._world.rank] += own[-2] - own[-1]
        if self.is_over(position + 1):
            values[-2] += beyond.samples
            values[-1] += not beyond.is_all
        return SizesNews(self, position, tuple(values), is_new=any(value != base for value in values))

    def learn(self, position: int, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' news in the step at `position`; those of a further pass are left out."""
        if position + AHEAD in self._sizes:
            return
        fallen = (int(one) - 1 for one in sums[:-ANNOUNCED])
        before = self._sizes[position + AHEAD - 1]
        self._sizes[position + AHEAD] = tuple(size - less for size, less in zip(before, fallen, strict=True))
        self._sizes.pop(position - 1, None)
        if self.is_over(position + 1):
            self.unused = Unused(int(sums[-2]) - 1, int(sums[-1]) == 1)


@dataclass(frozen=True, slots=True)
class SizesNews:
    """What a rank announces in a step, and what all ranks learn from the sum; see `shards.Announcement`."""

    _sizes: SizesAhead
    _position: int
    values: tuple[int, ...]
    is_new: bool

    def learn(self, sums: Sequence[float]) -> None:
        self._sizes.learn(self._position, sums)


class OwnStreams:
    """The mini-batches of which each rank reads its shard from a stream of its own.

    Args:
        batch_size, until, world: of the batches.

    Attributes:
        piece: the number of samples that this rank's stream gives a mini-batch.
        announced: the number of values that each rank announces in a step.
        nothing: the data of an empty shard, once a piece was read; None before.
        samples: the number of this rank's samples in the last epoch that it iterated alone.
    """

    def __init__(self, batch_size: int, until: str, world: World) -> None:
        self._batch_size = batch_size
        self._until = until
        self._world = world
        self.piece = piece_sizes(batch_size, world.size)[world.rank]
        self._sizes = SizesAhead(world, until)
        self.announced = world.size + ANNOUNCED
        self.nothing: Any = None
        self.samples = 0

    @property
    def unused(self) -> Unused | None:
        """The samples of the last epoch that are in no mini-batch; None before its last step is folded."""
        return self._sizes.unused

    def epoch(
        self, pieces: Iterator[StreamBatch], epoch: int, start: int, *, agrees: bool
    ) -> Iterator[tuple[MiniBatch, tuple[Any, ...]]]:
        """The mini-batches of an epoch from position `start` on, with this rank's data.

        Args:
            pieces: of this rank's stream.
            epoch: counted from 1.
            start: counted from 0.
            agrees: whether all ranks iterate together. Otherwise the mini-batches have this rank's part alone.
        """
        if not agrees and self._until == "first":
            raise ValueError(
                'An evaluation reads each rank\'s own stream to its end. Got until="first". Pass until="all".'
            )
        return self._together(pieces, epoch, start) if agrees else self._alone(pieces, epoch)

    def _together(
        self, pieces: Iterator[StreamBatch], epoch: int, start: int
    ) -> Iterator[tuple[MiniBatch, tuple[Any, ...]]]:
        world = self._world
        sizes = SizesAhead(self._world, self._until)
        self._sizes = sizes
        piece = next(pieces)
        for _ in range(start):
            piece = next(pieces, piece)
        sizes.begin(start, _known(piece)[:AHEAD])
        for position in count(start):
            if sizes.is_over(position):
                return
            here = sizes.at(position)
            place = epoch, position, position * self._batch_size, sum(here), here
            shards = cut(here, range(world.rank, world.rank + 1))
            is_last = sizes.is_over(position + 1)
            news = sizes.announce(position, _known(piece), piece.beyond)
            yield MiniBatch(*place, shards, is_last=is_last, announcement=news), piece.data
            if not is_last:
                piece = next(pieces, piece)

    def _alone(self, pieces: Iterator[StreamBatch], epoch: int) -> Iterator[tuple[MiniBatch, tuple[Any, ...]]]:
        self.samples = 0
        ranks = range(self._world.size)
        before = split_range(self._batch_size, self._world.size, self._world.rank).start  # draws are by sample
        for position, piece in enumerate(pieces):
            if piece.samples:
                self.samples += piece.samples
                here = tuple(piece.samples if rank == self._world.rank else 0 for rank in ranks)
                place = epoch, position, position * self._batch_size, piece.samples, here
                yield MiniBatch(*place, (Shard(self._world.rank, before, piece.samples),)), piece.data

    def check(self, world: World) -> None:
        """Raise ValueError unless a rank had a sample in an epoch iterated alone. Every rank must call this."""
        if not any(world.gather(self.samples, "the samples of the ranks' own streams")):
            raise ValueError(
                "One of the ranks' own streams must have a sample. None of them has. Pass objects whose __iter__ "
                "restarts."
            )


def _known(piece: StreamBatch) -> tuple[int, ...]:
    """The size of a piece and those of the next ones; 0 after the last."""
    return piece.samples, *piece.beyond.sizes
