"""Continue: which commands the page starts, and which it refuses."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.checkpoint import FileLock
from ddp_loop.monitor.continuing import CONTINUED, Continuations, command_of
from tests.support.harness import until
from tests.support.logged_files import python_command, write_start
from tests.support.runs import status_of
from tests.support.serving import write_run

SCRIPT = """
import json, os, sys
from pathlib import Path
said = {"arguments": sys.argv[1:], "directory": os.getcwd(), "environment": dict(os.environ), "python": sys.executable,
        "session": os.getsid(0) == os.getpid(), "input": sys.stdin.read()}
Path("said.part").write_text(json.dumps(said))
Path("said.part").rename("said.json")
print("printed")
sys.exit(int(os.environ.get("CODE_OF_THE_TEST", "0")))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A stopped run, and the script that began it in a folder of its own."""
    run = write_run(tmp_path / "runs" / "one", status="stopped")
    lab = tmp_path / "my lab"
    lab.mkdir()
    (lab / "train.py").write_text(SCRIPT)
    write_start(run, python_command("train.py", "--rate", "0.1; touch broken", "$(touch broken)"), lab)
    return run


@pytest.fixture
def pages() -> Iterator[Continuations]:
    """What continues runs; its processes have ended when the test ends."""
    pages = Continuations()
    yield pages
    for process, _ in pages._started.values():
        process.wait(20)


def ended(pages: Continuations, run: Path) -> int:
    process = pages._started[run][0]
    until(lambda: process.poll() is not None, "the command has ended")
    return int(process.returncode)


def start(pages: Continuations, run: Path) -> tuple[int, Any]:
    return pages.start(run, command_of(run).digest.encode())


def test_secrets_that_no_file_keeps_are_asked_for(pages: Continuations, run: Path, tmp_path: Path) -> None:
    assert pages.start(run, f"{command_of(run).digest}\none".encode())[0] == 409  # where none is missing
    words = ["--api-key", "***", "--url=http://a/b?token=***&page=3", "--names", "***x", "a://me:***@host"]
    write_start(run, python_command("train.py", *words), tmp_path / "my lab")
    command = command_of(run)
    names = ["--api-key", "--url=http://a/b?token", "a://me"]
    assert pages.about(run, "stopped")["lacks"] == [*command.lacks] == names
    for asked in (command.digest, f"{command.digest}\none\ntwo", f"{command.digest}\none\n\nthree"):
        code, said = pages.start(run, asked.encode())
        assert (code, said) == (409, f"The run folder does not keep {', '.join(names)}. Type each.")
    assert pages.start(run, f"{command.digest}\none two\nX&Y\nthree".encode())[0] == 202
    assert ended(pages, run) == 0
    given = json.loads((tmp_path / "my lab" / "said.json").read_text())["arguments"]
    assert given == [
        "--api-key",
        "one two",
        "--url=http://a/b?token=X&Y&page=3",
        "--names",
        "***x",
        "a://me:three@host",
    ]
    assert not [path for path in run.rglob("*") if path.is_file() and b"one two" in path.read_bytes()]
    write_start(run, python_command("train.py", "--password=seen"), run)  # as an older version kept it
    assert command_of(run).lacks == ("--password",)
    assert "seen" not in repr(command_of(run))


@pytest.mark.covers("E4")
def test_the_command_is_started_as_it_was_typed_without_a_shell(
    pages: Continuations, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1",
               "DDP_LOOP_START": "{}", "PET_NNODES": "2"}  # fmt: skip
    for name, value in ({"OF_THE_USER": "kept"} | foreign).items():
        monkeypatch.setenv(name, value)
    lab = Path(status_of(run)["directory"])
    line = f"cd {shlex.quote(str(lab))} && python train.py --rate '0.1; touch broken' '$(touch broken)'"
    assert command_of(run).line == line
    assert pages.about(run, "stopped")["can"]
    assert start(pages, run) == (202, {"said": "starting"})
    assert ended(pages, run) == 0
    said = json.loads((lab / "said.json").read_text())
    assert said["arguments"] == ["--rate", "0.1; touch broken", "$(touch broken)"]
    assert (said["directory"], said["session"], said["input"]) == (str(lab), True, "")
    assert Path(said["python"]).parent == Path(sys.executable).parent
    assert said["environment"]["OF_THE_USER"] == "kept"
    assert not foreign.keys() & said["environment"].keys()
    assert sorted(one.name for one in lab.iterdir()) == ["said.json", "train.py"]
    printed = run / "console" / CONTINUED
    assert printed.read_text() == "printed\n"
    assert printed.stat().st_mode & 0o022 == 0  # only its user writes it


def test_a_run_is_started_once(pages: Continuations, run: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "my lab" / "gate")
    (tmp_path / "my lab" / "train.py").write_text('print(open("gate").read())')
    assert start(pages, run)[0] == 202
    try:
        assert start(pages, run) == (409, "The run is active already.")
        assert pages.about(run, "stopped") == {
            "can": False, "digest": None, "lacks": [], "why": None, "is_starting": True, "failed": None,
        }  # fmt: skip
    finally:
        (tmp_path / "my lab" / "gate").write_text("go")
    assert ended(pages, run) == 0
    with closing(FileLock(run / "lock", "Loop")):
        assert start(pages, run) == (409, "The run is active already.")


def test_only_a_run_that_ended_early_offers_it(pages: Continuations, run: Path) -> None:
    for state in ("running", "stopping", "done", "waiting", "starting", "missing", "gone", "pruned"):
        assert not pages.about(run, state)["can"], state
    for state in ("stopped", "failed", "left", "lost"):
        assert pages.about(run, state)["can"], state


def test_a_command_that_has_changed_since_it_was_shown_is_not_started(pages: Continuations, run: Path) -> None:
    shown = command_of(run).digest.encode()
    write_start(run, python_command("-c", "open('broken', 'w')"), run)
    changed = (409, "The command is not the one that was shown. Read it again, and then confirm it.")
    for body in (shown, b"", b"\xff\xfe", b"x" * 2000, shown + b" "):
        assert pages.start(run, body) == changed
    assert not (run / "broken").exists()
    write_start(run, python_command("train.py"), run.parent)
    shown = command_of(run).digest.encode()
    write_start(run, python_command("train.py"), run)  # in another folder
    assert pages.start(run, shown) == changed
    assert not pages._started


GONE = "The script gone.py is no longer in "
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"start": None}, "does not have the command"),
    ({"start": []}, "does not have the command"),
    ({"start": "touch broken"}, "does not have the command"),
    ({"start": ["python", 3]}, "does not have the command"),
    ({"directory": None}, "does not have the command"),
    ({"start": ["", "train.py"]}, "cannot be shown whole"),
    ({"start": ["python", "a\0b"]}, "cannot be shown whole"),
    ({"start": ["python", "x" * 30_000]}, "cannot be shown whole"),
    ({"start": ["python", "\ud800"]}, "cannot be shown whole"),
    ({"directory": "/nowhere/at all"}, "The folder /nowhere/at all no longer exists"),
    ({"start": ["python", "gone.py"]}, GONE),
    ({"start": ["python", "-m", "ddp_loop", "run", "--ranks", "2", "gone.py"]}, GONE),
]


def test_a_command_that_cannot_be_started_is_one_line(pages: Continuations, run: Path) -> None:
    status = status_of(run)
    for changes, why in WRONG:
        (run / "status.json").write_text(json.dumps(status | changes))
        digest = pages.about(run, "stopped")["digest"] or "unknown"
        code, said = pages.start(run, digest.encode())
        assert code == 409
        assert isinstance(said, str)
        assert "\n" not in said
        assert why in said
        assert not pages._started
    write_start(run, ["no-such-program", "x"], run)
    missing = "The command cannot be started (No such file or directory: no-such-program)."
    assert start(pages, run) == (500, missing)
    assert not pages.about(run, "stopped")["is_starting"]


def test_a_command_that_fails_before_its_run_begins_says_why(pages: Continuations, run: Path, tmp_path: Path) -> None:
    (tmp_path / "my lab" / "train.py").write_text("print('first')\nraise SystemExit('no \\x1b[31msuch\\x1b[0m data')")
    assert start(pages, run)[0] == 202
    assert ended(pages, run) == 1
    assert pages.about(run, "stopped")["failed"] == "The command ended with code 1: no such data"
    (run / "console" / "continued.log").unlink()
    assert pages.about(run, "stopped")["failed"] == "The command ended with code 1."
    write_start(run, python_command("train.py"), tmp_path / "my lab")
    os.utime(run / "status.json", (2e9, 2e9))  # the run began, and has its own status
    assert pages.about(run, "stopped")["failed"] is None


# -- whose command it is -----------------------------------------------------------------------------------


def test_a_command_that_others_may_have_written_or_no_file_is_not_started(
    pages: Continuations, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = run / "status.json"

    def refusal() -> str:
        why = pages.about(run, "stopped")["why"]
        assert isinstance(why, str)
        assert pages.start(run, b"anything") == (409, why)
        assert not pages._started
        return why

    own = os.geteuid()
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: own + 1)
        assert refusal().startswith("status.json belongs to another user.")
    status.chmod(0o666)
    assert refusal().startswith("Everyone may write status.json")
    status.rename(tmp_path / "elsewhere.json")
    assert "cannot be read (No such file or directory)" in refusal()
    status.symlink_to(tmp_path / "elsewhere.json")
    assert "status.json cannot be read" in refusal()
    status.unlink()
    os.mkfifo(status)
    assert "is no file of at most" in refusal()
    status.unlink()
    with status.open("wb") as file:
        file.truncate(1 << 30)
    assert "is no file of at most" in refusal()
    status.write_text("[" * 5000)
    assert refusal() == "status.json is damaged, so the command is not known."
    (run / "trial.json").write_text("{}")
    assert refusal() == "This run is a trial of a sweep. Continue it by the sweep."


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder that is a link"])
def test_nothing_is_written_through_links(pages: Continuations, run: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "precious.log").write_text("precious")
    if kind == "a folder that is a link":
        (tmp_path / "precious.log").rename(tmp_path / "continued.log")
        (run / "console").symlink_to(tmp_path)
    else:
        (run / "console").mkdir()
        if kind == "a pipe":
            os.mkfifo(run / "console" / "continued.log")
        else:
            (run / "console" / "continued.log").symlink_to(tmp_path / "precious.log")
    status, said = start(pages, run)
    assert (status, str(said)[:29]) == (500, "The command cannot be started")
    assert not (tmp_path / "my lab" / "said.json").exists()
    assert "precious" in [one.read_text() for one in tmp_path.glob("*.log")]
