"""The control word: a few integers of each rank, on whose sum all ranks decide together in each fold."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from ddp_loop.data import MiniBatch

PROBLEM, _NEW, _ENDS, _STOP, _SAVE, _PLACE, _SQUARE, CONTROL_LENGTH = range(8)


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """What a rank asks of all in a fold.

    Attributes:
        stop: to end the loop after this step.
        save: to write a checkpoint after it.
        problem: an error to raise; the other ranks raise PeerFailed.
    """

    stop: bool = False
    save: bool = False
    problem: Exception | None = None


NO_REQUEST = ControlRequest()


def control_word(mini_batch: MiniBatch, *, problem: bool, new: bool, asked: ControlRequest) -> tuple[int, ...]:
    """This rank's part of the control word.

    Args:
        mini_batch: of this step; 8 bits of its checksum tell one from the next, and 256 squares add up in float32.
        problem: whether the rank has one.
        new: whether the rank has something that the layout has no room for.
        asked: its requests.
    """
    said = mini_batch.epoch, mini_batch.position, mini_batch.samples, mini_batch.digest
    place = zlib.crc32(b"%d %d %d %d" % said) & 0xFF
    return problem, new, mini_batch.ends_stream, asked.stop, asked.save, place, place * place


@lru_cache(maxsize=1024)  # most words are one of 256
def word_tensor(word: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The word as a tensor, which must not be written."""
    return torch.tensor(word, dtype=dtype, device="cpu")


class FoldEvents(Protocol):
    """What a fold asks of the loop, and calls while it waits."""

    def requests(self) -> ControlRequest:
        """What this rank asks of all, at a fold."""

    def while_reducing(self) -> None:
        """The sums over the ranks have started. Do other work: rows, the next data, the seeds of what follows."""


@dataclass(frozen=True, slots=True)
class ControlDecision:
    """The sum of all ranks' control words.

    Attributes:
        problem, new, stop, save: whether any rank says so.
        ends: the number of ranks whose stream ends.
        parted: whether ranks are at different mini-batches: n sum(p^2) = sum(p)^2 exactly if all p are the same.
    """

    problem: bool
    new: bool
    ends: int
    stop: bool
    save: bool
    parted: bool


def read_word(sums: Sequence[float], ranks: int) -> tuple[ControlDecision, list[bool]]:
    """The decision that a sum of words is, and for each parameter whether a shard gave it a gradient."""
    problem, new, ends, stop, save, place, square = sums[:CONTROL_LENGTH]
    parted = ranks * square != place**2
    decision = ControlDecision(problem > 0, new > 0, int(ends), stop > 0, save > 0, parted)
    return decision, list(map(bool, sums[CONTROL_LENGTH:]))
