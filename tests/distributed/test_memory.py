"""The exchange in memory: random programs of collectives, at whatever moment each rank comes to them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ddp_loop as dl
from ddp_loop.distributed import padded
from ddp_loop.distributed.backend import STEP
from ddp_loop.distributed.meetings import PART_BYTES
from ddp_loop.distributed.piece_sums import add_pieces
from ddp_loop.training.ordered_sum import tree_order
from tests.support.exchanges import (
    CPU,
    be_late,
    by_the_tree,
    digest,
    one_after_another,
    rows_of_all,
    same_bits,
    values,
)
from tests.support.harness import OnRanks

pytestmark = pytest.mark.covers("D10")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.float16]
DTYPES = [*FLOATS, torch.uint8, torch.int8, torch.int64, torch.complex128]
SIZES = [0, 1, 7, 1000, 30_000, PART_BYTES // 4, PART_BYTES // 4 + 1, 300_000]
OPERATIONS = 60


class Program:
    """Random collectives, the same on each rank, each with its result as one process computes it.

    Those that have begun are finished later, in an order of each rank's own where they need no other collective.
    """

    def __init__(self, world: dl.World, seed: int) -> None:
        self.world, self.seed = world, seed
        self.chance, self.own = random.Random(seed), random.Random(repr((seed, world.rank)))
        self.number = 0
        self.found: list[torch.Tensor] = []
        self.short: list[Callable[[], None]] = []  # to finish in any order
        self.long: list[Callable[[], None]] = []  # in the order in which they began

    def every(self, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [values(count, dtype, self.seed, self.number, rank) for rank in range(self.world.size)]

    def note(self, found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
        assert same_bits(found, wanted), f"operation {self.number}, {what}"
        self.found.append(wanted)

    def begin(self) -> None:
        """A collective of a step."""
        every = self.every(self.chance.choice(SIZES), self.chance.choice(DTYPES))
        own = every[self.world.rank].clone()
        match self.chance.randrange(4):
            case 0 | 1:
                found, wanted = own, one_after_another(every)
                work = self.world.start(lambda backend: backend.start_sum(own, STEP), CPU)
            case 2:
                found, wanted = own.new_empty(len(own) * len(every)), torch.cat(every)
                work = self.world.start(lambda backend: backend.start_gather(found, own, STEP), CPU)
            case _:
                found, wanted = own, every[0]
                work = self.world.start(lambda backend: backend.start_broadcast(own, STEP), CPU)
        number = self.number

        def finish() -> None:
            be_late(self.seed, number, self.world.rank, "finish")
            self.world.finish(work)
            self.note(found, wanted, number)

        (self.short if own.nbytes <= PART_BYTES else self.long).append(finish)

    def of_another_kind(self) -> None:
        """A collective with a header of its own, while others are under way."""
        every = self.every(self.chance.choice(SIZES), self.chance.choice(DTYPES))
        own, size = every[self.world.rank].clone(), self.world.size
        match self.chance.randrange(4):
            case 0:
                self.note(self.world.sum(own), one_after_another(every), "sum")
            case 1:
                self.note(torch.cat(self.world.gather(own)), torch.cat(every), "gather")
            case 2:
                self.note(self.world.broadcast(own), every[0], "broadcast")
            case 3:
                assert self.world.numbers(self.world.rank - 2**62, "n") == [rank - 2**62 for rank in range(size)]

    def flat_sums(self) -> None:
        """Some buckets, which begin while others come, over two steps."""
        shards = self.chance.randrange(1, 3 * self.world.size + 1)
        order = tree_order(shards, self.world.size, self.world.rank)
        made = []
        for _ in range(self.chance.randrange(1, 4)):
            length, dtype = self.chance.choice(SIZES[1:]), self.chance.choice(FLOATS)
            count = padded(length, order) * (2 if dtype.is_complex else 1)
            whole = self.world.flat_sum(order, count, dtype.to_real(), CPU)
            assert whole is not None
            rows = [whole.empty().view(dtype) for _ in range(max(1, order.pieces[self.world.rank]))]
            if self.chance.random() < 0.3 and self.own.random() < 0.5:  # only on some ranks
                rows[0] = torch.empty_like(rows[0])
            made.append((whole, rows, [torch.view_as_real(r).reshape(-1) if dtype.is_complex else r for r in rows]))
        for step in range(2):
            under_way, wanted = [], []
            for number, (whole, rows, flat) in enumerate(made):
                every = rows_of_all(order, len(rows[0]), rows[0].dtype, self.seed, self.number, step, number)
                for row, value in zip(rows, every[self.world.rank], strict=True):
                    row.copy_(value)
                wanted.append(by_the_tree(order, every))
                be_late(self.seed, self.number, step, number, self.world.rank)
                under_way.append(self.world.start(lambda _, whole=whole, flat=flat: whole.arrive(flat), CPU))  # type: ignore[misc]
            for number, (whole, _, _) in enumerate(made):
                self.world.finish(under_way[number])
                under_way[number] = self.world.start(lambda _, whole=whole: whole.reduce(), CPU)  # type: ignore[misc]
            for number, (whole, rows, _) in enumerate(made):
                self.world.finish(under_way[number])
                whole.collect()
                self.note(rows[0], wanted[number], (order, len(rows[0]), rows[0].dtype))
            self.world.finish(self.world.start(lambda backend: backend.start_settling(), CPU))

    def finish_some(self) -> None:
        while len(self.long) > self.chance.randrange(3):
            self.long.pop(0)()
        self.own.shuffle(self.short)
        for _ in range(self.own.randrange(len(self.short) + 1)):
            self.short.pop()()

    def run(self) -> list[torch.Tensor]:
        usual = [*[self.begin] * 4, self.of_another_kind, self.flat_sums]
        for self.number in range(OPERATIONS):
            be_late(self.seed, self.number, self.world.rank)
            self.chance.choice(usual)()
            if self.chance.random() < 0.3:
                self.finish_some()
        for finish in [*self.long, *self.short]:
            finish()
        return self.found


def finish_again(length: int, calls: int) -> float:
    """The sum of a wait that begins anew, after Ctrl-C ended one in the middle of adding up part number `calls`."""
    left = [calls]

    def interrupted(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        usual(*arguments)

    usual, total = add_pieces, torch.arange(float(length))
    with mock.patch("ddp_loop.distributed.memory.add_pieces", interrupted), dl.join_world(exchange="memory") as world:
        work = world.start_sum(total)
        if world.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                world.finish(work)
        left[0] = 0
        world.finish(work)
        assert torch.equal(total, 2 * torch.arange(float(length)))
        return world.sum(torch.ones(())).item()


@pytest.mark.parametrize(("length", "calls"), [(10, 1), (300_000, 1), (300_000, 2), (300_000, 3)])
def test_an_interrupted_wait_can_begin_anew(length: int, calls: int, on_ranks: OnRanks) -> None:
    assert on_ranks(2, finish_again, length, calls) == [2.0, 2.0]


def run_program(seed: int) -> str:
    with dl.join_world(exchange="memory", timeout_s=30.0) as world:
        program = Program(world, seed)
        program.run()
        return digest(sorted(program.found, key=lambda one: (len(one), str(one.dtype), digest([one]))))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_random_programs_give_what_one_process_computes(seed: int, ranks: int, on_ranks: OnRanks) -> None:
    assert len(set(on_ranks(ranks, run_program, seed))) == 1


def test_a_random_program_gives_what_one_process_computes(on_ranks: OnRanks) -> None:
    assert len(set(on_ranks(3, run_program, 1))) == 1


def gather_as_a_rank_fails(pipe: str) -> list[int]:
    """What rank 1 gathers if rank 0 fails right after it came, as rank 1 looks whether it waits in vain."""
    with dl.join_world(exchange="memory") as world:
        groups = world._groups
        if world.rank == 0:
            with open(pipe, "rb") as opened:  # until rank 1 looks
                opened.read()
        elif groups is not None and groups.memory is not None:
            wait_for_rank_0 = groups.memory._peers.wait

            def is_in_vain() -> bool:
                del world._collectives.is_in_vain  # of the next waits
                with open(pipe, "wb"):
                    pass
                wait_for_rank_0(60.0)
                return True

            world._collectives.is_in_vain = is_in_vain  # type: ignore[method-assign]
        return world.gather(world.rank)


@pytest.mark.covers("D6")
def test_what_a_rank_sent_before_it_failed_is_read(on_ranks: OnRanks, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert on_ranks(2, gather_as_a_rank_fails, str(tmp_path / "pipe")) == [[0, 1], [0, 1]]
