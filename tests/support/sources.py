"""Data that several test files read."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import ddp_loop as dl
from ddp_loop.data import MiniBatch, Shard

Place = tuple[int, int, int]  # epoch, position, shard


def shards_of(
    batches: dl.Batches | dl.SequenceBatches, epoch: int = 1, start: int = 0
) -> Iterator[tuple[MiniBatch, Shard, Any]]:
    """This rank's shards of an epoch with their data."""
    for loaded in batches.epoch(epoch, start):
        for place, shard in enumerate(loaded.mini_batch.shards):
            yield loaded.mini_batch, shard, loaded.data(place)


def places(batches: dl.Batches, epochs: int = 2) -> dict[Place, list[int]]:
    """Which samples this rank was given, by place; of data whose sample i is the number i."""
    return {
        (epoch, mini_batch.position, shard.number): data.tolist()
        for epoch in range(epochs)
        for mini_batch, shard, data in shards_of(batches, epoch + 1)
    }


def numbers(size: int) -> torch.Tensor:
    return torch.arange(size)


class Drawn(Dataset[Any]):
    """Sample i is i and a random number."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


class Mapped(Dataset[Any]):
    """So many samples, each of which a function makes of its number."""

    def __init__(self, size: int, sample: Callable[[int], Any]) -> None:
        self.size = size
        self.sample = sample

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Streamed(IterableDataset[Any]):
    """A stream that calls a function in each epoch and reads its samples."""

    def __init__(self, samples: Callable[[], Iterable[Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples())


def squares(index: int) -> int:
    return index * index


SIZE = 10


INPUTS = torch.arange(30.0).reshape(SIZE, 3)


class Images(Dataset[Any]):
    """Samples held by the data set itself."""

    def __init__(self) -> None:
        self.inputs = INPUTS.clone()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.inputs[index]


# A spawned worker, which a rank as a spawned process would have, imports torch first: 3 s on two cores.
FORKED: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
WORKERS: dict[str, dict[str, Any]] = {
    "none": {"num_workers": 0},
    "two": {"num_workers": 2},
    "two that persist": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
}


READERS = pytest.mark.parametrize("options", [{}, {"num_workers": 0}], ids=["by index", "by DataLoader"])


class Encoding(UserDict[str, torch.Tensor]):
    """A dict with a `to` and an attribute, as the BatchEncoding of Hugging Face's tokenizers."""

    origin = "shards"

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: rows.to(device) for name, rows in self.items()})


class Pair(NamedTuple):
    """Inputs with their labels."""

    inputs: Any
    labels: Any
