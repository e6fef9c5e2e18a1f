"""The exchange in memory when ranks diverge, are killed or stopped: which rank is named, how soon, what is left."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ddp_loop as dl
from ddp_loop.distributed import Pool, padded
from ddp_loop.distributed.meetings import ARENA_BYTES, PART_BYTES
from ddp_loop.distributed.memory import MemoryBackend
from ddp_loop.training.ordered_sum import tree_order
from tests.support.exchanges import CPU
from tests.support.harness import FAULT_S, OnRanks, let_ranks_meet, until
from tests.support.refusals import Caught, loop_over, loss_of, mean_of, network, samples
from tests.support.training import take

pytestmark = pytest.mark.covers("D10")

LATE_S = 0.2


def compute(seconds: float) -> None:
    one, until_s = torch.ones(100, 100), time.monotonic() + seconds
    while time.monotonic() < until_s:
        torch.mm(one, one)


def step_sum(world: dl.World, length: int = 5, dtype: torch.dtype = torch.float32) -> None:
    world.finish(world.start_sum(torch.ones(length, dtype=dtype)))


def flat_sum(world: dl.World, length: int) -> None:
    order = tree_order(world.size, world.size, world.rank)
    whole = world.flat_sum(order, padded(length, order), torch.float32, CPU)
    assert whole is not None
    row = whole.empty().fill_(1)
    world.finish(world.start(lambda _: whole.arrive([row]), CPU))
    world.finish(world.start(lambda _: whole.reduce(), CPU))
    whole.collect()


def wait_for_a_later_sum(world: dl.World) -> None:
    """Wait in a gather, with a sum under way that no other rank makes, as beside the sums of a GPU."""
    work = world.start_sum(torch.ones(5, dtype=torch.int32))
    world.gather(1, "numbers")
    world.finish(work)


def steps(world: dl.World, evaluates: bool) -> None:
    model = network()
    for step in loop_over(world, None, model):
        take(step, model)
        if evaluates and step.iteration == 2:
            dl.evaluate(model, dl.Batches(samples(9), 4, world), mean=mean_of)


Meets = Callable[[dl.World], object]
USUAL: dict[str, tuple[Meets, Meets]] = {  # of most ranks, and of the odd one
    "a gather": (step_sum, lambda world: world.gather(1, "numbers")),
    "another length": (step_sum, partial(step_sum, length=6)),
    "another dtype": (step_sum, partial(step_sum, dtype=torch.int32)),
    "a bucket of another size": (partial(flat_sum, length=1000), partial(flat_sum, length=400_000)),
    "a bucket in memory": (step_sum, partial(flat_sum, length=400_000)),
    "a wait for a later sum": (step_sum, wait_for_a_later_sum),
    "an evaluation": (partial(steps, evaluates=False), partial(steps, evaluates=True)),
    "another name": (lambda world: world.gather(1, "apples"), lambda world: world.gather(1, "pears")),
}


def part(kind: str, odd: int, late: int | None) -> Caught:
    """How a rank ends where one of them makes another collective; from when all are there."""
    began = time.monotonic()
    try:
        with dl.join_world(timeout_s=20.0, exchange="memory") as world:
            steps(world, evaluates=False)  # a process's first ones import much
            began = time.monotonic()
            if world.rank == late:
                compute(LATE_S)
            USUAL[kind][world.rank == odd](world)
    except Exception as error:
        return Caught(type(error).__name__, str(error), time.monotonic() - began)
    return Caught("", "", 0.0)


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize(("ranks", "odd"), [(2, 1), (3, 0)])
def test_ranks_that_part_all_get_one_error_with_the_places(kind: str, ranks: int, odd: int, on_ranks: OnRanks) -> None:
    results = on_ranks(ranks, part, kind, odd, None)
    assert {one.kind for one in results} == {"Parted"}, results
    assert len({one.text for one in results}) == 1, results
    for rank in range(ranks):
        assert f"rank {rank} is at " in results[0].text
    assert max(one.took_s for one in results) < FAULT_S


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_comes_later_gets_the_error_too(late: int, on_ranks: OnRanks) -> None:
    results = on_ranks(3, part, "a gather", 1, late)
    for rank, one in enumerate(results):
        assert one.kind in ("Parted", "PeerFailed") if rank == late else one.kind == "Parted", results
        assert "rank 1 is at a gather of numbers" in one.text or late == 1
        assert one.took_s < FAULT_S + LATE_S


def fail_where_another_waits_for_room() -> tuple[str, int | None]:
    """Rank 1 fails between a gather's header and its values; rank 0 has begun so much that it waits for room."""
    try:
        with dl.join_world(timeout_s=20.0, exchange="memory") as world:
            works = [world.start_sum(torch.ones(PART_BYTES // 4)) for _ in range(ARENA_BYTES // PART_BYTES)]
            failing = mock.patch.object(MemoryBackend, "start_gather", side_effect=LookupError("here"))
            with failing if world.rank == 1 else nullcontext():
                world.gather(bytes(PART_BYTES // 2))
            del works
    except (LookupError, dl.PeerFailed) as error:
        return type(error).__name__, getattr(error, "rank", None)
    return "", None


def test_a_failure_is_named_where_a_rank_waits_for_room(on_ranks: OnRanks) -> None:
    assert on_ranks(2, fail_where_another_waits_for_room) == [("PeerFailed", 1), ("LookupError", None)]


# -- killed and stopped ------------------------------------------------------------------------------------


def end_in_a_step(folder: str, exchange: str, culprit: int, workers: int) -> None:
    """One rank is killed in the forward of step 3; the others note what they raise, and how long after."""
    moment = Path(folder, "moment")
    try:
        with dl.join_world(timeout_s=20.0, exchange=exchange) as world:
            model = network()
            loaders: dict[str, Any] = {"num_workers": workers} if workers else {}
            batches = dl.Batches(samples(24), 6, world, shuffle=False, **loaders)
            for step in dl.Loop(batches, 1, state={"m": model}, progress=False):
                for rows in step:
                    if (world.rank, step.iteration) == (culprit, 3):
                        until(lambda: world.store._last_place(culprit).step == 3, "the watchdog has looked")
                        moment.write_text(repr(time.monotonic()))
                        os.kill(os.getpid(), signal.SIGKILL)
                    step.backward(loss_of(model, rows))
                step.fold()
    except dl.PeerFailed as error:
        note(folder, error)
        raise


def note(folder: str, error: dl.PeerFailed) -> None:
    took = time.monotonic() - float(Path(folder, "moment").read_text())
    word = {"rank": error.rank, "stage": error.stage, "step": error.step, "text": str(error), "took": took}
    Path(folder, f"rank-{os.environ['RANK']}").write_text(json.dumps(word))


def told(folder: Path, ranks: int, culprit: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(ranks) if rank != culprit]


@pytest.mark.parametrize(
    ("way", "culprit", "workers"),  # a DataLoader's processes live on
    [
        ("memory", 1, 0),
        pytest.param("memory", 0, 1, marks=pytest.mark.slow),
        pytest.param("gloo", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named_at_once(way: str, culprit: int, workers: int, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(dl.RankFailed) as failed:
        pool.run(end_in_a_step, 3, str(tmp_path), way, culprit, workers)
    assert failed.value.rank == culprit
    how = {"memory": "ended without an error of Python", "gloo": "does not answer (killed"}[way]
    for one in told(tmp_path, 3, culprit):
        assert (one["rank"], one["stage"], one["step"]) == (culprit, "forward", 3), one
        assert f"Rank {culprit} {how}" in one["text"]
        assert "Its last message was sent in forward of step 3." in one["text"]
        assert one["took"] < FAULT_S


def fill_a_stopped_ranks_connection(folder: str) -> None:
    """Rank 1 stops; rank 0 starts more sums than its connection has room for."""
    let_ranks_meet()
    try:
        with dl.join_world(timeout_s=2.0, exchange="memory") as world:
            world.sum(torch.ones(()))
            if world.rank == 1:
                Path(folder, "moment").write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                world.start_sum(torch.ones(()))
    except dl.PeerFailed as error:
        note(folder, error)
        raise


@pytest.mark.slow
def test_a_start_that_has_no_room_ends_with_the_timeout(tmp_path: Path) -> None:
    with Pool(2) as pool:
        pool.run(os.getpid, 2)
        with pytest.raises(dl.RankFailed):
            pool.run(fill_a_stopped_ranks_connection, 2, str(tmp_path), timeout_s=20.0)
    (one,) = told(tmp_path, 2, 1)
    assert one["rank"] == 1
    assert one["took"] < 2.0 + FAULT_S


# -- what is left ------------------------------------------------------------------------------------------


def leavings() -> dict[str, int]:
    """Descriptors, threads, mappings of shared memory, own files in /dev/shm, child processes; whether it is busy."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    began, used = time.monotonic(), time.process_time()
    threading.Event().wait(0.05)
    cores = (time.process_time() - used) / (time.monotonic() - began)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "in /dev/shm": sum(f"torch_{os.getpid()}_" in name for name in os.listdir("/dev/shm")),  # others have some too
        "mappings": sum("memfd:ddp_loop" in line for line in maps),
        "children": len(Path("/proc/self/task", str(os.getpid()), "children").read_text().split()),
        "busy": int(cores > 0.5),  # a thread that turns takes 1.0
    }


def await_no_more_than(before: list[dict[str, int]]) -> None:
    """Wait until this rank has no more of anything; a thread that was joined lives on for a moment in the kernel."""
    most = before[int(os.environ["RANK"])] | {"busy": 0}
    try:
        until(lambda: all(count <= most[what] for what, count in leavings().items()), "nothing is left")
    except AssertionError as error:
        raise AssertionError(f"{error}: {most} before, and {leavings()} then") from None


def leave_in_order() -> None:
    with dl.join_world(exchange="memory") as world:
        steps(world, evaluates=False)
        flat_sum(world, 400_000)


def kept() -> int:
    """The mappings that are left while the script keeps the world and a flat sum."""
    with dl.join_world(exchange="memory") as world:
        order = tree_order(world.size, world.size, world.rank)
        whole = world.flat_sum(order, padded(10, order), torch.float32, CPU)
        world.finish(world.start_sum(torch.ones(5)))
    assert whole is not None
    return leavings()["mappings"]


def fail(exchange: str, arrives: bool) -> None:
    """Rank 0 fails while the others have some operations under way, and one that was perhaps never sent."""
    with suppress(LookupError, dl.PeerFailed), dl.join_world(timeout_s=20.0, exchange=exchange) as world:
        order = tree_order(world.size, world.size, world.rank)
        whole = world.flat_sum(order, padded(400_000, order), torch.float32, CPU)
        assert whole is not None
        row = whole.empty().fill_(1)
        if arrives:
            world.start(lambda _: whole.arrive([row]), CPU)
        if world.rank == 0:
            raise LookupError
        for work in [world.start_sum(torch.ones(1 << 14)) for _ in range(3)]:
            world.finish(work)


def fail_in_a_metric() -> None:
    """Rank 0 fails in an evaluation, where the others gather."""

    def metric(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if world.rank == 0:
            raise LookupError
        return output.mean()

    with suppress(LookupError, dl.PeerFailed), dl.join_world(timeout_s=20.0) as world:
        dl.evaluate(network(), dl.Batches(samples(12), 4, world), metric=metric)


@pytest.mark.slow
def test_nothing_is_left_after_a_world_and_after_many_failures() -> None:
    tasks: list[Callable[[], None]] = [
        leave_in_order,
        partial(fail, "memory", True),
        partial(fail, "memory", False),
        partial(fail, "gloo", True),
        fail_in_a_metric,
    ]
    with Pool(3) as pool:
        for task in tasks:
            pool.run(task, 3)  # imports, and threads that torch keeps
        before = pool.run(leavings, 3)
        for task in tasks * 5:
            pool.run(task, 3)
        pool.run(await_no_more_than, 3, before)
        assert pool.run(kept, 2) == [0, 0]
