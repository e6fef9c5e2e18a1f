"""Mini-batches that do not depend on the number of ranks, cut into shards, and read one ahead."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any, Self

import torch
from torch.utils.data import default_collate

from ddp_loop.accelerators import sent
from ddp_loop.data.fingerprints import StreamPass, check_data, require_alike
from ddp_loop.data.partition import OwnPieces, Parts, Unused, check_partition, piece_sizes
from ddp_loop.data.placement import Places, parse_devices, without_rows
from ddp_loop.data.readers import LOADER_OPTIONS, LoaderReader, Request, TensorReader, is_stream, make_reader
from ddp_loop.data.shards import EVALUATED, Cut, Division, MiniBatch, Shard, split_sizes
from ddp_loop.data.streams import ANNOUNCED, OwnStreams, StreamReader
from ddp_loop.data.transforms import Draws, Transform
from ddp_loop.determinism import check_count, next_key, permutation
from ddp_loop.distributed import World

_ALIKE_NAMES = 0.7  # their ratio: "workers" is like "num_workers", but "in_order" is not


@dataclass(slots=True)
class LoadedBatch:
    """A mini-batch and the data of this rank's shards, which are read on first use and then kept."""

    mini_batch: MiniBatch
    _stream: Iterator[Any]
    _batches: Batches
    _data: list[Any] = field(default_factory=list)
    _error: Exception | None = None

    def data(self, shard: int) -> Any:
        """The data of this rank's shard number `shard`, counted from 0 on each rank."""
        if self._error is not None:
            raise self._error
        batches = self._batches
        while len(self._data) <= shard:
            following = self.mini_batch.shards[len(self._data)]
            data = next(self._stream)
            changed = data if batches._transform is None else batches._changed(self.mini_batch, following, data)
            self._data.append(changed)
        return self._data[shard]

    def nothing(self) -> Any:
        """The data of an empty shard: tensors without rows, (0, ...)."""
        return self._batches._nothing(self.mini_batch)

    def read_ahead(self) -> None:
        """Take the first shard's data from workers now; an error is raised when the data are used.

        Data that this process reads are read in their step: until then the script may change the model, the tensors or
        a level of noise. Workers read ahead in torch too.
        """
        if self.mini_batch.shards and self._batches.num_workers:
            try:
                self._stream = chain([next(self._stream)], self._stream)
            except Exception as error:
                self._error = error

    def finish_reading(self) -> None:
        """Read the remaining shards, so that the reader is at the next mini-batch."""
        if self.mini_batch.shards:
            self.data(len(self.mini_batch.shards) - 1)


def _check_world(world: object) -> World:
    """The world; raises TypeError for anything else, such as a batch size in its place."""
    if not isinstance(world, World):
        raise TypeError(f"Batches takes data, batch_size and a world from join_world. Got {world!r} as the world.")
    return world


def _check_flags(**flags: object) -> None:
    """Raise ValueError for a text in place of True or False, as from a command line, since any text counts as true."""
    for name, flag in flags.items():
        if isinstance(flag, str):
            raise ValueError(f"{name} must be True or False. Got {flag!r}.")


class Batches:
    """Mini-batches of `data`, cut into shards, and the shards over the ranks. Every rank must call this.

    The samples of a mini-batch depend on (seed, epoch, position) alone. Sample k of an epoch is
    data[permutation(seed, epoch)[k]], and mini-batch p has the samples k = p B .. (p + 1) B - 1. Each sample
    occurs exactly once per epoch; nothing is padded or repeated. B samples are cut into S shards of floor(B / S),
    plus one more in each of the first B mod S. The same rule divides the S shards over the ranks, so each rank has
    consecutive shards. For example::

        batches = dl.Batches((images, labels), 128, world)
        for step in dl.Loop(batches, epochs=20, state={"model": model, "optimizer": optimizer}):
            ...

    Args:
        data: one of four kinds. Tensors or arrays with one row per sample (one, a tuple or dict of them, or an
            object with `tensors`), kept on the device from the second step on if they take less than half of the
            memory that the first step left there. A map-style data set, read by `DataLoader`. A source without a
            length, which returns sample number i as `source[i]` or `source(i)` and whose numbers continue from epoch to
            epoch. A stream (an `IterableDataset`, or an object with `__iter__` only), which every rank reads from the
            start in each epoch, keeping its own shards.
        batch_size: B, the number of samples in a mini-batch over all ranks (see `scale_batch_size`). With
            `partition` "local" or "own" None takes all of each part, however much, as one mini-batch; the data need a
            length.
        world: from `join_world`.
        shuffle: whether each epoch has a new order. The default is True for data with a length.
        shards: S. The default is one per rank, and 8 in `evaluate`, `predict` and `confusion_matrix`. More shards than
            ranks are gradient accumulation.
        partition: the samples from which a shard takes its own. "global": from all. "local": from its part of the data,
            which is the same on all ranks; part s of S is split_range(n, S, s), and has an order of its own in each
            epoch. "own": from its rank's data, which differ from rank to rank, also in length. A stream has no length
            to cut, so "local" and "own" both make it each rank's own. See docs/migrate.md.
        until: whether an epoch of data in parts ends when "all" parts are done, or the "first". The weights stay exact.
        drop_last: whether to leave out the last mini-batch of an epoch if it is smaller; of data in parts, the last
            piece of each part.
        shares: how much of each mini-batch each rank has: a number per rank, such as (3, 1), or "measured". The default
            is equal shares. Without `shards` the sizes of the shards follow the shares. With `shards` the number of
            shards of each rank does, and bits stay as they are. A rank with a share of 0 idles, but takes part in all
            collectives. With "measured" a `Loop` measures the ranks' time per sample in its first steps, prints the
            shares and keeps them from then on; see docs/shares.md. Data in parts need `shards`; own data take none.
        length: the number of samples in an epoch, for a source without a length. The default is an endless epoch.
        seed: of the order and of random numbers drawn while reading. The default is the world's seed.
        transform: `transform(data, draws)` returns the data to use in place of a shard's data, on the same device.
            `draws` gives random numbers for each sample (see `Draws`). It is called once per shard and mini-batch.
        devices: where a shard's data go: one device, or a tuple or dict of devices with the structure of the data,
            such as (None, "cpu"). None, the default, is the world's device. Data that stay on the CPU of a GPU's world
            are in pinned memory, from which `.to(device, non_blocking=True)` copies while the host continues.
        check_data: whether the ranks compare their data once: tensors, or three samples of a data set, or the first
            sample of each mini-batch of a stream. Pass False for samples whose bits depend on the machine.
        loader: these arguments of `DataLoader`: `collate_fn`, `num_workers`, `pin_memory`, `prefetch_factor`,
            `persistent_workers`, `timeout`, `worker_init_fn`, `multiprocessing_context`.

    Random numbers from Python's, NumPy's and torch's global generators are keyed: in `__getitem__` by (seed, epoch,
    index), in `collate_fn` and `transform` by (seed, epoch, first sample of the shard), and while a stream is read by
    (seed, epoch). A generator owned by the data set, and draws in a `worker_init_fn`, are not.

    Attributes:
        batch_size, shards, seed, shuffle, drop_last, partition, until, world: as given, or their defaults.
        shares: of the ranks; None for equal shares, and until they are measured.
        length: the number of samples in an epoch; None for a stream and for an endless source. `len(batches)` is the
            number of mini-batches in an epoch.
        num_workers: of the `DataLoader`; None for tensors and streams, which this process reads.

    Raises:
        ValueError: a size is below 1, there are no samples, tensors have unequal lengths, a share is negative or no
            number, all shares are 0, `shares` has more ranks with a share than there are shards, or the ranks
            disagree. Without `shares` there may be fewer shards than ranks.
        TypeError: the data cannot be read by index.
        PeerFailed: another rank refused its data.
    """

    _reader: TensorReader | LoaderReader | StreamReader
    _ROWS = "batch_size"  # the name of the argument

    def __init__(
        self,
        data: Any,
        batch_size: int | None,
        world: World,
        *,
        shuffle: bool | None = None,
        shards: int | None = None,
        shares: Sequence[float] | str | None = None,
        drop_last: bool = False,
        partition: str = "global",
        until: str = "all",
        length: int | None = None,
        seed: int | None = None,
        transform: Callable[[Any, Draws], Any] | None = None,
        devices: Any = None,
        check_data: bool = True,
        **loader: Any,
    ) -> None:
        self.world = _check_world(world)
        self._check_data = check_data and partition != "own"
        self._passed = StreamPass()
        self.length: int | None = None
        self._parts: Parts | OwnPieces | None = None
        self._evaluated: Self | None = None
        self._offset = 0  # of this rank's own data in all ranks' data
        self._own: OwnStreams | None = None  # where each rank has its own
        self._order: tuple[int, torch.Tensor] | None = None
        with world.failing_together(Exception):  # the length of a data set is the user's code
            _check_flags(shuffle=shuffle, drop_last=drop_last)
            self._takes_all = batch_size is None and partition != "global"
            self.batch_size = 1 if self._takes_all else check_count(self._ROWS, batch_size)
            self.fixed_shards = shards is not None
            fixed = None if shards is None else check_count("shards", shards)
            self.division = Division(fixed, world.size, world.rank, shares)
            self.seed = world.seed if seed is None else check_count("seed", seed, least=None)
            self.drop_last = drop_last
            self.partition = partition
            self.until = until
            self._open(data, length, parse_devices(devices, world.device), loader)
            if self._takes_all and self.length is None:
                raise ValueError(
                    "All of the parts can be one mini-batch only if their lengths are known. Got batch_size=None for "
                    "data without a length. Pass a number, or data with a length."
                )
            self.shuffle = self._has_length if shuffle is None else shuffle
            asked = self.division.asked
            check_partition(partition, until, shards, asked, world.size, self.length, is_stream=self._own is not None)
            if partition != "own":
                self._cut_data(() if self.length is None else split_sizes(self.length, self.shards))
            self._transform = None if transform is None else Transform(transform, self.seed, world.device)
        own = self.length
        self.length = None if partition == "own" else own  # the length of all data is known below
        self._check_same()
        if partition == "own":
            sizes: list[int] = [] if own is None else world.gather(own, "the lengths of the ranks' data")
            self._cut_data(sizes)
            self._offset = sum(sizes[: world.rank])

    def _cut_data(self, sizes: Sequence[int]) -> None:
        """Give each shard its part of the data, of these sizes; none of a stream and without a partition."""
        if self._takes_all:
            self.batch_size = max(1, sum(sizes))
        if self.partition != "global" and sizes:
            self.length = sum(sizes)
            taken = None if self._takes_all else self.batch_size
            self._parts = Parts(sizes, taken, self.until, drop_last=self.drop_last)
        if self.length is not None and self.length < 1:
            raise ValueError("The data must have at least one sample. They have none. Check where they come from.")
        if self.shuffle and not self._has_length:
            raise ValueError("shuffle needs data with a length. These have none. Pass shuffle=False.")
        if self.steps == 0:
            raise ValueError(
                f"An epoch must have a mini-batch. {self.length} samples with batch_size={self.batch_size} and "
                "drop_last=True give none. Use a smaller batch_size or drop_last=False."
            )

    def _check_same(self) -> None:
        """Raise ValueError on every rank unless all have the same mini-batches of the same data."""
        facts = self.facts | {"shards": self.shards, "shares": self.division.asked}
        facts |= {"kind of data": self.announced, "check_data": self._check_data}
        gathered = self.world.gather(facts, "the arguments of Batches")
        if any(other != gathered[0] for other in gathered):
            require_alike([{"the length": (f"{other['samples']} samples", "")} for other in gathered])
            self.world.require_equal("Batches", facts)
        if self._check_data and self.world.size > 1 and not isinstance(self._reader, StreamReader):
            check_data(self._reader.fingerprint, self.world)  # the samples of a stream are compared as they are read

    def check_stream(self) -> None:
        """Raise ValueError unless all ranks read the same in the pass that ended. Every rank must call this."""
        if self._own is None:
            self._passed.check(self.world)
        else:
            self._own.check(self._passed.samples)

    def _open(self, data: Any, length: int | None, places: Places, loader: dict[str, Any]) -> None:
        _check_names(loader)
        if is_stream(data):
            if length is not None:
                raise ValueError(f"An epoch of a stream ends with the stream. Got length={length}. Remove length=.")
            self._reader = self._open_stream(data, places, loader)
        else:
            seed = next_key(self.seed, self.world.rank) if self.partition == "own" else self.seed
            self._reader, self.length = make_reader(data, seed, places, loader, self.world.accelerator)
        self.num_workers: int | None = loader.get("num_workers", 0) if isinstance(self._reader, LoaderReader) else None
        self._has_length = self.length is not None
        if length is not None:
            if self._has_length:
                raise ValueError(
                    f"length= is for data without a length. These have {self.length} samples. Got {length}. Remove "
                    "length=."
                )
            self.length = check_count("length", length)

    def _open_stream(self, data: Any, places: Places, loader: dict[str, Any]) -> StreamReader:
        if unknown := sorted(set(loader) - {"collate_fn"}):
            raise TypeError(
                f"A stream is read in this process and takes only collate_fn of DataLoader's arguments. Got {unknown}. "
                "Remove them."
            )
        collate = loader.get("collate_fn") or default_collate
        size = self.batch_size
        seed = self.seed
        if self.partition != "global":
            size = self.world.size if self._takes_all else size
            self._own = OwnStreams(size, self.until, self.world)
            size = piece_sizes(size, self.world.size)[self.world.rank]
            seed = next_key(seed, self.world.rank)
        compares = self._check_data and self._own is None
        return StreamReader(data, size, self.drop_last, self.division, collate, seed, places, compares)

    @property
    def facts(self) -> dict[str, object]:
        """The values that a resumed run must share with the run before it."""
        own = self._parts if self.partition == "own" else None
        return {
            "samples": self.length,
            "batch_size": None if self._takes_all else self.batch_size,
            "shards": self.shards if self.fixed_shards else None,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "partition": self.partition,
            "until": self.until,
            "parts": list(own.sizes) if own else None if self.partition == "global" else self.shards,
        }

    def checkpointed(self, *, skips: bool) -> dict[str, Any]:
        """The data's parts of a Loop's checkpoints, by name; their `state_dict` is a collective.

        Args:
            skips: whether the loop skips steps that are not finite.
        """
        return {}

    @property
    def can_cut_otherwise(self) -> bool:
        """Whether `cut_otherwise` gives the same mini-batches; the parts of data in parts follow from the shards."""
        return self.partition == "global"

    def cut_otherwise(self, cut: Cut) -> None:
        """Cut each shard into two, or mini-batches into one shard or into single samples. Every rank must call this."""
        if cut == "halves":
            self.division.halve()
        else:
            self.division.use_shards(1 if cut == "whole" else self.batch_size)

    # -- sizes ---------------------------------------------------------------------------------------------

    @property
    def shards(self) -> int:
        """S, the number of shards in a mini-batch."""
        return self.division.shards

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The shares of the ranks; None for equal shares, and until they are measured."""
        return self.division.shares

    @property
    def steps(self) -> int | None:
        """The number of mini-batches in an epoch; None for a stream and for an endless source."""
        if self._parts is not None:
            return self._parts.steps
        if self.length is None:
            return None
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def ends(self) -> bool:
        """Whether an epoch ends; an epoch of a stream ends with the stream."""
        return self.length is not None or isinstance(self._reader, StreamReader)

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError(
                "len() is not defined for a stream: its number of mini-batches is unknown. Iterate over it."
                if self.ends
                else "An epoch of this source never ends. Pass length= to Batches, or steps= to Loop."
            )
        return self.steps

    def sizes(self, position: int) -> tuple[int, ...]:
        """The number of samples in each of the S shards of a mini-batch; of sequences, in the first epoch.

        Args:
            position: of the mini-batch in its epoch, counted from 0.
        """
        return self.mini_batch(1, position).sizes

    @property
    def positions_of_sizes(self) -> list[int]:
        """The positions of mini-batches that together have all sizes of shards of an epoch, as far as known."""
        if isinstance(self._parts, Parts):
            return self._parts.positions_of_sizes
        return [0] if self.steps is None else sorted({0, self.steps - 1})

    @property
    def unused(self) -> Unused | None:
        """The number of samples that no mini-batch has. Own streams: in the last epoch; None if unknown."""
        if isinstance(self._parts, Parts):
            return Unused(sum(self._parts.sizes) - self._parts.samples)
        if self._own is not None:
            return self._own.unused
        if self.length is None:
            return None
        return Unused(self.length % self.batch_size if self.drop_last else 0)

    @property
    def announced(self) -> int:
        """The number of values that each rank announces in a step; see `Announcement`."""
        return 0 if self._own is None else self.world.size + ANNOUNCED

    @property
    def waits(self) -> bool:
        """Whether data wait on the host until a first step shows how much memory their device has left."""
        return isinstance(self._reader, TensorReader) and self._reader.waits

    def move_after(self, mini_batch: MiniBatch) -> None:
        """Move such data to their device if they fit; called when the step with a mini-batch is over.

        A mini-batch with fewer samples than others, from which a run may resume, shows too little.
        """
        if isinstance(self._reader, TensorReader) and mini_batch.samples >= sum(self.sizes(0)):
            self._reader.move()

    # -- mini-batches --------------------------------------------------------------------------------------

    def mini_batch(self, epoch: int, position: int) -> MiniBatch:
        """A mini-batch, with this rank's shards.

        Args:
            epoch: counted from 1.
            position: of the mini-batch in its epoch, counted from 0.
        """
        if self._parts is not None:
            return self._parts.mini_batch(epoch, position, self.division.mine)
        start = position * self.batch_size
        samples = self.batch_size if self.length is None else min(self.batch_size, self.length - start)
        sizes, shards = self.division.cuts.get(samples) or self.division.cut(samples, position)
        further = self.batch_size if self.drop_last else 1  # the samples of another mini-batch
        is_last = self.length is not None and self.length - start - samples < further
        return MiniBatch(epoch, position, start, samples, sizes, shards, is_last=is_last)

    def indices(self, epoch: int, start: int, number: int) -> torch.Tensor:
        """The positions in the data of samples `start` .. `start + number - 1` of an epoch; (number,) int64.

        With shuffled tensors they are on the device of the data, else on the CPU. Each rank's own data count one after
        the other.

        Args:
            epoch: counted from 1, as `Step.epoch`.
            start: the number of samples before them in the epoch.
            number: of samples.

        Raises:
            ValueError: the epoch is 0 or less.
        """
        at = self._positions(_checked(epoch), start, number)
        return torch.arange(at.start, at.stop, device="cpu") if isinstance(at, range) else at

    def _positions(self, epoch: int, start: int, number: int) -> torch.Tensor | range:
        """The positions that `indices` returns; a range where nothing is shuffled."""
        before = 0 if self._has_length else (epoch - 1) * (self.length or 0)
        if not self.shuffle and not isinstance(self._parts, Parts):
            return range(before + start, before + start + number)
        if self._order is None or self._order[0] != epoch:
            if isinstance(self._parts, Parts):
                order = self._parts.order(self.seed, epoch - 1, shuffle=self.shuffle) + before
            else:
                order = permutation(self.seed, epoch - 1, self.length or 0)
            self._order = epoch, order
        order = self._order[1]
        if isinstance(self._reader, TensorReader) and order.device != self._reader.place:
            order = sent(order, self._reader.place)  # the host does not wait
            self._order = epoch, order
        return order[start : start + number]

    def epoch(
        self, epoch: int, start: int = 0, *, held: bool = True, agrees: bool = False
    ) -> Generator[LoadedBatch, None, None]:
        """The mini-batches of an epoch from position `start` on, with this rank's data.

        Args:
            epoch: counted from 1, as `Step.epoch`.
            start: the position of the first mini-batch, counted from 0.
            held: whether the caller still reads mini-batches after it stops iterating; the workers then keep running.
                It does not read ahead, and does not call `move_after`.
            agrees: whether all ranks iterate together, and sum up the announcements of each mini-batch.

        Raises:
            ValueError: the epoch is not a whole number of 1 or more, or own streams give it no mini-batch.
        """
        return self._loaded(_checked(epoch), start, held=held, agrees=agrees)

    def _loaded(self, epoch: int, start: int, *, held: bool, agrees: bool) -> Generator[LoadedBatch, None, None]:
        """The generator of `epoch`."""
        if isinstance(self._reader, StreamReader):
            yield from self._streamed(self._reader, epoch, start, agrees=agrees)
            return
        if isinstance(self._reader, TensorReader):
            if held and self._reader.has_served:
                self._reader.move()
            for mini_batch in self._plan(epoch, start):
                rows = map(self._reader.one, self._requests(mini_batch))
                yield LoadedBatch(mini_batch, rows, self)
                self._reader.has_served |= held
            return
        # Two plans: a reader may run ahead, and on a rank without shards it never starts.
        stream = self._reader(chain.from_iterable(map(self._requests, self._plan(epoch, start))))
        try:
            for mini_batch in self._plan(epoch, start):
                loaded = LoadedBatch(mini_batch, stream, self)
                yield loaded
                loaded.finish_reading()
            held = False
        finally:
            if not held:
                stream.close()  # ends the workers even if the caller still holds a mini-batch

    def _streamed(self, stream: StreamReader, epoch: int, start: int, *, agrees: bool) -> Iterator[LoadedBatch]:
        own = self._own
        self._passed = StreamPass()
        if own is not None:
            found = own.epoch(stream, epoch, start, agrees=agrees)
        else:
            found = islice(stream.read(epoch - 1, stream.mini_batches(epoch)), start, None)
        for mini_batch, data in found:
            self._passed.add(mini_batch)
            loaded = LoadedBatch(mini_batch, data, self)
            yield loaded
            if own is not None and own.first is None and mini_batch.shards:
                own.first = loaded.data(0)
                own.skipped = None

    def for_evaluation(self) -> Self:
        """These batches with shards that do not depend on the ranks, as `evaluate` reads them; as given with `shards=`.

        See [Note: Evaluation]. Data in parts are read as if they were whole. Where each rank has data of its own, its
        shards have `batch_size` / 8 samples. Streams of the ranks' own, and parts whose last pieces are left out,
        depend on the ranks, and stay as they are.
        """
        drops_parts = self.partition != "global" and (self.drop_last or self.until != "all")
        if self.fixed_shards or self._own is not None or drops_parts:
            return self
        if self._evaluated is None:
            self._evaluated = self._cut_alike()
        self._evaluated.division.give(self.shares)  # which may have been measured since
        return self._evaluated

    def _cut_alike(self) -> Self:
        """The batches that `for_evaluation` returns."""
        found = copy.copy(self)
        world = self.world
        found.division = Division(EVALUATED, world.size, world.rank, deals=True)
        found._parts = found._order = None
        if isinstance(self._parts, Parts) and self.partition == "own":
            piece = -(-self.batch_size // EVALUATED)
            found.division = Division(1, world.size, world.rank)
            found._parts = OwnPieces(self._parts.sizes, piece, world.rank)
            found.shuffle = False
        elif isinstance(self._reader, StreamReader):
            found._reader = replace(self._reader, division=found.division)
        return found

    def __iter__(self) -> Generator[Any, None, None]:
        """Iterate once, in order, over the data of this rank's shards, for an evaluation loop of your own.

        Every rank must call this. Each sample occurs once, on one rank. Add up the ranks' results afterwards::

            for images, labels in test_batches:
                right += (model(images).argmax(1) == labels).sum()
            world.sum(right)

        Raises:
            ValueError: the batches are shuffled, or never end.
        """
        if self.shuffle or not self.ends:
            raise ValueError(
                "A plain `for` over Batches reads the data once and in order, for evaluation. "
                + ("These are shuffled" if self.shuffle else "These never end")
                + ". Pass shuffle=False and a length, or train with `for step in dl.Loop(batches, ...)`."
            )
        is_divided = self._own is None and self.partition != "own"
        last_whole = max((self.length or 0) // self.batch_size, 1) - 1  # a smaller one may have no shard for some ranks
        for loaded in self.epoch(1):
            for number in range(len(loaded.mini_batch.shards)):
                yield loaded.data(number)
            if is_divided and loaded.mini_batch.position == last_whole:
                # One rank alone would take its part for all data. Loops that all leave early end before this.
                compare = partial(self.world.require_equal, "the length of Batches in a plain `for`", self.length)
                self.world.defer(compare)

    def _changed(self, mini_batch: MiniBatch, shard: Shard, data: Any) -> Any:
        if self._transform is None:
            return data
        start = mini_batch.start + shard.start
        return self._transform(mini_batch.epoch - 1, start, self.indices(mini_batch.epoch, start, shard.samples), data)

    def _nothing(self, mini_batch: MiniBatch) -> Any:
        """The mini-batch's first sample without its rows, which has the right parts, shapes and types."""
        if (own := self._own) is not None:
            if own.skipped is not None:
                samples, data = own.skipped
                own.first = self._changed(mini_batch, Shard(0, 0, samples), data)
                own.skipped = None
            if own.first is not None:
                return without_rows(own.first)
        if isinstance(self._reader, StreamReader):
            raise ValueError(
                "Synced batch norm gives a rank without samples tensors without rows, which are made from a sample "
                "read by index. A stream has no index. Use a map-style data set, or larger mini-batches."
            )
        at = self._positions(mini_batch.epoch, mini_batch.start, 1)
        if self._parts is not None and self.partition == "own":
            at = range(min(1, self._parts.sizes[self.world.rank]))
        data = self._reader.one(Request(mini_batch.epoch - 1, mini_batch.start, at))
        return without_rows(self._changed(mini_batch, Shard(0, 0, len(at)), data))

    def _plan(self, epoch: int, start: int) -> Iterator[MiniBatch]:
        positions = count(start) if self.steps is None else range(start, self.steps)
        return map(self.mini_batch, repeat(epoch), positions)

    def _requests(self, mini_batch: MiniBatch) -> list[Request]:
        """A request to the reader for each of this rank's shards."""
        shards = mini_batch.shards  # neighbors
        if not shards:
            return []
        epoch = mini_batch.epoch
        start = mini_batch.start
        first = shards[0].start
        at = self._positions(epoch, start + first, shards[-1].start + shards[-1].samples - first)
        if isinstance(at, range):
            at = range(at.start - self._offset, at.stop - self._offset)
        elif self._offset:
            at = at - self._offset
        requests = []
        for shard in shards:
            place = shard.start - first
            requests.append(Request(epoch - 1, start + shard.start, at[place : place + shard.samples]))
        return requests


def _checked(epoch: int) -> int:
    return check_count("epoch", epoch, remedy="Epochs are counted from 1, as in Step.epoch.")


class ReadAhead:
    """Gives one mini-batch after the other, and reads one ahead when it is asked to.

    Args:
        batches: with the data.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._stream = batches.epoch(1, held=False, agrees=True)
        self._ahead: list[LoadedBatch | Exception | None] = []  # the next one, once it was read
        self._waits = batches.waits
        self._taken: MiniBatch | None = None  # the one of the step before, while data wait

    @contextmanager
    def epoch(self, number: int, start: int) -> Iterator[None]:
        """Read an epoch in the block.

        Args:
            number: of the epoch, counted from 1.
            start: the position of the first mini-batch, counted from 0.
        """
        self.restart(number, start)
        try:
            yield
        finally:
            self._stream.close()

    def restart(self, number: int, start: int) -> None:
        """Read on from another position, or as the mini-batches are divided now; data read ahead are dropped.

        Args:
            number, start: as for `epoch`.
        """
        self._stream.close()
        self._ahead.clear()
        self._stream = self._batches.epoch(number, start, held=False, agrees=True)

    def take(self) -> LoadedBatch | None:
        """The next mini-batch; None at the epoch's end. An error in its data is raised here."""
        if self._waits and self._taken is not None:
            self._batches.move_after(self._taken)
            self._waits = self._batches.waits
        loaded = self._ahead.pop() if self._ahead else next(self._stream, None)
        if isinstance(loaded, Exception):
            raise loaded
        if self._waits:
            self._taken = None if loaded is None else loaded.mini_batch
        return loaded

    def read(self) -> None:
        """Read the next mini-batch, unless that is done."""
        if self._ahead:
            return
        try:
            loaded = next(self._stream, None)
        except Exception as error:  # of the next step's data, raised in that step
            self._ahead.append(error)
            return
        if loaded is not None:
            loaded.read_ahead()
        self._ahead.append(loaded)


def _check_names(options: Iterable[str]) -> None:
    """Refuse a name that is like one of an argument."""
    own = [one.name for one in inspect.signature(Batches).parameters.values() if one.kind is one.KEYWORD_ONLY]
    for name in options:
        near = difflib.get_close_matches(name, [*own, *LOADER_OPTIONS], 1, _ALIKE_NAMES)
        if near and near[0] != name:
            raise TypeError(f"Batches has no argument {name!r}. Did you mean {near[0]!r}?")
