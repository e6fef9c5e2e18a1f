"""`python -m ddp_loop run` beside torchrun: the same bits and variables; how it ends after signals and failures."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.harness import until
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.covers("J6")]

RUN_S = 120.0  # two ranks take 6 s on two idle cores
RUN, TORCHRUN = ("-m", "ddp_loop", "run", "--ranks=2"), ("-m", "torch.distributed.run", "--nproc-per-node=2")

# The update is by hand: a process's first optimizer of torch imports its compiler, half of what a rank's start takes.
SCRIPT = """
import hashlib, json, os, sys, threading
import torch
import ddp_loop as dl

mode, run = sys.argv[1], sys.argv[2]
if mode == "before":
    raise FileNotFoundError("there is no config")
before = dict(os.environ)
with dl.join_world(device="cpu") as world:
    inputs, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
    model = torch.nn.Linear(8, 3)
    batches = dl.Batches((inputs, labels), 7, world)
    epochs = 10**6 if mode == "endless" else 2
    state = dict(model=model)
    for step in dl.Loop(batches, epochs, state=state, run_dir=run, progress=mode == "endless"):
        for images, classes in step:
            if step.iteration == 3 and world.rank == 1:
                if mode == "raise":
                    raise ValueError("the labels are bad")
                if mode == "exit":
                    sys.exit(3)
                if mode == "kill":
                    os.kill(os.getpid(), 9)
                if mode == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    raise ValueError("the first time")
            step.backward(torch.nn.functional.cross_entropy(model(images), classes))
        step.fold()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad
        if mode == "endless" and step.iteration == 5:
            open("begun-" + os.environ["RANK"], "w").close()
    digest = hashlib.sha1(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    sys.stdout.write(digest + "\\n")
    with open(os.path.join(run, "variables-" + os.environ["RANK"]), "w") as file:
        json.dump(before, file)
if mode == "after":
    raise KeyError("after the world")
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "the script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start Python in the test's folder; what still runs is killed, and its ranks end with it."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where nohup started the tests, the run would ignore it
        try:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=tmp_path, env={**variables, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        finally:
            signal.signal(signal.SIGHUP, before)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=RUN_S)
    return process.returncode, out, errors


def begun(process: subprocess.Popen[str], folder: Path, mark: str = "begun", ranks: int = 2) -> None:
    """Wait until all ranks have made some steps, or got a signal."""
    files = [folder / f"{mark}-{rank}" for rank in range(ranks)]
    until(lambda: all(map(Path.exists, files)) or process.poll() is not None, "the ranks have begun", RUN_S)


ADDED = {"DDP_LOOP_START", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
OF_EACH_LAUNCH = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


def test_the_bits_and_variables_are_those_of_torchrun_and_nothing_is_said(
    start: Start, script: str, tmp_path: Path
) -> None:
    both = [start(*launcher, script, "train", str(tmp_path / name)) for launcher, name in ((RUN, "a"), (TORCHRUN, "b"))]
    (code, out, errors), (_, reference, warned) = (ended(one) for one in both)
    assert (code, errors) == (0, "")
    assert "OMP_NUM_THREADS" in warned
    digests = [line for line in out.splitlines() if re.fullmatch("[0-9a-f]{40}", line)]
    assert len(digests) == 2
    assert digests == [line for line in reference.splitlines() if re.fullmatch("[0-9a-f]{40}", line)]
    status = json.loads((tmp_path / "a" / "status.json").read_text())
    assert status["start"] == [sys.executable, *RUN, script, "train", str(tmp_path / "a")]
    assert status["directory"] == str(tmp_path)
    assert json.loads((tmp_path / "b" / "status.json").read_text())["start"][:4] == [sys.executable, *TORCHRUN]
    for rank in range(2):
        ours, theirs = (json.loads((tmp_path / name / f"variables-{rank}").read_text()) for name in "ab")
        assert ours.keys() - theirs.keys() == ADDED - theirs.keys()
        assert theirs.keys() - ours.keys() == set()
        assert {name for name in theirs if ours[name] != theirs[name]} <= OF_EACH_LAUNCH
        assert ours["OMP_NUM_THREADS"] == "1"
        assert ours["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_with_code_0_and_its_start_goes_on(
    number: signal.Signals, start: Start, script: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(*RUN, script, "endless", str(run))
    begun(process, tmp_path)
    process.send_signal(number)
    code, out, errors = ended(process)
    assert code == 0, errors
    assert "Traceback" not in out + errors
    assert "death signal" not in errors
    status = json.loads((run / "status.json").read_text())
    assert status["status"] == "stopped"
    assert status["checkpoint"]
    (said,) = [line for line in (out + errors).splitlines() if line.startswith("to go on: ")]
    assert said.startswith(f"to go on: {sys.executable}")


IN_ONE_STEP = """
import os, sys, threading
import torch
import ddp_loop as dl
with dl.join_world(device="cpu") as world:
    model = torch.nn.Linear(2, 1)
    batches = dl.Batches(torch.ones(8, 2), 4, world)
    for step in dl.Loop(batches, 50, state=dict(model=model), run_dir=sys.argv[1], progress=False):
        for rows in step:
            step.backward(model(rows).mean())
        step.fold()
        if step.iteration == 3:
            open(f"begun-{world.rank}", "w").close()
            while not os.path.exists("go"):
                threading.Event().wait(0.1)
"""


@pytest.mark.parametrize("later", [signal.SIGTERM, signal.SIGHUP])
def test_a_supervisor_that_asks_twice_gets_a_checkpoint(later: signal.Signals, start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "slow.py").write_text(IN_ONE_STEP)
    process = start(*RUN, "slow.py", str(run))
    begun(process, tmp_path)
    for number in (signal.SIGTERM, later, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
    (tmp_path / "go").touch()
    code, _, errors = ended(process)
    assert code == 0, errors
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], bool(status["checkpoint"])) == ("stopped", True)


def test_a_second_ctrl_c_ends_at_once(start: Start, tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import os, signal, threading\n"
        "def mark(name): open(name + '-' + os.environ['RANK'], 'w').close()\n"
        "signal.signal(signal.SIGINT, lambda *_: mark('asked'))\n"
        "mark('begun')\n"
        "while True:\n    threading.Event().wait(1.0)\n"
    )
    process = start(*RUN, str(stubborn))
    for mark in ("begun", "asked"):
        begun(process, tmp_path, mark)
        process.send_signal(signal.SIGINT)
    code, _, errors = ended(process)
    assert code == 130
    assert errors == "ddp_loop: all ranks were ended by a second Ctrl-C\n"


def test_ctrl_c_outside_of_a_loop_is_one_line_and_code_130(start: Start, tmp_path: Path) -> None:
    waiting = tmp_path / "waiting.py"
    waiting.write_text(
        "import os, threading\n"
        "import ddp_loop as dl\n"
        "with dl.join_world(device='cpu') as world:\n"
        "    open(f'begun-{world.rank}', 'w').close()\n"
        "    while True:\n        threading.Event().wait(1.0)\n"
    )
    process = start(*RUN, str(waiting))
    begun(process, tmp_path, "begun")
    process.send_signal(signal.SIGINT)
    code, out, errors = ended(process)
    assert code == 130
    assert re.fullmatch(r"ddp_loop: rank [01] was ended by Ctrl-C\n", out + errors)


ASKED_TWICE = """
import ctypes, os, sys, threading
import torch
import ddp_loop as dl
from ddp_loop.distributed import signals

def mark(name): open(name + "-" + os.environ.get("RANK", "0"), "w").close()

def train():
    signals._SAME_S = 0.0
    with dl.join_world(device="cpu") as world:
        batches = dl.Batches(torch.ones(4, 1), 2, world)
        for step in dl.Loop(batches, 1, state={"model": torch.nn.Linear(1, 1)}, progress=False):
            for _ in step:
                mark("begun")
                while world.stops.asked is None:
                    threading.Event().wait(0.01)
                mark("asked")
                mutex = ctypes.create_string_buffer(64)
                while "stuck" in sys.argv:  # in compiled code, which nothing interrupts
                    ctypes.CDLL(None).pthread_mutex_lock(mutex)
                threading.Event().wait()

if __name__ == "__main__":
    dl.launch(train, 2) if "launch" in sys.argv else train()
"""


@pytest.mark.parametrize(
    ("launcher", "words", "line"),
    [
        ((), (), "ddp_loop: rank 0 was ended in forward of step 1 by a second Ctrl-C"),
        ((), ("stuck",), "ddp_loop: rank 0 was ended in forward of step 1 by a second Ctrl-C"),
        ((), ("launch",), "ddp_loop: all ranks were ended by a second Ctrl-C"),
        (RUN, (), "ddp_loop: rank [01] was ended by a second Ctrl-C in forward of step 1"),
    ],
    ids=["alone", "stuck", "launch", "run"],
)
def test_a_second_ctrl_c_is_one_line_and_code_130(
    launcher: tuple[str, ...],
    words: tuple[str, ...],
    line: str,
    start: Start,
    tmp_path: Path,
) -> None:
    script = tmp_path / "asked_twice.py"
    script.write_text(ASKED_TWICE)
    process = start(*launcher, str(script), *words)
    for mark in ("begun", "asked"):
        begun(process, tmp_path, mark, ranks=2 if launcher or "launch" in words else 1)
        process.send_signal(signal.SIGINT)
    code, out, errors = ended(process)
    assert code == 130
    assert re.fullmatch(f"ddp_loop: Stopping after this step .*\n{line}\n", out + errors)


STOPPED = """
import atexit, os, sys, threading
import torch
import ddp_loop as dl

def wait(name):
    open(name + "-" + os.environ["RANK"], "w").close()
    threading.Event().wait()

if "exit" in sys.argv:
    atexit.register(wait, "ending")
with dl.join_world(device="cpu") as world:
    if "world" in sys.argv:
        world.on_leaving(lambda: wait("ending"))
    batches = dl.Batches(torch.ones(4, 1), 2, world)
    model = torch.nn.Linear(1, 1)
    for step in dl.Loop(batches, 1, state={"model": model}, run_dir="run"):
        for rows in step:
            step.backward(model(rows).mean())
        step.fold()
        open("begun-" + os.environ["RANK"], "w").close()
        while world.stops.asked is None:
            threading.Event().wait(0.01)
"""


@pytest.mark.parametrize("where", ["world", "exit"])
def test_a_second_ctrl_c_after_the_checkpoint_is_one_line_too(where: str, start: Start, tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    process = start(*RUN, str(script), where)
    for mark in ("begun", "ending"):
        begun(process, tmp_path, mark)
        process.send_signal(signal.SIGINT)
    code, out, errors = ended(process)
    assert code == 130
    assert re.fullmatch(r"ddp_loop: Stopping after .*\nddp_loop: (rank \d was|all ranks were) ended by a .*\n", errors)
    assert (out + errors).count("to go on:") == out.count("to go on:") == 1
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize(
    ("mode", "first"),
    [
        ("raise", "ddp_loop: rank 1 failed in forward of step 3:"),
        ("exit", "ddp_loop: rank 1 ended with exit code 3 in forward of step 3"),
        ("kill", "ddp_loop: rank 1 was killed by SIGKILL, by a user or "),
    ],
)
def test_the_culprit_is_printed_once_and_the_others_in_a_line(
    mode: str, first: str, start: Start, script: str, tmp_path: Path
) -> None:
    code, out, errors = ended(start(*RUN, script, mode, str(tmp_path / "run")))
    assert code == 1
    lines = [line for line in errors.splitlines() if line]
    assert lines[0].startswith(first)
    assert re.fullmatch(r"ddp_loop: rank 0 was ended in (fold|forward|data) of step \d", lines[-1])
    traces = 1 if mode == "raise" else 0
    assert (out + errors).count("Traceback") == traces
    assert (out + errors).count("the labels are bad") == 2 * traces  # the line of the source, and the error
    assert len(lines) == 2 + 5 * traces or sys.version_info < (3, 13)
    assert "torchrun" not in errors


def test_of_a_long_error_the_beginning_and_the_end_are_printed(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text("raise ValueError(f\"no {'key, ' * 4000} at last\")\n")
    code, _, errors = ended(start(*RUN[:-1], RUN[-1], str(script)))
    assert code == 1
    assert re.search(r'long\.py", line 1, in <module>\n[^$]*ValueError: no key, key, ', errors)
    assert errors.count("characters are left out") == 1
    assert " at last\n" in errors


@pytest.mark.parametrize("mode", ["before", "after", "syntax"])
def test_an_error_of_all_ranks_outside_of_the_world_is_printed_once(
    mode: str, start: Start, script: str, tmp_path: Path
) -> None:
    if mode == "syntax":
        Path(script).write_text("import os\nfor\n")
    code, out, errors = ended(start(*RUN, script, mode, str(tmp_path / "run")))
    assert code == 1
    assert "frozen runpy" not in errors
    assert re.match(r"ddp_loop: rank \d failed:\n(Traceback| +File .*the script.py)", errors)
    assert (out + errors).count("    for\n" if mode == "syntax" else "Traceback") == 1


def test_a_failure_is_followed_by_a_restart_where_one_is_left(start: Start, script: str, tmp_path: Path) -> None:
    code, _, errors = ended(start(*RUN, "--max-restarts=2", script, "once", str(tmp_path / "run")))
    assert code == 0
    assert errors.count("ValueError: the first time") == 1
    assert errors.rstrip().splitlines()[-1] == "ddp_loop: the ranks start again (restart 1 of 2)"


def test_a_module_is_run_as_one_and_its_arguments_are_its_own(start: Start, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").write_text("")
    (tmp_path / "lab" / "job.py").write_text(
        "import sys\nsys.stdout.write(repr((__package__, sys.argv[1:])) + '\\n')\n"
    )
    code, out, errors = ended(start("-m", "ddp_loop", "run", "-m", "lab.job", "--run", "x", "--", "--ranks=3"))
    assert (code, out, errors) == (0, "('lab', ['--run', 'x', '--', '--ranks=3'])\n", "")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_the_culprit_is_red_on_a_terminal(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('the labels are bad')\n")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen, end = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # of a terminal whose other end is closed
            while some := os.read(screen, 4096):
                said.append(some)

    reader = threading.Thread(target=read)
    process = start(*RUN, str(script), stderr=end)
    os.close(end)
    reader.start()
    try:
        process.communicate(timeout=RUN_S)
    finally:
        until(lambda: not reader.is_alive(), "the terminal is read")
        os.close(screen)
    text = b"".join(said).decode()
    assert re.search(r"\x1b\[31mddp_loop: rank \d failed:", text)
    assert text.count("ValueError: the labels are bad") == 1
