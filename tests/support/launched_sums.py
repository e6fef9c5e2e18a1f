"""A device whose host launches the sums of gradients and goes on, as with NCCL; and ranks that hold one another up.

The fake NCCL still adds gradients up while its host waits. In `launched` waiting for such a sum only notes it, and
`synchronize` waits. So what a host waits for inside of the block is another host, never a sum. What it computes from
sums is undefined until `synchronize`.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

import ddp_loop as dl
from ddp_loop.distributed.backend import Backend, FlatSum, PieceOrder, Work
from tests.support.harness import MOMENT_S

HELD_S = MOMENT_S / 3  # a rank that waits for a sign so long was waited for by the rank that was to give it
NOTHING_S = 0.3  # so long a sign must not come


@dataclass(eq=False)
class Launched:
    """A sum that the host does not wait for."""

    work: Work

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        return True


@dataclass
class LaunchedSum:
    """A flat sum whose parts are launched."""

    whole: FlatSum

    def __post_init__(self) -> None:
        self.reduces_early = self.whole.reduces_early

    def empty(self) -> torch.Tensor:
        return self.whole.empty()

    def arrive(self, rows: Sequence[torch.Tensor]) -> Work:
        return Launched(self.whole.arrive(rows))

    def reduce(self) -> Work | None:
        work = self.whole.reduce()
        return None if work is None else Launched(work)

    def collect(self) -> None:
        self.whole.collect()


class LaunchingBackend:
    """The GPUs' backend, whose sums of gradients hold up no host."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.under_way = backend, list[Launched]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def flat_sum(self, order: PieceOrder, length: int, dtype: torch.dtype, device: torch.device) -> FlatSum:
        return LaunchedSum(self._backend.flat_sum(order, length, dtype, device))

    def wait(self, work: Work) -> None:
        if isinstance(work, Launched):
            self.under_way.append(work)
        else:
            self._backend.wait(work)

    def synchronize(self) -> None:
        """Wait for all sums, as for a device."""
        while self.under_way:
            self._backend.wait(self.under_way.pop(0).work)


@contextmanager
def launched(world: dl.World) -> Iterator[LaunchingBackend]:
    """Sums of gradients hold up no host of this world, until the end of the block, which waits for them."""
    collectives = world._collectives
    before = collectives._backends
    assert before is not None
    backend = LaunchingBackend(before.device)
    collectives._backends = replace(before, device=backend)
    try:
        yield backend
        backend.synchronize()
    finally:
        collectives._backends = before


class Sign:
    """A pipe with a name, made by the test, by which one rank lets another one go on."""

    def __init__(self, path: str) -> None:
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def give(self) -> None:
        os.write(self._pipe, b"!")

    def came(self, within_s: float = HELD_S) -> bool:
        """Wait for it; whether it was given."""
        ready, _, _ = select.select([self._pipe], [], [], within_s)
        return bool(ready) and os.read(self._pipe, 1) == b"!"

    def close(self) -> None:
        os.close(self._pipe)
