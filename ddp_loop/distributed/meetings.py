"""Meetings of the ranks of one machine: values in shared memory, and a header to every other rank.

[Note: Meetings] Each rank has an *arena* that all ranks have mapped. It puts its values there and sends every other
rank a header, which states the operation, its length, and where the values lie. Once the headers of all ranks have
come, it reads their values. So one meeting is enough for a small sum, and all ranks have the same bits.

[Note: Using memory again] A header also states the last operation that its sender completed. A rank overwrites values
in its arena once all others have completed the operation that the values belong to. Usually the next headers show
this; otherwise the rank sends a request, and the others complete the operation and reply.

[Note: Parting] Headers show when ranks are at different operations. Each rank then sends a text with its place, and all
raise the same error. A rank may wait in a later operation than the one at which they part, as beside the sums of a GPU.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache

import torch

from ddp_loop.distributed.backend import LOOK_S, Parted
from ddp_loop.distributed.failures import STAGE_NUMBERS, STAGES, PeerGone, RankStatus
from ddp_loop.distributed.local_sockets import TEXT_BYTES, Header, LocalPeers
from ddp_loop.distributed.shared_memory import Segment, aligned

ARRIVED, MAPPED, REDUCED, COPIED, _DONE, _ASK, _PLACE = range(7)  # stages, and other messages
ARENA_BYTES = 2 * 2**20
PART_BYTES = ARENA_BYTES // 4  # the most that a rank puts there for one operation
_PLACE_S = 1.0  # for the places of ranks that have come to the operation, or to another one
_LATE_PLACE_S = 0.05  # for the places of ranks that have not come yet
_ROOM_S = 0.001  # until a full connection is tried again
_VIEWS = 4096
_SPIN_S = 100e-6  # where each rank has a core

Then = Callable[["Meeting"], None]


@lru_cache(maxsize=1024)
def _digest(what: str, length: int, layout: object) -> int:
    return zlib.crc32(f"{what} {length} {layout}".encode(errors="replace"))


@dataclass(eq=False, slots=True)
class Meeting:
    """An operation under way: its ranks' headers of one stage.

    Attributes:
        header: of this rank.
        what: the operation, in words.
        then: the rest of the operation; None without one, and once it is done.
        headers: of all ranks, in rank order, once all have come.
        is_over: whether all is done.
    """

    header: Header
    what: str
    then: Then | None = None
    headers: list[Header] = field(default_factory=list)
    is_over: bool = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Raise: its backend is needed for the wait, and was left."""
        raise RuntimeError("The world of this operation was left.")


class Inbox:
    """What has come from the other ranks.

    Attributes:
        headers: of operations, by sequence and stage, then by rank.
        attached: descriptors, by sequence and rank.
        done: the last operation that each rank has completed.
        last: the last header of an operation, by rank.
        asked: by rank: it waits until this operation is completed here.
        places: of ranks that part, in words.
    """

    def __init__(self, others: Collection[int]) -> None:
        self.headers: dict[tuple[int, int], dict[int, Header]] = {}
        self.attached: dict[tuple[int, int], list[int]] = {}
        self.done = dict.fromkeys(others, 0)
        self.last = dict.fromkeys(others, Header(ARRIVED))
        self.asked: dict[int, int] = {}
        self.places: dict[int, str] = {}

    def take(self, rank: int, header: Header, text: bytes, descriptors: list[int]) -> None:
        """Note a message."""
        self.done[rank] = max(self.done[rank], header.done)
        if header.stage <= COPIED:
            self.last[rank] = header
            self.headers.setdefault((header.sequence, header.stage), {})[rank] = header
            if descriptors:
                self.attached[header.sequence, rank] = descriptors
        elif header.stage == _PLACE:
            self.places[rank] = text.decode(errors="replace")
        elif header.stage == _ASK:
            self.asked[rank] = header.sequence


class Meetings:
    """The meetings of one world's ranks on one machine, in their order. See [Note: Meetings].

    Args:
        rank: of this process, counted on its machine.
        peers: the connections to the other ranks.
        arenas: of all ranks of the machine, in rank order.
        first: the machine's first rank; messages count over all machines.
        where: where this rank is.
        in_vain: as in `Backend.wait`.
    """

    def __init__(
        self,
        rank: int,
        peers: LocalPeers,
        arenas: Sequence[Segment],
        first: int,
        where: Callable[[], RankStatus],
        in_vain: Callable[[], bool],
    ) -> None:
        self.rank = rank
        self._first = first
        self._peers = peers
        self._arenas = [one.bytes for one in arenas]
        self._where = where
        self._in_vain = in_vain
        self.others = [other for other in range(len(arenas)) if other != rank]
        self._sequence = 0
        self._open: dict[int, Meeting] = {}  # operations whose values in arenas this rank may still read
        self._regions: deque[tuple[int, int, int]] = deque()  # sequence, start, end, of values that may be read
        self._inbox = Inbox(self.others)
        self._views: dict[tuple[int, int, torch.dtype, int], torch.Tensor] = {}
        self._spin_s = _SPIN_S if len(arenas) <= len(os.sched_getaffinity(0)) else 0.0
        self.unsettled: Meeting | None = None  # the last operation whose sums other ranks may still read

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.others) + 1

    # -- meetings ------------------------------------------------------------------------------------------

    def meet(
        self,
        what: str,
        length: int = 0,
        values: Sequence[torch.Tensor] = (),
        *,
        layout: object = None,
        number: int = 0,
        descriptors: Sequence[int] = (),
        then: Then | None = None,
        reads: bool = False,
    ) -> Meeting:
        """Start an operation: copy values into the arena, and send a header to all ranks. Every rank must call this.

        Args:
            what, length, layout: the same on every rank; otherwise all raise. `length` is in bytes.
            values: (K,) each, of at most PART_BYTES together.
            number: for the others.
            descriptors: files for the others; `attached` returns them there.
            then: what remains to be done once the headers of all ranks have come.
            reads: whether it reads values from arenas.
        """
        offset = self._put(values)
        completed = self._completed
        self._sequence += 1
        where = self._where()
        header = Header(
            ARRIVED,
            segments=len(descriptors),
            digest=_digest(what, length, layout),
            sequence=self._sequence,
            offset=offset,
            done=completed,
            at=STAGE_NUMBERS.get(where.stage, 0),
            step=where.step,
            number=number,
        )
        meeting = Meeting(header, what, then)
        if reads:
            self._open[self._sequence] = meeting
        self._send(header, self.others, descriptors=descriptors)
        return meeting

    def again(self, meeting: Meeting, stage: int, number: int = 0) -> Meeting:
        """The next stage of an operation. Every rank must call this."""
        header = meeting.header._replace(stage=stage, segments=0, done=self._completed, number=number)
        self._send(header, self.others)
        return Meeting(header, meeting.what)

    def finish(self, work: Meeting) -> Meeting:
        """Wait until the headers of all ranks have come, complete the operation, and return it."""
        if work.is_over:
            return work
        key = work.header.sequence, work.header.stage
        self._drain(self.others)
        self._spin(key)

        def missing() -> list[int]:
            headers = self._inbox.headers.get(key, {})
            late = [] if work.is_over else [rank for rank in self.others if rank not in headers]
            if late:
                self._check_started(work, headers)
            return late

        self._await(missing, f"not every rank came to {work.what}")
        if not work.is_over:  # another rank may have asked for it
            self._complete(work, self._inbox.headers.get(key, {}))
        if self._inbox.asked:
            self._answer()
        return work

    def _await(self, missing: Callable[[], list[int]], why: str) -> None:
        """Read messages until no rank is missing.

        Raises:
            PeerGone: a missing rank has closed its connection.
            RuntimeError: `why`, if they are waited for in vain.
        """
        looked = time.monotonic()
        while late := missing():
            for rank in late:
                if rank in self._peers.gone:
                    last = self._inbox.last[rank]
                    raise PeerGone(self._first + rank, RankStatus(STAGES[last.at], last.step))
            self._drain(ready := self._peers.wait(LOOK_S))
            if not ready or time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                if self._in_vain():
                    self._drain(self.others)  # a rank that failed sent its part first, if it came so far
                    if missing():
                        raise RuntimeError(why)

    def _spin(self, key: tuple[int, int]) -> None:
        """Poll for a moment before sleeping: waking up takes longer than most waits."""
        end = time.monotonic() + self._spin_s
        while len(self._inbox.headers.get(key, {})) < len(self.others) and time.monotonic() < end:
            os.sched_yield()
            self._drain(self.others)

    def _complete(self, work: Meeting, headers: dict[int, Header]) -> None:
        self._check(work, headers)
        own = work.header
        work.headers = [headers.get(rank, own) for rank in range(self.size)]
        if work.then is not None:
            work.then(work)  # again if Ctrl-C interrupted it before
        work.then = None
        work.is_over = True
        self._inbox.headers.pop((own.sequence, own.stage), None)
        self._open.pop(own.sequence, None)

    def _answer(self) -> None:
        """Complete the operations that other ranks requested, if their headers have come, and reply."""
        for rank, sequence in list(self._inbox.asked.items()):
            for number in [number for number in self._open if number <= sequence]:
                headers = self._inbox.headers.get((number, ARRIVED), {})
                if number in self._open and len(headers) == len(self.others):
                    self._complete(self._open[number], headers)  # it only reads what is there
            if rank in self._inbox.asked and self._completed >= sequence:
                del self._inbox.asked[rank]
                self._send(Header(_DONE, done=self._completed), [rank])

    @property
    def _completed(self) -> int:
        """The last operation that is completed here with all before it."""
        return next(iter(self._open)) - 1 if self._open else self._sequence

    def _check_started(self, work: Meeting, headers: dict[int, Header]) -> None:
        """Check an operation, and those before it that are not completed here."""
        for sequence, meeting in self._open.items():
            if sequence < work.header.sequence:
                self._check(meeting, self._inbox.headers.get((sequence, ARRIVED), {}))
        self._check(work, headers)

    def _check(self, work: Meeting, headers: dict[int, Header]) -> None:
        """Raise where another rank makes another operation. See [Note: Parting]."""
        if any(header.digest != work.header.digest for header in headers.values()):
            self._part(f"{work.what}{self._where()}", headers.keys())

    def _part(self, own: str, met: Collection[int]) -> None:
        text = own.encode(errors="replace")[:TEXT_BYTES]
        self._send(Header(_PLACE), self.others, text)
        for ranks, most_s in (met, _PLACE_S), (self.others, _LATE_PLACE_S):
            deadline = time.monotonic() + most_s
            while any(rank not in self._inbox.places and rank not in self._peers.gone for rank in ranks):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._drain(self._peers.wait(left))
        places = {**self._inbox.places, self.rank: own}
        raise Parted({self._first + rank: place for rank, place in sorted(places.items())})

    def watch(self, descriptor: int) -> None:
        """End waits early, to check whether they are in vain, when this descriptor can be read."""
        self._peers.watch(descriptor)

    # -- messages ------------------------------------------------------------------------------------------

    def _send(self, header: Header, to: Collection[int], text: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message; where a connection is full, read meanwhile, so that ranks do not wait for each other."""
        looked = time.monotonic()
        while to := self._peers.send(header, to, text, descriptors):
            self._drain(self.others)
            to = [rank for rank in to if rank not in self._peers.gone]
            if to:
                time.sleep(_ROOM_S)
                if (now := time.monotonic()) - looked > LOOK_S:
                    looked = now
                    if self._in_vain():
                        raise RuntimeError(f"rank {self._first + to[0]} reads no messages")

    def _drain(self, ranks: Collection[int]) -> None:
        """Read what has come from these ranks."""
        for rank in ranks:
            while (message := self._peers.receive(rank)) is not None:
                self._inbox.take(rank, *message)
        if self._inbox.asked:
            self._answer()

    def attached(self, meeting: Meeting, rank: int) -> list[int]:
        """The descriptors that a rank sent with an operation; the caller closes them."""
        return self._inbox.attached.pop((meeting.header.sequence, rank), [])

    # -- the arena -----------------------------------------------------------------------------------------

    def values_of(self, meeting: Meeting, rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """What a rank put into its arena for an operation, (count,)."""
        return self._view(rank, meeting.headers[rank].offset, dtype, count)

    def _view(self, rank: int, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        key = rank, offset, dtype, count
        if (view := self._views.get(key)) is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # a view that was made in it could not be written outside of it
                view = self._views[key] = self._arenas[rank][offset : offset + count * dtype.itemsize].view(dtype)
        return view

    def _put(self, values: Sequence[torch.Tensor]) -> int:
        """Copy values into this rank's arena, one after another; returns where, in bytes."""
        size = sum(one.nbytes for one in values)
        offset = start = self._claim(size) if size else 0
        for one in values:
            self._view(self.rank, offset, one.dtype, len(one)).copy_(one)
            offset += one.nbytes
        return start

    def _claim(self, size: int) -> int:
        """A part of the arena that no rank reads any more. See [Note: Using memory again]."""
        size = aligned(size)
        regions = self._regions
        known = min([self._completed, *self._inbox.done.values()])
        while regions and regions[0][0] <= known:
            regions.popleft()
        start = regions[-1][2] if regions and regions[-1][2] + size <= ARENA_BYTES else 0
        end = start + size
        if needed := max((one for one, first, last in regions if first < end and start < last), default=0):
            self._await_completed(needed)
        regions.append((self._sequence + 1, start, end))
        return start

    def _await_completed(self, sequence: int) -> None:
        """Wait until all ranks have completed an operation, with those before it."""
        for meeting in [meeting for number, meeting in self._open.items() if number <= sequence]:
            self.finish(meeting)

        def late() -> list[int]:
            return [rank for rank in self.others if self._inbox.done[rank] < sequence]

        self._drain(late())
        if asked := late():
            self._send(Header(_ASK, sequence=sequence), asked)
            self._await(late, "not every rank completed its operations")

    # -- leaving -------------------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """Close the connections; the memory is freed with the last tensor in it."""
        self._peers.close()
        for number in [number for numbers in self._inbox.attached.values() for number in numbers]:
            os.close(number)
        self._inbox.attached.clear()
        self._arenas = []
        self._views = {}  # a loop that is kept holds them otherwise
