"""Collectives: those of the steps, and all others, which begin with a header, so that ranks never mix them up."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ddp_loop.accelerators import accelerator_of
from ddp_loop.distributed.backend import LOOK_S, Backend, Work
from ddp_loop.distributed.encoding import assign_sum, summable
from ddp_loop.distributed.failures import PeerFailed, RankStatus
from ddp_loop.distributed.store import RankStore

Value = TypeVar("Value")
Operation = Callable[[Backend], Work]
STEP = "a step's sum"
_SEEN = 3  # polls in a row that must find the next rank in another wait; a single one may be lag
_KIND_BYTES = 240  # for the name of a collective, where ranks make different ones


class Collectives:
    """Starts collectives, waits for them, and finds out who failed where one does not end.

    [Note: Headers] The sums of steps have sizes that all ranks agreed on, and a group of their own. Any other
    collective begins with a gather of fixed size that names it, in another group. Ranks that make different ones all
    raise the same error. Where one rank waits in a step's sum and its neighbour in something else, each sees that in
    the store.

    Args:
        steps, others: the backends of the steps' collectives and of all others; None in a world of one.
        store: of the world.
        timeout_s: of each collective, in seconds.

    Attributes:
        waits: the collective in which this rank waits; empty if it does not wait.
        under_way: the steps' operations that have begun and not ended.
    """

    def __init__(self, steps: Backend | None, others: Backend | None, store: RankStore, timeout_s: float) -> None:
        self._steps, self._others, self._store, self._timeout_s = steps, others, store, timeout_s
        self.waits = ""
        self.under_way: set[Work] = set()
        self._looks = self._parted = 0  # in this wait; those in a row with the next rank in another one
        self._deadline = 0.0

    # -- a step's own --------------------------------------------------------------------------------------

    def start(self, operation: Operation) -> Work | None:
        """Start one of a step's sums, exchanges or gathers; None in a world of one."""
        if self._steps is None:
            return None
        try:
            work = operation(self._steps)
        except RuntimeError as error:
            raise self._peer_failure(error, STEP) from error
        self.under_way.add(work)
        return work

    def finish(self, work: Work) -> None:
        """Wait for an operation; with NCCL only the device waits.

        Raises:
            PeerFailed: a rank failed, or did not come in time.
        """
        if self._steps is None:  # the world was left since
            work.wait()
        else:
            self._wait(self._steps, work, STEP)
        self.under_way.discard(work)

    def _wait(self, backend: Backend, work: Work, waits: str) -> None:
        self.waits, self._looks, self._parted = waits, 0, 0  # an interrupt may have ended the wait before
        try:
            backend.wait(work, self._is_in_vain)
        except RuntimeError as error:
            raise self._peer_failure(error, waits) from error
        self.waits = ""
        if self._looks:
            self._store.set_wait("")

    def _peer_failure(self, error: RuntimeError, waits: str) -> PeerFailed:
        self.waits = waits  # still counts, for the roll call
        return self._store.peer_failure(error, self._timeout_s)

    def _is_in_vain(self) -> bool:
        """Whether a rank failed, waits elsewhere, or takes too long; called during a wait."""
        now, kind = time.monotonic(), "step" if self.waits == STEP else "other"
        if not self._looks:
            self._deadline = now + self._timeout_s - LOOK_S
        if self._store.has_failure() or now > self._deadline:
            return True
        if not self._looks:
            self._store.set_wait(kind)
        self._looks += 1
        self._parted = self._parted + 1 if self._store.wait_of_next() not in ("", kind) else 0
        return self._parted >= _SEEN

    # -- all others ----------------------------------------------------------------------------------------

    def _side_by_side(self, part: torch.Tensor, waits: str) -> torch.Tensor:
        """All ranks' `part`, (K,), as the rows of (size, K)."""
        if self._others is None:
            return part.reshape(1, -1)
        whole = part.new_empty(self._others.size * part.numel())
        self._wait(self._others, self._others.start_gather(whole, part), waits)
        return whole.view(self._others.size, -1)

    def _check_alignment(self, kind: str, where: RankStatus, size: int = 0) -> list[int]:
        """Check that all ranks make a collective of this kind.

        Returns:
            Each rank's `size`.

        Raises:
            RuntimeError: some make another one; on every rank.
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
                "Every rank must make the same collectives in the same order, but "
                + ", ".join(f"rank {rank} is at {one}" for rank, one in enumerate(kinds))
                + ". Call evaluate, and whatever else is for every rank, on all of them in the same order."
            )
        return [size for _, size in told]

    def _collect(self, tensor: torch.Tensor, operation: Operation, waits: str) -> None:
        if self._others is None:
            return
        if accelerator_of(tensor.device).is_host:
            self._wait(self._others, operation(self._others), waits)
        elif (work := self.start(operation)) is not None:  # this group may have a faster way between GPUs
            self.finish(work)

    def sum(self, tensor: torch.Tensor, where: RankStatus) -> None:
        """Add `tensor` up over all ranks, in place."""
        kind = f"a sum of {tensor.dtype} {tuple(tensor.shape)}"
        self._check_alignment(kind, where)
        total = summable(tensor)
        self._collect(total, lambda backend: backend.start_sum(total), kind)
        assign_sum(tensor, total)

    def numbers(self, number: int, what: str, where: RankStatus) -> list[int]:
        """Every rank's 64-bit integer `number`, in rank order; it travels in the header."""
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
                raw = whole.reshape(-1).view(torch.uint8)
                self._collect(raw, partial(_start_broadcast, raw), kind[:_KIND_BYTES])
                if not tensor.is_contiguous():
                    tensor.copy_(whole)


def _start_broadcast(tensor: torch.Tensor, backend: Backend) -> Work:
    return backend.start_broadcast(tensor)
