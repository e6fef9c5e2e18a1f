"""The division of a mini-batch into shards and of the shards over ranks, by one rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import ddp_loop as dl
from ddp_loop.data import split_range, split_sizes
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("D1")


TOTALS = st.one_of(st.integers(0, 200), st.integers(0, 10**12))


@given(total=TOTALS, parts=st.integers(1, 100))
@example(128, 7)
@example(2, 3)
@example(0, 2)
def test_parts_add_up_follow_each_other_and_the_first_take_the_remainder(total: int, parts: int) -> None:
    small, remainder = divmod(total, parts)
    sizes = split_sizes(total, parts)
    assert sizes == tuple(small + (part < remainder) for part in range(parts))
    ranges = [split_range(total, parts, part) for part in range(parts)]
    assert tuple(map(len, ranges)) == sizes
    assert [0, *(piece.stop for piece in ranges)] == [*(piece.start for piece in ranges), total]


def test_what_is_no_number_of_parts_is_refused_and_integers_of_numpy_are_split() -> None:
    for total, parts in ((-1, 2), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match=f"Got {total} into {parts}"):
            split_sizes(total, parts)
    with pytest.raises(IndexError):
        split_range(10, 3, 3)
    with pytest.raises(TypeError, match="float"):
        split_sizes(10.0, 3)  # type: ignore[arg-type]
    sizes = split_sizes(np.int64(10), np.int32(3))  # type: ignore[arg-type]
    assert sizes == (4, 3, 3)
    assert {type(size) for size in sizes} == {int}


def shards_of_this_rank() -> list[list[tuple[int, int, int]]]:
    with dl.join_world() as world:
        cases = [(128, 7), (8, 2), (3, 6)]  # batch_size, shards
        mini_batches = [dl.Batches(range(200), size, world, shards=n).mini_batch(1, 0) for size, n in cases]
        return [[(shard.number, shard.start, shard.samples) for shard in one.shards] for one in mini_batches]


@pytest.mark.covers("C6")
def test_shards_are_divided_over_ranks_by_the_same_rule_and_empty_ones_are_left_out(on_ranks: OnRanks) -> None:
    assert on_ranks(3, shards_of_this_rank) == [
        [[(0, 0, 19), (1, 19, 19), (2, 38, 18)], [(0, 0, 4)], [(0, 0, 1), (1, 1, 1)]],
        [[(3, 56, 18), (4, 74, 18)], [(1, 4, 4)], [(2, 2, 1)]],
        [[(5, 92, 18), (6, 110, 18)], [], []],
    ]
