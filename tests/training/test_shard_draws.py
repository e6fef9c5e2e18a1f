"""What runs for a shard draws from the shard's streams: on any number of ranks and workers, and after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import ddp_loop as dl
from ddp_loop.determinism import digest
from tests.support.harness import OnRanks
from tests.support.sources import Mapped
from tests.support.training import loop_on, sgd

pytestmark = pytest.mark.covers("H1", "A9")

SIZE, BATCH, SHARDS, EPOCHS = 480, 48, 6, 2  # a rank reads 160 samples or more in each epoch


def draw() -> float:
    """A number that depends on the streams of all three."""
    return random.gauss(0.0, 1.0) + float(np.random.randn()) + torch.randn((), dtype=torch.float64).item()


MAPPED = ("__getitem__", "collate_fn", "transform")
PLACES = (*MAPPED, "the loop's body", "a stream", "a stream's set_epoch")


def mapped(draws: bool, index: int) -> tuple[float, float]:
    """The number, and a draw if it has a generator."""
    return index / SIZE, draw() if draws else 0.0


class Stream:
    """The same samples as a stream."""

    def __init__(self, in_set_epoch: bool) -> None:
        self.in_set_epoch = in_set_epoch
        self.shift = 0.0

    def set_epoch(self, epoch: int) -> None:
        self.shift = draw() if self.in_set_epoch else 0.0

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return ((index / SIZE, self.shift + (0.0 if self.in_set_epoch else draw())) for index in range(SIZE))


def batches_that_draw(world: dl.World, place: str, workers: int, shuffle: bool = True) -> dl.Batches:
    def collate(samples: list[Any]) -> Any:
        inputs, draws = default_collate(samples)
        return inputs, draws + draw()

    def transform(data: Any, draws: dl.Draws) -> Any:
        return data[0], data[1] + draw()

    if place.startswith("a stream"):
        return dl.Batches(Stream(place != "a stream"), BATCH, world, shards=SHARDS)
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    if place == "collate_fn":
        options["collate_fn"] = collate
    if place == "transform":
        options["transform"] = transform
    data = Mapped(SIZE, partial(mapped, place == "__getitem__"))
    return dl.Batches(data, BATCH, world, shards=SHARDS, shuffle=shuffle, **options)


def train(place: str, workers: int = 0, run: str | None = None, stop_at: int = 0) -> tuple[str, float]:
    """The SHA-256 of the weights of a small network, and what is drawn in an evaluation."""
    with dl.join_world(seed=3) as world:
        model = nn.Linear(2, 1).double().to(world.device)
        optimizer = sgd(model)
        batches = batches_that_draw(world, place, workers)
        loop = loop_on(batches, model, optimizer, epochs=EPOCHS, run_dir=run)
        with suppress(dl.Stopped):
            for step in loop:
                for inputs, draws in step:
                    shift = draw() if place == "the loop's body" else 0.0
                    rows = torch.stack([inputs.double(), draws.double()], 1)
                    step.backward((model(rows).squeeze(1) - 1 - shift).square().mean())
                if step.iteration == stop_at:
                    loop.stop()
                step.fold()
                optimizer.step()
        weights = digest(torch.cat([one.detach().flatten() for one in model.parameters()]))
        if place not in MAPPED:
            return weights, 0.0
        batches = batches_that_draw(world, place, workers, shuffle=False)
        return weights, dl.evaluate(nn.Identity(), batches, drawn=lambda output, draws: draws.double())["drawn"]


@pytest.mark.parametrize(
    ("place", "workers"), [*((place, 0) for place in PLACES), *((place, 2) for place in PLACES[:2])]
)
@pytest.mark.slow
@pytest.mark.both_exchanges
def test_shards_that_draw_train_and_evaluate_alike_on_any_number_of_ranks_and_after_a_stop(
    place: str, workers: int, tmp_path: Path, on_ranks: OnRanks
) -> None:
    expected = on_ranks(1, train, place)
    assert on_ranks(2, train, place, workers) == expected * 2
    on_ranks(2, train, place, workers, str(tmp_path), 13)
    assert on_ranks(3, train, place, workers, str(tmp_path)) == expected * 3


def where_the_streams_are() -> tuple[Any, ...]:
    kind, numbers, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(numbers), rest, torch.get_rng_state().tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [place for place in PLACES if place != "the loop's body"])
def test_the_process_s_own_streams_stay_where_they_are_while_each_shard_draws_its_own(place: str) -> None:
    with dl.join_world(seed=3) as world:
        batches = batches_that_draw(world, place, 0)
        draw()  # of the two normal numbers that Python and NumPy draw at once, one is kept
        before = where_the_streams_are()
        loaded = [one for epoch in (1, 2) for one in batches.epoch(epoch)]
        found = [float(one.data(number)[1][0]) for one in loaded for number in range(SHARDS)]
        for one in loaded:
            one.finish_reading()
        assert where_the_streams_are() == before
        assert len(set(found)) == len(found) or place == "a stream's set_epoch"


def drawn_after_gather(shards: int | None) -> list[float]:
    """What each rank draws there: an order of negatives, say."""
    with dl.join_world(seed=3) as world:
        model = nn.Linear(2, 1).double().to(world.device)
        optimizer = sgd(model)
        batches = dl.Batches(torch.ones(10, 2, dtype=torch.float64), 5, world, shards=shards)
        found = []
        for step in loop_on(batches, model, optimizer, epochs=2):
            for inputs in step:
                step.hold(model(inputs + draw()))
            step.backward(step.gather().square().mean())
            found.append(draw())
            step.fold()
            found.append(draw())
            optimizer.step()
        return found


def test_draws_after_a_gather_and_a_fold_are_equal_on_all_ranks_and_for_any_shards(on_ranks: OnRanks) -> None:
    expected = on_ranks(1, drawn_after_gather, None)
    assert len(set(expected[0])) == 8
    assert on_ranks(2, drawn_after_gather, None) == expected * 2
    assert on_ranks(3, drawn_after_gather, 2) == expected * 3
