"""Streams: data that can only be iterated over, cut into mini-batches as they arrive.

[Note: Every rank reads the whole stream] The length of a stream is unknown, so the size of a mini-batch is known only
when its samples have arrived. Each rank reads all samples and keeps those of its own shards. So all ranks know the
sizes, and the mini-batches do not depend on the ranks. Costly work, such as decoding, belongs in `collate_fn` or
`transform`, which run for a rank's own shards only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, TypeVar

from ddp_loop.data.fingerprints import quick
from ddp_loop.data.placement import Places, gpu_in, to_devices
from ddp_loop.data.seeded_dataset import collated
from ddp_loop.data.shards import Division, MiniBatch, Shard
from ddp_loop.determinism import SAMPLE, next_key, preserved_streams, restore_streams, seed_streams, stream_key, streams

Piece = TypeVar("Piece")


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

    def __post_init__(self) -> None:
        if isinstance(self.source, Iterator):
            raise TypeError(
                f"A stream must restart in every epoch. Got {type(self.source).__name__}, which can be iterated once. "
                "Pass an object whose __iter__ returns it."
            )

    def read(
        self, epoch: int, pieces: Iterator[tuple[Piece, list[Any], tuple[Shard, ...]]]
    ) -> Iterator[tuple[Piece, Iterator[Any]]]:
        """The pieces of an epoch, each with the data of its shards on their devices.

        Args:
            epoch: counted from 0.
            pieces: read from the source, each with its samples and this rank's shards of them. Their random states
                continue from one piece to the next, apart from those of the process and of `collate`.

        Raises:
            ValueError: the stream gives no piece, as one that does not restart.
        """
        device = gpu_in(self.places)
        key = stream_key(self.seed, SAMPLE, epoch)
        state: tuple[Any, ...] | None = None
        for position in count():
            with preserved_streams(device):
                if state is not None:
                    restore_streams(state)
                else:
                    seed_streams(key, device)
                    if hasattr(self.source, "set_epoch"):
                        self.source.set_epoch(epoch)
                found = next(pieces, None)
                if found is None:
                    break
                state = streams(device)
                piece, samples, shards = found
                data = []
                for shard in shards:
                    seed_streams(next_key(key, position, shard.number), device)
                    data.append(collated(self.collate, samples[shard.start : shard.start + shard.samples]))
            yield piece, iter([to_devices(one, self.places) for one in data])
        if position == 0:
            what = "too few samples" if self.drop_last else "no samples"
            raise ValueError(
                f"A stream must give a mini-batch in every epoch. In epoch {epoch + 1} it gave {what}. Pass an object "
                "whose __iter__ restarts."
            )

    def mini_batches(self, epoch: int, start: int) -> Iterator[tuple[MiniBatch, Iterator[Any]]]:
        """The mini-batches of an epoch, counted from 1, from position `start` on, with this rank's data."""
        return islice(self.read(epoch - 1, self._pieces(epoch)), start, None)

    def _pieces(self, epoch: int) -> Iterator[tuple[MiniBatch, list[Any], tuple[Shard, ...]]]:
        for position, (samples, is_last) in enumerate(_chunks(iter(self.source), self.size, self.drop_last)):
            sizes, shards = self.division.cut(len(samples), position)
            # Taken before collate_fn runs, on one rank, since that may remove or overwrite parts of the sample.
            first, digest = (_kept(samples[0]), quick(samples[0])) if self.compares else (None, 0)
            place = epoch, position, position * self.size, len(samples)
            yield MiniBatch(*place, sizes, shards, is_last, first, digest), samples, shards


def _kept(sample: Any) -> Any:
    """A copy of the container, which keeps the parts that the sample has now."""
    return type(sample)(sample) if type(sample) in (dict, list) else sample


def _chunks(source: Iterator[Any], size: int, drop_last: bool) -> Iterator[tuple[list[Any], bool]]:
    """Lists of `size` samples, each with whether it is the last; one sample, or `size`, is read ahead for that."""
    ahead = size if drop_last else 1
    chunk = list(islice(source, size))
    while chunk and not (drop_last and len(chunk) < size):
        following = list(islice(source, ahead))
        yield chunk, len(following) < ahead
        if len(following) < ahead:
            return
        chunk = following + list(islice(source, size - len(following)))
