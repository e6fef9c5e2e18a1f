"""The control word: a few integers that every rank adds to a step's own sum, and what they add up to.

Whatever ranks must decide together is decided on the sums alone, at the same step on all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_loop.shards import MiniBatch

PROBLEM, _NEW, _ENDS, _STOP, _SAVE, _PLACE, _SQUARE, LENGTH = range(8)


@dataclass(frozen=True, slots=True)
class Requests:
    """What a rank asks of all.

    Attributes:
        stop: to end the loop after this step.
        save: to write a checkpoint after it.
        problem: what it found wrong; then it raises that, and the others raise PeerFailed.
    """

    stop: bool = False
    save: bool = False
    problem: Exception | None = None


NOTHING = Requests()


def no_requests() -> Requests:
    """Nothing is asked."""
    return NOTHING


def place_of(mini_batch: MiniBatch) -> int:
    """A small number that tells one mini-batch from the next; in float32 its square adds up exactly on 256 ranks."""
    return zlib.crc32(b"%d %d %d" % (mini_batch.epoch, mini_batch.position, mini_batch.observations)) & 0xFF


def word(mini_batch: MiniBatch, *, problem: bool, new: bool, asked: Requests) -> tuple[int, ...]:
    """What this rank adds.

    Args:
        mini_batch: that it is at.
        problem: whether it found something wrong.
        new: whether it saw something that the layout has no room for.
        asked: what else it asks for.
    """
    place = place_of(mini_batch)
    return problem, new, mini_batch.ends_stream, asked.stop, asked.save, place, place * place


@dataclass(frozen=True, slots=True)
class Said:
    """What the words of all ranks add up to.

    Attributes:
        problem, new, stop, save: whether some rank says so.
        ends: how many say that a stream ends.
        parted: whether ranks are at different mini-batches: n sum(p^2) = sum(p)^2 exactly if all p are the same.
    """

    problem: bool
    new: bool
    ends: int
    stop: bool
    save: bool
    parted: bool

    @classmethod
    def of(cls, sums: Sequence[float], ranks: int) -> Said:
        """Of the first `LENGTH` sums."""
        parted = ranks * sums[_SQUARE] != sums[_PLACE] ** 2
        return cls(
            sums[PROBLEM] > 0, sums[_NEW] > 0, int(sums[_ENDS]), sums[_STOP] > 0, sums[_SAVE] > 0, parted
        )  # fmt: skip
