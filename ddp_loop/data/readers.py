"""Readers: tensors by index on their device, and data sets through torch's `DataLoader`."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from collections import UserDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import signal_handling

from ddp_loop.accelerators import Accelerator, accelerator_of, sent
from ddp_loop.data import fingerprints, messages
from ddp_loop.data.fingerprints import Fingerprint
from ddp_loop.data.messages import Message
from ddp_loop.data.placement import (
    EncodedTensors,
    Places,
    at_first,
    at_places,
    devices_in,
    gpu_in,
    is_limited,
    map_tensors,
    move_if_fits,
    pinned,
    tensors_in,
    to_devices,
)
from ddp_loop.data.seeded_dataset import ONE_BY_ONE, PROBE, SeededDataset, Wanted
from ddp_loop.determinism import preserved_streams, stream_key
from ddp_loop.distributed import WorkerSignals, children_except, end_daemons

# The arguments of DataLoader that a user may choose. Batches makes the order, the mini-batches and the shards. Not
# in_order: out of order, a shard would get another shard's samples.
LOADER_OPTIONS = frozenset(
    {"collate_fn", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "timeout"}
    | {"worker_init_fn", "multiprocessing_context"}
)

_DRAWS_INSTEAD = (
    " For weighted draws, as by a WeightedRandomSampler, pass a data set without a length that draws a sample in its "
    "__getitem__, and length=; docs/migrate.md shows one."
)
_DICTS = (dict, UserDict)  # the second is the BatchEncoding of Hugging Face's tokenizers
_CHOOSES = ("__getitem__", "__getitems__", "__len__")  # the methods of a TensorDataset by which samples are chosen
_PROBE_S = 30  # for a worker to start and read three samples; if it takes longer, they are not compared


@dataclass(frozen=True, slots=True)
class Request:
    """The samples of one shard.

    Attributes:
        epoch: counted from 0.
        start: the number of samples before them in the epoch.
        indices: their positions in the data, (n,) int64; a range where they are neighbors.
    """

    epoch: int
    start: int
    indices: torch.Tensor | range


# -- tensors -----------------------------------------------------------------------------------------------


def as_parts(data: Any) -> Any | None:
    """`data` as tensors with one row per sample (one, or a tuple or dict of them), or None if it is a data set.

    An object with `tensors`, such as torch's `TensorDataset`, counts as these tensors, unless its class has methods
    that may choose or transform samples.
    """
    if _counts_as_its_tensors(data):
        parts = as_parts(data.tensors)
        if parts is not None and hasattr(data, "__len__") and len(data) != common_length(parts):
            raise ValueError(
                "An object with tensors and without __getitem__ must have a sample for each row of the tensors. Got a "
                f"{type(data).__name__} with {len(data)} samples and {common_length(parts)} rows. Pass the rows that "
                "you want as tensors, or define __getitem__."
            )
        return parts
    if isinstance(data, torch.Tensor):
        if data.layout is not torch.strided or data.is_nested:
            form = "a nested tensor" if data.is_nested else data.layout
            raise TypeError(
                f"Tensors of data must be dense. Got {form}. Convert it by to_dense() or to_padded_tensor(), or pass a "
                "data set whose collate_fn makes such a tensor."
            )
        return data.detach()  # data are not parameters; a step's graph ends here
    if isinstance(data, np.ndarray):
        return _as_tensor(data)
    if isinstance(data, (tuple, *_DICTS)) and data:
        named = data if isinstance(data, _DICTS) else dict(enumerate(data))
        parts = {key: as_parts(value) for key, value in named.items()}
        if any(part is None for part in parts.values()):
            return None
        if isinstance(data, _DICTS):
            return parts
        kind: Any = type(data)
        return kind(*parts.values()) if hasattr(data, "_fields") else tuple(parts.values())
    return None


def _counts_as_its_tensors(data: Any) -> bool:
    kind = type(data)
    if not issubclass(kind, TensorDataset):
        chooses = callable(data) or any(hasattr(kind, name) for name in ("__getitem__", "__getitems__", "__iter__"))
        return hasattr(data, "tensors") and not chooses
    changed = [name for name in _CHOOSES if getattr(kind, name, None) is not getattr(TensorDataset, name, None)]
    if "__getitems__" in changed and "__getitem__" not in changed:
        raise TypeError(
            "Samples are read one by one, by __getitem__, never by __getitems__. Got a "
            f"{kind.__name__}, which has its own __getitems__ and the __getitem__ of TensorDataset. Define __getitem__ "
            "too, or pass a TensorDataset."
        )
    return not changed


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The array as a tensor in the same memory, which may be a file mapped for reading only."""
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"Arrays of data must hold numbers. Got {array.dtype}. Turn text and objects into numbers first, such as "
            "token ids, or pass a data set that returns them for collate_fn to convert."
        )
    if np.ma.is_masked(array):
        raise TypeError(
            f"Tensors have no masked values, which would count. Got {np.ma.getmaskarray(array).sum()} of {array.size}. "
            "Pass array.filled(...), with ~array.mask as another array for the weights, or leave those samples out."
        )
    if min(array.strides, default=0) < 0 or not array.dtype.isnative:  # array[::-1], a FITS file; torch has neither
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing writes to it
        return torch.from_numpy(array)


def common_length(parts: Any) -> int:
    """The number of rows of tensors with one row per sample.

    Raises:
        ValueError: a tensor has no first dimension, or first dimensions differ.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_in(parts)]
    if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"Tensors must have the same first dimension, one row per sample. Got shapes {shapes}.")
    return shapes[0][0]


class TensorReader:
    """Reads shards from tensors by index; the tensors move to their devices if they fit. See [Note: Placement].

    Args:
        parts: the tensors.
        places: their devices.
        accelerator: of the world; contiguous rows that stay on a GPU's host are in pinned memory.
        decode: makes a shard's data from its rows on their devices; None to leave them.

    Attributes:
        place: the device of all tensors; the CPU if they have several. Indices on this device need no copy.
        waits: whether tensors wait on the host until it is known how much memory their devices have left.
        has_served: whether a pass has come to a second mini-batch, or to its end.
    """

    def __init__(
        self,
        parts: Any,
        places: Places,
        accelerator: Accelerator | None = None,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        self._pins = accelerator if accelerator is not None and accelerator.is_gpu else None
        stays = self._pins is not None and any(accelerator_of(place).is_host for place in devices_in(places))
        if decode is not None and stays:  # data decoded later are not in pinned memory
            parts = decode(parts)
            decode = None
        self._decode = decode
        self._places = places
        self._parts = at_places(at_first, parts, places)
        self.waits = not self._find_homes() and any(map(is_limited, devices_in(places)))
        self.has_served = False

    def move(self) -> None:
        """Move the tensors that wait on the host to their devices if they fit there, once; the host waits."""
        if self.waits:
            self._parts = at_places(move_if_fits, self._parts, self._places)
            self._find_homes()
            self.waits = False

    def _find_homes(self) -> bool:
        """Look where the tensors are; returns whether all are on their devices."""
        self._homes = list(dict.fromkeys(tensor.device for tensor in tensors_in(self._parts)))
        self.place = self._homes[0] if len(self._homes) == 1 else torch.device("cpu")
        stay: list[bool] = []

        def look(part: Any, place: torch.device) -> None:
            stay.extend(tensor.device == place for tensor in tensors_in(part))

        at_places(look, self._parts, self._places)

        is_pinned = self._pins is not None and any(accelerator_of(home).is_host for home in self._homes)
        is_usual = type(self._parts) is tuple and all(stay) and len(self._homes) == 1 and not is_pinned
        is_usual = is_usual and all(isinstance(part, torch.Tensor) and _is_plain(part) for part in self._parts)
        self._tensors = self._parts if is_usual else ()
        return all(stay)

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the tensors."""
        return fingerprints.of("data", self._parts)

    def one(self, request: Request) -> Any:
        """Read a single shard."""
        indices = request.indices
        if self._tensors and isinstance(indices, torch.Tensor) and indices.device == self.place:
            rows: Any = tuple(map(torch.index_select, self._tensors, repeat(0), repeat(indices)))  # the usual case
        else:
            rows = self._rows(indices)
        return rows if self._decode is None else self._decode(rows)

    def _rows(self, indices: torch.Tensor | range) -> Any:
        at = {home: indices if isinstance(indices, range) else sent(indices, home) for home in self._homes}
        taken = map_tensors(lambda tensor: pinned(_rows(tensor, at[tensor.device]), self._pins), self._parts)
        return to_devices(taken, self._places)


def _rows(tensor: torch.Tensor, at: torch.Tensor | range) -> torch.Tensor:
    """A copy of the tensor's rows, in its own memory layout, which the caller may change in place.

    Neighbors are copied in one piece: 40,000 rows of two floats take 9 microseconds instead of 280. Of the other ways,
    `index_select` takes a third of the time, but loses channels_last and does not support all dtypes.
    """
    if isinstance(at, range):
        if tensor.is_contiguous():
            return tensor[at.start : at.stop].clone(memory_format=torch.contiguous_format)
        at = torch.arange(at.start, at.stop, device=tensor.device)
    return tensor.index_select(0, at) if _is_plain(tensor) else tensor[at]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype not in (torch.uint16, torch.uint32, torch.uint64)


# -- data sets ---------------------------------------------------------------------------------------------


class _RequestSampler:
    """The sampler of a DataLoader, with new requests for each pass, so that workers can persist."""

    requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Wanted]:
        for request in self.requests:
            yield _wanted(request)


def _wanted(request: Request) -> Wanted:
    at = request.indices
    return request.epoch, request.start, list(at) if isinstance(at, range) else at.tolist()


class LoaderReader:
    """Reads shards through torch's `DataLoader`: an item of the loader is a shard of this rank."""

    def __init__(self, source: Any, length: int | None, seed: int, places: Places, options: Mapping[str, Any]) -> None:
        self._probed = sorted({0, (length or 3) // 2, (length or 3) - 1})
        self._sampler = _RequestSampler()
        self._places = places
        self._length = length
        self._passes = 0
        self._gpu = gpu_in(places)
        keywords = dict(options)
        collate = keywords.pop("collate_fn", None)
        by_value = not keywords.get("pin_memory") and threading.current_thread() is threading.main_thread()
        collate = collate or (messages.default_collate if by_value else default_collate)
        self._keyed = SeededDataset(source, seed, collate, self._gpu)
        started = partial(messages.begin_worker, keywords.pop("worker_init_fn", None))
        self._signals = WorkerSignals(started) if keywords.get("num_workers") else None
        make: Any = DataLoader
        self._make_loader: Callable[..., DataLoader[Any]] = partial(
            make,
            self._keyed,
            sampler=self._sampler,
            batch_size=None,  # shards are made in SeededDataset
            collate_fn=Message.of if by_value and keywords.get("num_workers") else Message,
            worker_init_fn=self._signals,
            # Else each pass draws from the global generator.
            generator=torch.Generator("cpu").manual_seed(stream_key(seed)),
            **keywords,
        )
        self._loader = self._make_loader()

    def one(self, request: Request) -> Any:
        """Read a single shard in this process, outside of any pass."""
        with preserved_streams(self._gpu):
            return to_devices(self._keyed[_wanted(request)], self._places)

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of three samples, of the indices of a torch `Subset`, or of all tensors.

        If the loader has workers, a worker reads the samples: a data set may open its files in the first process that
        reads.
        """
        source = self._keyed.source
        found = Fingerprint()
        if isinstance(source, _TensorRows):
            return fingerprints.of("data", source.parts)
        while isinstance(source, Subset):
            found |= fingerprints.of_numbers(f"the indices of the {type(source).__name__}", source.indices)
            source = source.dataset
        if (parts := as_parts(source)) is not None:
            return found | fingerprints.of("data", parts)
        if self._loader.num_workers == 0:
            with preserved_streams(self._gpu):
                return found | self._keyed.probe(self._probed)
        return found | self._probe_in_a_worker()

    def _probe_in_a_worker(self) -> Fingerprint:
        before = children_except(set())
        more = {"timeout": self._loader.timeout or _PROBE_S, "pin_memory": False, "persistent_workers": False}
        loader = self._make_loader(**more, num_workers=1, sampler=[(0, PROBE, self._probed)])
        workers: set[BaseProcess] = set()
        loaded: Iterator[Any] | None = None
        try:
            with preserved_streams():
                loaded = iter(loader)
            _ignore_deaths(loaded)
            workers = children_except(before)
            with _deaths_noticed(loaded):
                return dict(next(loaded).received())
        except Exception:  # reading a shard raises it again
            return {}
        finally:
            _end_workers(loaded, workers)

    def __call__(self, requests: Iterable[Request]) -> Generator[Any, None, None]:
        source = self._keyed.source
        if self._length is not None and not isinstance(source, _TensorRows) and len(source) != self._length:
            raise ValueError(
                f"The data set had {self._length} samples when the Batches were made, and has {len(source)} now. Make "
                "new Batches, and a new Loop, for each length."
            )
        self._passes += 1
        this_pass = self._passes
        self._sampler.requests = requests
        here = self._loader.num_workers == 0  # then reading would change this process's own random state
        keep: Callable[[], AbstractContextManager[None]]
        keep = partial(preserved_streams, self._gpu) if here else nullcontext
        loaded: Iterator[Any] | None = None
        before = children_except(set())
        workers: set[BaseProcess] = set()
        try:
            with keep(), _drawn_on_cpu():  # torch draws a seed by the loader's generator
                loaded = self._start()
            workers = set() if self._loader.persistent_workers else children_except(before)
            while True:
                if self._loader.persistent_workers and this_pass != self._passes:
                    raise RuntimeError(
                        "Persistent workers read one epoch at a time. Another epoch was begun before this one ended. "
                        "Iterate over one after the other, make separate Batches, or remove persistent_workers."
                    )
                with keep(), _deaths_noticed(loaded):
                    data = next(loaded, None)
                if data is None:
                    return
                yield to_devices(data.received(), self._places)
        except Exception as error:
            if here:
                raise
            # End all workers, persistent ones too. The message has the worker's traceback; DataLoader's frames in this
            # traceback would keep the workers alive.
            self._release(persistent=True)
            self._loader = self._make_loader()
            error.__context__ = None
            raise error.with_traceback(None)  # noqa: B904
        finally:
            self._release()
            _end_workers(loaded, workers)  # torch waits 5 s for each, and leaves one that takes longer
            loaded = None

    def _start(self) -> Iterator[Any]:
        if self._signals is None or (self._loader.persistent_workers and self._signals.has_workers):
            return iter(self._loader)
        with self._signals.starting():
            loaded: Iterator[Any] = iter(self._loader)
        _ignore_deaths(loaded)
        messages.widen_pipe(loaded)
        return loaded

    def _release(self, *, persistent: bool = False) -> None:
        if self._signals is not None and (persistent or not self._loader.persistent_workers):
            self._signals.release()


def _drawn_on_cpu() -> AbstractContextManager[Any]:
    """Make the CPU the default device, if it is not.

    Workers forked in `with torch.device(...)` stay in it: each of their calls of torch takes 1 to 2 microseconds more.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _ignore_deaths(loaded: Any) -> None:
    """Let torch's SIGCHLD handler raise for no worker of this iterator.

    It raises in the main thread, at any line: within a sum of the ranks, the others would wait for this rank.
    """
    if getattr(loaded, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(loaded))
        loaded._worker_pids_set = False


@contextmanager
def _deaths_noticed(loaded: Any) -> Iterator[None]:
    """Raise in the block, where data are waited for, if one of the iterator's workers has died or dies."""
    workers = getattr(loaded, "_workers", ())
    signal_handling._set_worker_pids(id(loaded), tuple(worker.pid for worker in workers))
    try:
        signal_handling._error_if_any_worker_fails()
        yield
    finally:
        signal_handling._remove_worker_pids(id(loaded))


def _end_workers(loaded: Any, workers: set[BaseProcess]) -> None:
    """End a DataLoader's workers at once; torch waits 5 s for one that sleeps or is slow."""
    end_daemons(workers)
    if workers and hasattr(loaded, "_workers_done_event"):
        # torch sets this event when the iterator is freed. A worker that ended while reading it holds its lock forever.
        loaded._workers_done_event = multiprocessing.Event()


def is_stream(data: Any) -> bool:
    """Whether the data can only be iterated over, as an `IterableDataset` or an ordered iterable without an index."""
    has_order = not isinstance(data, Set | DataLoader)
    has_index = hasattr(data, "__getitem__") or callable(data)
    if isinstance(data, IterableDataset) or not hasattr(data, "__iter__") or not has_order or has_index:
        return isinstance(data, IterableDataset)
    if hasattr(data, "tensors"):  # often a loader of a script's own, which gives whole mini-batches
        raise TypeError(
            f"Data must not have both tensors and an __iter__ of their own. Got a {type(data).__name__}. Pass its "
            "tensors, which Batches shuffles and cuts; a stream of single samples must be an IterableDataset."
        )
    return True


def make_reader(
    data: Any, seed: int, places: Places, options: Mapping[str, Any], accelerator: Accelerator | None = None
) -> tuple[TensorReader | LoaderReader, int | None]:
    """The reader for `data`, and the number of samples; None without a length. A GPU's host memory is pinned.

    Raises:
        TypeError: `data` cannot be read by index, or an option is not one of LOADER_OPTIONS.
        ValueError: tensors have unequal lengths, or `places` has another structure than the tensors.
    """
    if unknown := sorted(set(options) - LOADER_OPTIONS):
        raise TypeError(
            f"Batches takes these arguments of DataLoader: {sorted(LOADER_OPTIONS)}. Got {unknown}. Batches itself "
            f"makes the order, the mini-batches and the shards.{_DRAWS_INSTEAD if 'sampler' in unknown else ''}"
        )
    if isinstance(data, str | bytes):
        raise TypeError(
            f"data must be samples, not text. Got {data[:40]!r}. Read the file first, or pass a data set of its lines."
        )
    decode = None
    encoded = getattr(data, "encoded", None)
    if isinstance(encoded, EncodedTensors) and not options:
        data = encoded.tensors
        decode = encoded.decode
    parts = as_parts(data)
    if parts is not None:
        length: int | None = common_length(parts)
        if not options:
            return TensorReader(parts, places, accelerator, decode), length
        data = _TensorRows(parts)
    members = data.values() if isinstance(data, _DICTS) else data if isinstance(data, tuple) else ()
    if isinstance(data, _DICTS) or any(isinstance(part, torch.Tensor | np.ndarray) for part in members):
        raise TypeError(
            "The parts of a tuple or dict of data must all be tensors or arrays. Got "
            f"{[type(part).__name__ for part in members]}. Convert lists by torch.as_tensor(...)."
        )
    if isinstance(data, DataLoader) or not (hasattr(data, "__getitem__") or callable(data)):
        raise TypeError(
            "data must be tensors (one, a tuple, a dict), a map-style data set, a source that returns sample number "
            f"i as source[i] or source(i), or a stream with __iter__. Got {type(data).__name__}."
            + (" Pass its dataset." if isinstance(data, DataLoader) else "")
            + (f" {ONE_BY_ONE}" if hasattr(data, "__getitems__") else "")
        )
    if parts is None:
        length = len(data) if hasattr(data, "__len__") else None
    pins = accelerator is not None and accelerator.is_gpu
    return LoaderReader(data, length, seed, places, {"pin_memory": pins, **options}), length


@dataclass(frozen=True)
class _TensorRows:
    """Tensors with one row per sample as a map-style data set, for a user's own collate_fn."""

    parts: Any

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[index].clone(), self.parts)
