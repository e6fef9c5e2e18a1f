"""Which samples come next: mini-batches that do not know the number of ranks, cut over shards."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import index
from typing import Any

import torch
from torch.utils.data import default_collate

from ddp_loop.data.fingerprints import REMEDY, Fingerprint, difference, of, unlike
from ddp_loop.data.placement import Places, gpu_in, map_tensors, parse_devices
from ddp_loop.data.readers import Reader, Request, TensorReader, is_stream, make_reader
from ddp_loop.data.shards import MiniBatch, Shard, cut, split_range, split_sizes
from ddp_loop.data.streams import StreamBatcher, StreamReader
from ddp_loop.data.transforms import Draws, Transform
from ddp_loop.determinism import permutation
from ddp_loop.distributed import World


def _whole(name: str, value: Any, least: int | None = None) -> int:
    """`value`, if it is a whole number, NumPy's and torch's too, and not below `least`."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        bound = "" if least is None else f", {least} or more"
        raise ValueError(f"{name} must be a whole number{bound}; got {value!r}")
    return number


@dataclass(slots=True)
class LoadedBatch:
    """A mini-batch and the data of this rank's shards of it, read when first asked for and then kept."""

    mini_batch: MiniBatch
    _stream: Iterator[Any]
    _change: Callable[[MiniBatch, Shard, Any], Any] | None
    _read_nothing: Callable[[MiniBatch], Any]
    _data: list[Any] = field(default_factory=list)
    _error: Exception | None = None

    def data(self, shard: int) -> Any:
        """The data of this rank's shard number `shard` of the mini-batch, counted from 0 on each rank."""
        if self._error is not None:
            raise self._error
        while len(self._data) <= shard:
            at_hand = self.mini_batch.shards[len(self._data)]
            data = next(self._stream)
            self._data.append(data if self._change is None else self._change(self.mini_batch, at_hand, data))
        return self._data[shard]

    def nothing(self) -> Any:
        """What a shard without samples would be handed: tensors of no rows, (0, ...)."""
        return self._read_nothing(self.mini_batch)

    def read_ahead(self) -> None:
        """Read the first shard's data already; what is wrong with them is said when they are asked for."""
        try:
            if self.mini_batch.shards:
                self.data(0)
        except Exception as error:
            self._error = error

    def finish_reading(self) -> None:
        """Read what is left, so that the next mini-batch's data come next."""
        if self.mini_batch.shards:
            self.data(len(self.mini_batch.shards) - 1)


@dataclass(slots=True)
class _StreamPass:
    """What a pass over a stream gave so far: its samples, a digest of them, and its first mini-batch."""

    samples: int = 0
    digest: int = 0
    first: MiniBatch | None = None

    def add(self, mini_batch: MiniBatch) -> None:
        self.first = self.first or mini_batch
        self.samples += mini_batch.samples
        self.digest = zlib.crc32(b"%d %d" % (self.digest, mini_batch.digest))


def _require_alike(prints: Sequence[Fingerprint]) -> None:
    """Raise ValueError unless the ranks' fingerprints say the same."""
    if (differs := difference(prints)) is not None:
        raise ValueError(f"every rank must be given the same data; {differs}: {REMEDY}")


def _first_sample(mini_batch: MiniBatch) -> Fingerprint:
    return of(f"the first sample of mini-batch {mini_batch.position + 1}", mini_batch.first)


def check_first(mini_batch: MiniBatch, world: World) -> None:
    """Raise ValueError on every rank unless a stream gave all the same first sample. Every rank must call this."""
    _require_alike(world.gather(_first_sample(mini_batch), "the samples of a stream"))


def check_end(ranks: int, mini_batch: MiniBatch, world: World) -> None:
    """Raise ValueError on every rank unless a stream that ended on so many `ranks` did so on all, alike.

    Every rank must call this.
    """
    if ranks != world.size:
        raise ValueError(
            f"a stream must give every rank the same samples; in mini-batch {mini_batch.position + 1} of "
            f"epoch {mini_batch.epoch + 1} it ended on {ranks} of {world.size} ranks: give all ranks the "
            "whole of it, Batches makes the shards"
        )
    world.require_equal("the samples of a stream's last mini-batch", mini_batch.samples)


class Batches:
    """Mini-batches of `data`, cut over shards and the shards over ranks. Every rank must call this.

    The samples of a mini-batch follow from (seed, epoch, position) alone: sample k of an epoch is
    data[permutation(seed, epoch)[k]], and mini-batch p takes k = p B .. (p + 1) B - 1. Each comes exactly
    once an epoch; nothing is padded or repeated. B over S shards is floor(B / S), and one more for the first
    B mod S; the S shards go over the ranks by the same rule, so rank r carries neighbours.

    Args:
        data: tensors or arrays (one, a tuple or a dict of them, or what has `tensors`), kept on the device
            where they fit; a map-style data set, read by `DataLoader`; a source without a length, which
            gives sample number i by `source[i]` or `source(i)` and is numbered on from epoch to epoch; or a
            stream (an `IterableDataset`, what has `__iter__` alone), which every rank reads from its beginning in
            each epoch, keeping its own shards.
        batch_size: B, the samples of a mini-batch over all ranks (see `scale_batch_size`).
        world: from `join_world`.
        shuffle: a new order each epoch; by default wherever the data have a length.
        shards: S; by default one per rank. More shards than ranks are gradient accumulation.
        drop_last: leave out the last mini-batch of an epoch if it is smaller. By default it is kept.
        length: samples of an epoch for a source without a length; without it an epoch never ends.
        seed: of the order and of randomness while reading; by default the world's.
        transform: `transform(data, draws)` gives what stands for a shard's data, on their device; `draws` has random
            numbers for each sample (see `Draws`). Called once for each shard of each mini-batch.
        devices: where a shard's data go: a device for all, or a tuple or dict of them like the data's own, such
            as (None, "cpu"); None is the world's, the default.
        check_data: whether ranks compare what they were given, once: tensors, or three samples of a data set; of a
            stream the first sample of each mini-batch. False for samples whose bits differ from machine to machine.
        loader: `DataLoader`'s own `collate_fn`, `num_workers`, `pin_memory`, `prefetch_factor`,
            `persistent_workers`, `timeout`, `worker_init_fn`, `multiprocessing_context`.

    Random draws by Python's, NumPy's and torch's global generators are keyed: in `__getitem__` by (seed, epoch, index),
    in `collate_fn` and `transform` by (seed, epoch, the shard's place), while a stream is read by (seed, epoch). A
    generator that the data hold themselves is their own, and so are the draws of a `worker_init_fn`.

    Raises:
        ValueError: a size below 1, no samples, tensors of unequal lengths, or ranks that disagree.
        TypeError: data that cannot be read by index.
        PeerFailed: another rank refused its data.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        world: World,
        *,
        shuffle: bool | None = None,
        shards: int | None = None,
        drop_last: bool = False,
        length: int | None = None,
        seed: int | None = None,
        transform: Callable[[Any, Draws], Any] | None = None,
        devices: Any = None,
        check_data: bool = True,
        **loader: Any,
    ) -> None:
        self.world, self._check_data = world, check_data
        self._passed = _StreamPass()
        self._order: tuple[int, torch.Tensor] | None = None
        self._cuts: dict[int, tuple[tuple[int, ...], tuple[Shard, ...]]] = {}  # by samples
        problem: Exception | None = None
        try:
            self.batch_size = _whole("batch_size", batch_size, 1)
            self.fixed_shards = shards is not None
            self.shards = world.size if shards is None else _whole("shards", shards, 1)
            self.seed = world.seed if seed is None else _whole("seed", seed)
            self.drop_last = drop_last
            self._open(data, length, parse_devices(devices, world.device), loader)
            self.shuffle = self._has_length if shuffle is None else shuffle
            self._check_epoch()
            self._transform = None if transform is None else Transform(transform, self.seed, world.device)
        except Exception as error:  # whatever a data set says when it is asked for its length
            problem = error
        world.raise_if_any_failed(problem)
        self._check_same()

    def _check_same(self) -> None:
        """Raise ValueError on every rank unless all have the same mini-batches of the same data."""
        what = "the data's length, batch_size, shards, drop_last, shuffle, seed and check_data"
        facts = (*self._facts(), self._check_data)
        told = self.world.gather(facts, what)
        if any(other != told[0] for other in told):
            _require_alike([{"the length": (f"{other[0]} samples", "")} for other in told])
            self.world.require_equal(what, facts)
        if not self._check_data or self.world.size == 1 or isinstance(self._reader, StreamReader):
            return
        found = self._reader.fingerprint()
        if difference(self.world.gather(found, "what the data are")) is not None:
            # A part that is another one when it is read again, by the clock say, tells nothing of the other ranks.
            unsteady = self.world.gather(unlike(found, self._reader.fingerprint()), "what the data are, read again")
            steady = {name: one for name, one in found.items() if name not in set().union(*unsteady)}
            _require_alike(self.world.gather(steady, "what the data are"))

    def check_stream(self) -> None:
        """Raise ValueError on every rank unless the pass that ended gave all the same. Every rank must call this."""
        whole: Fingerprint = {"the stream": (f"{self._passed.samples} samples", str(self._passed.digest))}
        if difference(self.world.gather(whole, "the samples of a stream")) is not None:
            found = {} if self._passed.first is None else _first_sample(self._passed.first)
            _require_alike(self.world.gather(found | whole, "the samples of a stream"))

    def _open(self, data: Any, length: int | None, places: Places, loader: dict[str, Any]) -> None:
        self._reader: Reader | StreamReader
        self.length: int | None = None
        if is_stream(data):
            if length is not None:
                raise ValueError(f"an epoch of a stream ends where the stream does; got length={length}: leave it out")
            self._reader = self._open_stream(data, places, loader)
        else:
            self._reader, self.length = make_reader(data, self.seed, places, loader)
        self._has_length = self.length is not None
        if self._has_length and length is not None:
            raise ValueError(f"length is for data without one; these have {self.length} samples, got {length}")
        if length is not None:
            self.length = _whole("length", length, 1)

    def _open_stream(self, data: Any, places: Places, loader: dict[str, Any]) -> StreamReader:
        if unknown := sorted(set(loader) - {"collate_fn"}):
            raise TypeError(
                f"a stream is read in this process, of DataLoader's keywords it takes collate_fn; got {unknown}: leave "
                "the others out"
            )
        collate = loader.get("collate_fn") or default_collate
        mine = split_range(self.shards, self.world.size, self.world.rank)
        read = StreamBatcher(
            data, self.batch_size, self.drop_last, self.shards, mine, collate, 0, gpu_in(places), self._check_data
        )
        return StreamReader(read, self.seed, places)

    def _check_epoch(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError("the data must have at least one sample; they have none: look at their source")
        if self.shuffle and not self._has_length:
            raise ValueError("shuffle needs data with a length; give shuffle=False: the source makes the order")
        if self.steps == 0:
            raise ValueError(
                f"an epoch must have a mini-batch; {self.length} samples with batch_size={self.batch_size} "
                "and drop_last=True leave none: take a smaller batch_size or drop_last=False"
            )

    @property
    def facts(self) -> dict[str, object]:
        """What a run over them is a run of."""
        return {
            "samples": self.length,
            "batch_size": self.batch_size,
            "shards": self.shards if self.fixed_shards else None,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def _facts(self) -> tuple[int | bool | None, ...]:
        return self.length, self.batch_size, self.shards, self.drop_last, self.shuffle, self.seed

    # -- sizes ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int | None:
        """The mini-batches of an epoch; None where it never ends."""
        if self.length is None:
            return None
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def ends(self) -> bool:
        """Whether an epoch has an end; a stream's is where the stream ends, whenever that is."""
        return self.length is not None or isinstance(self._reader, StreamReader)

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError(
                "nobody knows how many mini-batches a stream has: go through it"
                if self.ends
                else "an epoch of this source never ends: give Batches a length, or Loop its steps"
            )
        return self.steps

    def sizes(self, position: int) -> tuple[int, ...]:
        """The samples of each of the S shards of mini-batch number `position` of an epoch."""
        return split_sizes(self._samples(position), self.shards)

    def _samples(self, position: int) -> int:
        if self.length is None:
            return self.batch_size
        return min(self.batch_size, self.length - position * self.batch_size)

    # -- mini-batches --------------------------------------------------------------------------------------

    def mini_batch(self, epoch: int, position: int) -> MiniBatch:
        """Mini-batch number `position` of an epoch as this rank sees it."""
        samples = self._samples(position)
        if samples not in self._cuts:  # an epoch's mini-batches have two different sizes at most
            sizes = split_sizes(samples, self.shards)
            self._cuts[samples] = sizes, cut(sizes, split_range(self.shards, self.world.size, self.world.rank))
        sizes, shards = self._cuts[samples]
        start, is_last = position * self.batch_size, position + 1 == self.steps
        return MiniBatch(epoch, position, start, samples, sizes, shards, is_last=is_last)

    def indices(self, epoch: int, start: int, number: int) -> torch.Tensor:
        """Which samples of the data are number `start` .. `start + number - 1` of an epoch; int64.

        They lie where the data lie, if these are tensors.
        """
        if self.shuffle and self.length is not None:
            if self._order is None or self._order[0] != epoch:
                order = permutation(self.seed, epoch, self.length)
                self._order = (epoch, order.to(self._reader.place) if isinstance(self._reader, TensorReader) else order)
            return self._order[1][start : start + number]
        before = 0 if self._has_length else epoch * (self.length or 0)
        return torch.arange(before + start, before + start + number)

    def epoch(self, epoch: int, start: int = 0, *, held: bool = True) -> Generator[LoadedBatch, None, None]:
        """The mini-batches of an epoch from position `start` on, with this rank's data.

        Args:
            held: when it is left, mini-batches that are held can still be read, so its workers go on; else they end.
        """
        if isinstance(self._reader, StreamReader):
            yield from self._stream_epoch(self._reader, epoch, start)
            return
        # Two plans: readers may run ahead, and on a rank without shards they never start.
        change = None if self._transform is None else self._changed
        reader, requests = self._reader, self._requests(self._plan(epoch, start))
        stream = (reader.one(one) for one in requests) if isinstance(reader, TensorReader) else reader(requests)
        try:
            for mini_batch in self._plan(epoch, start):
                loaded = LoadedBatch(mini_batch, stream, change, self._nothing)
                yield loaded
                loaded.finish_reading()
            held = False
        finally:
            if not held:
                stream.close()  # ends its workers, also while a mini-batch is still held: the last, or one read ahead

    def _stream_epoch(self, stream: StreamReader, epoch: int, start: int) -> Generator[LoadedBatch, None, None]:
        passed = self._passed = _StreamPass()
        change = None if self._transform is None else self._changed
        for position, piece in enumerate(stream(epoch)):
            if position >= start:
                begin, sizes = position * self.batch_size, split_sizes(piece.samples, self.shards)
                more = piece.last, piece.first, piece.digest
                mini_batch = MiniBatch(epoch, position, begin, piece.samples, sizes, piece.shards, *more)
                passed.add(mini_batch)
                yield LoadedBatch(mini_batch, iter(piece.data), change, self._nothing)

    def __iter__(self) -> Generator[Any, None, None]:
        """This rank's shards of the data, gone through once in their order: for an evaluation loop of your own.

        Each sample comes once, on one rank; what is counted there is added up afterwards:

            for images, labels in test_batches:
                right += (model(images).argmax(1) == labels).sum()
            world.sum(right)

        Raises:
            ValueError: batches that shuffle, as for training: there a `Loop` goes through them; data that never end.
        """
        if self.shuffle or not self.ends:
            raise ValueError(
                "a plain `for` over Batches goes through the data once and in order, to evaluate; "
                + ("these shuffle" if self.shuffle else "these never end")
                + ": make them with shuffle=False and a length, or train on them: for step in dl.Loop(batches, ...)"
            )
        for loaded in self.epoch(0):
            for number in range(len(loaded.mini_batch.shards)):
                yield loaded.data(number)

    def _changed(self, mini_batch: MiniBatch, shard: Shard, data: Any) -> Any:
        if self._transform is None:
            return data
        start = mini_batch.start + shard.start
        samples = self.indices(mini_batch.epoch, start, shard.samples)
        return self._transform(mini_batch.epoch, start, samples, data)

    def _nothing(self, mini_batch: MiniBatch) -> Any:
        """The mini-batch's first sample without its rows: so the parts, shapes and types are right."""
        if isinstance(self._reader, StreamReader):
            raise ValueError(
                "with synced batch norm a rank without samples takes part with tensors of no rows, which are made "
                "of a sample read by its index; a stream has none: give a data set, or larger mini-batches"
            )
        first = Request(mini_batch.epoch, mini_batch.start, self.indices(mini_batch.epoch, mini_batch.start, 1))
        data = self._changed(mini_batch, Shard(0, 0, 1), self._reader.one(first))
        return map_tensors(lambda tensor: tensor[:0] if tensor.dim() else tensor, data)

    def _plan(self, epoch: int, start: int) -> Iterator[MiniBatch]:
        for position in count(start) if self.steps is None else range(start, self.steps):
            yield self.mini_batch(epoch, position)

    def _requests(self, plan: Iterator[MiniBatch]) -> Iterator[Request]:
        for mini_batch in plan:
            for shard in mini_batch.shards:
                start = mini_batch.start + shard.start
                yield Request(mini_batch.epoch, start, self.indices(mini_batch.epoch, start, shard.samples))
