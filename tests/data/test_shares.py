"""The shares of ranks: rounding, the resulting shards, and invalid shares."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddp_loop as dl
from ddp_loop.data.shards import Division, split_by_shares
from tests.support.harness import OnRanks
from tests.support.refusals import Refused
from tests.support.sources import Streamed, numbers

pytestmark = pytest.mark.covers("C5")


@pytest.mark.parametrize(
    ("total", "shares", "sizes"),
    [
        (10, (1, 1, 1, 0, 1), (3, 3, 2, 0, 2)),
        (7, (3, 1), (5, 2)),
        (1, (1, 3), (0, 1)),
        (10, (0.1, 0.2), (3, 7)),
        (9, (1e-300, 1e300), (0, 9)),
    ],
)
def test_sizes_are_in_proportion(total: int, shares: tuple[float, ...], sizes: tuple[int, ...]) -> None:
    assert split_by_shares(total, shares) == sizes


SHARES = st.lists(st.sampled_from([0, 1, 3, 0.1, 1 / 3]) | st.floats(0, 1), max_size=20)


@given(total=st.integers(0, 1000), shares=SHARES)
def test_sizes_add_up_and_are_less_than_one_from_their_quota(total: int, shares: list[float]) -> None:
    shares = [*shares, 1]
    sizes = split_by_shares(total, shares)
    assert sum(sizes) == total
    for size, share in zip(sizes, shares, strict=True):
        assert abs(size - total * share / sum(shares)) < 1 + 1e-9
        assert share or not size


@given(total=st.integers(0, 10**12), share=st.sampled_from([1, 0.1, 1 / 3]), ranks=st.integers(1, 100))
def test_equal_shares_are_split_as_without_shares(total: int, share: float, ranks: int) -> None:
    assert split_by_shares(total, (share,) * ranks) == dl.split_sizes(total, ranks)


def test_with_fixed_shards_the_number_of_shards_follows_the_share() -> None:
    divisions = [Division(8, 3, rank, (2, 0, 1)) for rank in range(3)]
    assert [one.mine for one in divisions] == [range(5), range(5, 5), range(5, 8)]
    assert {one.carried for one in divisions} == {(5, 0, 3)}
    assert {one.sizes(20) for one in divisions} == {(3, 3, 3, 3, 2, 2, 2, 2)}


@pytest.mark.parametrize(
    ("samples", "shards", "shares", "sizes", "carried"),
    [
        (13, 3, None, (3, 2, 2, 2, 2, 2), (3, 3)),
        (4, 3, None, (1, 1, 1, 1, 0, 0), (3, 3)),  # not 1, 1, 1, 0, 1, 0
        (13, None, None, (4, 3, 3, 3), (2, 2)),
        (9, None, (2, 1), (3, 3, 2, 1), (2, 2)),
    ],
)
def test_halves_are_pieces_of_the_shards(
    samples: int, shards: int | None, shares: Any, sizes: Any, carried: Any
) -> None:
    division = Division(shards, 2, 1, shares)
    division.halve()
    division.halve()  # a second Loop over the same batches
    assert division.shards == len(sizes)
    assert division.sizes(samples) == sizes
    assert division.carried == carried


def own_samples(shares: Any) -> tuple[list[list[int]], tuple[int, ...], tuple[float, ...] | None]:
    """This rank's samples of an epoch of tensors and of streams, the sizes of the first mini-batch, and the shares."""
    with dl.join_world(seed=0) as world:
        batches = dl.Batches(numbers(23), 10, world, shuffle=False, shares=shares)
        streams = [
            dl.Batches(Streamed(lambda: numbers(23)), 10, world, shares=shares, shards=shards)
            for shards in (None, 2 * len(shares))
        ]
        found = [[int(one) for rows in data for one in rows] for data in (batches, *streams)]
        return found, batches.sizes(0), batches.shares


@pytest.mark.parametrize(("shares", "sizes"), [((2, 0, 1), (7, 0, 3)), ((3, 1), (8, 2))])
def test_each_sample_comes_once(shares: tuple[int, ...], sizes: tuple[int, ...], on_ranks: OnRanks) -> None:
    results = on_ranks(len(shares), own_samples, shares)
    for by_rank in zip(*(found for found, _, _ in results), strict=True):
        assert sorted(sample for samples in by_rank for sample in samples) == numbers(23).tolist()
        assert [bool(samples) for samples in by_rank] == [share > 0 for share in shares]
        assert shares != (3, 1) or len(by_rank[0]) > 2 * len(by_rank[1])
    assert {one for _, one, _ in results} == {sizes}
    assert {one for _, _, one in results} == {tuple(map(float, shares))}


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ((0, 0), {}, r"At least one rank must have a share. Got \(0, 0\)"),
    ((1, -1), {}, "finite number of 0 or more. Got -1 for rank 1"),
    ((math.nan, 1), {}, "Got nan for rank 0"),
    ((1, math.inf), {}, "Got inf for rank 1"),
    ((1, "2"), {}, "Got '2' for rank 1"),
    ((1, True), {}, "Got True for rank 1"),
    ((1,), {}, "one number per rank. Got 1 for 2 ranks"),
    ((1, 1, 1), {}, "Got 3 for 2 ranks"),
    ("equal", {}, "Got 'equal'"),
    (3, {}, "Got 3. Remove shares="),
    ({0: 1, 1: 3}, {}, "one number per rank, such as"),
    ((1, 1), {"shards": 1}, "Got shares for 2 ranks and shards=1"),
    ("measured", {"shards": 1}, "Got shares for 2 ranks and shards=1"),
]


DISAGREEING: list[tuple[Any, Any]] = [((3, 1), (1, 3)), ((3, 1), "measured"), (None, (1, 1))]


def share(world: dl.World, folder: str, of_ranks: Any, options: dict[str, Any]) -> None:
    dl.Batches(numbers(23), 10, world, shares=of_ranks[world.rank], **options)


def test_an_invalid_share_and_other_ones_on_another_rank_are_refused_on_every_rank(refused: Refused) -> None:
    for shares, options, said in REFUSED:
        refused(2, share, (shares, shares), options, kind="ValueError", said=said)
    for of_ranks in DISAGREEING:
        said = "shares of Batches must be the same on every rank"
        refused(2, share, of_ranks, {}, kind="ValueError", said=said)
