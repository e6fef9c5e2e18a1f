"""What a run says in the terminal: a line per epoch, and in between a display that lives or a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ddp_loop.means import NORM, RATE, EpochMeans, Means
from ddp_loop.paces import Pace, slowest
from ddp_loop.progress import Moment
from ddp_loop.rates import Extent, Rate, as_clock

LINE_S = 5.0  # between two lines, at first
_SPARSER = 50  # and a 50th of the time since the run began, later: some 300 lines in a day
LOOK_S = 0.25  # between two looks of the display
_SHARE = 400  # and 400 times as long as the last look took
_POINTS = 256  # of the curve, at most


class Curve:
    """The losses of a run as at most `_POINTS` means over equally many rows each."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._rows_each, self._sum, self._rows = 1, 0.0, 0

    def add(self, value: float, rows: int = 1) -> None:
        """Add the mean of so many rows."""
        self._sum += value * rows
        self._rows += rows
        if self._rows < self._rows_each:
            return
        self.points.append(self._sum / self._rows)
        self._sum, self._rows = 0.0, 0
        if len(self.points) >= _POINTS:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self._rows_each *= 2


@dataclass(frozen=True, slots=True)
class View:
    """A run at a moment, to be shown.

    Attributes:
        extent: how far it goes.
        epoch, iteration: of the last row.
        values: the means of the last rows, by name; the last rate and norm.
        observations_per_s: of late.
        gone_s, left_s: the run's time so far, and what it still takes; None if that is unknown.
        losses: from the run's beginning, or where this process went on.
        slow_rank: which the others wait for.
    """

    extent: Extent
    epoch: int
    iteration: int
    values: Mapping[str, float]
    observations_per_s: float
    gone_s: float
    left_s: float | None
    losses: Sequence[float] = field(default=())
    slow_rank: int | None = None

    @property
    def place(self) -> str:
        """Such as "Epoch 3 of 20, step 41 of 200"."""
        of_epochs = f" of {self.extent.epochs}" if self.extent.epochs is not None else ""
        of_steps = f" of {self.extent.whole}" if self.extent.whole is not None else ""
        return f"Epoch {self.epoch}{of_epochs}, step {self.iteration}{of_steps}"

    @property
    def speed(self) -> str:
        """Such as "12,345 observations/s"."""
        rate = self.observations_per_s
        return f"{rate:,.0f} observations/s" if rate >= 100 else f"{rate:.3g} observations/s"

    @property
    def left(self) -> str:
        """Such as "1:12 left"."""
        return "" if self.left_s is None else f"{as_clock(self.left_s)} left"

    def line(self) -> str:
        """All this in a line of plain text."""
        means = [f"{name.capitalize()}: {value:.4f}" for name, value in self.values.items() if not _is_beside(name)]
        slow = [] if self.slow_rank is None else [f"rank {self.slow_rank} is slowest"]
        said = [*means, self.speed, *([self.left] if self.left else []), *slow]
        return f"{self.place}: {', '.join(said)}"


def _is_beside(name: str) -> bool:
    return name == NORM or name.startswith(RATE)


class Display(Protocol):
    """Shows a view in the place of the last one."""

    def show(self, view: View) -> None:
        """Show this one now."""

    def close(self) -> None:
        """Leave the last one where it is."""


class Terminal:
    """Says how a run goes on, from rank 0.

    Args:
        say: prints a line.
        extent: of the run.
        began: when the run began, on the monotonic clock; earlier by what it had taken before it went on.
        display: shows it while it goes on; without one lines are printed.
        epoch: with the rows of the epoch that a run goes on in.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        extent: Extent,
        began: float,
        display: Display | None,
        epoch: EpochMeans | None = None,
    ) -> None:
        self._say, self._extent, self._began, self._display = say, extent, began, display
        self._opened = time.monotonic()
        self._next = self._opened + (LOOK_S if display is not None else LINE_S)
        self._epoch, self._late = epoch or EpochMeans(), Means()  # without those since the last look
        self._last: Moment | None = None
        self._values: Mapping[str, float] = {}
        self._rate, self._curve = Rate(self._opened - began), Curve()
        self._slow: int | None = None
        self._view: View | None = None  # that was not shown yet

    def take(self, moment: Moment, values: Mapping[str, float]) -> None:
        """A row has come."""
        self._epoch.turn_to(moment.epoch)
        self._last, self._values = moment, values
        self._late.add(moment.observations, values)
        if moment.ends_epoch:
            self._view = self._make_view(moment)
            self._say(self._epoch_line(moment.epoch))
            self._epoch.turn_to(0)

    def take_ranks(self, ranks: Sequence[Pace]) -> None:
        """The ranks' paces have come."""
        self._slow = slowest(ranks)

    def look(self) -> None:
        """Show where the run is, if it is time."""
        now = time.monotonic()
        if now < self._next or self._last is None:
            return
        if self._display is None:
            if self._late.rows:
                self._say(self._make_view(self._last).line())
            self._next = now + max(LINE_S, (now - self._opened) / _SPARSER)
        else:
            self._show(self._display)
            ended = time.monotonic()
            self._next = ended + max(LOOK_S, _SHARE * (ended - now))

    def _show(self, display: Display) -> None:
        if self._late.rows and self._last is not None:
            self._view = self._make_view(self._last)
        view, self._view = self._view, None
        if view is not None:
            self._draw(lambda: display.show(view))

    def _draw(self, draw: Callable[[], None]) -> None:
        """Draw; a terminal that is gone gets no more, and stops nobody."""
        try:
            draw()
        except OSError:
            self._display = None

    def close(self, last_words: str | None = None) -> None:
        """The run ends, or was left."""
        if self._display is not None:
            self._show(self._display)
        if self._display is not None:
            self._draw(self._display.close)
        if last_words is not None:
            self._say(last_words)

    def _make_view(self, moment: Moment) -> View:
        """The run at this row; the rows since the last view are counted."""
        late, self._late = self._late, Means()
        self._epoch.means.add_all(late)
        means = late.means()
        if "loss" in means:
            self._curve.add(means["loss"], late.rows)
        beside = {name: value for name, value in self._values.items() if _is_beside(name)}
        return View(
            self._extent,
            moment.epoch,
            moment.iteration,
            means | beside,
            self._rate.take(moment.elapsed_s, late.observations),
            moment.elapsed_s,
            self._extent.left_s(moment.iteration, time.monotonic() - self._opened),
            self._curve.points,
            self._slow,
        )

    def _epoch_line(self, epoch: int) -> str:
        means = self._epoch.means
        said = ", ".join(f"{name.capitalize()}: {mean:.4f}" for name, mean in means.means().items())
        if means.skipped:
            said += f"{', ' if said else ''}{means.skipped} steps skipped, not finite"
        return f"Epoch: {epoch}, {said}"
