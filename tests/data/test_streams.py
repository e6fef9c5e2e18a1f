"""Streams: every sample once, the same mini-batches on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset

import ddp_loop as dl
from tests.support.comparing import Tensors, is_same, same_on_all, values_of
from tests.support.harness import OnRanks
from tests.support.refusals import Refused, mean_of, network, samples
from tests.support.sources import shards_of
from tests.support.training import loop_on

pytestmark = pytest.mark.covers("A9")

Taken = list[tuple[int, int, int, bool, list[int]]]  # epoch, position, shard, whether it ends the stream; samples


class Counting(IterableDataset[int]):
    """0, 1, 2, ..., and 100 more in each later epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + self.count))


def taken(count: int, size: int, **options: Any) -> Taken:
    with dl.join_world() as world:
        batches = dl.Batches(Counting(count), size, world, **options)
        assert batches.ends
        assert batches.steps is None
        found: Taken = []
        for epoch in range(2):
            for at, shard, data in shards_of(batches, epoch + 1):
                found.append((epoch, at.position, shard.number, at.ends_stream, data.tolist()))
        return found


@pytest.mark.parametrize(("count", "size", "shards"), [(23, 7, 3), (21, 7, 3), (2, 7, 3), (5, 1, 2)])
def test_a_stream_is_cut_as_tensors_are(count: int, size: int, shards: int, on_ranks: OnRanks) -> None:
    expected: Taken = []
    for epoch in range(2):
        for position, rows in enumerate(torch.arange(100 * epoch, 100 * epoch + count).split(size)):
            last = (position + 1) * size >= count
            parts = rows.split(list(dl.split_sizes(len(rows), shards)))
            expected += [(epoch, position, s, last, part.tolist()) for s, part in enumerate(parts) if len(part)]
    results = on_ranks(3, taken, count, size, shards=shards)
    assert sorted(one for result in results for one in result) == expected


def test_a_last_mini_batch_that_is_smaller_is_dropped_on_request(on_ranks: OnRanks) -> None:
    for count in (23, 21):
        rows = [one for result in on_ranks(2, taken, count, 7, drop_last=True, shards=1) for one in result]
        assert [(position, ends, len(part)) for _, position, _, ends, part in rows] == [
            *[(0, False, 7), (1, False, 7), (2, True, 7)] * 2
        ]


class Rows:
    """Samples with their sums, as an iterable that is not a torch data set."""

    def __init__(self, count: int) -> None:
        self.rows = torch.cat([samples(23), samples(40)[23:]])[:count]  # the same first ones for any count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((row, row.sum().reshape(1)) for row in self.rows)


def trained(as_stream: bool) -> tuple[Tensors, list[tuple[int, bool, float]]]:
    with dl.join_world() as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = samples(23)
        data: Any = Rows(23) if as_stream else (rows, rows.sum(1, keepdim=True))
        batches = dl.Batches(data, 6, world, shards=3, transform=shifted, shuffle=False)
        told = []
        for step in loop_on(batches, model, optimizer, epochs=2):
            for inputs, sums in step:
                step.backward(mse_loss(model(inputs), sums))
            told.append((step.samples, step.is_last_of_epoch, step.fold().loss.item()))
            optimizer.step()
        return values_of(model), told


def shifted(data: Any, draws: dl.Draws) -> Any:
    inputs, sums = data
    return inputs + draws.normal(4).double() / 10, sums


def test_training_on_a_stream_is_training_on_the_same_tensors(on_ranks: OnRanks) -> None:
    expected, expected_told = on_ranks(1, trained, False)[0]
    results = on_ranks(3, trained, True)
    assert is_same(same_on_all([tensors for tensors, _ in results]), expected)
    assert [told for _, told in results] == [expected_told] * 3
    assert [samples for samples, _, _ in expected_told] == [6, 6, 6, 5] * 2


class Drawing(IterableDataset[Any]):
    """Random numbers from all three generators in turn."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(10):
            yield random.random() + float(np.random.rand()) + torch.rand(()).item()


def noisy_collate(rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows) + torch.rand(len(rows))


def drawn(shards: int) -> list[list[tuple[int, list[float]]]]:
    with dl.join_world(seed=3) as world:
        batches = dl.Batches(Drawing(), 4, world, shards=shards, collate_fn=noisy_collate)
        epochs = []
        for epoch in range(2):
            found = []
            for mini_batch, shard, data in shards_of(batches, epoch + 1):
                random.random(), np.random.rand(), torch.rand(())
                found.append((mini_batch.position * 10 + shard.number, data.tolist()))
            epochs.append(found)
        return epochs


@pytest.mark.covers("H7")
def test_draws_while_reading_do_not_depend_on_ranks(on_ranks: OnRanks) -> None:
    alone = on_ranks(1, drawn, 2)[0]
    assert alone[0] != alone[1]
    results = on_ranks(3, drawn, 2)
    for epoch in range(2):
        assert sorted(one for result in results for one in result[epoch]) == sorted(alone[epoch])


def evaluated() -> tuple[dict[str, float], list[int]]:
    with dl.join_world() as world:
        batches = dl.Batches(Rows(23), 5, world)
        result = dl.evaluate(network(), batches, sums=lambda output, sums: sums.squeeze(1))
        return result, [len(sums) for _, sums in batches]


def test_a_stream_is_evaluated_with_each_sample_once(on_ranks: OnRanks) -> None:
    results = on_ranks(3, evaluated)
    mean = samples(23).sum(1).mean().item()
    for result, _ in results:
        assert result["samples"] == 23
        assert result["sums"] == pytest.approx(mean, rel=1e-12)
    assert sum(sum(sizes) for _, sizes in results) == 23


class Shifting(Drawing):
    """Random numbers, shifted by the epoch and by a random number of it."""

    shift = 0.0

    def set_epoch(self, epoch: int) -> None:
        self.shift = 100 * epoch + random.random()

    def __iter__(self) -> Iterator[float]:
        return (self.shift + one for one in super().__iter__())


def read_side_by_side(stream: Drawing, also: bool) -> list[list[float]]:
    """Mini-batches of an epoch, with another pass in the middle if `also`."""
    with dl.join_world(seed=3) as world:
        batches = dl.Batches(stream, 4, world, collate_fn=noisy_collate)
        found = []
        for loaded in batches.epoch(2):
            found.append(loaded.data(0).tolist())
            if also:
                dl.evaluate(torch.nn.Identity(), batches, mean=mean_of)
                for _ in batches:
                    pass
        return found


@pytest.mark.parametrize("stream", [Drawing, Shifting])
def test_two_passes_over_a_stream_do_not_disturb_each_other(stream: type[Drawing]) -> None:
    assert read_side_by_side(stream(), True) == read_side_by_side(stream(), False)


# -- refusals ----------------------------------------------------------------------------------------------


def train_on(world: dl.World, data: Any) -> Iterator[dl.Step]:
    model = network()
    for step in loop_on(dl.Batches(data, 6, world), model, epochs=2):
        for inputs, sums in step:
            step.backward(mse_loss(model(inputs), sums))
        step.fold()
        yield step


class Once(Rows):
    """Empty the second time."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows, self.rows = self.rows, self.rows[:0]
        return ((row, row.sum().reshape(1)) for row in rows)


class Torn(Rows):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, row in enumerate(super().__iter__()):
            if number == 14:
                raise OSError("the file is torn")
            yield row


def train_on_other(world: dl.World, folder: str, count: int) -> None:
    """Rank 1's stream has that length; the other ranks have 23 samples."""
    list(train_on(world, Rows(count if world.rank == 1 else 23)))


def train_once(world: dl.World, folder: str) -> None:
    list(train_on(world, Once(12)))


def evaluate_short(world: dl.World, folder: str) -> None:
    dl.evaluate(network(), dl.Batches(Rows(4), 5, world, drop_last=True))


def evaluate_other(world: dl.World, folder: str) -> None:
    dl.evaluate(network(), dl.Batches(Rows(20 + (world.rank == 1)), 5, world), mean=mean_of)


def predict(world: dl.World, folder: str) -> None:
    dl.predict(network(), dl.Batches(Rows(6), 3, world))


RESTARTS = "Pass an object whose __iter__ restarts"
REFUSED: list[tuple[Callable[..., None], tuple[int, ...], str]] = [
    (train_on_other, (11,), "In mini-batch 2 of epoch 1 it ended on 1 of 3 ranks. Give every rank the whole stream"),
    (train_on_other, (18,), "In mini-batch 3 of epoch 1 it ended on 1 of 3 ranks"),
    (train_on_other, (29,), "In mini-batch 4 of epoch 1 it ended on 2 of 3 ranks"),
    (train_on_other, (22,), "last mini-batch must be the same on every rank. Rank 0 has 5, rank 1 has 4"),
    (train_once, (), f"in every epoch. In epoch 2 it gave no samples. {RESTARTS}"),
    (evaluate_short, (), f"gave less than the 5 samples of one. {RESTARTS}, a smaller batch_size or drop_last"),
    (evaluate_other, (), "the stream is 20 samples on rank 0, but 21 samples on rank 1. Give every rank all data"),
    (predict, (), "The length of a stream is unknown. Pass a data set"),
]


@pytest.mark.covers("D10")
def test_streams_that_differ_between_ranks_or_do_not_restart_are_refused_on_all(refused: Refused) -> None:
    for use, arguments, said in REFUSED:
        refused(3, use, *arguments, kind="ValueError", said=said)


def read_torn_on_rank_1(world: dl.World, folder: str) -> None:
    list(train_on(world, Torn(23) if world.rank == 1 else Rows(23)))


@pytest.mark.covers("D10")
def test_a_stream_that_raises_ends_all_ranks_in_the_step_that_needs_the_sample(refused: Refused) -> None:
    told = refused(2, read_torn_on_rank_1, kind="OSError", said="the file is torn", by=1)[0].text
    assert "rank 1 failed in data of step 3" in told, told
    made: list[int] = []
    with pytest.raises(OSError, match="the file is torn"), dl.join_world() as world:
        made.extend(step.iteration for step in train_on(world, Torn(23)))
    assert made == [1, 2]  # sample 14 is in the third


def test_a_rank_that_reads_ahead_is_in_the_data_of_the_next_step(world: dl.World) -> None:
    places: list[tuple[int, str]] = []

    class Told(Rows):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for number, row in enumerate(super().__iter__()):
                places.append((number, str(world.where)))
                yield row

    for step in train_on(world, Told(18)):
        assert str(world.where) == f" in optimizer of step {step.iteration}"
    firsts = [place for number, place in places if number % 6 == 0]
    assert firsts == [f" in data of step {step}" for step in (1, 1, 2, 4, 4, 5)]  # the stream is one mini-batch ahead
