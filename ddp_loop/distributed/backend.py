"""The seam for collectives: how tensors travel between the ranks. One class for each way, in a file of its own.

[Note: A backend] `Collectives` starts the same operations in the same order and with the same sizes on every rank, and
knows who failed; a backend only moves and adds. An operation returns its `Work` at once, and its tensors stay untouched
until `wait`. The order in which a sum adds the ranks up is free, but must be one on every rank, so that all have the
same bits; a `FlatSum` adds pieces in a given order. What fails raises RuntimeError on the ranks that wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

LOOK_S = 0.5  # how often a wait checks whether it is in vain
STEP = "a step's sum"


class Parted(RuntimeError):
    """Ranks make different collectives; raised on every rank, with the place of each."""

    def __init__(self, places: Mapping[int, str]) -> None:
        super().__init__(
            "Every rank must make the same collectives in the same order, but "
            + ", ".join(f"rank {rank} is at {place}" for rank, place in places.items())
            + ". Call evaluate, and whatever else is for every rank, on all of them in the same order, with tensors of "
            "one shape and dtype."
        )


class Work(Protocol):
    """An operation under way."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Wait for it."""


@dataclass(frozen=True, slots=True)
class PieceOrder:
    """In which order the pieces of all ranks are added up.

    Attributes:
        pieces: for each rank, how many sums it sends; 0 for a rank without a shard.
        last_merges: for each piece, in rank order, how often the last two sums are added up after it.
        is_any: whether any order gives the same bits, or no order was asked for.
    """

    pieces: tuple[int, ...]
    last_merges: tuple[int, ...]
    is_any: bool


class FlatSum(Protocol):
    """The sum of one flat tensor over the ranks, in the order of its pieces: three parts, with a wait after each.

    Attributes:
        reduces_early: whether `reduce` starts a collective of its own, and the wait before it holds up the device only.
    """

    reduces_early: bool

    def empty(self) -> torch.Tensor:
        """New memory for a row, with any values, from which `arrive` need not copy."""

    def arrive(self, rows: Sequence[torch.Tensor]) -> Work:
        """Send this rank's pieces, of one length; the sum comes into the first. Every rank must call this."""

    def reduce(self) -> Work | None:
        """Add up this rank's part of all pieces, once they have arrived. Every rank must call this."""

    def collect(self) -> None:
        """Bring the sum into the first row, once all parts are added up."""


class Backend(Protocol):
    """A way for tensors to travel between the ranks. See [Note: A backend]. Every rank must call each `start_...`.

    `what` names an operation where ranks make different ones.
    """

    @property
    def size(self) -> int: ...

    def start_sum(self, tensor: torch.Tensor, what: str) -> Work:
        """Start to add `tensor` up over all ranks, in place."""

    def start_gather(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> Work:
        """Start to put every rank's `part`, (K,), side by side into `whole`, (size * K,)."""

    def start_broadcast(self, tensor: torch.Tensor, what: str) -> Work:
        """Start to make `tensor` what it is on rank 0, in place."""

    def flat_sum(self, order: PieceOrder, length: int, dtype: torch.dtype, device: torch.device) -> FlatSum:
        """The sum of a flat tensor of `length`, to be made many times; `length` is `padded`."""

    def start_settling(self) -> Work | None:
        """Start to wait until no rank reads what the last sums left in this one's memory; None if none can."""

    def wait(self, work: Work) -> None:
        """Wait for an operation until its values can be used on their device.

        Where the host waits, it looks every LOOK_S seconds whether that is in vain, by a function that the backend was
        made with: a rank failed, is elsewhere, or takes too long.

        Raises:
            Parted: ranks make different operations.
            RuntimeError: it failed, or is waited for in vain.
        """

    def cut_off(self) -> None:
        """End what is under way here and on the ranks that wait for this one, which failed."""

    def leave(self, unfinished: Collection[Work]) -> None:
        """Give up what it holds.

        Args:
            unfinished: the operations that were cut off.
        """
