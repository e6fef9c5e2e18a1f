"""Ranks of several machines that compute on the CPU: in memory inside a machine, over gloo between their leaders.

The first rank of each machine is its leader. A sum is added up in memory on each machine, the leaders add up what the
machines have, and each leader gives the result to its own machine.

[Note: One tree] A flat sum has one order over all ranks, whatever the machines. On its machine a rank adds up the
largest whole nodes of the tree that lie there; only these travel between the leaders, as the pieces of one rank do
(`training/ordered_sum`). So the bits do not depend on the machines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

import torch
from torch.nn.functional import pad

from ddp_loop.distributed.backend import STEP, FlatSum, PieceOrder, Work
from ddp_loop.distributed.gloo import GlooBackend
from ddp_loop.distributed.memory import MemoryBackend
from ddp_loop.distributed.piece_sums import IDENTITY, additions, padded


@dataclass(frozen=True, slots=True)
class SumNode:
    """A sum in a tree over pieces: those from `first` to `end`, of its halves; a piece itself without them."""

    first: int
    end: int
    halves: tuple[SumNode, SumNode] | None = None


def tree_of(last_merges: Sequence[int]) -> SumNode | None:
    """The tree that adds up pieces; None without any."""
    nodes = [SumNode(piece, piece + 1) for piece in range(len(last_merges))]
    for left, right in additions(last_merges):
        nodes[left] = SumNode(left, nodes[right].end, (nodes[left], nodes[right]))
    return nodes[0] if nodes else None


def nodes_inside(node: SumNode | None, first: int, end: int) -> Iterator[SumNode]:
    """The largest whole nodes among the pieces from `first` to `end`."""
    if node is None or node.end <= first or end <= node.first:
        return
    if first <= node.first and node.end <= end:
        yield node
    elif node.halves is not None:
        for half in node.halves:
            yield from nodes_inside(half, first, end)


def merges_of(node: SumNode | None, leaves: Collection[SumNode]) -> list[int]:
    """For each of the leaves below a node, how often the last two sums are added up after it."""
    if node is None:
        return []
    if node in leaves or node.halves is None:
        return [0]
    left, right = (merges_of(half, leaves) for half in node.halves)
    return [*left, *right[:-1], right[-1] + 1]


def machine_order(
    order: PieceOrder, machines: Sequence[range], own_rank: int
) -> tuple[list[PieceOrder], list[slice], PieceOrder]:
    """Cut an order over all ranks into those inside of a rank's machine and between the machines. See [Note: One tree].

    Args:
        order: over all ranks.
        machines: the ranks of each, in order.
        own_rank: that rank.

    Returns:
        The order of each sum that the machine sends, over its ranks' pieces; for each of these, which of the rank's own
        pieces it adds up; and the order of what the machines send.
    """
    starts = [sum(order.pieces[:rank]) for rank in range(len(order.pieces) + 1)]
    tree = tree_of(order.last_merges)
    own = next(ranks for ranks in machines if own_rank in ranks)
    sent = {ranks: list(nodes_inside(tree, starts[ranks.start], starts[ranks.stop])) for ranks in machines}
    nodes = []
    parts = []
    for node in sent[own]:
        added = {rank: range(max(node.first, starts[rank]), min(node.end, starts[rank + 1])) for rank in own}
        nodes.append(PieceOrder(tuple(map(len, added.values())), tuple(merges_of(node, ())), is_any=False))
        mine = added[own_rank]
        parts.append(slice(mine.start - starts[own_rank], mine.start - starts[own_rank] + len(mine)))
    leaves = [*chain(*sent.values())]
    counts = tuple(map(len, sent.values()))
    is_any = sum(counts) <= 2 and max(counts) == 1
    return nodes, parts, PieceOrder(counts, tuple(merges_of(tree, leaves)), is_any)


@dataclass(eq=False, slots=True)
class Stages:
    """An operation under way: a first part that has begun, and the rest, which is done in the wait."""

    first: Work
    rest: Callable[[], None]
    is_over: bool = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        return self.first.wait()


@dataclass(eq=False)
class TwoLevelBackend:
    """Collectives in memory inside machines, and over gloo between their leaders.

    Args:
        local: of this machine's ranks.
        leaders: of the first ranks of all machines; None on the other ranks.
        machines: the ranks of each machine, in order.
        rank: of this process.
    """

    local: MemoryBackend
    leaders: GlooBackend | None
    machines: Sequence[range]
    rank: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.machines[-1].stop

    def start_sum(self, tensor: torch.Tensor, what: str) -> Stages:
        first = self.local.start_sum(tensor, what)
        return self._stages(first, lambda leaders: leaders.wait(leaders.start_sum(tensor, what)), tensor, what)

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> Stages:
        most = max(map(len, self.machines))
        count = part.numel()
        mine = part.new_empty(self.local.size * count)

        def between(leaders: GlooBackend) -> None:
            sent = pad(mine, (0, most * count - len(mine)))
            every = part.new_empty(len(self.machines) * most * count)
            leaders.wait(leaders.start_gather(every, sent, what))
            rows = every.view(len(self.machines), most, count)
            torch.cat([rows[n, : len(ranks)].reshape(-1) for n, ranks in enumerate(self.machines)], out=whole)

        return self._stages(self.local.start_gather(mine, part, what), between, whole, what)

    def start_broadcast(self, tensor: torch.Tensor, what: str) -> Stages:
        first = self.local.meet(what)
        return self._stages(first, lambda leaders: leaders.wait(leaders.start_broadcast(tensor, what)), tensor, what)

    def _stages(self, first: Work, between: Callable[[GlooBackend], None], result: torch.Tensor, what: str) -> Stages:
        """An operation inside machines, then between their leaders, whose result each gives to its own machine."""

        def rest() -> None:
            if self.leaders is not None:
                between(self.leaders)
            self.local.finish(self.local.start_broadcast(result, what))

        return Stages(first, rest)

    def flat_sum(self, order: PieceOrder, length: int, dtype: torch.dtype, device: torch.device) -> TwoLevelFlatSum:
        return TwoLevelFlatSum(self, order, length, dtype)

    def start_settling(self) -> Work | None:
        return self.local.start_settling()

    def wait(self, work: Work) -> None:
        if isinstance(work, Stages):
            self.local.wait(work.first)
            if not work.is_over:
                work.rest()
            work.is_over = True
        else:
            self.local.wait(work)

    def cut_off(self) -> None:
        self.local.cut_off()
        if self.leaders is not None:
            self.leaders.cut_off()

    def leave(self, unfinished: Collection[Work]) -> None:
        self.local.leave(())
        if self.leaders is not None:
            self.leaders.leave(())
            self.leaders = None


class TwoLevelFlatSum:
    """A flat sum in memory inside machines, and over gloo between their leaders. See [Note: One tree].

    Args:
        backend: of the ranks.
        order: of the pieces of all ranks.
        length: of a row, in values.
        dtype: of the values.
    """

    reduces_early = False

    def __init__(self, backend: TwoLevelBackend, order: PieceOrder, length: int, dtype: torch.dtype) -> None:
        self._local = backend.local
        nodes, parts, between = machine_order(order, backend.machines, backend.rank)
        # A machine without shards sends -0.0, with its ranks' tails.
        nodes = nodes or [PieceOrder((0,) * self._local.size, (), is_any=False)]
        self._parts = parts or [slice(0, 0)]
        if not any(part.stop > part.start for part in self._parts):
            self._parts[0] = slice(0, 1)  # of a rank without pieces: its row with the tail
        host = torch.device("cpu")
        self._sums = [self._local.flat_sum(node, length, dtype, host) for node in nodes]
        self._length = padded(length, between)
        self._between: FlatSum | None = None
        if backend.leaders is not None:
            self._leaders = backend.leaders
            self._between = self._leaders.flat_sum(between, self._length, dtype, host)
        self._sent: list[list[torch.Tensor]] = []
        self._own: torch.Tensor  # the row of the sum

    def empty(self) -> torch.Tensor:
        return self._sums[0].empty()

    def arrive(self, rows: Sequence[torch.Tensor]) -> Work:
        self._own = rows[0]
        self._sent = [list(rows[part]) or [torch.full_like(rows[0], IDENTITY)] for part in self._parts]
        first, *others = [one.arrive(sent) for one, sent in zip(self._sums, self._sent, strict=True)]

        def rest() -> None:
            for work in others:
                self._local.finish(work)

        return Stages(first, rest)

    def reduce(self) -> None:
        """Do the rest of the sum; the ranks of a machine wait for their leader."""
        for work in filter(None, [one.reduce() for one in self._sums]):
            self._local.finish(work)
        for one in self._sums:
            one.collect()
        if (settling := self._local.start_settling()) is not None:
            self._local.finish(settling)
        if self._between is not None:
            rows = [pad(sent[0], (0, self._length - len(sent[0]))) for sent in self._sent]
            self._leaders.wait(self._between.arrive(rows))
            if (gathering := self._between.reduce()) is not None:
                self._leaders.wait(gathering)
            self._between.collect()
            self._own.copy_(rows[0][: len(self._own)])
        self._local.finish(self._local.start_broadcast(self._own, STEP))
        for first, *_ in self._sent[1:]:
            if first is not self._own:
                first.fill_(IDENTITY)  # a later pass writes gradients there, but no tail

    def collect(self) -> None:
        self._sent = []
