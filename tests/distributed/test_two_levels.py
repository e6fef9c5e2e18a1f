"""The same bits over gloo, in memory, and in memory inside of machines with gloo between them."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed import padded
from ddp_loop.distributed.backend import PieceOrder
from ddp_loop.distributed.piece_sums import tree_levels
from ddp_loop.distributed.shared_memory import aligned
from ddp_loop.distributed.two_levels import TwoLevelBackend, machine_order
from ddp_loop.training.buckets import FlatAllReduce, finish_all
from ddp_loop.training.ordered_sum import tree_order
from tests.support.exchanges import digest, make_flat_sum, on_machines, values
from tests.support.harness import FAULT_S, OnRanks, caught

pytestmark = pytest.mark.covers("C4", "D10")

Machines = tuple[int, ...]
CUTS: dict[int, list[Machines]] = {
    2: [(2,)],
    3: [(3,), (2, 1), (1, 2)],
    4: [(4,), (2, 2), (1, 3), (1, 2, 1)],
    5: [(5,), (3, 2)],
}


def is_cut(world: dl.World) -> bool:
    groups: Any = world._groups
    return isinstance(groups.backends.host, TwoLevelBackend)


def flat_sums(shards: tuple[int, ...], machines: Machines) -> list[str]:
    """The digest of flat sums for each number of shards; over gloo without machines."""
    found = []
    with on_machines(*machines), dl.join_world(exchange="memory" if machines else "gloo") as world:
        assert is_cut(world) == (len(machines) > 1)
        for count in shards:
            order = tree_order(count, world.size, world.rank)
            sums = []
            for length in (13, 40_000, 70_001):
                for dtype in (torch.float32, torch.float64, torch.complex64):
                    if length < 100 or dtype == torch.float32:
                        sums += make_flat_sum(world, order, padded(length, order), dtype, 2)
            found.append(digest(sums))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("shards", [(1, 2), (3, 5), (6, 7), (8, 9), (12, 16)])
@pytest.mark.slow
def test_flat_sums_have_the_same_bits_every_way(shards: tuple[int, ...], ranks: int, on_ranks: OnRanks) -> None:
    wanted = on_ranks(ranks, flat_sums, shards, ())
    assert wanted == [wanted[0]] * ranks
    for machines in CUTS[ranks]:
        assert on_ranks(ranks, flat_sums, shards, machines) == wanted, machines


def tails() -> list[float]:
    """The last value of two sums of the same rows, of which each rank sets it in its first row alone."""
    found = []
    with on_machines(1, 2), dl.join_world(exchange="memory") as world:
        order = tree_order(6, world.size, world.rank)
        whole = FlatAllReduce(world, order, 8, torch.float32, world.device)
        rows = [torch.full((8,), -0.0) for _ in range(2)]
        for _ in range(2):
            rows[0][7] = 10.0**world.rank
            whole.start(rows)
            finish_all([whole], world)
            found.append(float(rows[0][7]))
    return found


def test_a_tail_is_added_up_once_where_a_machine_sends_several_sums(on_ranks: OnRanks) -> None:
    assert on_ranks(3, tails) == [[111.0, 111.0]] * 3


def test_pieces_whose_sums_need_no_other_sum_are_added_up_at_once() -> None:
    assert tree_levels((0, 1, 0, 2)) == [([0, 2], [1, 3]), ([0], [2])]  # (0 + 1) + (2 + 3)
    assert tree_levels((0, 1, 1)) == [([0], [1]), ([0], [2])]


def test_rows_have_room_for_an_equal_part_on_each_rank_and_begin_at_cache_lines() -> None:
    order = PieceOrder((1, 1, 1), (0, 1, 1), is_any=False)
    assert [padded(length, order) for length in (1, 3, 8)] == [3, 3, 9]
    assert padded(8, replace(order, is_any=True)) == 8
    assert [aligned(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_one_sum_of_each_of_two_machines_may_be_added_up_in_any_order() -> None:
    order = PieceOrder((1, 1, 1, 1), (0, 1, 0, 2), is_any=False)  # (0 + 1) + (2 + 3)
    for machines, between in (
        ([range(2), range(2, 4)], PieceOrder((1, 1), (0, 1), is_any=True)),
        ([range(2), range(2, 3), range(3, 4)], PieceOrder((1, 1, 1), (0, 0, 2), is_any=False)),
        ([range(3), range(3, 4)], PieceOrder((2, 1), (0, 0, 2), is_any=False)),
    ):
        assert machine_order(order, machines, 0)[2] == between


# -- other collectives -------------------------------------------------------------------------------------


def collect(machines: Machines) -> str:
    """Everything that a world offers, on each rank."""
    found = []
    with on_machines(*machines), dl.join_world(exchange="memory") as world:
        for number, count in enumerate([0, 1, 5, 1000, 200_000]):
            for dtype in (torch.float64, torch.int64, torch.uint8, torch.complex64, torch.bool):
                one = values(count, torch.uint8, number, world.rank).to(dtype)
                found.append(world.sum(one.clone()))
                found.append(world.broadcast(one.clone()))
            found += map(torch.tensor, world.gather([float(world.rank)] * (world.rank * count % 1001)))
        found.append(torch.tensor(world.numbers(world.rank - 5, "numbers")))
        works = [world.start_sum(torch.ones(count)) for count in (3, 200_000, 10)]
        for work in works:
            world.finish(work)
        world.require_equal("the machines", machines)
        return digest(found)


@pytest.mark.parametrize("machines", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.slow
def test_collectives_give_the_same_on_one_machine_and_on_several(machines: Machines, on_ranks: OnRanks) -> None:
    ranks = sum(machines)
    assert set(on_ranks(ranks, collect, machines)) == set(on_ranks(ranks, collect, (ranks,)))


def join_often() -> list[float]:
    """The sums of worlds in a group that the script made; any of them could have met by chance."""
    found = []
    with on_machines(1, 2):
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        try:
            for _ in range(10):
                with dl.join_world(exchange="memory", timeout_s=20.0) as world:
                    assert is_cut(world)
                    found.append(world.sum(torch.ones(())).item())
        finally:
            dist.destroy_process_group()
    return found


def test_worlds_in_the_scripts_group_meet_on_several_machines(on_ranks: OnRanks) -> None:
    assert on_ranks(3, join_often) == [[3.0] * 10] * 3


def describe() -> str:
    with on_machines(1, 2), dl.join_world(exchange="memory") as world:
        return str(world)


def test_a_world_on_several_machines_says_that_they_use_gloo(on_ranks: OnRanks) -> None:
    assert on_ranks(3, describe) == ["3 ranks on cpu, sums over shared memory, and gloo between machines"] * 3


# -- training ----------------------------------------------------------------------------------------------


def network(batch_norm: bool) -> nn.Sequential:
    torch.manual_seed(3)
    norm: nn.Module = nn.BatchNorm1d(300) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 300), norm, nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2))


def train(exchange: str, machines: Machines, batch_norm: bool, fails: int = -1, stops: int = -1) -> tuple[str, int]:
    """The digest of a training, its evaluation and prediction, and the number of steps."""
    rows, made = torch.randn(44, 6, generator=torch.Generator().manual_seed(1)), 0
    with on_machines(*machines), dl.join_world(exchange=exchange, timeout_s=20.0) as world:
        assert (world.exchange, is_cut(world)) == (exchange, len(machines) > 1)
        model = network(batch_norm)
        if batch_norm:
            model = dl.sync_batch_norm(model, world)  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = dl.Batches(rows, 11, world, shards=None if batch_norm else 7)
        loop = dl.Loop(batches, 2, state={"m": model, "o": optimizer}, progress=False, ordered=True, bucket_cap_mib=0.2)
        with suppress(dl.Stopped):
            for step in loop:
                for mine in step:
                    if (world.rank, step.iteration) == (fails, 3):
                        raise LookupError("at the third step")
                    step.backward(model(mine).square().mean())
                if (world.rank, step.iteration) == (stops, 3):
                    loop.stop()
                step.fold()
                optimizer.step()
                made += 1
        if loop.stopped is not None:
            return loop.stopped, made
        result = dl.evaluate(model, dl.Batches(rows, 5, world), mean=lambda output, rows: output.mean())
        predicted = dl.predict(model, dl.Batches(rows, 5, world, shuffle=False))
        return digest([*model.state_dict().values(), predicted, torch.tensor(result["mean"])]), made


@pytest.mark.parametrize("machines", [(2, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.slow
def test_training_has_the_same_bits_on_several_machines(
    machines: Machines, batch_norm: bool, on_ranks: OnRanks
) -> None:
    ranks = sum(machines)
    wanted = on_ranks(ranks, train, "gloo", (), batch_norm)
    assert len(set(wanted)) == 1
    assert on_ranks(ranks, train, "memory", (ranks,), batch_norm) == wanted
    assert on_ranks(ranks, train, "memory", machines, batch_norm) == wanted


@pytest.mark.parametrize(("machines", "stops"), [((2, 1), 1), ((2, 1), 2), ((1, 2), 0)])
def test_a_stop_on_one_rank_stops_all_machines(machines: Machines, stops: int, on_ranks: OnRanks) -> None:
    assert on_ranks(3, train, "memory", machines, False, stops=stops) == [("loop.stop()", 3)] * 3


def fail(machines: Machines, culprit: int) -> tuple[str, str, float]:
    return caught(train, "memory", machines, False, culprit)


@pytest.mark.parametrize(("machines", "culprit"), [((2, 1), 1), ((2, 1), 2), ((1, 2), 0)])
def test_a_failure_on_one_rank_ends_all_machines(machines: Machines, culprit: int, on_ranks: OnRanks) -> None:
    for rank, (kind, text, took_s) in enumerate(on_ranks(3, fail, machines, culprit)):
        assert kind == ("LookupError" if rank == culprit else "PeerFailed"), text
        named = f"rank {culprit} on host {socket.gethostname()} (127.0.0.1) failed in forward of step 3: LookupError"
        assert rank == culprit or text.startswith(named), text
        assert took_s < FAULT_S


def part(machines: Machines, odd: int) -> tuple[str, str, float]:
    """One rank makes another collective than the others, on another machine too."""

    def work() -> None:
        with on_machines(*machines), dl.join_world(exchange="memory", timeout_s=20.0) as world:
            world.sum(torch.ones(()))  # so that all are there
            world.gather(1, "pears" if world.rank == odd else "apples")

    return caught(work)


@pytest.mark.parametrize(("machines", "odd"), [((2, 1), 2), ((2, 2), 0)])
def test_machines_that_part_get_an_error_that_names_places(machines: Machines, odd: int, on_ranks: OnRanks) -> None:
    for kind, text, took_s in on_ranks(sum(machines), part, machines, odd):
        assert kind in ("Parted", "PeerFailed")
        assert "pears" in text
        assert "apples" in text
        assert took_s < FAULT_S
