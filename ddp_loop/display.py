"""A display that lives in the terminal: a bar, the numbers of late, the curve of the loss; with rich."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ddp_loop.means import NORM, RATE
from ddp_loop.rates import as_clock
from ddp_loop.terminal import View

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_LEAST_BAR, _MOST_CURVE = 8, 100  # columns
_BETWEEN = "   "


def open_display() -> LiveDisplay | None:
    """A display, if stdout is a terminal that can move its cursor, and rich is there; else None."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None  # lines are printed then
    return LiveDisplay(Console(file=sys.stdout, highlight=False))


class LiveDisplay:
    """A few lines at the terminal's end that are written anew; whatever is printed meanwhile goes above them."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(
            console=console,
            auto_refresh=False,  # no thread: what it draws is drawn while the ranks wait for each other
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="ellipsis",
        )

    def show(self, view: View) -> None:
        """Show this one now."""
        self._live.update(self._render(view))
        if not self._live.is_started:
            self._live.start()
            self._console.show_cursor(True)  # a process may be ended without a chance to bring it back
        self._live.refresh()

    def close(self) -> None:
        """Leave the last one where it is."""
        if self._live.is_started:
            self._live.stop()

    def _render(self, view: View) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        width = self._console.width
        bar = self._bar(view, width)
        curve = self._curve(view.losses, width)
        place = [] if bar is not None else flowed([view.place, view.left] if view.left else [view.place], width)
        lines = [*place, *flowed(_cells(view), width), *([curve] if curve else [])]
        texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(*([] if bar is None else [bar]), *texts)

    def _bar(self, view: View, width: int) -> RenderableType | None:
        """Where the run is: words on the left, on the right, and between them the bar; None where it has no room."""
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
        first, last = f"loss {losses[0]:.4g} ", f" {losses[-1]:.4g}"
        blocks = _BLOCKS if "utf" in self._console.encoding else _PLAIN_BLOCKS
        return first + sparkline(losses, min(width - len(first) - len(last), _MOST_CURVE), blocks) + last


def _cells(view: View) -> list[str]:
    cells = [f"{_named(name)} {_number(name, value)}" for name, value in view.values.items()]
    ranks = view.extent.ranks
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {view.extent.device}"
    slow = f", rank {view.slow_rank} is slowest" if view.slow_rank is not None else ""
    return [*cells, view.speed, f"{as_clock(view.gone_s)} gone", where + slow]


def _named(name: str) -> str:
    return name.replace("_", " ") if name == NORM or name.startswith(RATE) else name


def _number(name: str, value: float) -> str:
    return f"{value:.3g}" if name == NORM or name.startswith(RATE) else f"{value:.4f}"


def flowed(cells: Sequence[str], width: int) -> list[str]:
    """Cells side by side, in as few lines as they need."""
    lines: list[str] = []
    for cell in cells:
        if lines and len(lines[-1]) + len(_BETWEEN) + len(cell) <= width:
            lines[-1] += _BETWEEN + cell
        else:
            lines.append(cell)
    return lines


def sparkline(values: Sequence[float], width: int, blocks: str = _BLOCKS) -> str:
    """Values as blocks between the least and the largest one, at most `width` of them; "?" is not finite."""
    if width < 1 or not values:
        return ""
    count = min(width, len(values))
    cuts = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    known = [value for value in means if math.isfinite(value)]
    least, most = min(known, default=0.0), max(known, default=0.0)
    step = (most - least) / (len(blocks) - 1) or 1.0
    return "".join(blocks[round((value - least) / step)] if math.isfinite(value) else "?" for value in means)
