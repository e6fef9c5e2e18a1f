"""Streams: data that can only be gone through, cut into mini-batches as they come.

[Note: Every rank reads the whole stream] How much of a stream is left nobody knows, so a mini-batch's size is known
when its observations are there. Each rank takes them all and keeps those of its own shards: so all ranks know the
sizes, and the mini-batches do not depend on the ranks. What is costly, decoding say, belongs into `collate_fn` or
`transform`, which see a rank's own shards alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_loop.determinism import OBSERVATION, next_key, preserved_streams, seed_process, stream_key
from ddp_loop.keyed import collated
from ddp_loop.places import Places, moved
from ddp_loop.shards import Shard, cut, split_sizes


class Piece(NamedTuple):
    """A mini-batch of a stream: its observations over all ranks, whether it is the last, this rank's shards' data."""

    observations: int
    last: bool
    shards: tuple[Shard, ...]
    data: tuple[Any, ...]


@dataclass
class Cut:
    """A stream as mini-batches, from its beginning.

    Args:
        source: gives an iterator over the observations anew in each epoch.
        batch_size, drop_last: of the mini-batches.
        shards: S.
        mine: the numbers of this rank's shards.
        collate: makes a shard's data of a list of observations.
        key: of the random streams while the stream is read, the same on every rank.
    """

    source: Iterable[Any]
    batch_size: int
    drop_last: bool
    shards: int
    mine: range
    collate: Callable[[list[Any]], Any]
    key: int = 0

    def __iter__(self) -> Generator[Piece, None, None]:
        seed_process(self.key)
        for position, (observations, last) in enumerate(_chunks(iter(self.source), self.batch_size, self.drop_last)):
            shards = cut(split_sizes(len(observations), self.shards), self.mine)
            with preserved_streams():  # a rank's own shards must not move the stream that all ranks share
                data = tuple(self._shard(position, shard, observations) for shard in shards)
            yield Piece(len(observations), last, shards, data)

    def _shard(self, position: int, shard: Shard, observations: list[Any]) -> Any:
        seed_process(next_key(next_key(self.key, position), shard.number))
        return collated(self.collate, observations[shard.start : shard.start + shard.observations])


def _chunks(source: Iterator[Any], size: int, drop_last: bool) -> Iterator[tuple[list[Any], bool]]:
    """Lists of `size`, and whether it is the last; for that one observation is taken ahead, or `size` of them."""
    ahead = size if drop_last else 1
    chunk = list(islice(source, size))
    while chunk and not (drop_last and len(chunk) < size):
        following = list(islice(source, ahead))
        yield chunk, len(following) < ahead
        if len(following) < ahead:
            return
        chunk = following + list(islice(source, size - len(following)))


class _OwnStreams:
    """Random streams that go on from one `using` to the next, beside those of the process."""

    def __init__(self) -> None:
        self._kept: tuple[Any, Any, torch.Tensor] | None = None

    @contextmanager
    def using(self) -> Iterator[None]:
        with preserved_streams():
            if self._kept is not None:
                random.setstate(self._kept[0])
                np.random.set_state(self._kept[1])
                torch.set_rng_state(self._kept[2])
            yield
            self._kept = random.getstate(), np.random.get_state(), torch.get_rng_state()


class StreamReader:
    """Reads mini-batches of a stream in this process, on random streams of its own.

    Raises:
        TypeError: an iterator, which does not begin anew.
    """

    def __init__(self, cut: Cut, seed: int, places: Places) -> None:
        self._cut, self._seed, self._places = cut, seed, places
        if isinstance(cut.source, Iterator):
            raise TypeError(
                f"a stream begins anew in every epoch; got {type(cut.source).__name__}, which is gone through once: "
                "give an object whose __iter__ makes it"
            )

    def __call__(self, epoch: int) -> Generator[Piece, None, None]:
        """The mini-batches of an epoch.

        Raises:
            ValueError: there is none: the stream does not begin anew.
        """
        this_pass = replace(self._cut, key=stream_key(self._seed, OBSERVATION, epoch))
        if hasattr(this_pass.source, "set_epoch"):
            this_pass.source.set_epoch(epoch)
        own, pieces, found = _OwnStreams(), iter(this_pass), False
        while True:
            with own.using():
                piece = next(pieces, None)
            if piece is None:
                break
            found = True
            yield piece._replace(data=tuple(moved(one, self._places) for one in piece.data))
        if not found:
            what = "too few for one" if self._cut.drop_last else "none"
            raise ValueError(
                f"a stream gives observations for a mini-batch in every epoch; in epoch {epoch + 1} it gave {what}: "
                "give an object whose __iter__ begins anew"
            )
