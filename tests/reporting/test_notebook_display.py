"""The progress of a run in a notebook's cell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape

import pytest

from ddp_loop.distributed import cells
from ddp_loop.distributed.cells import LaunchedCell, LaunchedCells
from ddp_loop.reporting.notebook_display import NotebookDisplay, as_html, open_notebook
from ddp_loop.reporting.rows import RowMeta
from ddp_loop.reporting.terminal import ProgressView, Terminal
from ddp_loop.reporting.throughput import TrainingLength
from tests.support.harness import OnRanks
from tests.support.paths import ROOT

LENGTH = TrainingLength(epochs=2, steps_per_epoch=20, ranks=2)


class Shown:
    """A cell, and what it was given."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str, bool]] = []

    def show(self, html: str, text: str, *, last: bool) -> None:
        self.shown.append((html, text, last))


def view_of(iteration: int, **values: float) -> ProgressView:
    return ProgressView(LENGTH, 1, iteration, values or {"loss": 0.25}, 512.0, 61.0, 30.0, [2.0, float("nan"), 0.5], 1)


def text_of(html: str) -> str:
    """What a reader sees."""
    return " ".join(unescape(re.sub(r"<progress.*?</progress>|<[^>]*>", " ", html)).split())


@pytest.mark.covers("J17")
def test_a_view_has_step_share_times_values_ranks_and_a_curve() -> None:
    html = as_html(view_of(10, loss=0.123456))
    for part in ("Epoch 1 of 2, step 10 of 40", "25 %", "0:30 left", "loss 0.1235", "1:01 elapsed", "loss 2 to 0.5"):
        assert part in text_of(html)
    assert "2 ranks on cpu, rank 1 is slowest" in text_of(html)
    assert '<progress style="flex: 1 1 12em" max="40" value="10"' in html
    assert 'd="M0 2.0M320 38.0"' in html  # a gap where the loss is not finite
    assert "src=" not in html
    assert "href" not in html


@pytest.mark.parametrize(("iteration", "ending"), [(40, "done"), (12, "ended")])
def test_the_last_view_says_how_it_ended(iteration: int, ending: str) -> None:
    cell = Shown()
    display = NotebookDisplay(cell)
    display.draw(lambda: None, last=True)
    assert cell.shown == []
    for last in (False, True):
        display.draw(lambda: view_of(iteration), last=last)
    (first, text, early), (end, _, late) = cell.shown
    assert (ending in text_of(first), ending in text_of(end)) == (False, True)
    assert (early, late, text) == (False, True, view_of(iteration).line())


def test_names_are_escaped_and_thousands_of_them_are_cut() -> None:
    assert "<img" not in as_html(view_of(1, **{"<img src=x onerror=alert(1)>": 1.0}))
    html = as_html(view_of(1, **{f"{number}" * 300: 1.0 for number in range(5000)}))
    assert len(html) < 60_000
    assert "and 4943 more" in html


def test_a_run_of_unknown_length_has_no_bar_and_one_value_no_curve() -> None:
    view = replace(view_of(3), extent=TrainingLength(), losses=[1.0])
    assert not {"<progress", "<svg"} & set(re.findall(r"<\w+", as_html(view)))


def test_a_terminal_draws_it_in_place_of_lines() -> None:
    cell, lines = Shown(), list[str]()
    terminal = Terminal(lines.append, LENGTH, 0.0, NotebookDisplay(cell))
    terminal.take(RowMeta(1, 1, 4, 1.0, False), {"loss": 1.0})
    terminal.close("stopped")
    assert lines == ["stopped"]
    assert [last for *_, last in cell.shown] == [True]
    assert "Epoch 1 of 2, step 1 of 40" in cell.shown[0][1]


@pytest.mark.slow
def test_without_a_notebook_nothing_is_imported_and_lines_are_printed() -> None:
    code = (
        "import sys, ddp_loop; from ddp_loop.reporting.notebook_display import open_notebook; "
        "assert open_notebook() is None and not {'IPython', 'ipykernel'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(cells.CELL, None)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdin=subprocess.DEVNULL)
    assert open_notebook() is None


def test_ranks_that_no_notebook_launched_have_no_cell(on_ranks: OnRanks) -> None:
    assert on_ranks(1, open_notebook) == [None]


def test_what_a_rank_shows_reaches_the_cell_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Shown()
    monkeypatch.setattr(cells, "NotebookCell", lambda: cell)
    receiving, sending = cells.cell_sockets()
    with receiving, sending:
        rank, launched = LaunchedCell(sending.fileno()), LaunchedCells(shows=True)
        rank.show("<p>first</p>", "first", last=False)
        rank.show("<p>\ud800</p>", "last", last=True)
        launched.take(receiving)
        rank = LaunchedCell(sending.fileno())  # of a loop whose process is killed
        rank.show("<p>lost</p>", "lost", last=False)
        launched.take(receiving)
        launched.end()
        launched.end()
        with pytest.raises(OSError, match="does not fit into a message"):
            rank.show("x" * 200_000, "", last=False)
        for _ in range(50):  # no one receives them, and the rank does not wait
            rank.show("x" * 60_000, "", last=False)
        quiet = LaunchedCells(shows=False)
        quiet.take(receiving)
        quiet.end()
    assert [(html, last) for html, _, last in cell.shown] == [
        *(("<p>first</p>", False), ("<p>?</p>", True), ("<p>lost</p>", False)),
        ("<p>lost</p><div><small>The ranks ended here.</small></div>", True),
    ]
