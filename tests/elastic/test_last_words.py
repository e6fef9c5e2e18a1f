"""The last words of `python -m ddp_loop run`: who failed and by whose signal, before any wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.launcher.api import LaunchConfig

from ddp_loop.elastic import is_stopped, oom_kills, process_states, rank_processes
from ddp_loop.elastic.rank_processes import RankProcesses
from tests.support.harness import until
from tests.support.paths import ROOT

pytestmark = pytest.mark.covers("J6")

RUN_S = 120.0  # two ranks take 6 s on two idle cores; less than what a launcher that waits for a stopped rank takes
# The update is by hand: a process's first optimizer of torch imports its compiler, half of what a rank's start takes.
SCRIPT = """
import os, signal, sys, threading
import torch
import ddp_loop as dl

mode = sys.argv[1]
if mode == "ignore":  # outside of a world
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("ignores", "w").close()
    while not os.path.exists("ignores"):
        threading.Event().wait(0.02)
    if os.environ["RANK"] == "0":
        raise ValueError("the labels are bad")
    while sys.argv[2] not in open("said").read():  # until the launcher has said it
        threading.Event().wait(0.02)
    sys.exit(3)
with dl.join_world(device="cpu"):
    pass  # all ranks are there before the shorter timeout counts
with dl.join_world(device="cpu", timeout_s=6) as world:
    model = torch.nn.Linear(8, 3)
    batches = dl.Batches(torch.randn(64, 8), 7, world)
    for step in dl.Loop(batches, 2, state=dict(model=model), progress=False):
        for rows in step:
            if step.iteration == 3 and world.rank == 1:
                if mode == "memory":
                    open("vmstat", "w").write("oom_kill 8\\n")
                os.kill(os.getpid(), signal.SIGSTOP if mode == "stop" else signal.SIGKILL)
            step.backward(model(rows).square().mean())
        step.fold()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad
"""
# The kernel's counter is a file of the test's, since a test cannot use up the machine's memory.
COUNTED = "import sys; from pathlib import Path; from ddp_loop.elastic import process_states; "
COUNTED += "process_states._PROC = process_states._CGROUPS = Path('.'); "
COUNTED += "from ddp_loop.cli import main; sys.exit(main(sys.argv[1:]))"


def ended(folder: Path, *words: str) -> tuple[int, list[str]]:
    """The exit code of a launcher, and the lines that it and its ranks wrote to stderr."""
    (folder / "train.py").write_text(SCRIPT)
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL, stderr=said,
        )  # fmt: skip
        try:
            code = process.wait(RUN_S)
        finally:
            process.kill()
            process.wait()
    return code, [line for line in (folder / "said").read_text().splitlines() if line]


HAS_OPTION = "shutdown_timeout" in {one.name for one in fields(LaunchConfig)}  # torch 2.11 waits 30 s
RUN = ("run", "--ranks=2", *(["--shutdown-timeout=600"] if HAS_OPTION else []), "train.py")


@pytest.mark.slow
def test_a_stopped_rank_is_named_at_once_with_what_the_others_know(tmp_path: Path) -> None:
    code, lines = ended(tmp_path, "-m", "ddp_loop", *RUN, "stop")
    assert code == 1
    assert lines[0] == ("ddp_loop: rank 1 was stopped, as by SIGSTOP, so it did not answer, and the launcher killed it")
    assert re.match(r"ddp_loop: rank 0 was ended in \w+ of step 3: Rank 1 does not answer \(killed, stopped", lines[1])
    assert len(lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "why"), [("kill", ", by a user or another program"), ("memory", ", for lack of memory")]
)
def test_memory_is_blamed_if_the_kernel_has_counted_such_a_kill(mode: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    code, lines = ended(tmp_path, "-c", COUNTED, *RUN, mode)
    assert code == 1
    assert lines[0] == f"ddp_loop: rank 1 was killed by SIGKILL{why}"
    assert re.fullmatch(r"ddp_loop: rank 0 was ended in \w+ of step \d", lines[-1])


@pytest.mark.slow
def test_the_failure_is_described_before_a_rank_that_ignores_sigterm_is_waited_for(tmp_path: Path) -> None:
    code, lines = ended(tmp_path, "-m", "ddp_loop", *RUN, "ignore", "and gets SIGTERM")
    assert code == 1
    assert lines[0] == "ddp_loop: rank 0 failed:"
    assert lines[-3:] == [
        "ValueError: the labels are bad",
        "ddp_loop: rank 1 has not ended by itself, and gets SIGTERM",
        "ddp_loop: rank 1 ended with exit code 3",
    ]


@pytest.mark.slow
def test_a_rank_that_the_launcher_killed_is_not_said_to_lack_memory(tmp_path: Path) -> None:
    words = [word.replace("600", "1") for word in RUN]
    code, lines = ended(tmp_path, "-m", "ddp_loop", *words, "ignore", "never")
    assert code == 1
    assert lines[0] == "ddp_loop: rank 0 failed:"
    assert lines[-1] == "ddp_loop: rank 1 was killed by SIGKILL, which the launcher sent"


def test_a_stopped_process_differs_from_a_running_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(process.pid), "it is stopped")
        process.send_signal(signal.SIGCONT)
        until(lambda: not is_stopped(process.pid), "it runs")
    finally:
        process.kill()
        process.communicate()
    assert not is_stopped(process.pid)


@pytest.mark.parametrize(
    ("group", "file", "text", "number"),
    [
        ("0::/user/job", "user/job/memory.events", "low 0\nhigh 3\noom 2\noom_kill 5\noom_group_kill 0\n", 5),
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
        ("2:cpu,memory:/job", "memory/job/memory.oom_control", "oom_kill 4\n", 4),
        ("0::/", "none", "", 7),
        ("nonsense", "none", "", 7),
    ],
)
def test_the_kernel_s_count_of_kills_is_that_of_the_own_group_or_of_the_machine(
    group: str, file: str, text: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"1:freezer:/x\n{group}\n")
    (tmp_path / "vmstat").write_text("oom_kill 7\n")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(process_states, "_PROC", tmp_path)
    monkeypatch.setattr(process_states, "_CGROUPS", tmp_path)
    assert oom_kills() == number
    (tmp_path / "vmstat").unlink()
    (tmp_path / "self" / "cgroup").unlink()
    assert oom_kills() is None


LEAVES = """import json, os, sys
with open(sys.argv[1] + ".new", "w") as file:
    facts = {"timestamp": "1", "is_shown": False, "py_callstack": "ValueError: its own error"}
    json.dump({"message": {"message": "ValueError: its own error", "extraInfo": facts}}, file)
os.replace(sys.argv[1] + ".new", sys.argv[1])
input()
"""


def test_a_rank_has_time_to_leave_its_error_before_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 has failed, and rank 0 has just been started."""
    monkeypatch.setattr(rank_processes, "GRACE_S", RUN_S)
    file = tmp_path / "error.json"
    was_there: list[bool] = []
    with subprocess.Popen([sys.executable, "-S", "-c", LEAVES, str(file)], stdin=subprocess.PIPE) as process:
        context = SimpleNamespace(
            subprocess_handlers={0: SimpleNamespace(proc=process, close=None)},
            error_files={0: str(file)},
            close=lambda *_: was_there.append(file.exists()),
            _failures={1: None},
        )
        RankProcesses(context, {0: 0}, 1)
        context.close()
        process.kill()
    assert was_there == [True]
    assert "its own error" in capsys.readouterr().err
