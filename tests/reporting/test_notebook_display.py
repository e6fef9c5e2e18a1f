"""The progress of a run in a notebook's cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn

import ddp_loop as dl
from ddp_loop.distributed import notebook_cell
from ddp_loop.distributed.notebook_cell import CELL, Bundle, CellRelay, LaunchersCell, in_notebook
from ddp_loop.reporting.notebook_display import NotebookDisplay, as_html, curve
from ddp_loop.reporting.terminal import ProgressView, Terminal, open_display
from ddp_loop.reporting.throughput import TrainingLength
from tests.support.harness import OnRanks
from tests.support.paths import ROOT

LENGTH = TrainingLength(epochs=2, steps_per_epoch=20, ranks=2)


class Shown:
    def __init__(self) -> None:
        self.bundles: list[Bundle] = []

    def show(self, bundle: Bundle) -> None:
        self.bundles.append(bundle)


def view_of(iteration: int, extent: TrainingLength = LENGTH, **values: float) -> ProgressView:
    return ProgressView(extent, 1, iteration, values or {"loss": 0.25}, 512.0, 61.0, 30.0, [2.0, float("nan"), 0.5], 1)


def text_of(html: str) -> str:
    """What a reader sees; the piece is well-formed."""
    return " ".join(" ".join(xml.etree.ElementTree.fromstring(html).itertext()).split())


def test_a_view_has_step_share_times_values_ranks_and_a_curve() -> None:
    html = as_html(view_of(10, loss=0.123456, gradient_norm=1e26))
    for part in ("Epoch 1 of 2, step 10 of 40", "25 %", "1:01 gone, 0:30 left", "loss 0.1235", "gradient norm 1e+26"):
        assert part in text_of(html)
    assert "512 samples/s · 2 ranks on cpu · rank 1 is slowest" in text_of(html)
    assert "width:25.0%" in html
    assert 'points="2.0,2.0 238.0,34.0"' in html  # the value that is not finite is left out


@pytest.mark.parametrize(("iteration", "ending"), [(40, "done"), (12, "ended")])
def test_the_last_view_says_how_it_ended(iteration: int, ending: str) -> None:
    shown = Shown()
    display = NotebookDisplay(shown)
    display.close()
    assert shown.bundles == []
    display.draw(lambda: None)
    display.draw(lambda: view_of(iteration))
    display.close()
    first, last = shown.bundles
    assert (ending in text_of(first["text/html"]), ending in text_of(last["text/html"])) == (False, True)
    assert last["text/plain"] == first["text/plain"] + f" ({ending})"
    assert "left" not in text_of(last["text/html"])


def test_names_are_escaped() -> None:
    assert "<img" not in as_html(view_of(1, **{"<img src=x onerror=alert(1)>": 1.0}))


def test_a_run_of_unknown_length_has_no_bar_and_one_value_no_curve() -> None:
    html = as_html(view_of(3, TrainingLength()))
    assert "%" not in text_of(html)
    assert "border-radius" not in html  # of the bar
    assert (curve([1.0]), curve([])) == ("", "")
    assert "nan" not in curve([3.0, 3.0, float("inf")])


def test_a_terminal_draws_it_in_place_of_lines() -> None:
    shown, lines = Shown(), list[str]()
    terminal = Terminal(lines.append, LENGTH, 0.0, NotebookDisplay(shown))
    terminal.close("stopped")
    assert (lines, shown.bundles) == (["stopped"], [])


def test_without_a_notebook_nothing_is_imported_and_lines_are_printed() -> None:
    code = (
        "import sys, ddp_loop, ddp_loop.reporting.terminal as t; "
        "assert t.open_display() is None and not {'IPython', 'ipykernel'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(CELL, None)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdin=subprocess.DEVNULL)
    assert not in_notebook()
    relay = CellRelay()
    relay.show()
    relay.close()
    assert relay.environment == {}


def train(path: str) -> list[str]:
    """Train with the launcher's cell at `path`, on rank 0 and on rank 1."""
    with pytest.MonkeyPatch.context() as patch, dl.join_world(seed=0) as world:
        patch.setenv(CELL, path)
        model = nn.Linear(3, 1)
        batches = dl.Batches(torch.ones(8, 3), 4, world)
        for step in dl.Loop(batches, 2, state={"m": model}):
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
    return sorted(os.listdir(Path(path).parent))


def test_rank_0_leaves_its_progress_for_the_launcher(on_ranks: OnRanks, tmp_path: Path) -> None:
    path = tmp_path / "output.json"
    assert on_ranks(2, train, str(path))[0] == ["output.json"]  # whole files alone, from one rank
    bundle = json.loads(path.read_text())
    assert "Epoch 2 of 2, step 4 of 4" in text_of(bundle["text/html"])
    assert bundle["text/plain"].endswith("(done)")


def train_without_its_launcher(path: str) -> int:
    """Train with the launcher's cell in a folder that is gone; returns the steps."""
    with pytest.MonkeyPatch.context() as patch, dl.join_world(seed=0) as world:
        patch.setenv(CELL, path)
        loop = dl.Loop(dl.Batches(torch.ones(8, 3), 4, world), 2, state={"m": (model := nn.Linear(3, 1))})
        for step in loop:
            for rows in step:
                step.backward(model(rows).mean())
            step.fold()
    return loop.iteration


def test_a_launcher_that_has_ended_ends_the_display_and_not_the_run(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(1, train_without_its_launcher, str(tmp_path / "gone" / "output.json")) == [4]


def test_a_relay_shows_what_is_new_once_and_removes_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    monkeypatch.setattr(notebook_cell, "in_notebook", lambda: True)
    monkeypatch.setattr(notebook_cell, "OwnCell", lambda: shown)
    relay = CellRelay()
    relay.show()
    rank = LaunchersCell(relay.environment[CELL])
    rank.show({"text/plain": "first"})
    relay.show()
    relay.show()
    Path(relay.environment[CELL]).write_text("{half")
    relay.show()
    rank.show({"text/plain": "last"})
    relay.close()
    assert [one["text/plain"] for one in shown.bundles] == ["first", "last"]
    with pytest.raises(OSError, match="No such file"):
        rank.show({"text/plain": "too late"})


def test_a_terminals_display_is_not_taken_for_a_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CELL, "/nowhere/output.json")
    assert isinstance(open_display(), NotebookDisplay)
    monkeypatch.delenv(CELL)
    assert not isinstance(open_display(), NotebookDisplay)
