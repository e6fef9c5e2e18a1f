"""The shares of ranks: rounding, the resulting shards, and invalid shares."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import ddp_loop as dl
from ddp_loop.data.shards import Division, split_by_shares
from tests.support.harness import OnRanks
from tests.support.refusals import ALL, Refused
from tests.support.sources import numbers

pytestmark = pytest.mark.covers("C5")


@pytest.mark.parametrize(
    ("total", "shares", "sizes"),
    [
        (10, (1, 1, 1, 0, 1), (3, 3, 2, 0, 2)),
        (16, (3, 1), (12, 4)),
        (7, (3, 1), (5, 2)),
        (1, (1, 3), (0, 1)),
        (0, (3, 1), (0, 0)),
        (5, (0, 0.25), (0, 5)),
        (10, (0.1, 0.2), (3, 7)),
        (9, (1e-300, 1e300), (0, 9)),
    ],
)
def test_sizes_are_in_proportion(total: int, shares: tuple[float, ...], sizes: tuple[int, ...]) -> None:
    assert split_by_shares(total, shares) == sizes


def test_equal_shares_are_split_as_without_shares() -> None:
    draw = random.Random(3)
    for _ in range(200):
        total, ranks = draw.randrange(10 ** draw.randrange(1, 12)), draw.randrange(1, 100)
        assert split_by_shares(total, (draw.choice([1, 0.1, 1 / 3]),) * ranks) == dl.split_sizes(total, ranks)


def test_sizes_add_up_and_are_less_than_one_from_their_quota() -> None:
    draw = random.Random(4)
    for _ in range(200):
        total = draw.randrange(1000)
        shares = [draw.choice([0, 1, 3, draw.random()]) for _ in range(draw.randrange(1, 20))] + [1]
        sizes = split_by_shares(total, shares)
        assert sum(sizes) == total
        assert all(abs(n - total * s / sum(shares)) < 1 + 1e-9 for n, s in zip(sizes, shares, strict=True))
        assert all(n == 0 for n, s in zip(sizes, shares, strict=True) if s == 0)


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


def own_samples(shares: Any, **options: Any) -> tuple[list[int], tuple[int, ...], tuple[float, ...] | None]:
    """This rank's samples of an epoch, the sizes of the first mini-batch, and the shares."""
    with dl.join_world(seed=0) as world:
        batches = dl.Batches(numbers(23), 10, world, shuffle=False, shares=shares, **options)
        found = [int(one) for rows in batches for one in rows]
        return found, batches.sizes(0), batches.shares


@pytest.mark.parametrize(("shares", "sizes"), [((1, 1, 1, 0, 1), (3, 3, 2, 0, 2)), ((3, 1), (8, 2))])
def test_each_sample_comes_once(shares: tuple[int, ...], sizes: tuple[int, ...], on_ranks: OnRanks) -> None:
    results = on_ranks(len(shares), own_samples, shares)
    assert sorted(sample for samples, _, _ in results for sample in samples) == numbers(23).tolist()
    assert {one for _, one, _ in results} == {sizes}
    assert {one for _, _, one in results} == {tuple(map(float, shares))}
    for (samples, _, _), share in zip(results, shares, strict=True):
        assert bool(samples) == (share > 0)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(numbers(23))


def own_of_stream(shares: Any, **options: Any) -> list[int]:
    with dl.join_world(seed=0) as world:
        return [int(one) for rows in dl.Batches(Stream(), 10, world, shares=shares, **options) for one in rows]


@pytest.mark.parametrize("options", [{}, {"shards": 4}], ids=["a shard per rank", "4 shards"])
def test_streams_are_shared_too(options: dict[str, int], on_ranks: OnRanks) -> None:
    results = on_ranks(3, own_of_stream, (1, 0, 3), **options)
    assert sorted(sample for samples in results for sample in samples) == numbers(23).tolist()
    assert not results[1]
    assert len(results[2]) > 2 * len(results[0])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "all zero": ((0, 0), {}, r"At least one rank must have a share. Got \(0, 0\)"),
    "negative": ((1, -1), {}, "finite number of 0 or more. Got -1 for rank 1"),
    "NaN": ((math.nan, 1), {}, "Got nan for rank 0"),
    "infinite": ((1, math.inf), {}, "Got inf for rank 1"),
    "a text": ((1, "2"), {}, "Got '2' for rank 1"),
    "a truth value": ((1, True), {}, "Got True for rank 1"),
    "too few": ((1,), {}, "one number per rank. Got 1 for 2 ranks"),
    "too many": ((1, 1, 1), {}, "Got 3 for 2 ranks"),
    "a word": ("equal", {}, "Got 'equal'"),
    "a number": (3, {}, "Got 3. Remove shares="),
    "a dict": ({0: 1, 1: 3}, {}, "one number per rank, such as"),
    "fewer shards than ranks with a share": ((1, 1), {"shards": 1}, "Got shares for 2 ranks and shards=1"),
    "fewer shards than measured ranks": ("measured", {"shards": 1}, "Got shares for 2 ranks and shards=1"),
}


def make_batches(world: dl.World, folder: str, shares: Any, options: dict[str, Any]) -> None:
    dl.Batches(numbers(23), 10, world, shares=shares, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_share_is_refused_on_every_rank(name: str, refused: Refused) -> None:
    shares, options, message = REFUSED[name]
    refused(2, make_batches, shares, options, kind="ValueError", said=message, by=ALL)


def disagree(world: dl.World, folder: str, of_ranks: tuple[Any, ...]) -> None:
    dl.Batches(numbers(23), 10, world, shares=of_ranks[world.rank])


@pytest.mark.parametrize("of_ranks", [((3, 1), (1, 3)), ((3, 1), "measured"), (None, (1, 1))], ids=str)
def test_ranks_that_disagree_are_refused(of_ranks: tuple[Any, ...], refused: Refused) -> None:
    said = "shares of Batches must be the same on every rank"
    refused(2, disagree, of_ranks, kind="ValueError", said=said, by=ALL)
