"""The progress of a run in a notebook's cell: a bar, the values, the curve of the loss, in place of the last ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ddp_loop.distributed import CellOutput
from ddp_loop.reporting.throughput import as_clock

if TYPE_CHECKING:
    from ddp_loop.reporting.terminal import ProgressView

_BLUE, _GREEN, _AMBER = "#1f77b4", "#2ca02c", "#b8860b"
_WIDTH, _HEIGHT = 240, 36  # of the curve, in pixels
_CELL = "padding:2px 12px 2px 0;text-align:left;border:0;background:none"


class NotebookDisplay:
    """Shows a run's progress in a cell.

    Args:
        output: of the cell.
    """

    def __init__(self, output: CellOutput) -> None:
        self._output = output
        self._view: ProgressView | None = None

    def draw(self, newest: Callable[[], ProgressView | None]) -> None:
        """Show the newest view."""
        if (view := newest()) is not None:
            self._view = view
            self._output.show({"text/html": as_html(view), "text/plain": view.line()})

    def close(self) -> None:
        """Show that the run has ended, and where."""
        if (view := self._view) is not None:
            ending = "done" if view.iteration == view.extent.whole else "ended"
            html, line = as_html(view, ending), f"{view.line()} ({ending})"
            self._output.show({"text/html": html, "text/plain": line})


def as_html(view: ProgressView, ending: str = "") -> str:
    """Return a view as a piece of HTML without scripts and outside files.

    Args:
        view: the progress.
        ending: "done" or "ended"; empty while the run is under way.
    """
    whole = view.extent.whole
    share = min(100 * view.iteration / whole, 100.0) if whole else None
    colour = {"": _BLUE, "done": _GREEN}.get(ending, _AMBER)
    time = f"{as_clock(view.gone_s)} gone" + (f", {view.left}" if view.left and not ending else "")
    ranks = view.extent.ranks
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {view.extent.device}"
    slow = [] if view.slow_rank is None or ending else [f"rank {view.slow_rank} is slowest"]
    head = [view.place, *([f"{share:.0f} %"] if share is not None else []), time, *([ending] if ending else [])]
    foot = [view.speed, where, *slow]
    cells = "".join(
        f'<td style="{_CELL}"><span style="opacity:.7">{escape(name.replace("_", " "))}</span><br/>'
        f"<b>{value:.4g}</b></td>"
        for name, value in view.values.items()
    )
    bar = "" if share is None else _bar(share, colour)
    return (
        '<div style="font-family:sans-serif;font-size:13px;max-width:720px">'
        f"<div>{escape(' · '.join(head))}</div>{bar}"
        f'<table style="border:0;margin:2px 0;border-collapse:collapse"><tr>{cells}'
        f'<td style="{_CELL}">{curve(view.losses, colour)}</td></tr></table>'
        f'<div style="opacity:.7">{escape(" · ".join(foot))}</div></div>'
    )


def _bar(share: float, colour: str) -> str:
    return (
        '<div style="height:8px;margin:4px 0;border-radius:4px;background:rgba(128,128,128,.25)">'
        f'<div style="height:8px;border-radius:4px;width:{share:.1f}%;background:{colour}"></div></div>'
    )


def curve(losses: Sequence[float], colour: str = _BLUE) -> str:
    """Return the losses as a line in an SVG picture; what is not finite is left out, and empty for fewer than two."""
    points = [(place, value) for place, value in enumerate(losses) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    least, most = min(value for _, value in points), max(value for _, value in points)
    across, up = (_WIDTH - 4) / max(points[-1][0], 1), (_HEIGHT - 4) / ((most - least) or 1.0)
    line = " ".join(f"{2 + place * across:.1f},{_HEIGHT - 2 - (value - least) * up:.1f}" for place, value in points)
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="loss">'
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/></svg>'
    )
