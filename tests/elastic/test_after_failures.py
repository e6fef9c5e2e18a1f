"""After a failure the user sees the error without lines of the package, and how to go on from the checkpoint."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.checkpoint import RunFolder
from ddp_loop.distributed import join_world
from ddp_loop.elastic import shorten_refusal, show_unless_reported
from tests.support.scripts import run

pytestmark = pytest.mark.covers("J6", "E5")

SCRIPT = """
import os, sys, time
import torch
import ddp_loop as dl

how, last = sys.argv[1], int(sys.argv[2])
world = dl.join_world(device="cpu")
model = torch.nn.Linear(2, 1)
state = {"model": model}
batches = dl.Batches(torch.ones(12, 2), 4, world)
for step in dl.Loop(batches, 2, state=state, run_dir="run", save_every=1, progress=False):
    for rows in step:
        outputs = model(rows)
        step.backward(outputs.mean() * (float("nan") if how == "nan" and step.iteration == last else 1.0))
    step.fold()
    if step.iteration == last and world.rank == world.size - 1:
        while not os.path.isdir(f"run/checkpoints/step-{last - 1:08d}"):
            time.sleep(0.01)
        if how == "raise":
            raise KeyError("image 7")
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "remove":
            os.rename("run", "removed")
"""
RANKS = {"run": ["-m", "ddp_loop", "run", "--ranks=2"]}  # torchrun may end rank 0 before it has said a word


def failed(folder: Path, *words: str) -> list[str]:
    """The lines of a job that fails."""
    done = run(*words, folder=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.splitlines()


def resumed_at(folder: Path, command: str) -> int:
    """Go on by the command, to the end, and return the step after which the run resumed."""
    words = shlex.split(command.replace(" 3", " 9"))
    words[0] = sys.executable
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    iteration: int = json.loads((folder / "run" / "starts.jsonl").read_text().splitlines()[-1])["iteration"]
    return iteration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "how"),
    [("run", "raise"), ("run", "kill"), ("run", "nan"), ("python", "raise"), ("python", "nan")],
)
def test_the_last_lines_name_the_checkpoint_and_the_command_that_goes_on(
    tmp_path: Path, launcher: str, how: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    lines = failed(tmp_path, *RANKS.get(launcher, []), "train.py", how, "3")
    if how == "nan":  # an error of the package shows the lines of the script alone
        assert sum(line.startswith("  File ") for line in lines) == 1
        assert sum("The loss of step 3 is nan" in line for line in lines) == 1
        other = [line for line in lines if line.endswith("failed in fold of step 3 too, with the same error")]
        assert len(other) == (launcher == "run")
    place = next(place for place, line in enumerate(lines) if line.startswith("to go on: "))
    kept = re.search(r"The checkpoint step-0000000(\d) is in .*run\.$", lines[place - 1])
    assert kept is not None
    assert place == len(lines) - 1
    assert 1 <= int(kept[1]) <= resumed_at(tmp_path, lines[place].removeprefix("to go on: "))


@pytest.mark.slow
def test_a_run_whose_folder_was_removed_is_not_said_to_go_on_from_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    lines = failed(tmp_path, *RANKS["run"], "train.py", "remove", "3")
    assert lines[-1] == f"ddp_loop: The run folder {tmp_path / 'run'} was removed or replaced while the run was in it."
    assert not any("to go on" in line for line in lines)


@pytest.mark.parametrize("is_refusal", [True, False])
def test_an_error_that_the_package_did_not_raise_itself_keeps_all_lines(tmp_path: Path, is_refusal: bool) -> None:
    """The package calls a function of the script, such as `collate_fn`, which calls the package."""
    path = tmp_path / "module.py"
    path.write_text(
        f"""
def inner():
    {"raise ValueError('the rule')" if is_refusal else "{}['no such key']"}
def outer(function):
    function()
"""
    )
    package: dict[str, Any] = {"__name__": "ddp_loop.some.module"}
    exec(compile(path.read_text(), str(path), "exec"), package)

    def collate() -> None:
        package["inner"]()

    with pytest.raises((ValueError, KeyError)) as caught:
        package["outer"](collate)
    shorten_refusal(caught.value)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["outer", "collate"] + ([] if is_refusal else ["inner"])


@pytest.mark.parametrize("mistake", [{"seed": "a"}, {"device": "gpu:99"}])
def test_a_refusal_before_there_is_a_world_shows_the_lines_of_the_script_alone(
    mistake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ValueError, match=r"must be|needs a GPU") as caught:
        join_world(**mistake)
    show_unless_reported(caught.type, caught.value, caught.tb)
    told = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert told.count("Traceback") == 1
    assert [line.strip() for line in told.splitlines() if line.startswith("  File ")] == [
        f'File "{__file__}", line {caught.tb.tb_lineno}, in {caught.tb.tb_frame.f_code.co_name}'
    ]


def test_a_refusal_from_a_block_of_the_package_does_not_show_its_context_manager(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(FileExistsError) as caught:
        RunFolder(tmp_path / "a file", {}, None)
    shorten_refusal(caught.value)
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 1
    assert caught.value.__cause__ is None  # the message has its words


@pytest.mark.slow
def test_the_stack_of_a_rank_that_stays_away_begins_at_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import threading
import torch
import ddp_loop as dl

world = dl.join_world(device="cpu", timeout_s=2)
if world.rank == 1:
    threading.Event().wait()
world.sum(torch.ones(1))
"""
    )
    lines = failed(tmp_path, *RANKS["run"], "train.py")
    stack = lines[lines.index("The stack of rank 1:") + 1 :]
    assert stack[0].startswith(f'  File "{tmp_path / "train.py"}", line 8, in <module>')
