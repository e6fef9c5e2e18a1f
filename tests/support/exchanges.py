"""What the tests of the exchange in memory share: programs of collectives, late ranks, several machines on one."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

import ddp_loop as dl
from ddp_loop.distributed.backend import PieceOrder
from ddp_loop.distributed.piece_sums import fill_identity

CPU = torch.device("cpu")


@contextmanager
def on_machines(*sizes: int) -> Iterator[None]:
    """Make this rank report machines with so many ranks each; one machine without sizes."""
    rank, every = int(os.environ["RANK"]), sizes or (int(os.environ["WORLD_SIZE"]),)
    places = [(local, size) for size in every for local in range(size)]
    local_rank, local_size = places[rank]
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)}):
        yield


def be_late(*place: object) -> None:
    """Compute for a while, up to a few ms, which follows from the place alone."""
    size = random.Random(repr(place)).choice((1, 1, 1, 40, 150, 300))
    one = torch.ones(size, size)
    torch.mm(one, one)


def values(count: int, dtype: torch.dtype, *place: object) -> torch.Tensor:
    """Values of any size and sign, (count,), which follow from the place alone."""
    generator = torch.Generator().manual_seed(random.Random(repr(place)).getrandbits(63))
    if dtype.is_complex:
        return torch.randn(count, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        exponents = torch.randint(-6, 7, (count,), generator=generator)
        return torch.ldexp(torch.randn(count, generator=generator), exponents).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (count,), dtype=dtype, generator=generator)


def one_after_another(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, from the left."""
    total = tensors[0].clone()
    for one in tensors[1:]:
        total = total + one
    return total


def by_the_tree(order: PieceOrder, rows: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The sum of all ranks' rows, as one process computes it."""
    pieces = [row for mine, count in zip(rows, order.pieces, strict=True) for row in mine[:count]]
    sums: list[torch.Tensor] = []
    for piece, merges in zip(pieces, order.last_merges, strict=True):
        sums.append(piece)
        for _ in range(merges):
            right, left = sums.pop(), sums.pop()
            sums.append(left + right)
    others = [mine[0] for mine, count in zip(rows, order.pieces, strict=True) if not count]
    return one_after_another([*sums, *others])


def rows_of_all(order: PieceOrder, length: int, dtype: torch.dtype, *place: object) -> list[list[torch.Tensor]]:
    """Rows for a flat sum, by rank; a rank without pieces sends -0.0, and whole numbers at the end, as all do there."""
    every = []
    for rank, pieces in enumerate(order.pieces):
        rows = [values(length, dtype, place, rank, piece) for piece in range(max(1, pieces))]
        for piece, row in enumerate(rows):
            if not pieces:
                fill_identity(row)
            row[-1] = 5 * rank + piece
        every.append(rows)
    return every


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of their bytes."""
    whole = hashlib.sha256()
    for one in tensors:
        whole.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def make_flat_sum(
    world: dl.World, order: PieceOrder, length: int, dtype: torch.dtype, steps: int
) -> list[torch.Tensor]:
    """The sums of some steps, of rows that follow from rank and step; they must be what one process computes."""
    every = [rows_of_all(order, length, dtype, step) for step in range(steps)]
    whole = world.flat_sum(order, length * (2 if dtype.is_complex else 1), dtype.to_real(), CPU)
    assert whole is not None
    rows = [whole.empty().view(dtype) for _ in every[0][world.rank]]
    found = []
    for step in range(steps):
        for row, value in zip(rows, every[step][world.rank], strict=True):
            row.copy_(value)
        flat = [torch.view_as_real(row).reshape(-1) if dtype.is_complex else row for row in rows]
        world.finish(world.start(lambda _, flat=flat: whole.arrive(flat), CPU))  # type: ignore[misc]
        world.finish(world.start(lambda _: whole.reduce(), CPU))
        whole.collect()
        world.finish(world.start(lambda backend: backend.start_settling(), CPU))
        found.append(rows[0].clone())
        assert same_bits(found[-1], by_the_tree(order, every[step])), (order, length, dtype, step)
    return found
