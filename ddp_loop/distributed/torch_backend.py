"""A process group of torch as a backend, as it is with NCCL.

[Note: Two ways] A flat sum of two pieces, or of pieces in any order, takes one all-reduce. Otherwise each rank receives
a part of every piece, adds these up in their order, and sends the result to all: an all-to-all and an all-gather, which
carry as much as a ring's all-reduce where every rank has one piece.

[Note: Levels] Additions of one level of the tree do not depend on each other, so one launch makes them all: 3 launches
for 8 pieces. Each has the operands that it would have alone, so the bits are the same.

[Note: Memory of a sum] On a GPU a sum has memory of its own only between its two collectives: its pieces as they are
sent, where a rank has several, and as they are received. The rank's part of the sum is written to its place in the flat
tensor, from which the all-gather sends it. On the host the received pieces' memory is kept, since new memory costs page
faults.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from ddp_loop.accelerators import accelerator_of
from ddp_loop.distributed.backend import STEP, PieceOrder, Work
from ddp_loop.distributed.piece_sums import in_order, tree_levels


class TorchBackend:
    """A process group of torch; it finds failures itself, and `wait` holds up the device alone."""

    holds_up_host = False  # in `wait`

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    def start_sum(self, tensor: torch.Tensor, what: str) -> Work:
        return self._group.allreduce([tensor])

    def start_exchange(
        self, received: torch.Tensor, sent: torch.Tensor, from_each: list[int], to_each: list[int]
    ) -> Work:
        """Start to send each rank its rows of `sent`, (rows, K), and to receive what all send here, in rank order."""
        return self._group.alltoall_base(received, sent, from_each, to_each)

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> Work:
        return self._group._allgather_base(whole, part)

    def start_broadcast(self, tensor: torch.Tensor, what: str) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([tensor], options)

    def flat_sum(self, order: PieceOrder, length: int, dtype: torch.dtype, device: torch.device) -> TorchFlatSum:
        return TorchFlatSum(self, order, length, dtype, device)

    def start_settling(self) -> None:
        return None

    def wait(self, work: Work) -> None:
        work.wait()

    def cut_off(self) -> None:
        self._group.abort()

    def leave(self, unfinished: Collection[Work]) -> None:
        """Drop the group: its connections are closed with the last reference."""
        del self._group


class TorchFlatSum:
    """A flat sum by all-reduce, or by all-to-all and all-gather. See [Note: Two ways]."""

    def __init__(
        self, backend: TorchBackend, order: PieceOrder, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._backend = backend
        self._order = order
        self.reduces_early = not (order.is_any or backend.holds_up_host)
        self._length = length
        self._dtype = dtype
        self._device = device
        self._rows = [max(1, pieces) for pieces in order.pieces]  # a rank without shards sends -0.0, with the tail
        self._levels = tree_levels(order.last_merges)
        self._keeps_received = accelerator_of(device).is_host
        self._flat: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._received: torch.Tensor | None = None

    def empty(self) -> torch.Tensor:
        return torch.empty(self._length, dtype=self._dtype, device=self._device)

    def arrive(self, rows: Sequence[torch.Tensor]) -> Work:
        if self._order.is_any:
            return self._backend.start_sum(rows[0], STEP)
        self._flat = rows[0]
        ranks = self._backend.size
        parts = [row.view(ranks, -1) for row in rows]
        self._sent = torch.stack(parts, 1).view(ranks * len(rows), -1) if len(rows) > 1 else parts[0]
        if self._received is None:
            self._received = rows[0].new_empty(sum(self._rows), len(rows[0]) // ranks)
        return self._backend.start_exchange(self._received, self._sent, self._rows, [len(rows)] * ranks)

    def reduce(self) -> Work | None:
        if self._received is None or self._flat is None:
            return None
        pieces, others = in_order(self._received.split(self._rows), self._order)
        own = self._flat.view(self._backend.size, -1)[self._backend.rank]
        for lefts, rights in self._levels[:-1]:
            torch._foreach_add_([pieces[left] for left in lefts], [pieces[right] for right in rights])
        if self._levels:
            (left,), (right,) = self._levels[-1]
            torch.add(pieces[left], pieces[right], out=own)
        else:
            own.copy_(pieces[0])
        for other in others:  # tails alone
            own.add_(other)
        self._sent = None
        if not self._keeps_received:
            self._received = None
        return self._backend.start_gather(self._flat, own, STEP)

    def collect(self) -> None:
        self._flat = None
