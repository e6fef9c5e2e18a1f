"""How far a run goes, how fast it is, and the time that it still takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 5.0  # observations/s are of the last so many seconds
_PARTS = 20  # of a window: so many moments are remembered


@dataclass(frozen=True)
class Extent:
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


class Rate:
    """Observations per second, over a window of the last seconds.

    Args:
        began_s: when the first observations were begun.
    """

    def __init__(self, began_s: float, window_s: float = WINDOW_S) -> None:
        self._window_s, self._sum = window_s, 0
        self._marks: deque[tuple[float, int]] = deque([(began_s, 0)])

    def take(self, elapsed_s: float, observations: int) -> float:
        """The rate, when so many more observations have been gone through."""
        self._sum += observations
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
