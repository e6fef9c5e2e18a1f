"""Streams: data that can only be iterated over, cut into mini-batches as they arrive.

[Note: Every rank reads the whole stream] The length of a stream is unknown, so the size of a mini-batch is known only
when its samples have arrived. Each rank reads all samples and keeps those of its own shards. So all ranks know the
sizes, and the mini-batches do not depend on the ranks. Costly work, such as decoding, belongs in `collate_fn` or
`transform`, which run for a rank's own shards only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from ddp_loop.data.fingerprints import quick
from ddp_loop.data.placement import Places, to_devices
from ddp_loop.data.seeded_dataset import collated
from ddp_loop.data.shards import Division, MiniBatch, Shard
from ddp_loop.determinism import SAMPLE, next_key, preserved_streams, restore_streams, seed_streams, stream_key, streams


class ReadSoFar(NamedTuple):
    """What a rank has read of its stream beyond a piece.

    Attributes:
        sizes: of the next pieces; 0 after the last one.
        samples: their number, with those that `drop_last` leaves out.
        is_all: whether the stream has ended.
    """

    sizes: tuple[int, ...] = ()
    samples: int = 0
    is_all: bool = False


class StreamBatch(NamedTuple):
    """A mini-batch of a stream.

    Attributes:
        samples: the number of its samples over all ranks.
        first: the first sample; None if the ranks do not compare samples.
        digest: `quick` of it.
        last: whether the stream ends here.
        shards: this rank's shards that are not empty.
        data: their data.
        beyond: what was read beyond them, of a rank's own stream.
    """

    samples: int
    first: Any
    digest: int
    last: bool
    shards: tuple[Shard, ...]
    data: tuple[Any, ...]
    beyond: ReadSoFar = ReadSoFar()


@dataclass
class StreamBatcher:
    """A stream as mini-batches, from its start.

    Args:
        source: an iterable whose iterators each start at the first sample.
        batch_size: the number of samples in a mini-batch.
        drop_last: whether to leave out a last mini-batch that is smaller.
        division: into shards, and over the ranks.
        collate: makes a shard's data from a list of samples.
        key: of the random generators while the stream is read, the same on every rank.
        device: whose generator is seeded, beside the CPU's.
        compares: whether the ranks compare the first sample of each mini-batch.
    """

    source: Iterable[Any]
    batch_size: int
    drop_last: bool
    division: Division
    collate: Callable[[list[Any]], Any]
    key: int = 0
    device: torch.device | None = None
    compares: bool = False

    def __iter__(self) -> Generator[StreamBatch, None, None]:
        for position, (samples, last) in enumerate(_chunks(iter(self.source), self.batch_size, self.drop_last)):
            _, shards = self.division.cut(len(samples), position)
            # Taken before collate_fn runs, on one rank, since that may remove or overwrite parts of the sample.
            first, digest = (_kept(samples[0]), quick(samples[0])) if self.compares else (None, 0)
            with preserved_streams(self.device):  # the generators for reading must stay alike on all ranks
                data = tuple(self._shard(position, shard, samples) for shard in shards)
            yield StreamBatch(len(samples), first, digest, last, shards, data)

    def _shard(self, position: int, shard: Shard, samples: list[Any]) -> Any:
        seed_streams(next_key(self.key, position, shard.number), self.device)
        return collated(self.collate, samples[shard.start : shard.start + shard.samples])


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


class _PrivateStreams:
    """Random states that continue from one `using` to the next, apart from those of the process."""

    def __init__(self, key: int, device: torch.device | None) -> None:
        self._key = key
        self._device = device
        self._kept: tuple[Any, ...] | None = None

    @contextmanager
    def using(self) -> Iterator[None]:
        with preserved_streams(self._device):
            if self._kept is None:
                seed_streams(self._key, self._device)
            else:
                restore_streams(self._kept)
            yield
            self._kept = streams(self._device)


class StreamReader:
    """Reads mini-batches of a stream in this process, with random generators of its own.

    Raises:
        TypeError: the source is an iterator, which cannot restart.
    """

    def __init__(self, cut: StreamBatcher, seed: int, places: Places) -> None:
        self._cut = cut
        self._seed = seed
        self._places = places
        if isinstance(cut.source, Iterator):
            raise TypeError(
                f"A stream must restart in every epoch. Got {type(cut.source).__name__}, which can be iterated once. "
                "Pass an object whose __iter__ returns it."
            )

    def divided(self, division: Division) -> StreamReader:
        """A reader of the same stream with another division into shards."""
        return StreamReader(replace(self._cut, division=division), self._seed, self._places)

    def __call__(self, epoch: int) -> Generator[StreamBatch, None, None]:
        """The mini-batches of an epoch.

        Raises:
            ValueError: the stream gives no mini-batch, as one that does not restart.
        """
        key = stream_key(self._seed, SAMPLE, epoch)
        this_pass = replace(self._cut, key=key)
        found = False
        own = _PrivateStreams(key, self._cut.device)
        if hasattr(this_pass.source, "set_epoch"):
            with own.using():
                this_pass.source.set_epoch(epoch)
        pieces = iter(this_pass)
        while True:
            with own.using():
                piece = next(pieces, None)
            if piece is None:
                break
            found = True
            yield piece._replace(data=tuple(to_devices(one, self._places) for one in piece.data))
        if not found:
            what = "too few samples" if self._cut.drop_last else "no samples"
            raise ValueError(
                f"A stream must give a mini-batch in every epoch. In epoch {epoch + 1} it gave {what}. Pass an object "
                "whose __iter__ restarts."
            )

    def mini_batches(self, epoch: int, start: int) -> Generator[tuple[MiniBatch, tuple[Any, ...]], None, None]:
        """The mini-batches of an epoch, counted from 1, from position `start` on, with this rank's data."""
        for position, piece in enumerate(self(epoch - 1)):
            if position >= start:
                begin = position * self._cut.batch_size
                sizes = self._cut.division.sizes(piece.samples)
                more = piece.last, piece.first, piece.digest
                yield MiniBatch(epoch, position, begin, piece.samples, sizes, piece.shards, *more), piece.data
