"""What a run says: to a terminal, which is read as it would be seen, through a pipe, and when it is to be quiet."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_loop.checkpoint import ROWS
from ddp_loop.reporting import WeightedMeans, terminal
from ddp_loop.reporting.jsonl import RunFiles
from ddp_loop.reporting.logged_values import LoggedValues
from ddp_loop.reporting.reporter import RowDispatcher
from ddp_loop.reporting.rows import RowMeta
from ddp_loop.reporting.sink_calls import SinkCalls
from ddp_loop.reporting.terminal import LossCurve, ProgressView, Terminal, flowed, open_display, sparkline
from ddp_loop.reporting.throughput import TrainingLength
from tests.support.harness import until
from tests.support.paths import ROOT
from tests.support.terminals import END_S, read_until, screen_of


def shown_of(sent: str) -> list[str]:
    """The lines that a terminal shows of what it is sent, without the empty ones: as much of it as rich uses."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", sent):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b"):
            kind, number = part[-1], part[2:-1]
            assert kind in "AKmhl", f"this screen does not know {kind}"
            if kind == "A":
                row = max(0, row - int(number or 1))
            elif kind == "K":
                lines[row] = ""
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


TRAIN = """
import sys
import torch
import ddp_loop as dl

def train(run):
    with dl.join_world(seed=0) as world:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.randn(64, 4)
        data = inputs, inputs.sum(1, keepdim=True)
        state = dict(model=model, optimizer=optimizer)
        loop = dl.Loop(dl.Batches(data, 4, world), 10**6, state=state, run_dir=run)
        for step in loop:
            for x, y in step:
                loss = (model(x) - y).square()
                step.backward(loss.mean(), near=loss.squeeze(1) < 0.1)
            step.fold()
            optimizer.step()
            if step.is_last_of_epoch:
                world.print("said by the script", step.epoch)
            if step.iteration == 40 and world.rank == 0:
                (open(run + "/is-there", "w")).close()

if __name__ == "__main__":
    dl.launch(train, 2, sys.argv[1])
"""


def read_until_end(near: int, process: subprocess.Popen[bytes], stop_when: Path) -> str:
    """All that is sent until the process ends; it is sent Ctrl-C's signal once this file is there."""
    os.set_blocking(near, False)
    said, deadline = b"", time.monotonic() + END_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        try:
            said += os.read(near, 65536)
            continue
        except BlockingIOError:
            if ended:
                return said.decode()
        if stop_when.exists():
            os.killpg(process.pid, signal.SIGINT)
            stop_when.unlink()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    raise TimeoutError(said.decode())


@pytest.mark.covers("E2", "E5")
@pytest.mark.slow
def test_a_terminal_shows_the_run_below_its_lines_and_ctrl_c_stops_it_and_says_so(tmp_path: Path) -> None:
    with screen_of(80) as (near, far):
        script = tmp_path / "train.py"
        script.write_text(TRAIN)
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "run")],
            cwd=tmp_path, env=environment, start_new_session=True, stdin=far, stdout=far, stderr=far,
        )  # fmt: skip
        said = read_until_end(near, process, tmp_path / "run" / "is-there")
    assert process.returncode == -signal.SIGINT, said  # of `launch`, when its ranks have stopped
    lines = shown_of(said)
    epochs = [line for line in lines if line.startswith("Epoch: ")]
    assert [int(line.split(",")[0][7:]) for line in epochs] == list(range(1, len(epochs) + 1))
    assert len(epochs) >= 2
    assert "said by the script 2" in lines
    stopping = "ddp_loop: Stopping after this step (Ctrl-C). Press it again to leave at once, without a checkpoint."
    assert stopping in " ".join(lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("stopped after"))
    bar, values, speed, curve, last = lines[at - 4 : at + 1]
    step = re.fullmatch(r"stopped after step (\d+), checkpoint step-\d+: Ctrl-C at rank \d", last)
    assert step is not None, last
    assert re.fullmatch(rf"Epoch \d+ of 1000000, step {step[1]} of 16000000 ━+ +0 %  [\d:]+ left", bar), bar
    assert re.fullmatch(r"loss \d\.\d{4}   near [01]\.\d{4}   learning rate 0\.01   gradient norm [\d.e-]+", values)
    assert re.fullmatch(r"[\d.,]+ samples/s   0:\d\d elapsed   2 ranks on cpu(, rank \d is slowest)?", speed), speed
    assert re.fullmatch(r"loss [\d.]+ [▁▂▃▄▅▆▇█]+ [\d.e-]+", curve), curve
    assert said.count("\x1b[?25h") >= said.count("\x1b[?25l") > 0  # the cursor is never left away


# -- the lines in between --------------------------------------------------------------------------------------


def test_a_line_comes_every_few_seconds_at_most_and_in_a_long_run_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[tuple[float, str]]()  # a simulated clock, and the lines with their times
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    extent = TrainingLength(epochs=2, steps_per_epoch=10**6)
    shown = Terminal(lambda line: said.append((now[0] - 100.0, line)), extent, 100.0, None)
    for iteration in range(1, 14401):
        now[0] = 100.0 + iteration * 0.5
        values = {"loss": 1.0 / iteration, "accuracy": 0.5, "gradient_norm": 3.0, "learning_rate": 0.1}
        shown.take(RowMeta(1, iteration, 64, iteration * 0.5, False), values)
        shown.refresh()
    gaps = [later - sooner for (sooner, _), (later, _) in pairwise(said)]
    line = "Epoch 1 of 2, step 10 of 2000000: Loss: 0.2929, Accuracy: 0.5000, 128 samples/s, 277:46:35 left"
    assert said[0] == (5.0, line)
    assert min(gaps) >= 5.0
    assert max(gaps) <= 7200 / 50 + 1
    assert len(said) < 250


def test_the_line_of_a_run_of_unknown_length_shows_no_time_left() -> None:
    view = ProgressView(TrainingLength(epochs=2), 1, 3, {"loss": 0.25}, 12.5, 1.0, None, slow_rank=1)
    assert view.line() == "Epoch 1 of 2, step 3: Loss: 0.2500, 12.5 samples/s, rank 1 is slowest"


def test_lines_keep_the_letters_of_a_name_and_show_logged_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = Terminal(said.append, TrainingLength(), 0.0, None)
    for iteration in (1, 2):
        now[0] = 6.0 * iteration
        shown.take_logged({"d/Norm": 2.0}, 1)
        shown.take(RowMeta(1, iteration, 4, now[0], iteration == 2), {"loss": 1.0, "mIoU": 0.5})
        shown.refresh()
    assert said[0].startswith("Epoch 1, step 1: Loss: 1.0000, MIoU: 0.5000, d/Norm: 2.0000, ")
    assert said[-1] == "Epoch: 1, Loss: 1.0000, MIoU: 0.5000, d/Norm: 2.0000 (last)"


def test_a_value_that_is_logged_after_an_epoch_is_never_on_the_next_ones_line() -> None:
    said = list[str]()
    shown = Terminal(said.append, TrainingLength(), 0.0, None)
    for epoch in (1, 2):
        shown.take(RowMeta(epoch, 2 * epoch - 1, 4, 0.1, False), {"loss": 1.0})
        if epoch == 2:
            shown.take_logged({"val_loss": 0.1}, 1)  # it arrives when the next epoch has begun
        shown.take_logged({"val_loss": 0.3}, 3)  # before the rows of its epoch
        shown.take(RowMeta(epoch, 2 * epoch, 4, 0.2, True), {"loss": 1.0})
    shown.take_logged({"val_loss": 0.2}, 2)
    assert said == ["Epoch: 1, Loss: 1.0000", "Epoch: 1, val_loss: 0.1000", "Epoch: 2, Loss: 1.0000", said[-1]]
    assert said[-1] == "Epoch: 2, val_loss: 0.2000"


def test_the_last_view_has_what_was_logged_after_the_last_epoch() -> None:
    display = Looked()
    shown = Terminal(list[str]().append, TrainingLength(), 0.0, display)
    shown.take_logged({"val_loss": 0.5, "rate": 1.0}, 1)
    shown.take(RowMeta(1, 1, 4, 0.1, True), {"loss": 1.0})
    shown.take_logged({"val_loss": 0.25}, 1)
    shown.close()
    assert display.views[-1].values == {"loss": 1.0, "val_loss": 0.25, "rate": 1.0}
    assert ", val_loss: 0.2500, " in display.views[-1].line()


def dispatcher(began: float, show_logged: Any = None, shown: Terminal | None = None) -> tuple[Any, RowDispatcher]:
    """What keeps logged values, and what hands rows on."""
    files, sinks = RunFiles(None, 0, print), SinkCalls([], print)
    logged = LoggedValues(files, sinks, began, show_logged)
    return logged, RowDispatcher(files.open(ROWS, "keep"), sinks, logged, shown, began)


def test_what_follows_an_epoch_is_shown_with_the_next_row() -> None:
    shown = list[tuple[int, float]]()
    logged, rows = dispatcher(0.0, lambda values, epoch: shown.append((epoch, values["val_loss"])))
    rows.add(RowMeta(1, 1, 4, 0.1, True), ("loss",), torch.ones(1), {})
    logged.add(1, 1, {"val_loss": 0.5})
    rows.flush_ready()
    assert shown == []  # its step may log it again
    rows.add(RowMeta(2, 2, 4, 0.2, False), ("loss",), torch.ones(1), {})
    rows.flush_ready()
    assert shown == [(1, 0.5)]
    rows.close()


@pytest.mark.covers("A12")
def test_the_line_of_an_epoch_counts_the_samples_that_are_not_used() -> None:
    for name, samples, said in (
        ("unused_samples", 0, ""),
        ("unused_samples", 1, ", 1 sample not used"),
        ("unused_samples_at_least", 6, ", at least 6 samples not used"),
    ):
        lines: list[str] = []
        shown = Terminal(lines.append, TrainingLength(), 0.0, None)
        shown.take(RowMeta(1, 1, 4, 0.1, False), {"loss": 1.0})
        shown.take(RowMeta(1, 2, 4, 0.2, True), {"loss": 2.0, name: float(samples)})
        assert lines == [f"Epoch: 1, Loss: 1.5000{said}"]


def test_the_means_of_means_are_those_of_all_rows_without_the_skipped() -> None:
    rows = [(3, {"loss": 1.0}), (5, {"loss": float("nan"), "skipped": 1.0}), (1, {"loss": 3.0, "skipped": 0.0})]
    one, other = WeightedMeans(), WeightedMeans()
    for number, row in enumerate(rows):
        (one if number < 1 else other).add(*row)
    one.add_all(other)
    assert one.means() == {"loss": 1.5}
    assert (one.rows, one.samples, one.skipped) == (3, 9, 1)
    weighted = WeightedMeans()
    weighted.add(3, {"weight": 1.0, "loss": 1.0, "learning_rate": 7.0, "gradient_norm": 9.0})
    weighted.add(3, {"weight": 3.0, "loss": 5.0})
    assert weighted.means() == {"loss": 4.0}
    weightless = WeightedMeans()
    weightless.add(3, {"weight": 0.0, "loss": 1.0})
    assert math.isnan(weightless.means()["loss"])


# -- the display -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 80])
def test_the_display_fits_its_terminal_and_is_drawn_over_itself(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "30")
    with screen_of(columns) as (near, far), os.fdopen(os.dup(far), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        display = open_display()
        assert display is not None
        values = {"loss": 0.5, "accuracy": 0.25, "gradient_norm": 1.25, "learning_rate": 0.1}
        extent = TrainingLength(epochs=4, steps_per_epoch=25, ranks=3)
        view = ProgressView(extent, 2, 10, values, 1234.0, 65.0, 30.0, [4.0, 2.0, 1.0, 0.5], 1)
        display.draw(lambda: view, last=False)
        print("above 10")
        view = replace(view, iteration=50)
        print("above 50")  # draws it again, as it is now
        said = read_until(near, "step 50 of 100")
        display.draw(lambda: view, last=True)
        assert sys.stdout is stdout
        print("below", flush=True)
        said += read_until(near, "below\r\n")
    lines = shown_of(said)
    assert lines[:2] == ["above 10", "above 50"]
    assert all(len(line) <= columns for line in lines)
    if columns == 40:
        assert lines[2] == "Epoch 2 of 4, step 50 of 100   0:30 left"  # no room for a bar
    else:
        assert re.fullmatch(r"Epoch 2 of 4, step 50 of 100 ━+[╸╺]?━*  50 %  0:30 left", lines[2])
    assert lines.pop() == "below"
    cells = "   ".join(lines[3:-1])
    assert cells == (
        "loss 0.5000   accuracy 0.2500   gradient norm 1.25   learning rate 0.1   1,234 samples/s   1:05 elapsed   "
        "3 ranks on cpu, rank 1 is slowest"
    )
    assert lines[-1] == "loss 4 █▄▂▁ 0.5"
    assert len(lines) == {40: 8, 80: 6}[columns]


class Looked:
    """Keeps what it is to show, and when; its clock may move with each look."""

    def __init__(self, look_s: float = 0.0) -> None:
        self.views, self.times = list[ProgressView](), list[float]()
        self.now, self._look_s = 100.0, look_s

    def draw(self, newest: Callable[[], ProgressView | None], *, last: bool) -> None:
        self.now += self._look_s
        self.times.append(self.now)
        if (view := newest()) is not None:
            self.views.append(view)


def test_a_slow_terminal_never_shows_a_state_older_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    display = Looked(0.5)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: display.now))
    shown = Terminal(print, TrainingLength(), display.now, display)
    for iteration in range(1, 100):
        display.now += 0.1
        shown.take(RowMeta(1, iteration, 4, 0.1 * iteration, False), {"loss": 1.0})
        shown.refresh()
    # A look, a second's wait, at most one more step until the next look, and the look itself.
    assert len(display.views) == len(display.times) > 5
    assert all(later - earlier <= 1.0 + 0.1 + 0.5 + 1e-9 for earlier, later in pairwise(display.times))


@pytest.mark.covers("E2")
def test_the_display_is_drawn_again_although_no_step_ends() -> None:
    display, began = Looked(), time.monotonic()
    _, rows = dispatcher(began, shown=Terminal(print, TrainingLength(), began, display))
    for iteration in range(1, 5):
        rows.add(RowMeta(1, iteration, 4, time.monotonic() - began, False), ("loss",), torch.ones(1), {})
    until(lambda: [view.iteration for view in display.views].count(4) > 1, "it is drawn again")
    shown = list(display.views)
    rows.close()
    assert {view.iteration for view in shown} <= set(range(1, 5))
    assert all(earlier.elapsed_s < later.elapsed_s for earlier, later in pairwise(shown))


class Alone(Looked):
    """Notes whether another thread could draw while this one does."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[bool] = []

    def draw(self, newest: Callable[[], ProgressView | None], *, last: bool) -> None:
        super().draw(newest, last=last)
        with ThreadPoolExecutor(1) as another:
            self.others.append(another.submit(terminal._drawing.acquire, blocking=False).result())


def test_one_thread_draws_at_a_time_so_that_a_display_is_begun_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first view may be due in the main thread and in the display's own at once: a notebook then showed two."""
    display = Alone()
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: display.now))
    shown = Terminal(print, TrainingLength(), display.now, display)
    display.now += 1.0
    shown.take(RowMeta(1, 1, 4, 1.0, False), {"loss": 1.0})
    shown.refresh()
    shown.close()
    assert display.others == [False] * 2


def test_without_a_terminal_or_rich_there_is_no_display(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert open_display() is None  # pytest's stdout is none
    with screen_of(80) as (_, far), os.fdopen(os.dup(far), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setenv("TERM", "dumb")
        assert open_display() is None
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setitem(sys.modules, "rich.console", None)
        assert open_display() is None


def test_a_curve_keeps_the_whole_run_in_few_points() -> None:
    curve = LossCurve()
    for number in range(100_000):
        curve.add(float(number))
    assert 64 <= len(curve.points) < 256
    assert curve.points == sorted(curve.points)
    assert curve.points[:2] == [255.5, 767.5]  # of 512 rows each
    assert sum(curve.points) / len(curve.points) == pytest.approx(50_000, rel=0.02)


def test_a_small_curve_is_drawn_between_its_least_and_largest_value() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([0, float("nan"), 7], 3) == "▁?█"
    assert sparkline([], 8) == sparkline([1.0], 0) == ""
    assert flowed(["aaa", "bbb", "cc"], 9) == ["aaa   bbb", "cc"]


def test_large_and_tiny_numbers_are_written_with_an_exponent() -> None:
    texts = {
        829310543714798908720807936.0: "8.29e+26",
        -1e6: "-1e+06",
        999999.0: "999999.0000",
        0.12345: "0.1235",
        0.0001: "0.0001",
        0.000031: "3.1e-05",
        0.0: "0.0000",
        math.nan: "nan",
        -math.inf: "-inf",
    }
    assert {value: terminal.as_number(value) for value in texts} == texts
