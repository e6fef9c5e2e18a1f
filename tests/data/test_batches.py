"""The order of the samples: each once per epoch, whatever the number of ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import ddp_loop as dl
from tests.support.harness import OnRanks
from tests.support.sources import Drawn, Place, numbers, places, squares
from tests.support.training import loop_on

Draw = tuple[int, int, int | None, int]  # size, mini-batch, shards, seed


# -- each once, in one order -----------------------------------------------------------------------------------


def random_draws(ranks: int) -> list[Draw]:
    """Some of 100 fixed draws of all kinds, with mini-batches larger than the data and empty shards."""
    draw = random.Random(ranks)
    return [
        (draw.randint(1, 60), draw.randint(1, 70), draw.choice([None, 1, 2, 3, 5, 8]), draw.randrange(2**40))
        for _ in range(25)
    ]


def places_of_draws(draws: list[Draw]) -> list[dict[Place, list[int]]]:
    with dl.join_world() as world:
        return [
            places(dl.Batches(numbers(size), batch_size, world, shards=shards, seed=seed))
            for size, batch_size, shards, seed in draws
        ]


def in_order(found: dict[Place, list[int]], epoch: int) -> list[int]:
    """The samples of an epoch, in the order of mini-batches and shards."""
    return [index for place in sorted(found) if place[0] == epoch for index in found[place]]


@pytest.mark.covers("A6", "C6")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_sample_occurs_once_per_epoch_in_the_order_of_one_rank(ranks: int, on_ranks: OnRanks) -> None:
    draws = random_draws(ranks)
    by_rank = on_ranks(ranks, places_of_draws, draws)
    alone = places_of_draws([(size, batch_size, 1, seed) for size, batch_size, _, seed in draws])
    for number, (size, batch_size, _, _) in enumerate(draws):
        together: dict[Place, list[int]] = {}
        for found in by_rank:
            assert not together.keys() & found[number].keys()  # no shard is on two ranks
            together |= found[number]
        for epoch in (0, 1):
            order = in_order(together, epoch)
            assert sorted(order) == list(range(size))
            assert order == in_order(alone[number], epoch)
        assert {place[1] for place in together} == set(range(-(-size // batch_size)))


@pytest.mark.covers("A6")
def test_the_order_depends_on_the_seed_and_the_epoch() -> None:
    with dl.join_world(seed=1) as world:
        found = [places(dl.Batches(numbers(50), 8, world, seed=seed)) for seed in (None, 1, 2, 2)]
    first, same, other, again = [[in_order(one, epoch) for epoch in (0, 1)] for one in found]
    assert first == same  # the default is the world's seed
    assert other == again
    orders = [*first, *other]
    # Two random orders of 50 are equal with a probability of 1 / 50!.
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(50)) not in orders


def shards_of_this_rank() -> list[list[list[int]]]:
    """The samples of this rank's shards in each epoch, of sorted data: 10 classes with 300 samples each."""
    with dl.join_world() as world:
        batches = dl.Batches(numbers(3000), 60, world)
        return [[loaded.data(0).tolist() for loaded in batches.epoch(epoch)] for epoch in (1, 2)]


def chi_square(samples: list[int]) -> float:
    counts = np.bincount(np.array(samples) // 300, minlength=10)
    expected = len(samples) / 10
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.covers("A10")
def test_every_rank_has_the_classes_of_the_whole_within_sampling_noise_and_owns_no_sample(on_ranks: OnRanks) -> None:
    # chi-square of 10 classes has mean 9 and variance 18 in a random sample, less without putting back. Six
    # deviations over what is summed; sorted data that are not shuffled, or cut over ranks first, give thousands.
    by_rank = on_ranks(3, shards_of_this_rank)
    for epoch in (*shards_of_this_rank(), *(epoch for epochs in by_rank for epoch in epochs)):
        assert sum(map(chi_square, epoch)) < 9 * len(epoch) + 6 * (18 * len(epoch)) ** 0.5
        assert chi_square([sample for shard in epoch for sample in shard]) < 9 + 6 * 18**0.5
    first, second = (set().union(*epoch) for epoch in by_rank[0])
    # A third of rank 0's 1,000 occur there again (hypergeometric, deviation 12); all would if ranks owned samples.
    assert abs(len(first & second) - 1000 / 3) < 6 * 12.2


@pytest.mark.covers("A13")
def test_the_last_partial_mini_batch_is_kept_unless_dropped(world: dl.World) -> None:
    kept, dropped = dl.Batches(numbers(10), 4, world), dl.Batches(numbers(10), 4, world, drop_last=True)
    assert [len(indices) for indices in places(kept, 1).values()] == [4, 4, 2]
    assert [len(indices) for indices in places(dropped, 1).values()] == [4, 4]
    assert (len(kept), len(dropped)) == (3, 2)
    assert in_order(places(dropped), 1) == in_order(places(kept), 1)[:8]
    assert len(dl.Batches(numbers(8), 4, world)) == len(dl.Batches(numbers(8), 4, world, drop_last=True)) == 2
    assert (str(kept.unused), str(dropped.unused)) == ("0 samples", "2 samples")


def test_a_late_position_needs_no_iteration(world: dl.World) -> None:
    batches = dl.Batches(lambda i: i, 3, world)
    loaded = next(batches.epoch(1, start=2**40))
    assert loaded.data(0).tolist() == [3 * 2**40, 3 * 2**40 + 1, 3 * 2**40 + 2]


# -- starting in the middle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_started_in_the_middle_is_the_rest_of_it(workers: int, world: dl.World) -> None:
    def rest(position: int) -> list[list[Any]]:
        return [[part.tolist() for part in loaded.data(0)] for loaded in batches.epoch(2, start=position)]

    batches = dl.Batches(Drawn(), 4, world, num_workers=workers)
    whole = rest(0)
    assert len(whole) == 6
    for start in (3, 5, 6, 7):
        assert rest(start) == whole[start:]


def test_unread_shards_do_not_shift_the_next_ones(world: dl.World) -> None:
    batches = dl.Batches(numbers(12), 4, world, shards=2, shuffle=False)
    assert [loaded.data(0).tolist() for loaded in batches.epoch(1)] == [[0, 1], [4, 5], [8, 9]]


@pytest.mark.parametrize("data", [numbers(23), Drawn()], ids=["tensor", "data set"])
def test_the_data_of_a_mini_batch_exist_until_it_is_released(data: Any, world: dl.World) -> None:
    batches = dl.Batches(data, 4, world, shards=2)
    loaded = next(batches.epoch(1))  # the epoch itself is released at once
    first, second = loaded.data(0), loaded.data(1)
    assert loaded.data(0) is first
    assert loaded.data(1) is second


# -- sources without a length ----------------------------------------------------------------------------------


def test_the_numbers_of_a_source_continue_from_epoch_to_epoch(world: dl.World) -> None:
    batches = dl.Batches(squares, 2, world, length=3)
    assert len(batches) == 2
    assert list(places(batches).values()) == [[0, 1], [4], [9, 16], [25]]


def test_a_source_without_any_length_never_ends(world: dl.World) -> None:
    for workers in (0, 2):
        batches = dl.Batches(squares, 2, world, num_workers=workers)
        assert (batches.length, batches.steps) == (None, None)
        found = [loaded.data(0).tolist() for loaded, _ in zip(batches.epoch(1), range(3), strict=False)]
        assert found == [[0, 1], [4, 9], [16, 25]]
    with pytest.raises(TypeError, match=r"never ends\. Pass length= to Batches, or steps= to Loop"):
        len(batches)


def rows_and_their_number(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack(samples), torch.tensor(len(samples))


def test_the_data_of_an_empty_shard_have_all_parts_and_no_rows(world: dl.World) -> None:
    rows_of_three: list[torch.Tensor] = list(torch.arange(18.0).reshape(6, 3))
    batches = dl.Batches(rows_of_three, 4, world, collate_fn=rows_and_their_number)
    rows, number = next(batches.epoch(1)).nothing()
    assert (rows.shape, rows.dtype, number.shape) == ((0, 3), torch.float32, ())


# -- the epochs' numbers ---------------------------------------------------------------------------------------


def test_batches_count_epochs_from_1_as_steps_do(world: dl.World) -> None:
    batches, model = dl.Batches(numbers(10), 4, world), torch.nn.Linear(1, 1)
    places = [batches.mini_batch(epoch, position) for epoch in (1, 2) for position in range(3)]
    for step, place in zip(loop_on(batches, model, epochs=2), places, strict=True):
        for rows in step:
            assert rows.tolist() == batches.indices(step.epoch, place.start, step.samples).tolist()
            step.backward(model(rows.float().reshape(-1, 1)).mean())
        step.fold()
    assert next(batches.epoch(2)).mini_batch == places[3]
    assert places[3].epoch == 2
    with pytest.raises(ValueError, match=r"Got 0\. Epochs are counted from 1, as in Step\.epoch"):
        batches.indices(0, 0, 4)
    with pytest.raises(ValueError, match=r"epoch must be a whole number, 1 or more\. Got 0"):
        next(batches.epoch(0))
