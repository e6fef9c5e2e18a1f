"""Collectives: the steps' own, and all others, which begin with a header, so that ranks never mix them up."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch

from ddp_loop.accelerators import accelerator_of
from ddp_loop.distributed.backend import LOOK_S, STEP, Backend, Parted, Work
from ddp_loop.distributed.encoding import assign_sum, summable
from ddp_loop.distributed.failures import RankStatus
from ddp_loop.distributed.store import RankStore
from ddp_loop.distributed.values import from_bytes, to_bytes

Value = TypeVar("Value")
Operation = Callable[[Backend], Work | None]
_SEEN = 3  # polls in a row that must find the next rank in another wait; a single one may be lag
_KIND_BYTES = 240  # for the name of a collective, where ranks make different ones


@dataclass(frozen=True, slots=True)
class Backends:
    """The backends of a world.

    Attributes:
        host, device: of the steps' own operations, on tensors in the host's memory and on all others.
        others: of all other collectives on the host.
    """

    host: Backend
    device: Backend
    others: Backend

    def each(self) -> list[Backend]:
        """All of them, each once."""
        return list(dict.fromkeys((self.others, self.host, self.device)))


class _Wait:
    """One wait of a rank. A class enters it 3 microseconds faster than a generator does, and a step waits four times.

    Args:
        collectives: of the rank.
        waits: for what.
    """

    __slots__ = "_collectives", "_waits"

    def __init__(self, collectives: Collectives, waits: str) -> None:
        self._collectives = collectives
        self._waits = waits

    def __enter__(self) -> None:
        collectives = self._collectives
        collectives.waits = self._waits
        collectives._looks = 0
        collectives._parted = 0  # an interrupt may have ended the wait before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        collectives = self._collectives
        if error is None:
            collectives.waits = ""
            if collectives._looks:
                collectives._store.set_wait("")
        elif isinstance(error, RuntimeError) and not isinstance(error, Parted):
            collectives.waits = self._waits  # still counts, for the roll call
            raise collectives._store.peer_failure(error, collectives._timeout_s) from error


class Collectives:
    """Starts collectives, waits for them, and finds out who failed where one does not end.

    [Note: Headers] The sums of steps have sizes that all ranks agreed on. Any other collective begins with integers of
    all ranks that name it. Ranks that make different ones all raise the same error. Over gloo these have a group of
    their own; where one rank waits in a step's sum and its neighbour in something else, each sees that in the store. In
    memory each operation has a header, so ranks that part see it at once.

    Args:
        backends: of this world; None in a world of one.
        store: of the world.
        timeout_s: of each collective, in seconds.

    Attributes:
        waits: the collective in which this rank waits; empty if it does not wait.
        under_way: the steps' operations that have begun and not ended.
    """

    def __init__(self, backends: Backends | None, store: RankStore, timeout_s: float) -> None:
        self._backends = backends
        self._store = store
        self._timeout_s = timeout_s
        self.waits = ""
        self.under_way: dict[Work, Backend] = {}
        self._looks = self._parted = 0  # in this wait; those in a row with the next rank in another one
        self._deadline = 0.0

    # -- a step's own --------------------------------------------------------------------------------------

    def backend_of(self, device: torch.device) -> Backend | None:
        """The backend for a step's tensors on a device; None in a world of one."""
        if self._backends is None:
            return None
        return self._backends.host if accelerator_of(device).is_host else self._backends.device

    def start(self, operation: Operation, device: torch.device) -> Work | None:
        """Start one of a step's own operations on tensors of a device; None in a world of one."""
        if (backend := self.backend_of(device)) is None:
            return None
        with _Wait(self, STEP):
            work = operation(backend)
        if work is not None:
            self.under_way[work] = backend
        return work

    def finish(self, work: Work) -> None:
        """Wait for an operation; with NCCL only the device waits.

        Raises:
            PeerFailed: a rank failed, or did not come in time.
        """
        if (backend := self.under_way.get(work)) is None:  # the world was left since
            work.wait()
            return
        with _Wait(self, STEP):
            backend.wait(work)
        self.under_way.pop(work, None)

    def is_in_vain(self) -> bool:
        """Whether a rank failed, waits elsewhere, or takes too long; called during a wait."""
        now = time.monotonic()
        kind = "step" if self.waits == STEP else "other"
        if not self._looks:
            self._deadline = now + self._timeout_s - LOOK_S
        if self._store.has_failure() or now > self._deadline:
            return True
        if not self._looks:
            self._store.set_wait(kind)
        self._looks += 1
        self._parted = self._parted + 1 if self._store.wait_of_next() not in ("", kind) else 0
        return self._parted >= _SEEN

    def check_peers(self, has_lost_a_peer: Callable[[], bool]) -> None:
        """Look for a killed rank while this one waits for its device, which may wait for that rank.

        Raises:
            PeerFailed: a connection has ended, and no rank has left without an error.
        """
        if has_lost_a_peer() and not self._store.has_ended_rank():
            with _Wait(self, self.waits or "a wait for its device"):
                raise RuntimeError("A connection has ended while the device was waited for.")

    # -- all others ----------------------------------------------------------------------------------------

    def _side_by_side(self, part: torch.Tensor, waits: str) -> torch.Tensor:
        """All ranks' `part`, (K,), as the rows of (size, K)."""
        if self._backends is None:
            return part.reshape(1, -1)
        others = self._backends.others
        whole = part.new_empty(others.size * part.numel())
        with _Wait(self, waits):
            others.wait(others.start_gather(whole, part, waits))
        return whole.view(others.size, -1)

    def numbers(self, number: int, kind: str, where: RankStatus) -> list[int]:
        """Every rank's 64-bit integer `number`, in rank order, if all ranks make a collective of this kind.

        Raises:
            Parted: some make another one; on every rank.
        """
        header = torch.tensor((zlib.crc32(kind.encode()), number), device="cpu")
        told = self._side_by_side(header, kind).tolist()
        if len({crc for crc, _ in told}) > 1:
            text = f"{kind}{where}".encode(errors="replace")[:_KIND_BYTES]
            rows = self._side_by_side(_row_of(text, _KIND_BYTES), kind)
            places = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
            raise Parted(dict(enumerate(places)))
        return [one for _, one in told]

    def _collect(self, tensor: torch.Tensor, operation: Callable[[Backend], Work], waits: str) -> None:
        if self._backends is None:
            return
        if accelerator_of(tensor.device).is_host:
            others = self._backends.others
            with _Wait(self, waits):
                others.wait(operation(others))
        elif (work := self.start(operation, tensor.device)) is not None:  # perhaps a faster way between GPUs
            self.finish(work)

    def sum(self, tensor: torch.Tensor, where: RankStatus) -> None:
        """Add `tensor` up over all ranks, in place."""
        kind = f"a sum of {tensor.dtype} {tuple(tensor.shape)}"
        self.numbers(0, kind, where)
        total = summable(tensor)
        self._collect(total, lambda backend: backend.start_sum(total, kind), kind)
        assign_sum(tensor, total)

    def gather(self, value: Value, what: str, where: RankStatus) -> list[Value]:
        """Every rank's `value`, in rank order."""
        kind = f"a gather of {what}"
        word = to_bytes(value)
        lengths = self.numbers(len(word), kind, where)
        rows: Any = self._side_by_side(_row_of(word, max(lengths)), kind).numpy()
        return [from_bytes(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[torch.Tensor], where: RankStatus) -> None:
        """Make these tensors what they are on rank 0, in place."""
        forms = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
        kind = f"a broadcast of {forms}"
        named = kind[:_KIND_BYTES]
        self.numbers(0, kind, where)
        for tensor in tensors:
            if tensor.numel():
                whole = tensor.detach().contiguous()
                raw = whole.reshape(-1).view(torch.uint8)
                self._collect(raw, lambda backend, raw=raw: backend.start_broadcast(raw, named), named)  # type: ignore[misc]
                if not tensor.is_contiguous():
                    tensor.copy_(whole)


def _row_of(text: bytes, length: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.ljust(length, b"\0")), dtype=torch.uint8)
