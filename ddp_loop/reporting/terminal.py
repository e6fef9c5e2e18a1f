"""The terminal of a run: a line per epoch, and between them a live display, or a line now and then.

[Note: Fresh] The display is drawn in the main thread while the ranks wait for each other, and by every line that is
printed above it. If neither happens for a moment (a long step, an evaluation), a thread draws it, so that it is never
older than a second. All of them draw the newest view. Locks are taken in one order: `_drawing`, rich's, the progress's.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Protocol, cast

from ddp_loop.reporting.console import Unrecorded, follow_instead
from ddp_loop.reporting.rows import NORM, RATE, UNUSED, UNUSED_AT_LEAST, EpochMeans, RowMeta, WeightedMeans
from ddp_loop.reporting.throughput import RankTiming, Throughput, TrainingLength, as_clock, slowest

LINE_S = 5.0  # between two lines, at least
_SPARSER = 50  # and at least a 50th of the run's time: some 300 lines a day
LOOK_S = 0.25  # between two updates of the display in the main thread, at least
_SHARE = 400  # and at least 400 times the duration of the last one, but
_STALE_S = 0.7  # not more; then the thread looks whether to draw, so that no state is older than a second
_POINTS = 256  # of the curve, at most


def as_number(value: float) -> str:
    """Format a value with four decimals, or as 8.29e+26 and 3.1e-05 where these would hide it."""
    return f"{value:.4f}" if value == 0 or 1e-4 <= abs(value) < 1e6 or not math.isfinite(value) else f"{value:.3g}"


class LossCurve:
    """The losses of a run, as at most `_POINTS` means over equal numbers of rows."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._rows_each = 1
        self._sum = 0.0
        self._rows = 0

    def add(self, value: float, rows: int = 1) -> None:
        """Add the mean of some rows."""
        self._sum += value * rows
        self._rows += rows
        if self._rows < self._rows_each:
            return
        self.points.append(self._sum / self._rows)
        self._sum = 0.0
        self._rows = 0
        if len(self.points) >= _POINTS:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self._rows_each *= 2


@dataclass(frozen=True, slots=True)
class ProgressView:
    """The progress of a run at one moment.

    Attributes:
        extent: the run's length.
        epoch, iteration: of the last row.
        values: the means of the last rows, and the last learning rate and gradient norm, by name.
        samples_per_s: over the last seconds.
        elapsed_s, left_s: the run's time so far, and the remaining time; None if it is unknown.
        losses: since this process started.
        slow_rank: the rank that the others wait for.
        logged: the names of values that the script logged; they are shown as they are.
    """

    extent: TrainingLength
    epoch: int
    iteration: int
    values: Mapping[str, float]
    samples_per_s: float
    elapsed_s: float
    left_s: float | None
    losses: Sequence[float] = ()
    slow_rank: int | None = None
    logged: Collection[str] = ()

    @property
    def place(self) -> str:
        """The progress, as "Epoch 3 of 20, step 41 of 200"."""
        of_epochs = f" of {self.extent.epochs}" if self.extent.epochs is not None else ""
        of_steps = f" of {self.extent.whole}" if self.extent.whole is not None else ""
        return f"Epoch {self.epoch}{of_epochs}, step {self.iteration}{of_steps}"

    @property
    def speed(self) -> str:
        """The speed, as "12,345 samples/s"."""
        rate = self.samples_per_s
        return f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"

    @property
    def left(self) -> str:
        """The remaining time, as "1:12 left"; empty if it is unknown."""
        return "" if self.left_s is None else f"{as_clock(self.left_s)} left"

    @property
    def slow(self) -> str:
        """The rank that the others wait for, as "rank 3 is slowest"; empty without one."""
        return "" if self.slow_rank is None else f"rank {self.slow_rank} is slowest"

    def line(self) -> str:
        """Return the whole view as a line of text."""
        means = [
            f"{name if name in self.logged else _title(name)}: {as_number(value)}"
            for name, value in self.values.items()
            if not _is_beside(name)
        ]
        return f"{self.place}: {', '.join(filter(None, [*means, self.speed, self.left, self.slow]))}"


def _title(name: str) -> str:
    """A metric's name at the head of its value; the other letters stay, as in mIoU."""
    return name[:1].upper() + name[1:]


def _is_beside(name: str) -> bool:
    return name == NORM or name.startswith(RATE)


class Display(Protocol):
    """Shows a view in the place of the last one."""

    def draw(self, newest: Callable[[], ProgressView | None], *, last: bool) -> None:
        """Show the newest view, now and whenever something is printed; the last one stays visible."""


class Progress:
    """The rows of a run so far: as a view, and an epoch's as a line. Two threads may use it.

    Args:
        extent: the run's length.
        began: when the run began, on the monotonic clock, less the time of earlier processes.
        epoch: the rows of the epoch in which a run resumes.

    Attributes:
        opened: when it was made, on the monotonic clock.
        last: the last row, its place and its values; None before the first.
        late: the rows since the last view.
        slow_rank: the rank that the others wait for.
    """

    def __init__(self, extent: TrainingLength, began: float, epoch: EpochMeans | None) -> None:
        self._extent = extent
        self._began = began
        self._epoch = epoch or EpochMeans()
        self.opened = time.monotonic()
        self.last: tuple[RowMeta, Mapping[str, float]] | None = None
        self.late = WeightedMeans()
        self.slow_rank: int | None = None
        self._rate = Throughput(self.opened - began)
        self._curve = LossCurve()
        # By epoch, of those whose line is still to come: the newest value, and how often it was logged.
        self._logged: dict[int, dict[str, tuple[float, int]]] = {}
        self._view: ProgressView | None = None
        self._lock = threading.RLock()

    def take(self, moment: RowMeta, values: Mapping[str, float]) -> str | None:
        """Take a row, but for one that was taken before; returns the epoch's line with its last row."""
        with self._lock:
            if self.last is not None and moment.iteration <= self.last[0].iteration:
                return None
            self._epoch.turn_to(moment.epoch)
            self.last = (moment, values)
            self.late.add(moment.samples, values)
            if not moment.is_last_of_epoch:
                return None
            self._view = self._make_view(moment, values)
            line = self._epoch_line(moment.epoch, values)
            self._epoch.turn_to(0)
            return line

    def take_logged(self, values: Mapping[str, float], epoch: int) -> str | None:
        """Take values that the script logged: for the epoch's line; returns a line of their own after it."""
        with self._lock:
            last = None if self.last is None else self.last[0]
            is_over = last is not None and (last.epoch > epoch or (last.epoch == epoch and last.is_last_of_epoch))
            if not is_over:
                known = self._logged.setdefault(epoch, {})
                known |= {name: (value, known.get(name, (0.0, 0))[1] + 1) for name, value in values.items()}
                return None
            if self._view is not None and self._view.epoch == epoch:
                names = {*self._view.logged, *values}
                self._view = replace(self._view, values={**self._view.values, **values}, logged=names)
        return ", ".join([f"Epoch: {epoch}", *(f"{name}: {as_number(one)}" for name, one in values.items())])

    def newest(self) -> ProgressView | None:
        """Return the view of all rows, as of now; None before the first row."""
        with self._lock:
            if self.late.rows and self.last is not None:
                self._view = self._make_view(*self.last)
            if self._view is None:
                return None
            return replace(self._view, elapsed_s=max(time.monotonic() - self._began, self._view.elapsed_s))

    def _make_view(self, moment: RowMeta, values: Mapping[str, float]) -> ProgressView:
        """Return the view of this row and of all rows since the last view."""
        late = self.late
        self.late = WeightedMeans()
        self._epoch.means.add_all(late)
        means = late.means()
        if "loss" in means:
            self._curve.add(means["loss"], late.rows)
        beside = {name: value for name, value in values.items() if _is_beside(name)}
        logged = {name: value for name, (value, _) in self._logged.get(moment.epoch, {}).items()}
        return ProgressView(
            self._extent,
            moment.epoch,
            moment.iteration,
            means | logged | beside,
            self._rate.take(moment.elapsed_s, late.samples),
            moment.elapsed_s,
            self._extent.left_s(moment.iteration, time.monotonic() - self.opened),
            self._curve.points,
            self.slow_rank,
            frozenset(logged),
        )

    def _epoch_line(self, epoch: int, values: Mapping[str, float]) -> str:
        means = self._epoch.means
        parts = [
            f"Epoch: {epoch}",
            *(f"{_title(name)}: {as_number(mean)}" for name, mean in means.means(self._epoch.sums).items()),
        ]
        for name, (value, times) in self._logged.pop(epoch, {}).items():
            parts.append(f"{name}: {as_number(value)}{' (last)' if times > 1 else ''}")  # the others are means
        if means.skipped:
            parts.append(f"{means.skipped} steps skipped, not finite")
        for name, said in ((UNUSED, ""), (UNUSED_AT_LEAST, "at least ")):
            if (samples := values.get(name, 0)) > 0:
                parts.append(f"{said}{samples:.0f} sample{'' if samples == 1 else 's'} not used")
        return ", ".join(parts)


class Terminal:
    """Shows the progress of a run, on rank 0.

    Args:
        say: prints a line.
        extent: the run's length.
        began: when the run began, on the monotonic clock, less the time of earlier processes.
        display: shows the progress; without one lines are printed.
        epoch: the rows of the epoch in which a run resumes.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        extent: TrainingLength,
        began: float,
        display: Display | None,
        epoch: EpochMeans | None = None,
    ) -> None:
        self._say = say
        self._display = display
        self._progress = Progress(extent, began, epoch)
        self._next = self._progress.opened + (LOOK_S if display is not None else LINE_S)
        self._drawn = self._progress.opened
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, moment: RowMeta, values: Mapping[str, float]) -> None:
        """Take a row; one that was taken before is left out."""
        if (line := self._progress.take(moment, values)) is not None:
            self._say(line)

    def take_logged(self, values: Mapping[str, float], epoch: int) -> None:
        """Take values that the script logged: for the epoch's line, or a line of their own after it."""
        if (line := self._progress.take_logged(values, epoch)) is not None:
            self._say(line)

    def take_ranks(self, ranks: Sequence[RankTiming]) -> None:
        """Take the ranks' timings."""
        self._progress.slow_rank = slowest(ranks)

    def watch(self, hand_on: Callable[[], None]) -> None:
        """Let a thread keep the display fresh; see [Note: Fresh].

        Args:
            hand_on: gives `take` the rows that have arrived; called in the thread before it draws.
        """
        if self._display is not None:
            _finish_drawing_before_forks()
            self._thread = threading.Thread(
                target=self._keep_fresh, args=(hand_on,), name="ddp_loop display", daemon=True
            )
            self._thread.start()

    def _keep_fresh(self, hand_on: Callable[[], None]) -> None:
        while not self._ended.wait(LOOK_S) and self._display is not None:
            if time.monotonic() - self._drawn > _STALE_S:
                with _drawing:
                    hand_on()
                    self._show()

    def refresh(self) -> None:
        """Show the progress if it is time."""
        now = time.monotonic()
        progress = self._progress
        if now < self._next or progress.last is None:
            return
        if self._display is None:
            if progress.late.rows and (view := progress.newest()) is not None:
                self._say(view.line())
            self._next = now + max(LINE_S, (now - progress.opened) / _SPARSER)
        else:
            self._show()
            self._next = self._drawn + min(_STALE_S, max(LOOK_S, _SHARE * (self._drawn - now)))

    def _show(self, *, last: bool = False) -> None:
        """Draw the newest view; a terminal that was closed gets no further one."""
        with _drawing:
            if self._display is None or self._progress.last is None:
                return
            try:
                self._display.draw(self._progress.newest, last=last)
                self._drawn = time.monotonic()
            except OSError:
                self._display = None

    def close(self, last_words: str | None = None) -> None:
        """Show the last view and a last message."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._show(last=True)
        if last_words is not None:
            self._say(last_words)


_drawing = threading.RLock()  # held by the thread that draws, so that one begins a display, and by the one that forks


@cache  # once in a process
def _finish_drawing_before_forks() -> None:
    """Keep rich's locks free in a forked process (a DataLoader's worker), which may print too."""
    os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = "_.-=+*%#"
_LEAST_BAR = 8
_MOST_CURVE = 100  # columns
_BETWEEN = "   "


def open_display() -> LiveDisplay | None:
    """Return a display if stdout is a terminal that can move its cursor and rich is installed; else None."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return LiveDisplay(Console(file=cast(IO[str], Unrecorded(sys.stdout)), highlight=False))


class LiveDisplay:
    """A few lines at the end of the terminal that are redrawn; other output is printed above them."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._newest: Callable[[], ProgressView | None] = lambda: None
        self._live = Live(
            self,  # rendered anew by each print
            console=console,
            auto_refresh=False,  # the terminal decides when
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="ellipsis",
        )

    def draw(self, newest: Callable[[], ProgressView | None], *, last: bool) -> None:
        """Show the newest view, now and whenever something is printed; the last one stays visible."""
        self._newest = newest
        if not self._live.is_started:
            before = sys.stdout, sys.stderr
            self._live.start()
            follow_instead(before[0], sys.stdout)  # what is printed above the display
            follow_instead(before[1], sys.stderr)
            self._console.show_cursor(True)  # a killed process could not show it again
        self._live.refresh()
        if last:
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if (view := self._newest()) is not None:
            yield self._render(view)

    def _render(self, view: ProgressView) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        width = self._console.width
        bar = self._bar(view, width)
        curve = self._curve(view.losses, width)
        place = [] if bar is not None else flowed([view.place, view.left], width)
        lines = [*place, *flowed(cells(view), width), *([curve] if curve else [])]
        texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(*([] if bar is None else [bar]), *texts)

    def _bar(self, view: ProgressView, width: int) -> RenderableType | None:
        """Return the bar between the place and the remaining time; None if there is no room for it."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        whole = view.extent.whole
        share = f"{100 * view.iteration // whole:3} %" if whole else ""
        right = f"{share}  {view.left}" if view.left else share
        room = width - len(view.place) - len(right) - 2
        if not whole or room < _LEAST_BAR:
            return None
        grid = Table.grid(padding=(0, 1))
        grid.add_row(view.place, ProgressBar(total=whole, completed=view.iteration, width=room), right)
        return grid

    def _curve(self, losses: Sequence[float], width: int) -> str:
        if len(losses) < 2:
            return ""
        first = f"loss {losses[0]:.4g} "
        last = f" {losses[-1]:.4g}"
        blocks = _BLOCKS if "utf" in self._console.encoding else _PLAIN_BLOCKS
        return first + sparkline(losses, min(width - len(first) - len(last), _MOST_CURVE), blocks) + last


def cells(view: ProgressView) -> list[str]:
    """Return the values of a view and its speed, time and ranks, each as a short text."""
    cells = [
        f"{name.replace('_', ' ')} {value:.3g}" if _is_beside(name) else f"{name} {as_number(value)}"
        for name, value in view.values.items()
    ]
    ranks = view.extent.ranks
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {view.extent.device}"
    return [*cells, view.speed, f"{as_clock(view.elapsed_s)} elapsed", ", ".join(filter(None, [where, view.slow]))]


def flowed(cells: Sequence[str], width: int) -> list[str]:
    """Join cells to as few lines as possible; empty ones are left out."""
    lines: list[str] = []
    for cell in filter(None, cells):
        if lines and len(lines[-1]) + len(_BETWEEN) + len(cell) <= width:
            lines[-1] += _BETWEEN + cell
        else:
            lines.append(cell)
    return lines


def sparkline(values: Sequence[float], width: int, blocks: str = _BLOCKS) -> str:
    """Draw values as at most `width` blocks, from the smallest to the largest value; "?" is not finite."""
    if width < 1 or not values:
        return ""
    count = min(width, len(values))
    cuts = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    known = [value for value in means if math.isfinite(value)]
    least = min(known, default=0.0)
    most = max(known, default=0.0)
    step = (most - least) / (len(blocks) - 1) or 1.0
    return "".join(blocks[round((value - least) / step)] if math.isfinite(value) else "?" for value in means)
