"""What runs for a shard draws from the shard's streams: on any number of ranks and workers, and after a resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

import ddp_loop as dl
from ddp_loop.determinism import digest
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("H1", "A9")

SIZE, BATCH, SHARDS, EPOCHS = 480, 48, 6, 2  # a rank reads 160 samples or more in each epoch

GENERATORS: dict[str, Callable[[], float]] = {
    "random": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: float(np.random.randn()),
    "torch": lambda: torch.randn((), dtype=torch.float64).item(),
}
EACH = tuple(GENERATORS)
GENERATORS["all"] = lambda: sum(GENERATORS[name]() for name in EACH)  # with workers: to start them takes long
PLACES = ("__getitem__", "collate_fn", "transform", "the loop's body", "a stream", "a stream's set_epoch")


class Drawing(Dataset[Any]):
    """Sample i is i, and a draw if it has a generator."""

    def __init__(self, draw: Callable[[], float] | None) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[float, float]:
        return index / SIZE, 0.0 if self.draw is None else self.draw()


class Stream:
    """The same samples as a stream."""

    def __init__(self, draw: Callable[[], float], in_set_epoch: bool) -> None:
        self.draw, self.in_set_epoch, self.shift = draw, in_set_epoch, 0.0

    def set_epoch(self, epoch: int) -> None:
        self.shift = self.draw() if self.in_set_epoch else 0.0

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return ((index / SIZE, self.shift + (0.0 if self.in_set_epoch else self.draw())) for index in range(SIZE))


def batches_that_draw(
    world: dl.World, place: str, draw: Callable[[], float], workers: int, shuffle: bool = True
) -> dl.Batches:
    def collate(samples: list[Any]) -> Any:
        inputs, draws = default_collate(samples)
        return inputs, draws + draw()

    def transform(data: Any, draws: dl.Draws) -> Any:
        return data[0], data[1] + draw()

    if place.startswith("a stream"):
        return dl.Batches(Stream(draw, place != "a stream"), BATCH, world, shards=SHARDS)
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    if place == "collate_fn":
        options["collate_fn"] = collate
    if place == "transform":
        options["transform"] = transform
    source = Drawing(draw if place == "__getitem__" else None)
    return dl.Batches(source, BATCH, world, shards=SHARDS, shuffle=shuffle, **options)


def train(
    place: str, names: tuple[str, ...] = EACH, workers: int = 0, run: str | None = None, stop_at: int = 0
) -> dict[str, str]:
    """The SHA-256 of the weights of a small network, by the generator that its data were drawn by."""
    ends = {}
    for name in names:
        with dl.join_world(seed=3) as world:
            model = nn.Linear(2, 1).double().to(world.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = batches_that_draw(world, place, GENERATORS[name], workers)
            folder = None if run is None else f"{run}/{name}"
            state = {"model": model, "optimizer": optimizer}
            resume = None if run is None else True
            loop = dl.Loop(batches, EPOCHS, state=state, run_dir=folder, resume=resume, progress=False)
            with suppress(dl.Stopped):
                for step in loop:
                    for inputs, draws in step:
                        shift = GENERATORS[name]() if place == "the loop's body" else 0.0
                        rows = torch.stack([inputs.double(), draws.double()], 1)
                        step.backward((model(rows).squeeze(1) - 1 - shift).square().mean())
                    if step.iteration == stop_at:
                        loop.stop()
                    step.fold()
                    optimizer.step()
            ends[name] = digest(torch.cat([one.detach().flatten() for one in model.parameters()]))
    return ends


@pytest.mark.parametrize(
    ("place", "workers"), [*((place, 0) for place in PLACES), *((place, 2) for place in PLACES[:2])]
)
@pytest.mark.slow
@pytest.mark.both_exchanges
def test_fixed_shards_that_draw_give_the_same_weights_on_any_number_of_ranks(
    place: str, workers: int, on_ranks: OnRanks
) -> None:
    names = ("all",) if workers else EACH
    expected = on_ranks(1, train, place, names)[0]
    assert len(set(expected.values())) == len(names)
    for ranks in (1, 2, 3) if workers else (2, 3):
        assert on_ranks(ranks, train, place, names, workers) == [expected] * ranks


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.slow
@pytest.mark.both_exchanges
def test_a_run_that_stops_in_mid_epoch_draws_on_as_if_it_had_not(place: str, tmp_path: Path, on_ranks: OnRanks) -> None:
    expected = on_ranks(1, train, place)[0]
    on_ranks(2, train, place, run=str(tmp_path), stop_at=13)
    assert on_ranks(3, train, place, run=str(tmp_path)) == [expected] * 3


def evaluate_drawn(place: str, names: tuple[str, ...], workers: int) -> dict[str, float]:
    found = {}
    for name in names:
        with dl.join_world(seed=3) as world:
            batches = batches_that_draw(world, place, GENERATORS[name], workers, shuffle=False)
            found[name] = dl.evaluate(nn.Identity(), batches, drawn=lambda output, draws: draws.double())["drawn"]
    return found


@pytest.mark.parametrize("place", PLACES[:3])
@pytest.mark.slow
@pytest.mark.both_exchanges
def test_what_is_evaluated_does_not_depend_on_the_ranks(place: str, on_ranks: OnRanks) -> None:
    expected = on_ranks(1, evaluate_drawn, place, tuple(GENERATORS), 0)[0]
    assert on_ranks(3, evaluate_drawn, place, EACH, 0) == [{name: expected[name] for name in EACH}] * 3
    assert on_ranks(2, evaluate_drawn, place, ("all",), 2) == [{"all": expected["all"]}] * 2


def where_the_streams_are() -> tuple[Any, ...]:
    kind, numbers, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(numbers), rest, torch.get_rng_state().tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [place for place in PLACES if place != "the loop's body"])
@pytest.mark.parametrize("generator", EACH)
def test_the_process_s_own_streams_stay_where_they_are_while_shards_are_read(generator: str, place: str) -> None:
    with dl.join_world(seed=3) as world:
        batches = batches_that_draw(world, place, GENERATORS[generator], 0)
        for draw in GENERATORS.values():
            draw()  # of the two normal numbers that Python and NumPy draw at once, one is kept
        before = where_the_streams_are()
        for loaded in batches.epoch(1):
            loaded.finish_reading()
        assert where_the_streams_are() == before


def drawn_by_shards(place: str, generator: str) -> list[float]:
    with dl.join_world(seed=3) as world:
        batches = batches_that_draw(world, place, GENERATORS[generator], 0)
        shards = [
            loaded.data(number) for epoch in (0, 1) for loaded in batches.epoch(epoch + 1) for number in range(SHARDS)
        ]
        return [float(draws[0]) for _, draws in shards]


@pytest.mark.parametrize("place", ["collate_fn", "transform"])
@pytest.mark.parametrize("generator", EACH)
def test_each_shard_draws_its_own(generator: str, place: str) -> None:
    found = drawn_by_shards(place, generator)
    assert len(set(found)) == len(found) == EPOCHS * SIZE // BATCH * SHARDS
