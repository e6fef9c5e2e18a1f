"""How pieces of a sum are added up in a given order, whatever they are and wherever they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from ddp_loop.distributed.backend import PieceOrder
from ddp_loop.distributed.encoding import as_real

Item = TypeVar("Item")
IDENTITY = -0.0  # x + -0.0 is x to the bit, also where x is -0.0


def fill_identity(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with -0.0, in both parts of a complex one, and return it."""
    as_real(tensor).fill_(IDENTITY)
    return tensor


def padded(length: int, order: PieceOrder) -> int:
    """The length of a row with room for `length` values; a multiple of the ranks where each is sent a part."""
    ranks = len(order.pieces)
    return length if order.is_any else -(-length // ranks) * ranks


def in_order(rows: Sequence[torch.Tensor], order: PieceOrder) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The pieces of all ranks, and the rows of ranks without any, from each rank's rows, (count, K)."""
    pieces = [piece for one, count in zip(rows, order.pieces, strict=True) for piece in one[:count]]
    others = [one[0] for one, count in zip(rows, order.pieces, strict=True) if not count]
    return (pieces, others) if pieces else (others[:1], others[1:])


def merge(sums: list[Item | None], times: int, add: Callable[[Item, Item], object]) -> list[Item]:
    """Add the last of `sums` into the one before it, `times` times; None stands for an empty shard.

    Returns:
        The sums that are free again.
    """
    freed: list[Item] = []
    for _ in range(times):
        right = sums.pop()
        left = sums[-1]
        if left is None:
            sums[-1] = right
        elif right is not None:
            add(left, right)
            freed.append(right)
    return freed


def additions(last_merges: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The additions of pieces in their order: the left one, by the number of its first piece, and the right one.

    Args:
        last_merges: for each piece, how often the last two sums are added up after it.
    """
    sums: list[int] = []
    for piece, merges in enumerate(last_merges):
        sums.append(piece)
        for _ in range(merges):
            right = sums.pop()
            yield sums[-1], right


def tree_levels(last_merges: Iterable[int]) -> list[tuple[list[int], list[int]]]:
    """The `additions` in groups that can run at once: the left ones, into which the right ones are added."""
    levels: list[tuple[list[int], list[int]]] = []
    heights = Counter[int]()  # the number of levels below each sum
    for left, right in additions(last_merges):
        height = max(heights[left], heights[right])
        if height == len(levels):
            levels.append(([], []))
        levels[height][0].append(left)
        levels[height][1].append(right)
        heights[left] = height + 1
    return levels


def add_pieces(
    pieces: Sequence[torch.Tensor], last_merges: Iterable[int], others: Iterable[torch.Tensor], out: torch.Tensor
) -> None:
    """Add up `pieces` in their order, then `others`, into `out`, (K,) each; the pieces are only read.

    Where there are two pieces, or one, `out` may be one of them.
    """
    if len(pieces) == 1:
        out.copy_(pieces[0])
    elif len(pieces) == 2:
        torch.add(pieces[0], pieces[1], out=out)
    else:
        sums = list(pieces)
        own: set[int] = set()  # those that may be written
        room: torch.Tensor | None = out  # for the first sum, which all others join
        for left, right in additions(last_merges):
            if left in own:
                sums[left].add_(sums[right])
            elif right in own:
                sums[left] = torch.add(sums[left], sums[right], out=sums[right])
            else:
                sums[left] = torch.add(sums[left], sums[right], out=room)
                room = None
            own.add(left)
    for one in others:
        out.add_(one)
