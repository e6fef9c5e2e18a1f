"""Collectives of the ranks: the steps' own, and all others, which begin with a header, so that ranks never mix them."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_loop.distributed.encoding import assign_sum, summable
from ddp_loop.distributed.failures import PeerFailed, RankStatus
from ddp_loop.distributed.store import RankStore

Value = TypeVar("Value")
Start = Callable[[dist.ProcessGroup], dist.Work]
STEP = "a step's sum"
_SLICE = timedelta(seconds=0.5)
_SEEN = 3  # slices in which the next rank waits elsewhere; one could be a moment's lag
_KIND_BYTES = 240  # of the word about a collective that other ranks did not come for


class Collectives:
    """Starts collectives, waits for them, and says who failed where one does not end well.

    [Note: Headers] The sums of steps have sizes that all ranks agreed on, and a group of their own. Any other
    collective begins with a gather of one size that says what it is, in another group. Ranks that came for different
    ones raise alike; where one waits in a step's sum and another one elsewhere, two neighbours see that from what both
    say in the store.

    Args:
        steps, others: the two groups; None in a world of one.
        store: of the world, where ranks leave words.
        device: where the steps' sums are.
        timeout_s: of each collective, in seconds.

    Attributes:
        waits: what this rank waits in; empty if it waits in nothing.
        under_way: the steps' sums that have begun and not ended.
    """

    def __init__(
        self,
        steps: dist.ProcessGroup | None,
        others: dist.ProcessGroup | None,
        store: RankStore,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._steps, self._others, self._store = steps, others, store
        self._on_cpu, self._timeout_s = device.type == "cpu", timeout_s
        self.waits = ""
        self.under_way: set[dist.Work] = set()

    # -- a step's own --------------------------------------------------------------------------------------

    def start(self, collective: Start) -> dist.Work | None:
        """Begin one of a step's sums, exchanges or gathers; None in a world of one."""
        if self._steps is None:
            return None
        try:  # written out here and in `finish`: a context manager takes 2 microseconds
            work = collective(self._steps)
        except RuntimeError as error:
            raise self._peer_failure(error, STEP) from error
        self.under_way.add(work)
        return work

    def finish(self, work: dist.Work) -> None:
        """Wait for it; on a GPU with NCCL only the device waits.

        Raises:
            PeerFailed: a rank failed, or did not come in time.
        """
        self.waits = STEP
        try:
            if self._on_cpu:
                self._wait(work)
            else:
                work.wait()
        except RuntimeError as error:
            raise self._peer_failure(error, STEP) from error
        self.waits = ""
        self.under_way.discard(work)

    def _peer_failure(self, error: RuntimeError, waits: str) -> PeerFailed:
        self.waits = waits  # still, for those who ask
        return self._store.peer_failure(error, self._timeout_s)

    def _wait(self, work: dist.Work) -> None:
        """Wait; look now and then whether a rank failed or waits elsewhere, since gloo does not always say so.

        With several sums under way a peer's closed connection ended them all in 9 of 10 failures, else one was not
        woken before its timeout.
        """
        deadline, parted, told = time.monotonic() + self._timeout_s, 0, False
        while True:
            try:
                work.wait(_SLICE)
                break
            except RuntimeError:
                if work.is_completed():  # perhaps since the slice ran out, and then it only seems to have failed
                    work.wait()  # at once; raises what ended it, if something did
                    break
                if self._store.has_failure() or time.monotonic() > deadline:
                    raise
                kind = "step" if self.waits == STEP else "other"
                if not told:
                    self._store.set_wait(kind)
                    told = True
                parted = parted + 1 if self._store.wait_of_next() not in ("", kind) else 0
                if parted >= _SEEN:
                    raise
        if told:
            self._store.set_wait("")

    # -- all others ----------------------------------------------------------------------------------------

    def _finish_other(self, work: dist.Work, waits: str) -> None:
        self.waits = waits
        try:
            self._wait(work)
        except RuntimeError as error:
            raise self._peer_failure(error, waits) from error
        self.waits = ""

    def _side_by_side(self, part: torch.Tensor, waits: str) -> torch.Tensor:
        """Every rank's `part`, (K,), as the rows of (size, K)."""
        if self._others is None:
            return part.reshape(1, -1)
        whole = part.new_empty(self._others.size() * part.numel())
        self._finish_other(self._others._allgather_base(whole, part), waits)
        return whole.view(self._others.size(), -1)

    def _check_alignment(self, kind: str, where: RankStatus, size: int = 0) -> list[int]:
        """Come together for a collective of this kind.

        Returns:
            Each rank's `size`.

        Raises:
            RuntimeError: some came for another one; on every rank.
        """
        header = torch.tensor([zlib.crc32(kind.encode()), size])
        told = self._side_by_side(header, kind).tolist()
        if len({crc for crc, _ in told}) > 1:
            room = torch.zeros(_KIND_BYTES, dtype=torch.uint8)
            text = f"{kind}{where}".encode(errors="replace")[:_KIND_BYTES]
            room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            kinds = [
                bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in self._side_by_side(room, kind)
            ]
            raise RuntimeError(
                "every rank must make the same collectives in the same order; "
                + ", ".join(f"rank {rank} came to {one}" for rank, one in enumerate(kinds))
                + ": call evaluate, and whatever else is for every rank, on all of them and in one order"
            )
        return [size for _, size in told]

    def _collect(self, tensor: torch.Tensor, collective: Start, waits: str) -> None:
        if self._others is None:
            return
        if tensor.device.type == "cpu":
            self._finish_other(collective(self._others), waits)
        elif (work := self.start(collective)) is not None:  # this group may have a faster way between GPUs
            self.finish(work)

    def sum(self, tensor: torch.Tensor, where: RankStatus) -> None:
        """Add `tensor` up over all ranks, in place."""
        kind = f"a sum of {tensor.dtype} {tuple(tensor.shape)}"
        self._check_alignment(kind, where)
        total = summable(tensor)
        self._collect(total, lambda group: group.allreduce([total]), kind)
        assign_sum(tensor, total)

    def numbers(self, number: int, what: str, where: RankStatus) -> list[int]:
        """Every rank's whole `number` of 64 bits, in rank order: in the header itself."""
        return [number] if self._others is None else self._check_alignment(what, where, number)

    def gather(self, value: Value, what: str, where: RankStatus) -> list[Value]:
        """Every rank's `value`, in rank order."""
        if self._others is None:
            return [value]
        kind, word = f"a gather of {what}", pickle.dumps(value)
        lengths = self._check_alignment(kind, where, len(word))
        room = torch.zeros(max(lengths), dtype=torch.uint8)
        room[: len(word)] = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        rows: Any = self._side_by_side(room, kind).numpy()
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[torch.Tensor], where: RankStatus) -> None:
        """Make these tensors what they are on rank 0, in place."""
        forms = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
        kind = f"a broadcast of {forms}"
        self._check_alignment(kind, where)
        for tensor in tensors:
            if tensor.numel():
                whole = tensor.detach().contiguous()
                self._broadcast(whole.reshape(-1).view(torch.uint8), kind[:_KIND_BYTES])
                if not tensor.is_contiguous():
                    tensor.copy_(whole)

    def _broadcast(self, raw: torch.Tensor, kind: str) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._collect(raw, lambda group: group.broadcast([raw], options), kind)
