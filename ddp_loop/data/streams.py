"""Streams: data that can only be iterated over, which all ranks read, or of which each rank reads its own.

[Note: Every rank reads the whole stream] The length of a stream is unknown, so the size of a mini-batch is known only
when its samples have arrived. Each rank reads all samples and keeps its own shards' samples. So all ranks know
the sizes, and the mini-batches do not depend on the ranks. Costly work, such as decoding, belongs in `collate_fn` or
`transform`, which run for a rank's own shards only.

[Note: Sizes ahead] A rank reads `AHEAD` pieces ahead, and announces the size of the last of them in the control word of
each step. So at the start of a step all ranks know the sizes of all its shards, and whether the epoch ends with it,
without a collective of their own. A step's next mini-batch is made while its word is on the way, from the words before
it: this is why one piece ahead is not enough. An announced value that says nothing new is 1 in the sum over the ranks,
as for the gradients that a word lists, so that a GPU's host reads only the words that say something.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

from ddp_loop.data.fingerprints import quick
from ddp_loop.data.partition import Unused
from ddp_loop.data.placement import Places, gpu_in, to_devices
from ddp_loop.data.seeded_dataset import collated
from ddp_loop.data.shards import Announcement, Division, MiniBatch, Shard, cut, split_range
from ddp_loop.determinism import SAMPLE, next_key, preserved_streams, restore_streams, seed_streams, stream_key, streams
from ddp_loop.distributed import World

AHEAD = 3  # pieces
ANNOUNCED = 2  # values beside the ranks' sizes: the samples that are not used, and the ranks that have more of them
Piece = TypeVar("Piece", MiniBatch, "OwnPiece")
Reading = Iterator[tuple[Piece, Iterator[Any]]]  # pieces, each with the data of this rank's shards


@dataclass(frozen=True)
class StreamReader:
    """Reads a stream in this process, with random generators of its own.

    Args:
        source: an iterable whose iterators each start at the first sample.
        size: the number of samples in a mini-batch, or in a rank's piece of one.
        drop_last: whether to leave out a last mini-batch that is smaller.
        division: into shards, and over the ranks.
        collate: makes a shard's data from a list of samples.
        seed: of the random generators.
        places: where the data go.
        compares: whether the ranks compare the first sample of each mini-batch.
        told: the last epoch given to `set_epoch`, in any pass; empty before the first one.

    Raises:
        TypeError: the source is an iterator, which cannot restart.
    """

    source: Iterable[Any]
    size: int
    drop_last: bool
    division: Division
    collate: Callable[[list[Any]], Any]
    seed: int
    places: Places
    compares: bool = False
    told: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.source, Iterator):
            raise TypeError(
                f"A stream must restart in every epoch. Got {type(self.source).__name__}, which can be iterated once. "
                "Pass an object whose __iter__ returns it."
            )

    def read(self, epoch: int, pieces: Iterator[tuple[Piece, list[Any]]]) -> Reading[Piece]:
        """The pieces of an epoch, each with the data of its shards on their devices.

        Args:
            epoch: counted from 0.
            pieces: read from the source, each with its samples. Reading has random states of its own, which continue
                from one piece to the next.

        Raises:
            ValueError: the stream gives no piece, as one that does not restart.
        """
        device = gpu_in(self.places)
        key = stream_key(self.seed, SAMPLE, epoch)
        state: tuple[Any, ...] | None = None
        for position in count():
            with preserved_streams(device):
                if state is None or self.told != [epoch]:  # another pass may have set its own
                    seed_streams(key, device)
                    if hasattr(self.source, "set_epoch"):
                        self.source.set_epoch(epoch)
                    self.told[:] = [epoch]
                if state is not None:
                    restore_streams(state)
                found = next(pieces, None)
                if found is None:
                    break
                state = streams(device)
            piece, samples = found
            yield piece, self._data(piece.shards, samples, next_key(key, position))
        if position == 0:
            few = f"less than the {self.size} samples of one" if self.drop_last else "no samples"
            smaller = ", a smaller batch_size or drop_last=False" if self.drop_last else ""
            raise ValueError(
                f"A stream must give a mini-batch in every epoch. In epoch {epoch + 1} it gave {few}. Pass an object "
                f"whose __iter__ restarts{smaller}."
            )

    def _data(self, shards: Sequence[Shard], samples: list[Any], key: int) -> Iterator[Any]:
        """The data of each shard, which `collate` makes when they are used."""
        device = gpu_in(self.places)
        for shard in shards:
            with preserved_streams(device):
                seed_streams(next_key(key, shard.number), device)
                data = collated(self.collate, samples[shard.start : shard.start + shard.samples])
            yield to_devices(data, self.places)

    def mini_batches(self, epoch: int) -> Iterator[tuple[MiniBatch, list[Any]]]:
        """The mini-batches of an epoch, counted from 1, with all samples."""
        source = iter(self.source)
        ahead = self.size if self.drop_last else 1  # so many samples tell whether a mini-batch is the last
        samples = list(islice(source, self.size))
        for position in count():
            if not samples or (self.drop_last and len(samples) < self.size):
                return
            following = list(islice(source, ahead))
            is_last = len(following) < ahead
            sizes, shards = self.division.cut(len(samples), position)
            first: Any = samples[0] if self.compares else None
            digest = quick(first) if self.compares else 0
            if type(first) in (dict, list):  # collate_fn, which runs on one rank, may remove or overwrite its parts
                first = type(first)(first)
            place = epoch, position, position * self.size, len(samples)
            yield MiniBatch(*place, sizes, shards, is_last, first, digest), samples
            if is_last:
                return
            samples = following + list(islice(source, self.size - len(following)))


# -- own streams -------------------------------------------------------------------------------------------


class OwnPiece(NamedTuple):
    """A rank's shard of a mini-batch, and the pieces that the rank has read beyond it.

    Attributes:
        shards: the piece as a shard, of its own samples; none of an empty piece.
        sizes: of the piece and the next ones; 0 after the last one.
        beyond: the number of samples after the piece, with those that `drop_last` leaves out.
        is_all: whether the stream has ended.
    """

    shards: tuple[Shard, ...]
    sizes: tuple[int, ...]
    beyond: int
    is_all: bool


def pieces_ahead(stream: StreamReader, rank: int) -> Iterator[tuple[OwnPiece, list[Any]]]:
    """The pieces of a rank's own stream, each with its samples; at the end once an empty one."""
    source = iter(stream.source)
    waiting: deque[list[Any]] = deque()
    left = 0
    is_all = False
    while True:
        while len(waiting) <= AHEAD and not is_all:
            piece = list(islice(source, stream.size))
            is_all = len(piece) < stream.size
            if piece and not (is_all and stream.drop_last):
                waiting.append(piece)
            else:
                left = len(piece)
        piece = waiting.popleft() if waiting else []
        sizes = *map(len, waiting), *(0,) * (AHEAD - len(waiting))
        shards = (Shard(rank, 0, len(piece)),) if piece else ()
        yield OwnPiece(shards, (len(piece), *sizes), sum(sizes) + left, is_all), piece
        if not piece:
            return


@dataclass
class OwnStreams:
    """The mini-batches of which each rank reads its shard from a stream of its own.

    Args:
        batch_size, until, world: of the batches.

    Attributes:
        first: the data of the first shard that was read, from which an empty shard's are made; None before.
        skipped: the number of samples and the data of the first piece, where a run resumed after it; None without.
        unused: the samples of the last epoch that are in no mini-batch; None before its last step is folded.
    """

    batch_size: int
    until: str
    world: World
    first: Any = None
    skipped: tuple[int, Any] | None = None
    unused: Unused | None = None

    def epoch(self, stream: StreamReader, epoch: int, start: int, *, agrees: bool) -> Reading[MiniBatch]:
        """The mini-batches of an epoch from position `start` on, with this rank's data.

        Args:
            stream: this rank's.
            epoch: counted from 1.
            start: counted from 0.
            agrees: whether all ranks iterate together. Otherwise the mini-batches have this rank's part alone.
        """
        pieces = stream.read(epoch - 1, pieces_ahead(stream, self.world.rank))
        if agrees:
            return self._together(pieces, epoch, start)
        if self.until == "first":
            raise ValueError(
                'An evaluation reads each rank\'s own stream to its end. Got until="first". Pass until="all".'
            )
        return self._alone(pieces, epoch)

    def _together(self, pieces: Reading[OwnPiece], epoch: int, start: int) -> Reading[MiniBatch]:
        world = self.world
        ends = any if self.until == "first" else all
        found = self._after(pieces, start)
        sizes = world.gather(found[0].sizes[:AHEAD], "the sizes of the ranks' own streams")
        known = dict(enumerate(zip(*sizes, strict=True), start))  # the sizes of the shards, by position
        self.unused = None

        def is_over(position: int) -> bool:
            return ends(not size for size in known[position])

        def learn(position: int, sums: Sequence[float]) -> None:
            if position + AHEAD in known:  # in a further pass
                return
            fallen = (int(one) - 1 for one in sums[:-ANNOUNCED])
            before = known[position + AHEAD - 1]
            known[position + AHEAD] = tuple(size - less for size, less in zip(before, fallen, strict=True))
            known.pop(position - 1, None)
            if is_over(position + 1):
                self.unused = Unused(int(sums[-2]) - 1, int(sums[-1]) == 1)

        for position in count(start):
            if is_over(position):
                if position == 0:
                    said = "None of them does"
                    remedy = ""
                    if any(known[0]):
                        said = f"That of rank {known[0].index(0)} does not"
                        remedy = ', or until="all"'
                    raise ValueError(
                        f"The ranks' own streams must give an epoch a mini-batch. {said}. Pass objects whose __iter__ "
                        f"restarts{remedy}."
                    )
                return
            here = known[position]
            is_last = is_over(position + 1)
            piece, data = found
            news = self._news(piece, is_last, partial(learn, position))
            place = epoch, position, position * self.batch_size, sum(here), here
            shards = cut(here, range(world.rank, world.rank + 1))
            yield MiniBatch(*place, shards, is_last=is_last, announcement=news), data
            if not is_last:
                found = next(pieces, found)

    def _after(self, pieces: Reading[OwnPiece], start: int) -> tuple[OwnPiece, Iterator[Any]]:
        """The piece at position `start`, or the last one, which is empty, of a stream that ended before."""
        found = next(pieces)
        for position in range(start):
            piece, data = found
            if position == 0 and piece.sizes[0]:
                self.skipped = piece.sizes[0], next(data)
            found = next(pieces, found)
        return found

    def _news(self, piece: OwnPiece, is_last: bool, learn: Callable[[Sequence[float]], None]) -> Announcement:
        """This rank's announcement in the step with a piece."""
        base = 1 if self.world.rank == 0 else 0
        values = [base] * (self.world.size + ANNOUNCED)
        values[self.world.rank] += piece.sizes[-2] - piece.sizes[-1]
        if is_last:
            values[-2] += piece.beyond
            values[-1] += not piece.is_all
        return Announcement(tuple(values), any(value != base for value in values), learn)

    def _alone(self, pieces: Reading[OwnPiece], epoch: int) -> Reading[MiniBatch]:
        rank = self.world.rank
        before = split_range(self.batch_size, self.world.size, rank).start  # draws are by sample
        for position, (piece, data) in enumerate(pieces):
            if samples := piece.sizes[0]:
                here = tuple(samples if other == rank else 0 for other in range(self.world.size))
                place = epoch, position, position * self.batch_size, samples, here
                yield MiniBatch(*place, (Shard(rank, before, samples),)), data

    def check(self, samples: int) -> None:
        """Raise ValueError unless a rank had samples in an epoch iterated alone. Every rank must call this."""
        if not any(self.world.gather(samples, "the samples of the ranks' own streams")):
            raise ValueError(
                "One of the ranks' own streams must have a sample. None of them has. Pass objects whose __iter__ "
                "restarts."
            )
