"""The exchange in memory, for ranks of one machine that compute on the CPU: a backend.

Small operations take one meeting. Large tensors go in parts, one after another; those of buckets lie in shared memory
anyway (`memory_sum`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from ddp_loop.distributed.backend import Numbers, PieceOrder, Work
from ddp_loop.distributed.meetings import BROADCAST, COPIED, GATHER, NUMBERS, PART_BYTES, SUM, Meeting, Meetings, Then
from ddp_loop.distributed.memory_sum import MemoryFlatSum
from ddp_loop.distributed.piece_sums import add_pieces


class MemoryBackend(Meetings):
    """Collectives between the ranks of one machine."""

    # -- operations ----------------------------------------------------------------------------------------

    def start_numbers(self, numbers: Sequence[int], what: str) -> Numbers:
        meeting = self.meet(NUMBERS, len(numbers), what, words=tuple(numbers))
        return meeting, meeting.rows

    def start_sum(self, tensor: torch.Tensor, what: str) -> Meeting:
        flat = tensor.view(-1)
        return self._start(SUM, flat, what, partial(self._add, flat), lambda part: self.start_sum(flat[part], what))

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> Meeting:
        return self._gather(whole.view(self.size, -1), part, what)

    def _gather(self, rows: torch.Tensor, own: torch.Tensor, what: str) -> Meeting:
        return self._start(
            GATHER, own, what, partial(self._fill, rows), lambda part: self._gather(rows[:, part], own[part], what)
        )

    def start_broadcast(self, tensor: torch.Tensor, what: str) -> Meeting:
        flat = tensor.view(-1)
        return self._start(
            BROADCAST,
            flat,
            what,
            partial(self._take, flat),
            lambda part: self.start_broadcast(flat[part], what),
            sends=self.rank == 0,
        )

    def flat_sum(self, order: PieceOrder, length: int, dtype: torch.dtype, device: torch.device) -> MemoryFlatSum:
        return MemoryFlatSum(self, order, length, dtype)

    def start_settling(self) -> Meeting | None:
        """Start to wait until no rank reads this one's buckets."""
        last = self.unsettled
        self.unsettled = None
        return None if last is None else self.again(last, COPIED)

    def _start(
        self,
        kind: int,
        own: torch.Tensor,
        what: str,
        then: Then,
        start_part: Callable[[slice], Meeting],
        *,
        sends: bool = True,
    ) -> Meeting:
        """Start an operation on all elements of `own`, (K,), in parts where they do not fit into the arena at once."""
        if own.nbytes > PART_BYTES:
            return self.meet(kind, own.nbytes, what, own.dtype, then=self._in_parts(own, start_part))
        return self.meet(kind, own.nbytes, what, own.dtype, [own] if sends else [], then=then, reads=True)

    def _in_parts(self, tensor: torch.Tensor, start: Callable[[slice], Meeting]) -> Then:
        """Do an operation on all elements of `tensor`, (K,), in parts, one after another."""
        step = PART_BYTES // tensor.itemsize
        left = deque(range(0, len(tensor), step))
        under_way: list[Meeting] = []  # kept, since Ctrl-C may end this wait, and another one begin

        def run(meeting: Meeting, in_vain: Callable[[], bool]) -> None:
            while left or under_way:
                if not under_way:
                    under_way.append(start(slice(left[0], left[0] + step)))
                    left.popleft()
                self.finish(under_way[0], in_vain)
                under_way.clear()

        return run

    def _add(self, flat: torch.Tensor, meeting: Meeting, in_vain: Callable[[], bool]) -> None:
        if len(flat):
            pieces = self.values_of_all(meeting, flat.dtype, len(flat))
            add_pieces(pieces, (0, *(1,) * (self.size - 1)), (), flat)

    def _fill(self, rows: torch.Tensor, meeting: Meeting, in_vain: Callable[[], bool]) -> None:
        for row, values in zip(rows, self.values_of_all(meeting, rows.dtype, rows.shape[1]), strict=True):
            row.copy_(values)

    def _take(self, flat: torch.Tensor, meeting: Meeting, in_vain: Callable[[], bool]) -> None:
        if self.rank != 0:
            flat.copy_(self.values_of(meeting, 0, flat.dtype, len(flat)))

    def wait(self, work: Work, in_vain: Callable[[], bool]) -> None:
        if isinstance(work, Meeting):
            self.finish(work, in_vain)

    def cut_off(self) -> None:
        self.end()

    def leave(self, under_way: Collection[Work], *, failed: bool) -> None:
        self.end()
