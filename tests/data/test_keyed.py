"""Random draws of a sample depend on its number, not on the samples read before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import ddp_loop as dl
from ddp_loop.data.seeded_dataset import SeededDataset
from ddp_loop.determinism import preserved_streams
from tests.support.harness import OnRanks
from tests.support.sources import FORKED, shards_of

pytestmark = pytest.mark.covers("A9", "H1")

SIZE = 140


def draw_in_a_fork() -> float:
    """A draw that leaves torch's generator unchanged."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand((), dtype=torch.float64).item()


GENERATORS: list[Callable[[], float]] = [
    random.random,
    lambda: random.gauss(0.0, 1.0),
    lambda: float(np.random.rand()),
    lambda: float(np.random.randn()),
    lambda: torch.rand((), dtype=torch.float64).item(),
    lambda: torch.randn((), dtype=torch.float64).item(),
    draw_in_a_fork,
]


def draw_from_each() -> list[float]:
    return [draw() for draw in GENERATORS]


class Drawing(Dataset[Any]):
    """Sample i is i and a draw from each generator; only some samples draw. It keeps which samples were read."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.read: list[int] = []

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> list[float]:
        self.read.append(index)
        return [index, *(draw_from_each() if index % self.every == 0 else [0.0] * len(GENERATORS))]


def drawn(
    source: Drawing, batch_size: int, shards: int | None = 1, epoch: int = 1, **options: Any
) -> dict[float, list[float]]:
    """The draws of this rank, by sample."""
    found: dict[float, list[float]] = {}
    with dl.join_world(seed=3) as world:
        batches = dl.Batches(source, batch_size, world, shards=shards, collate_fn=list, **options)
        for _, _, samples in shards_of(batches, epoch):
            found |= {index: draws for index, *draws in samples}
            draw_from_each()  # as a training loop draws in between
    return found


@pytest.mark.parametrize("every", [1, 7])
def test_draws_depend_on_sample_and_epoch_and_not_on_how_or_by_which_rank_a_shard_is_read(
    every: int, on_ranks: OnRanks
) -> None:
    expected, later = (drawn(Drawing(every), 1, epoch=epoch) for epoch in (1, 2))  # each sample seeded
    draws = [draw for one in (expected, later) for index in one if index % every == 0 for draw in one[index]]
    assert len(set(draws)) == len(draws) == 2 * len(GENERATORS) * SIZE // every
    for batch_size, shards in ((SIZE, 1), (40, 2), (7, 1)):
        source = Drawing(every)
        assert drawn(source, batch_size, shards) == expected
        assert sorted(source.read) == list(range(SIZE))
    assert drawn(Drawing(every), 20, num_workers=2) == expected
    together: dict[float, list[float]] = {}
    for found in on_ranks(3, drawn, Drawing(every), 20, None, **FORKED):
        together |= found
    assert together == expected


def test_a_collate_fn_does_not_continue_the_streams_of_the_last_sample() -> None:
    with preserved_streams():
        samples = SeededDataset(Drawing(1), 0, list)
        of_collate = SeededDataset(Drawing(SIZE), 0, lambda _: draw_from_each())  # samples 1, 2, ... draw nothing
        for first in (1, 20):
            indices = list(range(first, first + 10))
            of_samples = {draw for _, *draws in samples[0, first, indices] for draw in draws}
            assert of_samples.isdisjoint(of_collate[0, first, indices])
        assert set(of_collate[0, 1, [5]]).isdisjoint(of_collate[0, 20, [5]])  # keyed by the shard's start
