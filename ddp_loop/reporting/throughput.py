"""A run's length, speed and remaining time, and how long each rank waits for the others.

[Note: The slow rank] Steps take equally long on all ranks, because each fold waits for the slowest rank. That rank
waits least. This needs no collective: each rank puts its timing into the store now and then, and rank 0 reads them.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ddp_loop.distributed import RankStore
from ddp_loop.reporting.usage import memory_mib

TELL_S = 1.0  # between two timings of a rank; each takes 30 microseconds
GATHER_S = 3.0  # between two reads of rank 0
_FIRST_S = 0.5

RankTiming = Mapping[str, float]


def slowest(ranks: Sequence[RankTiming]) -> int | None:
    """Return the rank that all others wait for by more than a tenth of a step; None without one."""
    if len(ranks) < 2:
        return None
    least, next_one, *_ = sorted(ranks, key=lambda one: one["wait_s"])
    late = next_one["wait_s"] - least["wait_s"] > 0.1 * least["step_s"]
    return int(least["rank"]) if late else None


class RankTimings:
    """Publishes the timing of this rank, and gathers all ranks' timings on rank 0.

    Args:
        store: of the world.
        key: unique to the loop, the same on every rank.
        rank, size: of the world.
        device: whose memory is reported.
    """

    def __init__(self, store: RankStore, key: str, rank: int, size: int, device: torch.device) -> None:
        self._store = store
        self._key = f"pace/{key}"
        self._rank = rank
        self._device = device
        self._others = [one for one in range(size) if one != rank]
        self._since: tuple[float, int, float] | None = None  # the clock, the iteration and the waiting so far
        self._next_word = self._next_look = 0.0
        self._own: RankTiming | None = None

    def record(self, iteration: int, waited_s: float) -> bool:
        """Record a folded step, and publish a timing if one is due; returns whether `gather` is due.

        Args:
            iteration: of the step.
            waited_s: the time waited in all folds so far.
        """
        now = time.monotonic()
        if self._since is None:  # the first step is slower: it allocates
            self._since = now, iteration, waited_s
            self._next_word = now + _FIRST_S
            self._next_look = now + _FIRST_S + TELL_S
        if now < self._next_word:
            return False
        self._next_word = now + TELL_S
        since, first, before = self._since
        if iteration > first:
            self._since = now, iteration, waited_s
            self._own = {
                "rank": self._rank,
                "step_s": round((now - since) / (iteration - first), 6),
                "wait_s": round((waited_s - before) / (iteration - first), 6),
                "memory_mib": memory_mib(self._device),
            }
            if self._rank:
                with suppress(RuntimeError):  # the launcher, and its store, have ended
                    self._store.put(f"{self._key}/{self._rank}", json.dumps(self._own))
        looks = now >= self._next_look
        if looks:
            self._next_look = now + GATHER_S
        return looks

    def gather(self) -> list[RankTiming]:
        """Return the newest timing of each rank that has published one, in rank order; on rank 0."""
        timings = [] if self._own is None else [self._own]
        with suppress(RuntimeError):  # the launcher, and its store, have ended
            words = self._store.get_all([f"{self._key}/{one}" for one in self._others])
            timings += [json.loads(word) for word in words]
        return timings


WINDOW_S = 5.0  # over which samples/s are measured
_PARTS = 20  # the number of moments that are stored in a window


@dataclass(frozen=True)
class TrainingLength:
    """How long a run is, and where it runs.

    Attributes:
        epochs, steps: of `Loop`.
        steps_per_epoch: None if it is unknown, as for a stream.
        after: the iteration that the run resumes from.
        ranks, device: the number of ranks, and their device.
    """

    epochs: int | None = None
    steps_per_epoch: int | None = None
    steps: int | None = None
    after: int = 0
    ranks: int = 1
    device: str = "cpu"

    @property
    def whole(self) -> int | None:
        """The number of steps; None if it is unknown."""
        by_epochs = None if self.epochs is None or self.steps_per_epoch is None else self.epochs * self.steps_per_epoch
        known = [steps for steps in (by_epochs, self.steps) if steps is not None]
        return min(known, default=None)

    def left_s(self, iteration: int, passed_s: float) -> float | None:
        """Estimate the seconds that remain, at the speed of this process so far; None if unknown.

        Args:
            iteration: of the last step.
            passed_s: the seconds since this process began.
        """
        if self.whole is None or iteration <= self.after:
            return None
        return max(self.whole - iteration, 0) * passed_s / (iteration - self.after)


class Throughput:
    """Samples per second, over a window of the last seconds.

    Args:
        began_s: when the first step began.
    """

    def __init__(self, began_s: float) -> None:
        self._sum = 0
        self._marks: deque[tuple[float, int]] = deque([(began_s, 0)])

    def take(self, elapsed_s: float, samples: int) -> float:
        """Add samples, and return the rate."""
        self._sum += samples
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= elapsed_s - WINDOW_S:
            marks.popleft()
        since_s, before = marks[0]
        if elapsed_s - marks[-1][0] >= WINDOW_S / _PARTS:
            marks.append((elapsed_s, self._sum))
        return (self._sum - before) / (elapsed_s - since_s) if elapsed_s > since_s else 0.0


def as_clock(seconds: float) -> str:
    """Format seconds as 0:07, 12:40, 3:00:00."""
    whole = round(seconds)
    minutes = whole // 60 % 60
    hours = whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
