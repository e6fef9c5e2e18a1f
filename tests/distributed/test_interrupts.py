"""A wait that an exception of a signal ended leaves nothing behind for the next one."""

from __future__ import annotations

import ctypes
import select
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddp_loop as dl
from ddp_loop.distributed import watchdog
from ddp_loop.distributed.backend import LOOK_S, STEP, Work
from ddp_loop.distributed.collectives import Backends, Collectives
from ddp_loop.distributed.store import RankStore
from ddp_loop.distributed.torch_backend import TorchBackend
from ddp_loop.distributed.watchdog import Watchdog, _interrupted
from tests.support.harness import OnRanks, caught

pytestmark = pytest.mark.covers("D10")


class Interrupted(TorchBackend):
    """The first wait ends by Ctrl-C, after one look whether it is in vain."""

    looks: list[bool]
    in_vain: Callable[[], bool]

    def wait(self, work: Work) -> None:
        self.looks.append(self.in_vain())
        if len(self.looks) == 1:
            raise KeyboardInterrupt


def test_a_wait_after_an_interrupted_one_has_a_time_of_its_own() -> None:
    store = dist.HashStore()
    group: Any = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
    backend = Interrupted(group)
    backend.looks = []
    collectives = Collectives(Backends(backend, backend, backend), RankStore(store, 0, 2), timeout_s=LOOK_S)
    backend.in_vain = collectives.is_in_vain
    for error in (KeyboardInterrupt, None):
        work = collectives.start(lambda one: one.start_sum(torch.ones(1), STEP), torch.device("cpu"))
        assert work is not None
        if error is None:
            collectives.finish(work)
        else:
            with pytest.raises(error):
                collectives.finish(work)
    assert backend.looks == [False, False]


class Pending:
    """A watchdog that would raise."""

    def __init__(self) -> None:
        self.raised = 0

    def raise_pending(self) -> None:
        self.raised += 1


def test_an_interruption_waits_where_python_ignores_what_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = Pending()
    monkeypatch.setattr(Watchdog, "_open", [pending])

    class Dying:
        def __del__(self) -> None:
            _interrupted(0, sys._getframe())

    one = Dying()
    del one
    assert pending.raised == 0
    _interrupted(0, sys._getframe())
    assert pending.raised == 1


class Thing:
    """It can have a weak reference."""


def fail_beside(work: Callable[[dl.World], None]) -> str:
    """Rank 0 fails, and rank 1 works; returns what ended them."""

    def job() -> None:
        with dl.join_world(timeout_s=20.0) as world:
            if world.rank == 0:
                raise LookupError
            work(world)

    return caught(job)[0]


def be_interrupted_in_a_callback() -> tuple[str, list[str]]:
    """The interruption comes in a callback, where Python ignores it, and then somewhere else."""
    ended: list[str] = []

    def wait_and_raise(_: object) -> None:
        try:
            threading.Event().wait()
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    def work(world: dl.World) -> None:
        thing = Thing()
        reference = weakref.ref(thing, wait_and_raise)
        del thing
        assert reference() is None
        threading.Event().wait()

    return fail_beside(work), ended


def test_an_interruption_that_python_ignored_comes_again(on_ranks: OnRanks) -> None:
    assert on_ranks(2, be_interrupted_in_a_callback) == [("LookupError", []), ("PeerFailed", ["PeerFailed"])]


END_S, HELD_S = 0.8, 1.0  # until the rank is ended, which leaves it time to raise


def hold_the_interpreter() -> str:
    """No other thread runs from when a failure is known here until a rank that cannot be interrupted would be ended."""

    def work(world: dl.World) -> None:
        assert world._watchdog is not None
        select.select([world._watchdog.noticed], [], [])
        ctypes.PyDLL(None).usleep(int(1e6 * HELD_S))
        threading.Event().wait()

    with mock.patch.object(watchdog, "_END_S", END_S), mock.patch.object(watchdog, "_INTERRUPT_S", 0.05):
        return fail_beside(work)


def test_a_rank_that_held_the_interpreter_is_interrupted_and_not_ended(on_ranks: OnRanks) -> None:
    assert on_ranks(2, hold_the_interpreter) == ["LookupError", "PeerFailed"]


def test_what_else_python_ignores_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __del__(self) -> None:
            raise LookupError

    ignored: list[object] = []

    def hook(unraisable: Any) -> None:
        ignored.append(unraisable.exc_type)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    with dl.join_world(device="cpu"):
        one = Failing()
        del one
    assert ignored == [LookupError]
    assert sys.unraisablehook is hook
