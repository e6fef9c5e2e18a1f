"""The exchange in memory, for ranks of one machine that compute on the CPU: a backend.

Small operations take one meeting. Large tensors go in parts, one after another; those of buckets lie in shared memory
anyway (`memory_sum`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch

from ddp_loop.distributed.backend import Numbers, PieceOrder, Work
from ddp_loop.distributed.meetings import BROADCAST, COPIED, GATHER, NUMBERS, PART_BYTES, SUM, Meeting, Meetings
from ddp_loop.distributed.memory_sum import MemoryFlatSum
from ddp_loop.distributed.piece_sums import add_pieces


class MemoryBackend(Meetings):
    """Collectives between the ranks of one machine."""

    def start_numbers(self, numbers: Sequence[int], what: str) -> Numbers:
        meeting = self.meet(NUMBERS, len(numbers), what, words=tuple(numbers))
        return meeting, lambda: [header.words[: len(numbers)] for header in meeting.headers]

    def start_sum(self, tensor: torch.Tensor, what: str) -> Meeting:
        flat = tensor.view(-1)
        one_by_one = (0, *(1,) * (self.size - 1))

        def add(values: list[torch.Tensor], part: slice) -> None:
            add_pieces(values, one_by_one, (), flat[part])

        return self._start(SUM, flat, what, add)

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> Meeting:
        rows = whole.view(self.size, -1)

        def fill(values: list[torch.Tensor], part: slice) -> None:
            torch.stack(values, out=rows[:, part])

        return self._start(GATHER, part, what, fill)

    def start_broadcast(self, tensor: torch.Tensor, what: str) -> Meeting:
        flat = tensor.view(-1)

        def take(values: list[torch.Tensor], part: slice) -> None:
            if self.rank != 0:
                flat[part].copy_(values[0])

        return self._start(BROADCAST, flat, what, take, sends=self.rank == 0)

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
        use: Callable[[list[torch.Tensor], slice], None],
        *,
        sends: bool = True,
    ) -> Meeting:
        """Start an operation on all elements of `own`, (K,), in parts where they do not fit into the arena at once.

        `use` gets what each rank sent of a part, and the part.
        """

        def start(part: slice) -> Meeting:
            sent = own[part]

            def read(meeting: Meeting) -> None:
                use([self.values_of(meeting, rank, sent.dtype, len(sent)) for rank in range(self.size)], part)

            return self.meet(kind, sent.nbytes, what, own.dtype, [sent] if sends else [], then=read, reads=True)

        if own.nbytes <= PART_BYTES:
            return start(slice(None))
        step = PART_BYTES // own.itemsize
        left = deque(range(0, len(own), step))
        under_way: list[Meeting] = []  # kept, since Ctrl-C may end this wait, and another one begin

        def run_parts(meeting: Meeting) -> None:
            while left or under_way:
                if not under_way:
                    under_way.append(start(slice(left[0], left[0] + step)))
                    left.popleft()
                self.finish(under_way[0])
                under_way.clear()

        return self.meet(kind, own.nbytes, what, own.dtype, then=run_parts)

    def wait(self, work: Work) -> None:
        if isinstance(work, Meeting):
            self.finish(work)

    def cut_off(self) -> None:
        self.end()

    def leave(self, under_way: Collection[Work], *, failed: bool) -> None:
        self.end()
