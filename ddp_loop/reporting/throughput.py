"""Throughput: how far a run goes, how fast it is, the time it still takes; and how long each rank waits for the others.

[Note: The slow rank] All ranks' steps take equally long, since each fold waits for the slowest. That one waits least.
No collective is made for this: each rank leaves a word now and then, and rank 0 reads those that are there.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ddp_loop.accelerators import accelerator_of
from ddp_loop.distributed import RankStore

TELL_S = 1.0  # from one word of a rank to the next; a word takes 30 microseconds
GATHER_S = 3.0  # from one look of rank 0 to the next
_FIRST_S = 0.5
_MIB = 2**20

RankTiming = Mapping[str, float]


def memory_mib(device: torch.device) -> float:
    """What this process holds: of a GPU's memory what torch has taken of it, else the resident part of its own."""
    return accelerator_of(device).memory_held() / _MIB


def slowest(ranks: Sequence[RankTiming]) -> int | None:
    """The rank that the others wait for, if they do for more than a tenth of the step; None of one."""
    if len(ranks) < 2:
        return None
    waits = sorted(ranks, key=lambda one: one["wait_s"])
    least, next_one = waits[0], waits[1]
    late = next_one["wait_s"] - least["wait_s"] > 0.1 * least["step_s"]
    return int(least["rank"]) if late else None


class RankTimings:
    """This rank's pace, told; on rank 0 those of all, as far as they are there.

    Args:
        store: of the world, where ranks leave words.
        key: of the loop's own, the same on every rank.
        rank, size: of the world.
        device: whose memory is said.
    """

    def __init__(self, store: RankStore, key: str, rank: int, size: int, device: torch.device) -> None:
        self._store, self._key, self._rank, self._device = store, f"pace/{key}", rank, device
        self._others = [one for one in range(size) if one != rank]
        self._since: tuple[float, int, float] | None = None  # the clock, the iteration and the waiting so far
        self._next_word = self._next_look = 0.0
        self._own: RankTiming | None = None

    def record(self, iteration: int, waited_s: float) -> bool:
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
        self._publish(now, iteration, waited_s)
        looks = now >= self._next_look
        if looks:
            self._next_look = now + GATHER_S
        return looks

    def _publish(self, now: float, iteration: int, waited_s: float) -> None:
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
                self._store.put(f"{self._key}/{self._rank}", json.dumps(self._own))

    def gather(self) -> list[RankTiming]:
        """The last word of each rank that has said one, in their order; on rank 0."""
        told = [] if self._own is None else [self._own]
        with suppress(RuntimeError):  # the store is gone with the launcher
            told += [json.loads(word) for word in self._store.get_all([f"{self._key}/{one}" for one in self._others])]
        return told


WINDOW_S = 5.0  # samples/s are of the last so many seconds
_PARTS = 20  # of a window: so many moments are remembered


@dataclass(frozen=True)
class TrainingLength:
    """How far a run goes, and on what.

    Attributes:
        epochs, steps: as the Loop was given them.
        steps_per_epoch: None where nobody knows, of a stream.
        after: the iteration that it goes on from.
        ranks, device: where it runs.
    """

    epochs: int | None = None
    steps_per_epoch: int | None = None
    steps: int | None = None
    after: int = 0
    ranks: int = 1
    device: str = "cpu"

    @property
    def whole(self) -> int | None:
        """The number of its steps, if that is known."""
        by_epochs = None if self.epochs is None or self.steps_per_epoch is None else self.epochs * self.steps_per_epoch
        known = [steps for steps in (by_epochs, self.steps) if steps is not None]
        return min(known, default=None)

    def left_s(self, iteration: int, gone_s: float) -> float | None:
        """The seconds that the steps behind `iteration` take, at the pace of this process's own; None if unknown.

        Args:
            iteration: of the step at hand.
            gone_s: since this process began.
        """
        if self.whole is None or iteration <= self.after:
            return None
        return max(self.whole - iteration, 0) * gone_s / (iteration - self.after)


class Throughput:
    """Samples per second, over a window of the last seconds.

    Args:
        began_s: when the first samples were begun.
    """

    def __init__(self, began_s: float, window_s: float = WINDOW_S) -> None:
        self._window_s, self._sum = window_s, 0
        self._marks: deque[tuple[float, int]] = deque([(began_s, 0)])

    def take(self, elapsed_s: float, samples: int) -> float:
        """The rate, when so many more samples have been gone through."""
        self._sum += samples
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= elapsed_s - self._window_s:
            marks.popleft()
        since_s, before = marks[0]
        if elapsed_s - marks[-1][0] >= self._window_s / _PARTS:
            marks.append((elapsed_s, self._sum))
        return (self._sum - before) / (elapsed_s - since_s) if elapsed_s > since_s else 0.0


def as_clock(seconds: float) -> str:
    """Such as 0:07, 12:40, 3:00:00."""
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
