"""The display of a run in a notebook: HTML in the output of a cell, redrawn in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from ddp_loop.distributed import Cell, open_cell
from ddp_loop.reporting.terminal import ProgressView, cells

_WIDTH = 320
_HEIGHT = 40
_MOST_POINTS = 80  # of the curve
_MOST_CELLS = 60
_MOST_LETTERS = 200
_MOST_TEXT = 4000  # a view of thousands of metrics would not fit into a message of a rank

_BOX = "font: 13px/1.6 var(--jp-ui-font-family, system-ui, sans-serif); max-width: 60em; padding: 2px 0"
_ROW = "display: flex; flex-wrap: wrap; align-items: center; gap: 0 1.2em; font-variant-numeric: tabular-nums"


def open_notebook() -> NotebookDisplay | None:
    """Return a display if this process is the kernel of a notebook, or a rank that `launch` started from one."""
    cell = open_cell()
    return None if cell is None else NotebookDisplay(cell)


class NotebookDisplay:
    """Shows each view in the place of the last one; what is printed comes below it.

    Args:
        cell: of the notebook.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def draw(self, newest: Callable[[], ProgressView | None], *, last: bool) -> None:
        """Show the newest view; the last one stays visible."""
        if (view := newest()) is not None:
            self._cell.show(as_html(view, has_ended=last), view.line()[:_MOST_TEXT], last=last)


def as_html(view: ProgressView, *, has_ended: bool = False) -> str:
    """Return a view as HTML that loads nothing; names of metrics are escaped.

    Args:
        view: of the run.
        has_ended: whether no further step follows.
    """
    values = cells(view)
    more = [f"and {len(values) - _MOST_CELLS} more"] if len(values) > _MOST_CELLS else []
    spans = [f"<span>{_text(value)}</span>" for value in [*values[:_MOST_CELLS], *more]]
    rows = [_place(view, has_ended=has_ended), _row(spans), _curve(view.losses)]
    return f'<div style="{_BOX}">{"".join(rows)}</div>'


def _place(view: ProgressView, *, has_ended: bool) -> str:
    whole = view.extent.whole
    parts = [f"<b>{_text(view.place)}</b>"]
    if whole:
        share = f"{100 * view.iteration // whole} %"
        bar = (
            f'<progress style="flex: 1 1 12em" max="{whole}" value="{view.iteration}" aria-label="progress of the run">'
        )
        parts += [f"{bar}{share}</progress>", f"<span>{share}</span>"]
    if has_ended:
        parts.append("<span>done</span>" if whole and view.iteration >= whole else "<span>ended</span>")
    elif view.left:
        parts.append(f"<span>{_text(view.left)}</span>")
    return _row(parts)


def _row(parts: Sequence[str]) -> str:
    return f'<div style="{_ROW}">{"".join(parts)}</div>'


def _text(text: str) -> str:
    return escape(text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}...")


def _curve(losses: Sequence[float]) -> str:
    """The losses as a line; it has a gap where one is not finite."""
    every = max(1, math.ceil(len(losses) / _MOST_POINTS))
    points = losses[::every]
    known = [value for value in points if math.isfinite(value)]
    if len(known) < 2:
        return ""
    least = min(known)
    span = (max(known) - min(known)) or 1.0
    path = ""
    pen = "M"
    for number, value in enumerate(points):
        if not math.isfinite(value):
            pen = "M"
            continue
        x = _WIDTH * number / (len(points) - 1)
        y = _HEIGHT - 2 - (_HEIGHT - 4) * ((value - least) / span)
        path = f"{path}{pen}{x:.0f} {y:.1f}"
        pen = "L"
    ends = f"loss {losses[0]:.4g} to {losses[-1]:.4g}"
    line = f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return _row([f'<svg {size} role="img" aria-label="{ends}">{line}</svg>', f"<span>{ends}</span>"])
