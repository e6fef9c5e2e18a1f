"""What a run says: to a terminal, which is read as it would be seen, through a pipe, and when it is to be quiet."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
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


class Screen:
    """What a terminal shows of what it is sent: as much of it as rich uses."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\r":
                self._column = 0
            elif part == "\n":
                self._row, self._column = self._row + 1, 0
                self.lines += [""] * (self._row + 1 - len(self.lines))
            elif part.startswith("\x1b"):
                self._control(part[-1], part[2:-1])
            else:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + part + line[self._column + len(part) :]
                self._column += len(part)

    def _control(self, kind: str, number: str) -> None:
        if kind == "A":
            self._row = max(0, self._row - int(number or 1))
        elif kind == "K":
            self.lines[self._row] = ""
        else:
            assert kind in "mhl", f"this screen does not know {kind}"


TRAIN = """
import sys
import torch
import ddp_loop as dl
from ddp_loop import datasets

def train(run, epochs, quiet):
    with dl.join_world(seed=0) as world:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.randn(64, 4)
        data = inputs, inputs.sum(1, keepdim=True)
        state = dict(model=model, optimizer=optimizer)
        loop = dl.Loop(dl.Batches(data, 4, world), epochs, state=state, run_dir=run, progress=not quiet)
        for step in loop:
            for x, y in step:
                loss = (model(x) - y).square()
                step.backward(loss.mean(), near=loss.squeeze(1) < 0.1)
            step.fold()
            optimizer.step()
            if step.is_last_of_epoch and not quiet:
                world.print("said by the script", step.epoch)
            if step.iteration == 40 and world.rank == 0:
                (open(run + "/is-there", "w")).close()

if __name__ == "__main__":
    if "--first-quiet" in sys.argv:
        dl.launch(train, 2, sys.argv[1] + "-quiet", int(sys.argv[2]), True)
        print("that was quiet", flush=True)
    dl.launch(train, 2, sys.argv[1], int(sys.argv[2]), False)
"""


def start(folder: Path, *arguments: str, columns: int = 80, **options: Any) -> subprocess.Popen[bytes]:
    script = folder / "train.py"
    script.write_text(TRAIN)
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "COLUMNS": str(columns)}
    command = [sys.executable, str(script), str(folder / "run"), *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **options)


def read_until_end(near: int, process: subprocess.Popen[bytes], stop_when: Path | None = None) -> str:
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
        if stop_when is not None and stop_when.exists():
            os.killpg(process.pid, signal.SIGINT)
            stop_when = None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    raise TimeoutError(said.decode())


@pytest.mark.covers("E2", "E5")
@pytest.mark.slow
def test_a_terminal_shows_the_run_below_its_lines_and_ctrl_c_stops_it_and_says_so(tmp_path: Path) -> None:
    columns = 80
    with screen_of(columns) as (near, far):
        process = start(tmp_path, "1000000", columns=columns, stdin=far, stdout=far, stderr=far)
        said = read_until_end(near, process, stop_when=tmp_path / "run" / "is-there")
    assert process.returncode == -signal.SIGINT, said  # of `launch`, when its ranks have stopped
    screen = Screen()
    screen.feed(said)
    lines = [line.rstrip() for line in screen.lines if line.strip()]
    epochs = [line for line in lines if line.startswith("Epoch: ")]
    assert [int(line.split(",")[0][7:]) for line in epochs] == list(range(1, len(epochs) + 1))
    assert len(epochs) >= 2
    assert "said by the script 2" in lines
    said = "ddp_loop: Stopping after this step (Ctrl-C). Press it again to leave at once, without a checkpoint."
    assert said in " ".join(lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("stopped after"))
    bar, values, speed, curve, last = lines[at - 4 : at + 1]
    step = re.fullmatch(r"stopped after step (\d+), checkpoint step-\d+: Ctrl-C at rank \d", last)
    assert step is not None, last
    assert re.fullmatch(rf"Epoch \d+ of 1000000, step {step[1]} of 16000000 ━+ +0 %  [\d:]+ left", bar), bar
    assert re.fullmatch(r"loss \d\.\d{4}   near [01]\.\d{4}   learning rate 0\.01   gradient norm [\d.e-]+", values)
    assert re.fullmatch(r"[\d,]+ samples/s   0:\d\d elapsed   2 ranks on cpu(, rank \d is slowest)?", speed), speed
    assert re.fullmatch(r"loss [\d.]+ [▁▂▃▄▅▆▇█]+ [\d.e-]+", curve), curve
    assert said.count("\x1b[?25h") >= said.count("\x1b[?25l")  # the cursor is never left away


@pytest.mark.covers("E2", "B6")
@pytest.mark.slow
def test_through_a_pipe_there_are_lines_alone_and_quiet_is_silent(tmp_path: Path) -> None:
    piped = start(tmp_path, "3", "--first-quiet", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = piped.communicate(timeout=END_S)[0].decode()
    assert piped.returncode == 0, said
    quiet, mark, said = said.partition("that was quiet\n")
    assert (quiet, mark) == ("", "that was quiet\n")
    assert "\r" not in said
    assert "\x1b" not in said
    # An epoch's line has what the script logs in its last step, so it follows what the script prints there.
    found = re.findall(r"^said by the script (\d)\nEpoch: (\d), Loss: \d\.\d{4}, Near: [01]\.\d{4}\n", said, re.M)
    assert found == [("1", "1"), ("2", "2"), ("3", "3")]
    others = [line for line in said.splitlines() if not line.startswith(("Epoch: ", "said by", "2 ranks on cpu"))]
    assert all(re.match(r"Epoch \d of 3, step \d+ of 48: Loss: ", line) for line in others)  # if it took so long


# -- the lines in between --------------------------------------------------------------------------------------


def lines_in(seconds: float, monkeypatch: pytest.MonkeyPatch, step_s: float = 0.5) -> list[tuple[float, str]]:
    """The lines that a terminal shows of a run of this length, and their times, on a simulated clock."""
    now, said = [100.0], list[tuple[float, str]]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = Terminal(
        lambda line: said.append((now[0] - 100.0, line)), TrainingLength(epochs=2, steps_per_epoch=10**6), 100.0, None
    )
    for iteration in range(1, int(seconds / step_s) + 1):
        now[0] = 100.0 + iteration * step_s
        values = {"loss": 1.0 / iteration, "accuracy": 0.5, "gradient_norm": 3.0, "learning_rate": 0.1}
        shown.take(RowMeta(1, iteration, 64, iteration * step_s, False), values)
        shown.refresh()
    return said


def test_a_line_comes_every_few_seconds_at_most_and_in_a_long_run_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines_in(7200.0, monkeypatch)
    gaps = [later - sooner for (sooner, _), (later, _) in pairwise(said)]
    assert said[0] == (5.0, "Epoch 1 of 2, step 10 of 2000000: Loss: 0.2929, Accuracy: 0.5000, "
                            "128 samples/s, 277:46:35 left")  # fmt: skip
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


def test_what_follows_an_epoch_is_shown_with_the_next_row() -> None:
    shown = list[tuple[int, float]]()
    files = RunFiles(None, 0, print)
    sinks = SinkCalls([], print)
    logged = LoggedValues(files, sinks, 0.0, lambda values, epoch: shown.append((epoch, values["val_loss"])))
    rows = RowDispatcher(files.open(ROWS, "keep"), sinks, logged, None, 0.0)
    rows.add(RowMeta(1, 1, 4, 0.1, True), ("loss",), torch.ones(1), {})
    logged.add(1, 1, {"val_loss": 0.5})
    rows.flush_ready()
    assert shown == []  # its step may log it again
    rows.add(RowMeta(2, 2, 4, 0.2, False), ("loss",), torch.ones(1), {})
    rows.flush_ready()
    assert shown == [(1, 0.5)]
    rows.close()


@pytest.mark.covers("A12")
@pytest.mark.parametrize(
    ("name", "samples", "said"),
    [
        ("unused_samples", 0, ""),
        ("unused_samples", 1, ", 1 sample not used"),
        ("unused_samples_at_least", 6, ", at least 6 samples not used"),
    ],
)
def test_the_line_of_an_epoch_counts_the_samples_that_are_not_used(name: str, samples: int, said: str) -> None:
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


# -- the display -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_display_fits_its_terminal_and_is_drawn_over_itself(
    columns: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "30")
    with screen_of(columns) as (near, far), os.fdopen(os.dup(far), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        display = open_display()
        assert display is not None
        values = {"loss": 0.5, "accuracy": 0.25, "gradient_norm": 1.25, "learning_rate": 0.1}
        extent = TrainingLength(epochs=4, steps_per_epoch=25, ranks=3)
        at = 10

        def newest() -> ProgressView:
            return ProgressView(extent, 2, at, values, 1234.0, 65.0, 30.0, [4.0, 2.0, 1.0, 0.5], 1)

        display.draw(newest)
        print("above 10")
        at = 50
        print("above 50")  # draws it again, as it is now
        said = read_until(near, "step 50 of 100")
        display.close()
        assert sys.stdout is stdout
        print("below", flush=True)
        said += read_until(near, "below\r\n")
    screen = Screen()
    screen.feed(said)
    lines = [line.rstrip() for line in screen.lines if line.strip()]
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
    assert len(lines) == {40: 8, 80: 6, 200: 5}[columns]


class SlowDisplay:
    """Takes half a second of a clock for each view."""

    def __init__(self) -> None:
        self.now, self.shown = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def draw(self, newest: Callable[[], ProgressView | None]) -> None:
        assert newest() is not None
        self.now += 0.5
        self.shown.append(self.now)

    def close(self) -> None:
        pass


def test_a_slow_terminal_never_shows_a_state_older_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    display = SlowDisplay()
    monkeypatch.setattr(terminal, "time", display)
    shown = Terminal(print, TrainingLength(), display.now, display)
    for iteration in range(1, 100):
        display.now += 0.1
        shown.take(RowMeta(1, iteration, 4, 0.1 * iteration, False), {"loss": 1.0})
        shown.refresh()
    # A look, a second's wait, at most one more step until the next look, and the look itself.
    assert len(display.shown) > 5
    assert all(later - earlier <= 1.0 + 0.1 + 0.5 + 1e-9 for earlier, later in pairwise(display.shown))


class Looked:
    """Keeps what it is to show."""

    def __init__(self) -> None:
        self.views = list[ProgressView]()

    def draw(self, newest: Callable[[], ProgressView | None]) -> None:
        if (view := newest()) is not None:
            self.views.append(view)

    def close(self) -> None:
        pass


@pytest.mark.covers("E2")
def test_the_display_is_drawn_again_although_no_step_ends() -> None:
    display, began = Looked(), time.monotonic()
    files = RunFiles(None, 0, print)
    sinks = SinkCalls([], print)
    logged = LoggedValues(files, sinks, began)
    rows = RowDispatcher(
        files.open(ROWS, "keep"), sinks, logged, Terminal(print, TrainingLength(), began, display), began
    )
    for iteration in range(1, 5):
        rows.add(RowMeta(1, iteration, 4, time.monotonic() - began, False), ("loss",), torch.ones(1), {})
    until(lambda: [view.iteration for view in display.views].count(4) > 1, "it is drawn again")
    shown = list(display.views)
    rows.close()
    assert {view.iteration for view in shown} <= set(range(1, 5))
    assert all(earlier.elapsed_s < later.elapsed_s for earlier, later in pairwise(shown))


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
    assert sum(curve.points) / len(curve.points) == pytest.approx(50_000, rel=0.02)


def test_a_small_curve_is_drawn_between_its_least_and_largest_value() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([0, float("nan"), 7], 3) == "▁?█"
    assert sparkline([], 8) == sparkline([1.0], 0) == ""
    assert flowed(["aaa", "bbb", "cc"], 9) == ["aaa   bbb", "cc"]


def test_a_run_that_prints_and_lives_in_a_terminal_has_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        with dl.join_world(seed=0) as world:
            model = torch.nn.Linear(2, 1)
            for step in dl.Loop(dl.Batches(torch.ones(40, 2), 4, world), 2, state={"m": model}, on_row=rows.append):
                for inputs in step:
                    step.backward(model(inputs).mean())
                step.fold()
        return [{name: row[name] for name in ("iteration", "loss", "gradient_norm")} for row in rows]

    piped = train()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "LOOK_S", 0.0)
    monkeypatch.setattr(terminal, "_SHARE", 0)
    with screen_of(80) as (near, far), os.fdopen(os.dup(far), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        live = train()
        assert "Epoch 2 of 2" in read_until(near, "Epoch 2 of 2")
    assert live == piped


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (829310543714798908720807936.0, "8.29e+26"),
        (-1e6, "-1e+06"),
        (999999.0, "999999.0000"),
        (0.12345, "0.1235"),
        (0.0001, "0.0001"),
        (0.000031, "3.1e-05"),
        (1e-9, "1e-09"),
        (0.0, "0.0000"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_large_and_tiny_numbers_are_written_with_an_exponent(value: float, text: str) -> None:
    assert terminal.as_number(value) == text
