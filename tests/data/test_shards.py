"""The division of a mini-batch into shards and of the shards over ranks, by one rule."""

from __future__ import annotations

import random

import numpy as np
import pytest

import ddp_loop as dl
from ddp_loop.data import Shard, split_range, split_sizes
from ddp_loop.data.shards import cut
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("D1")


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [
        (256, 2, (128, 128)),
        (128, 7, (19, 19, 18, 18, 18, 18, 18)),
        (2, 3, (1, 1, 0)),
        (10, 3, (4, 3, 3)),
        (0, 2, (0, 0)),
        (5, 1, (5,)),
    ],
)
def test_the_first_parts_take_the_remainder(total: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert split_sizes(total, parts) == sizes


def random_splits(number: int = 300) -> list[tuple[int, int]]:
    """Fixed totals and parts, small and large."""
    draw = random.Random(3)
    return [(draw.randrange(10 ** draw.randrange(1, 12)), draw.randrange(1, 100)) for _ in range(number)]


def test_the_sizes_add_up_and_differ_by_one_at_most_and_fall() -> None:
    for total, parts in random_splits():
        sizes = split_sizes(total, parts)
        assert len(sizes) == parts
        assert sum(sizes) == total
        assert sizes == tuple(sorted(sizes, reverse=True))
        assert sizes[0] - sizes[-1] <= 1


def test_the_ranges_follow_each_other_and_have_the_sizes() -> None:
    for total, parts in random_splits():
        ranges = [split_range(total, parts, part) for part in range(parts)]
        assert tuple(len(piece) for piece in ranges) == split_sizes(total, parts)
        assert ranges[0].start == 0
        assert [piece.stop for piece in ranges] == [piece.start for piece in ranges[1:]] + [total]


@pytest.mark.parametrize(("total", "parts"), [(-1, 2), (4, 0), (4, -1)])
def test_no_parts_and_negative_totals_are_refused(total: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"Got {total} into {parts}"):
        split_sizes(total, parts)


def test_a_piece_number_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError):
        split_range(10, 3, 3)


def test_integers_of_numpy_are_split_and_fractions_are_not() -> None:
    assert split_sizes(np.int64(10), np.int32(3)) == (4, 3, 3)  # type: ignore[arg-type]
    assert {type(size) for size in split_sizes(np.int64(10), np.int32(3))} == {int}  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float"):
        split_sizes(10.0, 3)  # type: ignore[arg-type]


def test_empty_shards_are_left_out_and_the_others_keep_their_numbers() -> None:
    assert cut((2, 1, 0, 0), range(1, 4)) == (Shard(number=1, start=2, samples=1),)
    assert cut((2, 1, 0, 0), range(2, 4)) == ()


def shards_of_this_rank(batch_size: int, shards: int) -> list[tuple[int, int, int]]:
    with dl.join_world() as world:
        mini_batch = dl.Batches(list(range(200)), batch_size, world, shards=shards).mini_batch(1, 0)
        return [(shard.number, shard.start, shard.samples) for shard in mini_batch.shards]


def test_shards_are_divided_over_ranks_by_the_same_rule(on_ranks: OnRanks) -> None:
    assert on_ranks(3, shards_of_this_rank, 128, 7) == [
        [(0, 0, 19), (1, 19, 19), (2, 38, 18)],
        [(3, 56, 18), (4, 74, 18)],
        [(5, 92, 18), (6, 110, 18)],
    ]


@pytest.mark.covers("C6")
def test_a_rank_may_have_no_shard_or_only_empty_ones(on_ranks: OnRanks) -> None:
    assert on_ranks(3, shards_of_this_rank, 8, 2) == [[(0, 0, 4)], [(1, 4, 4)], []]
    assert on_ranks(3, shards_of_this_rank, 2, 6) == [[(0, 0, 1), (1, 1, 1)], [], []]
