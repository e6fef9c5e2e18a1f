"""Reading by DataLoader: random numbers that depend on the sample, and the life of workers."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial
from multiprocessing import util
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ddp_loop as dl
from ddp_loop.data import readers as reading
from ddp_loop.distributed import children_except
from tests.support.harness import MOMENT_S, OnRanks, child_processes
from tests.support.runs import LONG_S
from tests.support.sources import FORKED, INPUTS, SIZE, WORKERS, Images, Mapped

# -- randomness while reading ----------------------------------------------------------------------------------


def noisy(index: int) -> tuple[int, float, float, torch.Tensor]:
    """The number and three draws."""
    return index, random.gauss(0.0, 1.0), np.random.randn(), torch.rand((), dtype=torch.float64)


def fail(index: int) -> float:
    random.random()
    raise LookupError(f"no {index}")


@pytest.mark.parametrize("workers", WORKERS)
def test_reading_leaves_the_random_state_of_the_process(workers: str) -> None:
    with dl.join_world(seed=3) as world:
        expected = [(random.random(), np.random.rand(), float(torch.rand(()))) for _ in range(6)]
    with dl.join_world(seed=3) as world:
        batches, found = dl.Batches(Mapped(SIZE, noisy), 4, world, **WORKERS[workers]), []
        for epoch in (0, 1):
            for loaded in batches.epoch(epoch + 1):
                loaded.data(0)
                found.append((random.random(), np.random.rand(), float(torch.rand(()))))
                with pytest.raises(LookupError):
                    next(dl.Batches(fail, 4, world).epoch(1)).data(0)
    assert found == expected


# -- workers come and go ---------------------------------------------------------------------------------------


def test_workers_end_with_the_epoch_while_its_last_mini_batch_is_held(world: dl.World) -> None:
    before = child_processes()
    held = list(dl.Batches(Images(), 4, world, num_workers=2).epoch(1))
    assert len(held) == 3
    assert child_processes() == before


def test_persistent_workers_are_the_same_in_each_epoch_and_end_with_the_batches(world: dl.World) -> None:
    before = child_processes()
    batches = dl.Batches(Images(), 4, world, **WORKERS["two that persist"])
    found = []
    for epoch in (0, 1):
        found += [child_processes() - before for loaded in batches.epoch(epoch + 1) if loaded.data(0) is not None]
    assert len(found[0]) == 2
    assert all(workers == found[0] for workers in found)
    del batches
    assert child_processes() == before


@pytest.mark.parametrize("workers", WORKERS)
def test_an_epoch_may_be_left_in_the_middle_for_the_next_one(workers: str, world: dl.World) -> None:
    batches = dl.Batches(torch.arange(20), 2, world, shuffle=True, **WORKERS[workers])
    for epoch in range(3):
        found = []
        for loaded in batches.epoch(epoch + 1):
            found.append(loaded.data(0).tolist())
            if len(found) == 2:
                break
        order = batches.indices(epoch + 1, 0, 20).tolist()
        assert found == [order[:2], order[2:4]]
    assert [loaded.data(0).tolist() for loaded in batches.epoch(1)][9] == batches.indices(1, 18, 2).tolist()


@pytest.mark.parametrize("workers", ["none", "two"])
def test_two_epochs_may_be_read_alternately(workers: str, world: dl.World) -> None:
    batches = dl.Batches(torch.arange(6), 2, world, shuffle=True, **WORKERS[workers])
    for one, other in zip(batches.epoch(1), batches.epoch(2), strict=True):
        start = one.mini_batch.start
        assert one.data(0).tolist() == batches.indices(1, start, 2).tolist()
        assert other.data(0).tolist() == batches.indices(2, start, 2).tolist()


def test_persistent_workers_refuse_a_second_epoch_before_the_first_ends(world: dl.World) -> None:
    batches = dl.Batches(torch.arange(6), 2, world, **WORKERS["two that persist"])
    training = batches.epoch(1)
    next(training).data(0)
    assert len([loaded.data(0) for loaded in batches.epoch(2)]) == 3  # as an evaluation in between
    with pytest.raises(RuntimeError, match="Persistent workers read one epoch at a time"):
        next(training).data(0)


def torn(index: int) -> torch.Tensor:
    """One sample cannot be read."""
    if index == 5:
        raise OSError("the file is torn")
    return INPUTS[index]


@pytest.mark.parametrize("workers", ["two", "two that persist"])
def test_workers_end_when_reading_fails_while_the_exception_is_held(workers: str, world: dl.World) -> None:
    before = child_processes()
    with pytest.raises(OSError, match="the file is torn") as caught:
        [loaded.data(0) for loaded in dl.Batches(Mapped(SIZE, torn), 2, world, **WORKERS[workers]).epoch(1)]
    assert caught.value.__traceback__ is not None
    assert child_processes() == before


def unsendable(raises: bool, index: int) -> Any:
    """Sample 3 cannot be pickled, or raises an error that cannot."""

    class Local(Exception):
        pass

    if index < 3:
        return index
    if raises:
        raise Local("the file is torn")
    return Local


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("raises", [False, True], ids=["a sample", "an error"])
def test_what_a_worker_cannot_pickle_is_an_error_and_no_wait(raises: bool, world: dl.World) -> None:
    options: dict[str, Any] = {"num_workers": 1, "collate_fn": as_they_are, "timeout": MOMENT_S}
    kind, said = (RuntimeError, "the file is torn") if raises else (TypeError, "cannot be pickled .*Local")
    before = child_processes()
    batches = dl.Batches(Mapped(4, partial(unsendable, raises)), 2, world, shuffle=False, check_data=False, **options)
    mini_batches = batches.epoch(1)
    assert next(mini_batches).data(0) == [0, 1]
    with pytest.raises(kind, match=said):
        next(mini_batches).data(0)
    assert child_processes() == before


def end_late(_: int) -> None:
    """A worker that takes longer to end than torch waits for it, as on a busy machine."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    util.Finalize(None, time.sleep, args=(LONG_S,), exitpriority=0)


@pytest.mark.parametrize("leaves", [False, True])
def test_no_worker_is_left_that_takes_longer_to_end_than_torch_waits(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    monkeypatch.setattr("ddp_loop.distributed.processes._DAEMON_END_S", 0.1)
    with dl.join_world() as world:
        before = child_processes()
        for loaded in dl.Batches(Images(), 4, world, num_workers=2, worker_init_fn=end_late).epoch(1):
            loaded.data(0)
            if leaves:
                break
        del loaded
        assert child_processes() == before


def workers_of_this_rank(leaves: bool) -> tuple[int, bool]:
    """The most workers of a rank at a time, and whether none is left. A mini-batch has one shard, which is rank 0's."""
    before = child_processes()
    most = 0
    with dl.join_world() as world:
        for loaded in dl.Batches(Images(), 3, world, shards=1, **FORKED).epoch(1):
            for number, _ in enumerate(loaded.mini_batch.shards):
                loaded.data(number)
            most = max(most, len(child_processes() - before))
            if leaves:
                break
        del loaded
    return most, child_processes() == before


@pytest.mark.covers("C6")
@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_without_shards_starts_no_worker_and_one_that_leaves_has_none_left(
    leaves: bool, on_ranks: OnRanks
) -> None:
    assert on_ranks(2, workers_of_this_rank, leaves) == [(1, True), (0, True)]


def test_a_worker_that_ends_with_the_lock_of_its_event_blocks_nothing() -> None:
    """A worker that is terminated while it reads the event holds its lock."""
    before = children_except(set())
    loaded: Any = iter(DataLoader(Images(), num_workers=1))
    next(loaded)
    assert loaded._workers_done_event._cond._lock.acquire(timeout=MOMENT_S)  # as the worker does; nothing releases it
    reading._end_workers(loaded, children_except(before))
    ending = threading.Thread(target=loaded._shutdown_workers, daemon=True)
    ending.start()
    ending.join(MOMENT_S)
    assert not ending.is_alive()
    assert not loaded._workers[0].is_alive()


def test_data_that_hang_in_a_worker_are_not_compared(world: dl.World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PROBE_S", 1)
    before = child_processes()
    reader = dl.Batches(Mapped(SIZE, lambda index: threading.Event().wait()), 2, world, num_workers=1)._reader
    assert isinstance(reader, reading.LoaderReader)
    assert reader.fingerprint() == {}
    assert child_processes() == before


def test_a_worker_that_dies_raises_where_its_data_are_waited_for_and_not_within_a_sum_say(world: dl.World) -> None:
    """torch's SIGCHLD handler raises in the main thread, at any line, for each worker in its list."""
    before = children_except(set())
    epoch = dl.Batches(Images(), 3, world, **FORKED).epoch(1)
    next(epoch).data(0)
    (worker,) = children_except(before)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* is killed by signal"):
        next(epoch).data(0)
