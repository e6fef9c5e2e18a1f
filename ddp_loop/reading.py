"""Reading observations: tensors by index where they lie, data sets through torch's `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ddp_loop.determinism import preserved_streams, seed_observation

# What of a DataLoader's keywords is the user's to choose; order, batches and shards are those of Batches.
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
        "in_order",
    }
)


@dataclass(frozen=True, slots=True)
class Request:
    """Which observations one shard is made of: the epoch and their indices in the data, int64, on the CPU."""

    epoch: int
    indices: torch.Tensor


Reader = Callable[[Iterable[Request]], Iterator[Any]]


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    """`data` with every tensor in it changed; tuples (named ones too), lists and dicts are gone through."""
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(change, value) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(change, value) for value in data))
    if isinstance(data, tuple | list):
        return type(data)(map_tensors(change, value) for value in data)
    return data


def tensors_in(data: Any) -> list[torch.Tensor]:
    """The tensors in `data`, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, data)
    return found


def moved(data: Any, device: torch.device) -> Any:
    """`data` with every tensor on `device`; from pinned memory the copy does not hold up the host."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), data)


# -- tensors -----------------------------------------------------------------------------------------------


def as_parts(data: Any) -> Any | None:
    """`data` as tensors side by side (a tensor, or a tuple or dict of them), or None if it is a data set.

    Whatever has `tensors`, as torch's `TensorDataset` has, stands for these.
    """
    data = getattr(data, "tensors", data)
    if isinstance(data, torch.Tensor):
        return data
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data)
    if isinstance(data, tuple | dict) and data:
        named = data if isinstance(data, dict) else dict(enumerate(data))
        parts = {key: as_parts(value) for key, value in named.items()}
        if any(part is None for part in parts.values()):
            return None
        return parts if isinstance(data, dict) else tuple(parts.values())
    return None


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


def _fits(parts: Any, device: torch.device) -> bool:
    size = sum(tensor.nbytes for tensor in tensors_in(parts))
    # Half of the free memory is left for the network; what does not fit is copied shard by shard.
    return device.type != "cuda" or 2 * size < torch.cuda.mem_get_info(device)[0]


class TensorReader:
    """Reads shards out of tensors by index; they are kept on the device where they fit."""

    def __init__(self, parts: Any, device: torch.device) -> None:
        self._device = device
        self._place = device if _fits(parts, device) else torch.device("cpu")
        self._parts = moved(parts, self._place)

    def __call__(self, requests: Iterable[Request]) -> Iterator[Any]:
        for request in requests:
            yield self._take(request.indices)

    def _take(self, indices: torch.Tensor) -> Any:
        # A copy, also for rows that follow each other: the user may change it in place.
        at = indices.to(self._place, non_blocking=True)
        taken = map_tensors(lambda tensor: tensor.index_select(0, at), self._parts)
        return taken if self._place == self._device else moved(taken, self._device)


# -- data sets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Keyed:
    """A map-style data set read by (epoch, index): its randomness follows the observation, not the worker."""

    source: Any
    seed: int

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_observation(self.seed, epoch, index)
        try:
            return self.source[index] if hasattr(self.source, "__getitem__") else self.source(index)
        except Exception as error:
            error.add_note(f"while observation {index} of epoch {epoch} was read")
            raise


class _Requests:
    """The batch sampler of a DataLoader: set before each pass over it, so that its workers may persist."""

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for request in self.requests:
            yield [(request.epoch, index) for index in request.indices.tolist()]


class LoaderReader:
    """Reads shards through torch's `DataLoader`: a batch of the loader is a shard of this rank."""

    def __init__(self, source: Any, seed: int, device: torch.device, options: Mapping[str, Any]) -> None:
        self._sampler = _Requests()
        self._device = device
        keywords = {"pin_memory": device.type == "cuda", **options}
        self._loader: DataLoader[Any] = DataLoader(
            _Keyed(source, seed),  # type: ignore[arg-type]
            batch_sampler=self._sampler,
            generator=torch.Generator().manual_seed(seed),  # else each pass draws from the global stream
            **keywords,
        )

    def __call__(self, requests: Iterable[Request]) -> Iterator[Any]:
        self._sampler.requests = requests
        here = self._loader.num_workers == 0  # then reading would disturb this process's own streams
        keep: Callable[[], AbstractContextManager[None]] = preserved_streams if here else nullcontext
        with keep():
            loaded = iter(self._loader)
        while True:
            with keep():
                data = next(loaded, self)
            if data is self:
                return
            yield moved(data, self._device)


def make_reader(data: Any, seed: int, device: torch.device, options: Mapping[str, Any]) -> tuple[Reader, int | None]:
    """The reader for `data`, and the number of its observations, None where it has no length.

    Raises:
        TypeError: `data` is nothing that can be read by index, or an option is not the user's to choose.
        ValueError: tensors of unequal lengths.
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
            return TensorReader(parts, device), length
        data = _Rows(parts)
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") or callable(data)):
        raise TypeError(
            "data must be tensors (one, a tuple, a dict), a map-style data set, or a source that gives "
            f"observation number i by source[i] or source(i); got {type(data).__name__}"
        )
    if parts is None:
        length = len(data) if hasattr(data, "__len__") else None
    return LoaderReader(data, seed, device, options), length


@dataclass(frozen=True)
class _Rows:
    """Tensors side by side as a map-style data set, for a collate of the user's own."""

    parts: Any

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[index], self.parts)
