"""The exchange in memory, for ranks of one machine that compute on the CPU: a backend.

Small operations take one meeting. Large tensors go in parts, one after another; a bucket's lie in shared memory
anyway.

[Note: In place] The row of a large bucket lies in a segment of its rank, which all ranks have mapped. Gradients are
written there once. When all have arrived, each rank adds up one slice of all rows and writes the sum into its own row.
When all have done so, each copies the other slices into its own row, where `.grad` already points. The script may
change that row only after all ranks have copied (`start_settling`).

A small bucket goes through the arena instead: every rank adds up all of it, after one meeting.

If a rank has no memory for a segment, all ranks use the arena instead, part by part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch

from ddp_loop.distributed.backend import STEP, PieceOrder, Work
from ddp_loop.distributed.meetings import COPIED, MAPPED, PART_BYTES, REDUCED, Meeting, Meetings
from ddp_loop.distributed.piece_sums import add_pieces, in_order
from ddp_loop.distributed.shared_memory import Segment, aligned

SMALL_BYTES = 256 * 2**10  # of a row: up to here one meeting is faster than two
_BLOCK_BYTES = 256 * 2**10  # of a slice: it stays in the cache while pieces are added to it
_SLICE_BYTES = 64  # slices begin at cache lines


class MemoryBackend(Meetings):
    """Collectives between the ranks of one machine."""

    def start_sum(self, tensor: torch.Tensor, what: str) -> Meeting:
        flat = tensor.view(-1)
        one_by_one = (0, *(1,) * (self.size - 1))

        def add(values: list[torch.Tensor], part: slice) -> None:
            add_pieces(values, one_by_one, (), flat[part])

        return self._start(flat, what, add)

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> Meeting:
        rows = whole.view(self.size, -1)

        def fill(values: list[torch.Tensor], part: slice) -> None:
            torch.stack(values, out=rows[:, part])

        return self._start(part, what, fill)

    def start_broadcast(self, tensor: torch.Tensor, what: str) -> Meeting:
        flat = tensor.view(-1)

        def take(values: list[torch.Tensor], part: slice) -> None:
            if self.rank != 0:
                flat[part].copy_(values[0])

        return self._start(flat, what, take, sends=self.rank == 0)

    def flat_sum(self, order: PieceOrder, length: int, dtype: torch.dtype, device: torch.device) -> MemoryFlatSum:
        return MemoryFlatSum(self, order, length, dtype)

    def start_settling(self) -> Meeting | None:
        """Start to wait until no rank reads this one's buckets."""
        last = self.unsettled
        self.unsettled = None
        return None if last is None else self.again(last, COPIED)

    def _start(
        self, own: torch.Tensor, what: str, use: Callable[[list[torch.Tensor], slice], None], *, sends: bool = True
    ) -> Meeting:
        """Start an operation on all elements of `own`, (K,), in parts where they do not fit into the arena at once.

        `use` gets what each rank sent of a part, and the part.
        """

        def start(part: slice) -> Meeting:
            sent = own[part]

            def read(meeting: Meeting) -> None:
                use([self.values_of(meeting, rank, sent.dtype, len(sent)) for rank in range(self.size)], part)

            values = [sent] if sends else []
            return self.meet(what, sent.nbytes, values, layout=own.dtype, then=read, reads=True)

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

        return self.meet(what, own.nbytes, layout=own.dtype, then=run_parts)

    def wait(self, work: Work) -> None:
        if isinstance(work, Meeting):
            self.finish(work)

    def leave(self, unfinished: Collection[Work]) -> None:
        self.cut_off()


class MemoryFlatSum:
    """A flat sum in memory. See [Note: In place].

    Args:
        meetings: of the ranks.
        order: of the pieces.
        length: of a row, in values.
        dtype: of the values.
    """

    reduces_early = False

    def __init__(self, meetings: Meetings, order: PieceOrder, length: int, dtype: torch.dtype) -> None:
        self._meetings = meetings
        self._order = order
        self._dtype = dtype
        self._count = length
        self._rows = [max(1, pieces) for pieces in order.pieces]  # a rank without shards sends -0.0, with the tail
        self._layout = dtype, order.pieces
        self._size = length * dtype.itemsize
        self._is_small = self._size <= SMALL_BYTES and self._size * max(self._rows) <= PART_BYTES
        self._own: dict[int, tuple[int, Segment]] = {}  # this rank's, by address: number and memory of a segment
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}  # by rank and number of its segment: (rows, count)
        self._sent: list[torch.Tensor] = []
        self._meeting: Meeting | None = None

    def empty(self) -> torch.Tensor:
        if not self._is_small:
            with suppress(OSError):  # then all ranks take the other way
                rank = self._meetings.rank
                number = len(self._own) + 1
                segment = Segment.make(aligned(self._size) * self._rows[rank])
                self._own[segment.bytes.data_ptr()] = number, segment
                self._mapped[rank, number] = self._rows_in(segment, self._rows[rank])
                return segment.bytes[: self._size].view(self._dtype)
        return torch.empty(self._count, dtype=self._dtype, device="cpu")

    def arrive(self, rows: Sequence[torch.Tensor]) -> Meeting:
        self._sent = list(rows)
        if self._is_small:
            return self._through_arena(slice(None))
        number, segment = self._own.get(rows[0].data_ptr(), (0, None))
        descriptors: list[int] = []
        if segment is not None:
            for row, place in zip(rows[1:], self._mapped[self._meetings.rank, number][1:], strict=True):
                place.copy_(row)
            if segment.descriptor >= 0:
                descriptors = [segment.descriptor]
        self._meeting = self._meetings.meet(
            STEP, self._size, layout=self._layout, number=number, descriptors=descriptors
        )
        if segment is not None:
            segment.close()
        return self._meeting

    def reduce(self) -> Meeting | None:
        meeting = self._meeting
        if meeting is None:
            return None
        rows = self._rows_of_all(meeting)
        if rows is None:
            step = PART_BYTES // max(self._rows) // self._dtype.itemsize
            for first in range(0, self._count, step):
                self._meetings.finish(self._through_arena(slice(first, first + step)))
            self._meeting = None
            return None
        part = self._slice(self._meetings.rank)
        own = self._sent[0]
        pieces, others = in_order(rows, self._order)
        if len(pieces) == 2 and not others:
            torch.add(pieces[0][part], pieces[1][part], out=own[part])
        else:
            self._add_in_blocks(pieces, others, own, part)
        return self._meetings.again(meeting, REDUCED)

    def collect(self) -> None:
        meeting = self._meeting
        own = self._sent[0]
        self._meeting = None
        self._sent = []
        if meeting is None:
            return
        for rank in self._meetings.others:
            part = self._slice(rank)
            own[part].copy_(self._mapped[rank, meeting.headers[rank].number][0, part])
        self._meetings.unsettled = meeting

    # -- in shared memory ----------------------------------------------------------------------------------

    def _rows_in(self, segment: Segment, rows: int) -> torch.Tensor:
        """The rows of a segment, (rows, count)."""
        whole = segment.bytes.view(self._dtype)
        return whole.as_strided((rows, self._count), (aligned(self._size) // self._dtype.itemsize, 1))

    def _rows_of_all(self, meeting: Meeting) -> list[torch.Tensor] | None:
        """Each rank's rows, in rank order; None where a rank has no segment, or could not map one."""
        headers = meeting.headers
        if any(header.segments for header in headers):
            mapped = [self._map(meeting, other) for other in self._meetings.others]
            told = self._meetings.finish(self._meetings.again(meeting, MAPPED, not all(mapped)))
            if any(header.number for header in told.headers):
                self._own.clear()  # from now on
                self._mapped = {at: rows for at, rows in self._mapped.items() if at[0] != self._meetings.rank}
        if any(header.number == 0 for header in headers) or not self._own:
            return None
        return [self._mapped[rank, header.number] for rank, header in enumerate(headers)]

    def _map(self, meeting: Meeting, rank: int) -> bool:
        """Map the segment that a rank sent, if it did; returns whether that worked."""
        header = meeting.headers[rank]
        descriptors = self._meetings.attached(meeting, rank)
        try:
            for descriptor in descriptors:
                segment = Segment(descriptor)
                segment.close()
                self._mapped[rank, header.number] = self._rows_in(segment, self._rows[rank])
        except (OSError, RuntimeError):
            return False
        return len(descriptors) == header.segments  # none comes where this process can open no more files

    def _slice(self, rank: int) -> slice:
        """The values that a rank adds up."""
        lines = -(-self._size // _SLICE_BYTES)
        size = self._meetings.size
        each = _SLICE_BYTES // self._dtype.itemsize
        first, end = (min(one * lines // size * each, self._count) for one in (rank, rank + 1))
        return slice(first, end)

    def _add_in_blocks(
        self, pieces: list[torch.Tensor], others: list[torch.Tensor], own: torch.Tensor, part: slice
    ) -> None:
        step = _BLOCK_BYTES // self._dtype.itemsize
        total = own.new_empty(min(step, part.stop - part.start))
        for start in range(part.start, part.stop, step):
            block = slice(start, min(start + step, part.stop))
            room = total[: block.stop - start]
            add_pieces([one[block] for one in pieces], self._order.last_merges, [one[block] for one in others], room)
            own[block].copy_(room)

    # -- through the arena ---------------------------------------------------------------------------------

    def _through_arena(self, part: slice) -> Meeting:
        """Add up a part of all rows, in one meeting."""
        own = [row[part] for row in self._sent]
        count = len(own[0])

        def add(meeting: Meeting) -> None:
            rows = [
                self._meetings.values_of(meeting, rank, self._dtype, rows * count).view(rows, count)
                for rank, rows in enumerate(self._rows)
            ]
            pieces, others = in_order(rows, self._order)
            add_pieces(pieces, self._order.last_merges, others, own[0])

        size = count * self._dtype.itemsize
        return self._meetings.meet(STEP, size, own, layout=self._layout, then=add, reads=True)
