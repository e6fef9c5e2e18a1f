"""The console output of a run in its folder: what is kept, in which order, and that the streams stay what they are."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_loop as dl
from ddp_loop.reporting import console
from ddp_loop.reporting.console import ConsoleLog, Unrecorded, follow_instead
from ddp_loop.reporting.terminal import ProgressView, open_display
from ddp_loop.reporting.throughput import TrainingLength
from tests.support.harness import OnRanks
from tests.support.paths import ROOT
from tests.support.refusals import loop_over, network
from tests.support.runs import rows_of
from tests.support.terminals import read_until, screen_of
from tests.support.training import take

VIEW = ProgressView(TrainingLength(epochs=20), 3, 41, {"loss": 0.25}, 12.5, 1.0, None)


class Recording:
    """A log of a folder, and what it has kept."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text("{}")
        self.folder, self.warnings = folder, list[str]()
        self.log = ConsoleLog(self.warnings.append)
        self.log.open(folder, 0)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None:
        self.log.close()

    @property
    def text(self) -> str:
        return log_of(self.folder)


def train(run: Any, steps: int = 2, fail_at: int = 0, after: str = "") -> list[bool]:
    """Print in each step; whether the streams are followed before, inside and after the world."""
    followed = ["write" in vars(sys.stdout)]
    with dl.join_world(seed=0) as world:
        model = network()
        print("before the loop", flush=True)
        loop = loop_over(world, run, model, torch.optim.SGD(model.parameters()), epochs=None, steps=steps)
        followed.append("write" in vars(sys.stdout))
        for step in loop:
            print(f"step {step.iteration} of rank {world.rank}")
            print("a warning", file=sys.stderr)
            if step.iteration == fail_at and world.rank == 1:
                raise KeyError("planted")
            take(step, model)
        if after:
            print(after)
    return [*followed, "write" in vars(sys.stdout)]


def log_of(folder: Path, rank: int = 0) -> str:
    return (folder / "console" / f"rank-{rank}.log").read_text()


def test_each_rank_keeps_what_it_prints_while_the_loop_has_its_folder(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, train, str(tmp_path / "run"), 2, 0, "evaluated") == [[False, True, False]] * 2
    for rank in range(2):
        steps = [line for one in (1, 2) for line in (f"step {one} of rank {rank}", "a warning")]
        assert log_of(tmp_path / "run", rank).splitlines() == [*steps, "evaluated"]
    assert on_ranks(2, train, None) == [[False, False, False]] * 2


def test_the_traceback_of_a_failure_is_kept(on_ranks: OnRanks, tmp_path: Path) -> None:
    with pytest.raises(dl.RankFailed, match="planted"):
        on_ranks(2, train, str(tmp_path), 3, 2)
    lines = log_of(tmp_path, 1).splitlines()
    assert lines[-1] == "KeyError: 'planted'"
    assert "Traceback (most recent call last):" in lines
    assert "PeerFailed" in log_of(tmp_path, 0)


def test_a_resumed_run_appends_after_a_line(on_ranks: OnRanks, tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        on_ranks(1, train, str(tmp_path), steps)
    lines = [line.split(",")[0] for line in log_of(tmp_path).splitlines() if line != "a warning"]
    own = [f"step {one} of rank 0" for one in (1, 2, 3)]
    assert lines == [own[0], "--- start 2", own[1], "--- start 3", own[2]]


def test_two_loops_of_one_world_have_their_own_steps_and_output(tmp_path: Path) -> None:
    with dl.join_world(seed=0) as world:
        for name in ("one", "two"):
            model = network()
            loop = loop_over(world, str(tmp_path / name), model, torch.optim.SGD(model.parameters()))
            print("in", name)
            for step in loop:
                take(step, model)
            print("after", name)
    assert [log_of(tmp_path / name) for name in ("one", "two")] == ["in one\nafter one\n", "in two\nafter two\n"]
    assert [rows_of(tmp_path / name) for name in ("one", "two")] == [[1, 2, 3, 4]] * 2
    assert "write" not in vars(sys.stdout)


def test_logs_that_are_nested_both_get_it_and_leave_nothing_whichever_ends_first(tmp_path: Path) -> None:
    for first in (0, 1):
        ones = [Recording(tmp_path / f"{first}-{number}") for number in range(2)]
        print("both")
        ones[first].log.close()
        print("the other")
        ones[1 - first].log.close()
        print("none")
        assert [ones[first].text, ones[1 - first].text] == ["both\n", "both\nthe other\n"]
        assert "write" not in vars(sys.stdout)


def test_handlers_redirections_and_writelines_work_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler, held = logging.StreamHandler(sys.stderr), sys.stdout
    with Recording(tmp_path) as one:
        assert sys.stdout is held
        handler.emit(logging.LogRecord("name", logging.INFO, "", 0, "by a handler", None, None))
        with contextlib.redirect_stdout(io.StringIO()) as aside:
            print("elsewhere")
        sys.stdout.writelines(["two\n", "lines\n"])
        with pytest.raises(UnicodeEncodeError):
            print("ümlaut \ud800")
    assert one.text == "by a handler\ntwo\nlines\nümlaut \\ud800"
    assert (aside.getvalue(), capsys.readouterr().out.splitlines()[:2]) == ("elsewhere\n", ["two", "lines"])


def test_of_a_line_that_is_drawn_anew_the_last_drawing_is_kept(tmp_path: Path) -> None:
    with Recording(tmp_path) as one:
        for percent in range(1000):
            sys.stdout.write(f"\r{percent / 10} %")
            sys.stderr.write(f"{percent} files\r")
        sys.stdout.write("\n")
        print("Loading ...", end="")
        sys.stdout.write("\rLoaded")
        sys.stdout.write("\nlines of\r\nWindows\r\n")
        sys.stdout.write("\rnever ended")
    lines = ["99.9 %", "Loading ...", "Loaded", "lines of", "Windows", "never ended", "999 files"]
    assert one.text.splitlines() == lines


def test_a_stream_that_is_missing_closed_or_takes_no_attributes_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slots:
        __slots__ = ()

        def write(self, text: str) -> int:
            return len(text)

    closed = io.TextIOWrapper(io.BytesIO())
    for stdout, stderr in ((None, Slots()), (closed, None)):
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        with Recording(tmp_path) as one:
            if stdout is closed:
                closed.close()
                with pytest.raises(ValueError, match="closed file"):
                    print("not lost")
            else:
                print("to no reader")
        assert one.warnings == []
    assert "not lost" in one.text


def test_the_file_ends_at_its_limit_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "MOST_BYTES", 1000)
    for _ in range(2):
        with Recording(tmp_path) as one:
            for number in range(300):
                print(f"ü{number:04}")
            assert "write" not in vars(sys.stdout)  # further output costs nothing
    whole, end = one.text.split("\n[", 1)
    assert end == "the console output is cut here: 8 MiB]\n"
    assert 996 <= len(whole.encode()) <= 1000
    assert console.__dict__["_CUT"].count(b"8 MiB") == 1


def test_a_full_disk_is_one_warning_and_the_output_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recording(tmp_path) as one:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        os.dup2(descriptor, one.log.__dict__["_file"])
        os.close(descriptor)
        print("shown", "anyway")
        print("and more")
        assert "write" not in vars(sys.stdout)
    (warning,) = one.warnings
    assert warning.endswith("gets no more of the console output. No space left on device. Training continues.")
    assert capsys.readouterr().out == "shown anyway\nand more\n"


def test_a_folder_that_cannot_be_written_is_one_warning_and_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "console").write_text("a file")
    with Recording(tmp_path) as one:
        print("shown")
    assert len(one.warnings) == 1
    (tmp_path / "console").unlink()
    (tmp_path / "console").mkdir()
    (tmp_path / "other").write_text("mine")
    (tmp_path / "console" / "rank-0.log").symlink_to(tmp_path / "other")
    with Recording(tmp_path) as one:
        print("shown")
    assert (len(one.warnings), (tmp_path / "other").read_text()) == (1, "mine")


def test_a_machine_without_the_run_folder_gets_no_file(tmp_path: Path) -> None:
    log = ConsoleLog(print)
    log.open(tmp_path, 3)
    assert (log.is_open, list(tmp_path.iterdir())) == (False, [])


def test_a_forked_worker_appends_whole_lines(tmp_path: Path) -> None:
    with Recording(tmp_path) as one:
        print("parent", flush=True)
        if (child := os.fork()) == 0:
            print("child")
            os._exit(0)
        os.waitpid(child, 0)
        print("parent again")
    assert one.text == "parent\nchild\nparent again\n"


def test_a_terminal_stays_one_and_a_live_display_leaves_only_real_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with screen_of(80) as (near, far), os.fdopen(os.dup(far), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with Recording(tmp_path) as one:
            assert sys.stdout.isatty()
            display = open_display()
            assert display is not None
            for number in range(3):
                display.draw(lambda: VIEW, last=False)
                print("real line", number)
            display.draw(lambda: VIEW, last=True)
            print("after the display")
            assert sys.stdout is stream
            shown = read_until(near, "after the display")
    assert one.text == "real line 0\nreal line 1\nreal line 2\nafter the display\n"
    assert "Epoch 3" in shown
    assert "real line 0" in shown


def test_a_substitute_is_followed_and_what_is_written_beside_is_not(tmp_path: Path) -> None:
    with Recording(tmp_path) as one:
        substitute = io.StringIO()
        follow_instead(sys.stdout, substitute)
        follow_instead(sys.stdout, sys.stdout)
        print("followed", file=substitute)
        print("not followed", file=Unrecorded(sys.stdout))
        print("too")
    assert one.text == "followed\ntoo\n"


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from ddp_loop.reporting.console import ConsoleLog
ConsoleLog(print).open(Path(sys.argv[1]), 0)
print("written", end="")
print(" before", file=sys.stderr)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_of_a_killed_process_all_that_it_wrote_is_there(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    command = [sys.executable, "-c", KILLED.format(root=str(ROOT)), str(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert log_of(tmp_path) == "written before\n"
