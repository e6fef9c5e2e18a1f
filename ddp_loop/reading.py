"""Reading observations: tensors by index where they lie, data sets through torch's `DataLoader`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ddp_loop.determinism import preserved_streams, stream_key
from ddp_loop.keyed import Keyed
from ddp_loop.launchers import children_but, end_daemons
from ddp_loop.places import Places, at_places, devices_in, kept, map_tensors, moved, tensors_in

# What of a DataLoader's keywords is the user's to choose; order, batches and shards are those of Batches. Not
# in_order: out of order, a shard would get another shard's observations.
LOADER_OPTIONS = frozenset(
    {
        "collate_fn",
        "num_workers",
        "pin_memory",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
    }
)


@dataclass(frozen=True, slots=True)
class Request:
    """Which observations one shard is made of: the epoch and their indices in the data, int64, on the CPU."""

    epoch: int
    indices: torch.Tensor


class Reader(Protocol):
    """Reads shards by the indices of their observations."""

    def __call__(self, requests: Iterable[Request], /) -> Generator[Any, None, None]:
        """The shards' data, one for each request."""

    def one(self, epoch: int, index: int, /) -> Any:
        """A shard of a single observation."""


# -- tensors -----------------------------------------------------------------------------------------------


def as_parts(data: Any) -> Any | None:
    """`data` as tensors side by side (a tensor, or a tuple or dict of them), or None if it is a data set.

    What has `tensors`, as torch's `TensorDataset` has, stands for these, unless it has a `__getitem__` of its
    own: that may well transform them.
    """
    if getattr(type(data), "__getitem__", None) in (None, TensorDataset.__getitem__):
        data = getattr(data, "tensors", data)
    if isinstance(data, torch.Tensor):
        return data.detach()  # data are no parameters: no step's graph goes on beyond them
    if isinstance(data, np.ndarray):
        return _as_tensor(data)
    if isinstance(data, tuple | dict) and data:
        named = data if isinstance(data, dict) else dict(enumerate(data))
        parts = {key: as_parts(value) for key, value in named.items()}
        if any(part is None for part in parts.values()):
            return None
        if isinstance(data, dict):
            return parts
        kind: Any = type(data)
        return kind(*parts.values()) if hasattr(data, "_fields") else tuple(parts.values())
    return None


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The array as a tensor, where it lies: it may be a file in memory, open for reading alone."""
    if min(array.strides, default=0) < 0:
        array = array.copy()  # turned round, array[::-1]; torch has no negative strides
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor is it written to
        return torch.from_numpy(array)


def _is_mixed(data: Any) -> bool:
    """Whether some parts of a tuple or a dict are tensors side by side and others nothing that can be."""
    return isinstance(data, dict) or (
        isinstance(data, tuple) and any(isinstance(part, torch.Tensor | np.ndarray) for part in data)
    )


def common_length(parts: Any) -> int:
    """The number of observations of tensors side by side.

    Raises:
        ValueError: a tensor without a first dimension, or first dimensions that differ.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_in(parts)]
    if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(
            f"tensors side by side must have the same first dimension, the observations; got shapes {shapes}"
        )
    return shapes[0][0]


class TensorReader:
    """Reads shards out of tensors by index; they are kept on their devices where they fit.

    Attributes:
        place: where the tensors lie, if all in one place; indices that lie there too need no copy that holds the
            host up.
    """

    def __init__(self, parts: Any, places: Places) -> None:
        self._parts = at_places(kept, parts, places)
        self._homes = list(dict.fromkeys(tensor.device for tensor in tensors_in(self._parts)))
        self.place = self._homes[0] if len(self._homes) == 1 else torch.device("cpu")
        stay: list[bool] = []

        def look(part: Any, place: torch.device) -> None:
            stay.extend(tensor.device == place for tensor in tensors_in(part))

        at_places(look, self._parts, places)
        self._elsewhere = None if all(stay) else places
        parts = self._parts if type(self._parts) is tuple and all(stay) and len(self._homes) == 1 else ()
        self._tensors = parts if all(isinstance(part, torch.Tensor) for part in parts) else ()

    def __call__(self, requests: Iterable[Request]) -> Generator[Any, None, None]:
        for request in requests:
            yield self._take(request.indices)

    def one(self, epoch: int, index: int) -> Any:
        """A shard of a single observation."""
        return self._take(torch.tensor([index]))

    def _take(self, indices: torch.Tensor) -> Any:
        if self._tensors and indices.device == self.place:  # the usual case, in half the time
            return tuple([_rows(tensor, indices) for tensor in self._tensors])
        at = {home: indices.to(home, non_blocking=True) for home in self._homes}
        taken = map_tensors(lambda tensor: _rows(tensor, at[tensor.device]), self._parts)
        return taken if self._elsewhere is None else moved(taken, self._elsewhere)


def _rows(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor, in its own layout. A copy, also where they follow each other: it may be changed in place.

    `index_select` takes a third of the time, but gives up channels_last, and does not know all types.
    """
    plain = tensor.is_contiguous() and tensor.dtype not in (torch.uint16, torch.uint32, torch.uint64)
    return tensor.index_select(0, at) if plain else tensor[at]


# -- data sets ---------------------------------------------------------------------------------------------


class _Requests:
    """The sampler of a DataLoader: set before each pass over it, so that its workers may persist."""

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for request in self.requests:
            yield request.epoch, request.indices.tolist()


def _as_it_is(shard: Any) -> Any:
    return shard


class LoaderReader:
    """Reads shards through torch's `DataLoader`: an item of the loader is a shard of this rank."""

    def __init__(self, source: Any, seed: int, places: Places, options: Mapping[str, Any]) -> None:
        self._sampler = _Requests()
        self._places = places
        self._passes = 0
        keywords = {"pin_memory": any(device.type == "cuda" for device in devices_in(places)), **options}
        collate = keywords.pop("collate_fn", None) or default_collate
        self._keyed = Keyed(source, seed, collate)
        make: Any = DataLoader
        self._make_loader: Callable[[], DataLoader[Any]] = partial(
            make,
            self._keyed,
            sampler=self._sampler,
            batch_size=None,  # shards are made in Keyed
            collate_fn=_as_it_is,
            generator=torch.Generator().manual_seed(stream_key(seed)),  # else each pass draws from the global stream
            **keywords,
        )
        self._loader = self._make_loader()

    def one(self, epoch: int, index: int) -> Any:
        """A shard of a single observation, read in this process."""
        with preserved_streams():
            return moved(self._keyed[epoch, [index]], self._places)

    def __call__(self, requests: Iterable[Request]) -> Generator[Any, None, None]:
        self._passes += 1
        this_pass = self._passes
        self._sampler.requests = requests
        here = self._loader.num_workers == 0  # then reading would disturb this process's own streams
        keep: Callable[[], AbstractContextManager[None]] = preserved_streams if here else nullcontext
        loaded: Iterator[Any] | None = None
        before = children_but(set())
        workers: set[BaseProcess] = set()
        try:
            with keep():
                loaded = iter(self._loader)
            workers = set() if self._loader.persistent_workers else children_but(before)
            while True:
                if self._loader.persistent_workers and this_pass != self._passes:
                    raise RuntimeError(
                        "persistent workers read one epoch at a time; this one was left for another: go through one "
                        "after the other, make Batches for each, or leave persistent_workers away"
                    )
                with keep():
                    data = next(loaded, self)
                if data is self:
                    return
                yield moved(data, self._places)
        except GeneratorExit:
            end_daemons(workers)  # one that is asleep, or slow, is not waited for: torch does so for 5 s
            raise
        except Exception as error:
            if here:
                raise
            # End the workers, those that persist too. The message holds the worker's traceback; DataLoader's frames
            # in this one would keep the workers alive.
            self._loader = self._make_loader()
            error.__context__ = None
            raise error.with_traceback(None)  # noqa: B904
        finally:
            loaded = None


def is_stream(data: Any) -> bool:
    """Whether the data can only be gone through: torch's `IterableDataset`, or another iterable without an index."""
    has_order = not isinstance(data, Set | DataLoader)
    has_index = hasattr(data, "__getitem__") or callable(data) or as_parts(data) is not None
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and has_order and not has_index)


def make_reader(data: Any, seed: int, places: Places, options: Mapping[str, Any]) -> tuple[Reader, int | None]:
    """The reader for `data`, and the number of its observations, None where it has no length.

    Raises:
        TypeError: `data` is nothing that can be read by index, or an option is not the user's to choose.
        ValueError: tensors of unequal lengths, or places of another shape than tensors side by side.
    """
    if unknown := sorted(set(options) - LOADER_OPTIONS):
        raise TypeError(
            f"of DataLoader's keywords Batches takes {sorted(LOADER_OPTIONS)}; got {unknown}: the order, the "
            "mini-batches and the shards are made by Batches itself"
        )
    parts = as_parts(data)
    if parts is not None:
        length: int | None = common_length(parts)
        if not options:
            return TensorReader(parts, places), length
        data = _Rows(parts)
    if parts is None and _is_mixed(data):
        kinds = [type(part).__name__ for part in (data.values() if isinstance(data, dict) else data)]
        raise TypeError(
            f"data side by side must all be tensors or arrays; got {kinds}: torch.as_tensor(...) makes one of a list"
        )
    if isinstance(data, DataLoader) or not (hasattr(data, "__getitem__") or callable(data)):
        raise TypeError(
            "data must be tensors (one, a tuple, a dict), a map-style data set, a source that gives observation number "
            f"i by source[i] or source(i), or a stream, which has __iter__; got {type(data).__name__}"
            + (": give its dataset" if isinstance(data, DataLoader) else "")
        )
    if parts is None:
        length = len(data) if hasattr(data, "__len__") else None
    return LoaderReader(data, seed, places, options), length


@dataclass(frozen=True)
class _Rows:
    """Tensors side by side as a map-style data set, for a collate of the user's own."""

    parts: Any

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[index].clone(), self.parts)
