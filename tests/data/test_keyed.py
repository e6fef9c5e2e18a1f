"""Random draws of a sample depend on its number, not on the samples read before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

import ddp_loop as dl
from ddp_loop.data.seeded_dataset import SeededDataset
from ddp_loop.determinism import preserved_streams

pytestmark = pytest.mark.covers("A9", "H1")

SIZE = 140

GENERATORS: dict[str, Callable[[], float]] = {
    "Python": random.random,
    "Python's normal": lambda: random.gauss(0.0, 1.0),
    "NumPy": lambda: float(np.random.rand()),
    "NumPy's normal": lambda: float(np.random.randn()),
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
    "torch's normal": lambda: torch.randn((), dtype=torch.float64).item(),
}


class Drawing(Dataset[Any]):
    """Sample i is i plus a draw; only some samples draw."""

    def __init__(self, generator: str, every: int) -> None:
        self.generator, self.every = generator, every

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, GENERATORS[self.generator]() if index % self.every == 0 else 0.0


def drawn(source: Dataset[Any], batch_size: int, shards: int, workers: int) -> dict[int, float]:
    found: dict[int, float] = {}
    with dl.join_world(seed=3) as world:
        batches = dl.Batches(source, batch_size, world, shards=shards, num_workers=workers)
        for loaded in batches.epoch(1):
            for number, _ in enumerate(loaded.mini_batch.shards):
                random.gauss(0.0, 1.0), np.random.randn(), torch.randn(3)  # as a training loop draws in between
                found.update(zip(*(part.tolist() for part in loaded.data(number)), strict=True))
    return found


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("generator", GENERATORS)
def test_draws_do_not_depend_on_how_a_shard_is_read(generator: str, every: int) -> None:
    source = Drawing(generator, every)
    expected = drawn(source, 1, 1, 0)  # each sample seeded
    assert len({value for index, value in expected.items() if index % every == 0}) == -(-SIZE // every)
    for batch_size, shards in ((SIZE, 1), (40, 2), (7, 1)):
        assert drawn(source, batch_size, shards, 0) == expected


class Counted:
    def __init__(self, draws: bool) -> None:
        self.read: list[int] = []
        self.draws = draws

    def __getitem__(self, index: int) -> float:
        self.read.append(index)
        return random.random() if self.draws else 0.0


class Caching(Counted):
    """Draws once for each sample."""

    def __init__(self) -> None:
        super().__init__(draws=True)
        self.kept: dict[int, float] = {}

    def __getitem__(self, index: int) -> float:
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


def read_by(source: Any, size: int) -> list[int]:
    with preserved_streams():
        keyed = SeededDataset(source, 0, default_collate)
        for start in range(0, 200, size):
            keyed[0, start, list(range(start, start + size))]
    return source.read  # type: ignore[no-any-return]


@pytest.mark.parametrize("source", [Counted(draws=False), Counted(draws=True)], ids=["no", "yes"])
def test_a_sample_is_read_once_whether_it_draws_or_not(source: Counted) -> None:
    assert read_by(source, 20) == list(range(200))


@pytest.mark.parametrize("size", [20, 200])
def test_a_data_set_that_caches_its_draws_drew_from_keyed_streams(size: int) -> None:
    expected, source = Caching(), Caching()
    read_by(expected, 1)
    read_by(source, size)
    assert source.kept == expected.kept
    assert len(set(source.kept.values())) == 200


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_collate_fn_does_not_continue_the_streams_of_the_last_sample(generator: str) -> None:
    draw = GENERATORS[generator]
    with preserved_streams():
        samples = SeededDataset(Drawing(generator, 1), 0, list)
        of_collate = SeededDataset(Drawing("torch", SIZE), 0, lambda _: draw())  # samples 1, 2, ... draw nothing
        for first in (1, 20):
            indices = list(range(first, first + 10))
            assert of_collate[0, first, indices] not in [value for _, value in samples[0, first, indices]]
        assert of_collate[0, 1, [5]] != of_collate[0, 20, [5]]  # keyed by the shard's start, not by its samples


class Forked(Dataset[Any]):
    """Draws that leave torch's generator unchanged."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        with torch.random.fork_rng(devices=[]):
            return index, torch.rand((), dtype=torch.float64).item()


def test_draws_that_leave_torchs_generator_unchanged_are_keyed_too() -> None:
    expected = drawn(Forked(), 1, 1, 0)
    assert len(set(expected.values())) == SIZE
    assert drawn(Forked(), 20, 1, 2) == expected
