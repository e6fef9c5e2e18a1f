"""The sum of a flat tensor over the ranks, which runs while backward goes on.

[Note: In turn] A sum in tree order has two collectives, with this rank's additions between them. Where its waits hold
up the device alone, as with NCCL, the start of the next sum makes the additions and starts the second collective. So
all but the last sums are nearly done when backward ends. The order of collectives follows from the order of starts,
which is the same on every rank, never from what has arrived. Before the next start rather than after it: so a GPU holds
the pieces of one bucket at a time. Where a wait holds up the host, it would hold up backward, and all additions follow
it. A sum of one collective has nothing to start, so backward does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_loop.distributed import Work, World, as_real, fill_identity
from ddp_loop.training.ordered_sum import ReductionOrder


class FlatAllReduce:
    """The sum of one flat tensor of `padded` length over the ranks: `start`, `fold`, `finish`."""

    def __init__(
        self, world: World, order: ReductionOrder, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._world = world
        self._rows = max(1, order.pieces[world.rank])
        self._length = length
        self._dtype = dtype
        self.device = device
        self._sum = world.flat_sum(order, length, dtype, device)
        self._work: Work | None = None
        self._is_folded = False
        self.flat: torch.Tensor | None = None  # where the sum will be, from `start` to `finish`

    def empty(self) -> torch.Tensor:
        """New memory for a row, from which the sum is quickest; with any values."""
        if self._sum is None:
            return torch.empty(self._length, dtype=self._dtype, device=self.device)
        return self._sum.empty()

    def empty_rows(self) -> list[torch.Tensor]:
        """New rows of this rank that add nothing."""
        return [fill_identity(self.empty()) for _ in range(self._rows)]

    def start(self, rows: Sequence[torch.Tensor], before: FlatAllReduce | None = None) -> None:
        """Send this rank's pieces; the sum comes into the first of `rows`. Every rank must call this.

        Args:
            rows: of one length.
            before: the sum that was started before it in this pass. See [Note: In turn].
        """
        if before is not None and before._sum is not None and before._sum.folds_early:
            before.fold()
        flat = [as_real(row).reshape(-1) for row in rows]  # no backend adds complex numbers
        self.flat = flat[0]
        self._is_folded = False
        whole = self._sum
        if whole is not None:
            self._work = self._world.start(lambda _: whole.arrive(flat), self.device)

    def fold(self) -> None:
        """Add up this rank's part of all pieces, and send it to all ranks, once. Every rank must call this."""
        if self._sum is not None and not self._is_folded:
            self._world.finish(self._work)
            whole = self._sum
            self._is_folded = True
            self._work = self._world.start(lambda _: whole.reduce(), self.device)

    def finish(self) -> None:
        """Wait until the sum has come."""
        if self._sum is not None:
            self._world.finish(self._work)
            self._sum.collect()
        self._work = self.flat = None


def finish_all(sums: Sequence[FlatAllReduce], world: World) -> None:
    """Fold and finish sums that have all been started. Every rank must call this."""
    for one in sums:
        one.fold()
    for one in sums:
        one.finish()
    for device in dict.fromkeys(one.device for one in sums):
        world.finish(world.start(lambda backend: backend.start_settling(), device))
