"""A wait that an exception of a signal ended leaves nothing behind for the next one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_loop.distributed.backend import LOOK_S, STEP, Work
from ddp_loop.distributed.collectives import Backends, Collectives
from ddp_loop.distributed.store import RankStore
from ddp_loop.distributed.torch_backend import TorchBackend
from ddp_loop.distributed.watchdog import Watchdog, _interrupted

pytestmark = pytest.mark.covers("D10")


class Interrupted(TorchBackend):
    """The first wait ends by Ctrl-C, after one look whether it is in vain."""

    looks: list[bool]

    def wait(self, work: Work, in_vain: Callable[[], bool]) -> None:
        self.looks.append(in_vain())
        if len(self.looks) == 1:
            raise KeyboardInterrupt


def test_a_wait_after_an_interrupted_one_has_a_time_of_its_own() -> None:
    store = dist.HashStore()
    group: Any = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
    backend = Interrupted(group)
    backend.looks = []
    collectives = Collectives(Backends(backend, backend, backend), RankStore(store, 0, 2), timeout_s=LOOK_S)
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
