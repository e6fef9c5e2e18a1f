"""The parts of data: sizes, positions and order against a plain count of them."""

from __future__ import annotations

import random

import pytest
import torch

from ddp_loop.data.partition import Parts

pytestmark = pytest.mark.covers("A11", "A12")


def counted(sizes: list[int], pieces: tuple[int, ...], until: str, *, drop_last: bool) -> list[list[list[int]]]:
    """The samples of each shard of each mini-batch, taken one after the other."""
    parts, start = [], 0
    for size in sizes:
        parts.append(list(range(start, start + size)))
        start += size
    found: list[list[list[int]]] = []
    while True:
        taken = []
        for part, piece in zip(parts, pieces, strict=True):
            one = part[:piece]
            del part[:piece]
            taken.append([] if drop_last and len(one) < piece else one)
        if not any(taken) or (until == "first" and drop_last and not all(taken)):
            return found
        found.append(taken)
        if until == "first" and not all(parts):
            return found


@pytest.mark.parametrize("seeds", [range(first, first + 25) for first in (0, 25, 50, 75)], ids=str)
def test_mini_batches_of_parts_are_those_of_a_plain_count(seeds: range) -> None:
    for seed in seeds:
        assert_counted(seed)


def assert_counted(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, draw.randrange(1, 30)]) for _ in range(draw.randrange(1, 6))]
    sizes[0] += 12
    size, until, drop_last = draw.randrange(len(sizes), 12), draw.choice(["all", "first"]), draw.random() < 0.5
    pieces = tuple(size // len(sizes) + (part < size % len(sizes)) for part in range(len(sizes)))
    expected = counted(sizes, pieces, until, drop_last=drop_last)
    if not expected or (until == "first" and 0 in sizes):
        with pytest.raises(ValueError, match="An epoch must have a mini-batch"):
            Parts(sizes, size, until, drop_last=drop_last)
        return
    parts = Parts(sizes, size, until, drop_last=drop_last)
    assert parts.steps == len(expected)
    order = parts.order(seed, 0, shuffle=False).tolist()
    shuffled = parts.order(seed, 1, shuffle=True).tolist()
    assert order == [number for shards in expected for shard in shards for number in shard]
    assert len(set(shuffled)) == len(shuffled) == parts.samples == len(order)
    starts = [sum(sizes[:part]) for part in range(len(sizes) + 1)]
    seen, all_sizes = 0, set[tuple[int, int]]()
    for position, shards in enumerate(expected):
        one = parts.mini_batch(1, position, range(len(sizes)))
        assert (one.start, one.samples, one.sizes) == (seen, sum(map(len, shards)), tuple(map(len, shards)))
        assert one.is_last == (position + 1 == len(expected))
        for shard in one.shards:
            numbers = shuffled[seen + shard.start :][: shard.samples]
            assert all(starts[shard.number] <= number < starts[shard.number + 1] for number in numbers)
        seen += one.samples
        all_sizes.update(zip(range(len(sizes)), one.sizes, strict=True))
    there = {pair for at in parts.positions_of_sizes for pair in enumerate(parts.mini_batch(1, at, range(0)).sizes)}
    assert there == all_sizes


def test_the_order_differs_in_each_part_and_epoch() -> None:
    parts = Parts([50, 50], 2, "all", drop_last=False)
    first, second = (parts.order(3, epoch, shuffle=True) for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first[::2], first[1::2] - 50)
    assert torch.equal(first, parts.order(3, 0, shuffle=True))
