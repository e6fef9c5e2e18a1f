"""How long each rank's steps take, and how long it waits in them for the others: words in the launcher's store.

[Note: The slow rank] All ranks' steps take equally long, since each fold waits for the slowest. That one waits least.
No collective is made for this: each rank leaves a word now and then, and rank 0 reads those that are there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ddp_loop.words import Words

TELL_S = 1.0  # from one word of a rank to the next; a word takes 30 microseconds
GATHER_S = 3.0  # from one look of rank 0 to the next
_FIRST_S = 0.5
_MIB = 2**20

Pace = Mapping[str, float]


def memory_mib(device: torch.device) -> float:
    """What this process holds: of a GPU's memory what torch has taken of it, else the resident part of its own."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / _MIB
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / _MIB
    return 0.0


def slowest(ranks: Sequence[Pace]) -> int | None:
    """The rank that the others wait for, if they do for more than a tenth of the step; None of one."""
    if len(ranks) < 2:
        return None
    waits = sorted(ranks, key=lambda one: one["wait_s"])
    least, next_one = waits[0], waits[1]
    late = next_one["wait_s"] - least["wait_s"] > 0.1 * least["step_s"]
    return int(least["rank"]) if late else None


class Paces:
    """This rank's pace, told; on rank 0 those of all, as far as they are there.

    Args:
        words: of the world.
        key: of the loop's own, the same on every rank.
        rank, size: of the world.
        device: whose memory is said.
    """

    def __init__(self, words: Words, key: str, rank: int, size: int, device: torch.device) -> None:
        self._words, self._key, self._rank, self._device = words, f"pace/{key}", rank, device
        self._others = [one for one in range(size) if one != rank]
        self._since: tuple[float, int, float] | None = None  # the clock, the iteration and the waiting so far
        self._next_word = self._next_look = 0.0
        self._own: Pace | None = None

    def note(self, iteration: int, waited_s: float) -> bool:
        """A step was folded: tell where it is time; returns whether it is time to look, too.

        Args:
            iteration: of the step.
            waited_s: in all folds up to this one.
        """
        now = time.monotonic()
        if self._since is None:  # the first step is another: it makes what the others use again
            self._since = now, iteration, waited_s
            self._next_word, self._next_look = now + _FIRST_S, now + _FIRST_S + TELL_S
        if now < self._next_word:
            return False
        self._tell(now, iteration, waited_s)
        looks = now >= self._next_look
        if looks:
            self._next_look = now + GATHER_S
        return looks

    def _tell(self, now: float, iteration: int, waited_s: float) -> None:
        self._next_word = now + TELL_S
        if self._since is None or iteration <= self._since[1]:
            return
        since, first, before = self._since
        steps = iteration - first
        self._since = now, iteration, waited_s
        self._own = {
            "rank": self._rank,
            "step_s": round((now - since) / steps, 6),
            "wait_s": round((waited_s - before) / steps, 6),
            "memory_mib": round(memory_mib(self._device), 1),
        }
        if self._rank:
            with suppress(RuntimeError):  # the store is gone with the launcher
                self._words.tell(f"{self._key}/{self._rank}", json.dumps(self._own))

    def gather(self) -> list[Pace]:
        """The last word of each rank that has said one, in their order; on rank 0."""
        told = [] if self._own is None else [self._own]
        with suppress(RuntimeError):  # the store is gone with the launcher
            told += [json.loads(word) for word in self._words.ask_all([f"{self._key}/{one}" for one in self._others])]
        return told
