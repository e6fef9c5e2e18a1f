"""The command that starts a run again, as its launcher was called."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_loop.checkpoint import way_on, words_to_go_on
from ddp_loop.checkpoint.starting import start_command
from tests.support.scripts import run

pytestmark = pytest.mark.covers("J6")


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lab/train.py", "--run", "the one"])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.delenv("DDP_LOOP_START", raising=False)


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({}, "python lab/train.py"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "python lab/train.py"),  # of `launch`
        (
            {"TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"},
            "torchrun --nproc_per_node=2 lab/train.py",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "3"},
            "torchrun --nnodes=3 --nproc_per_node=4 lab/train.py",
        ),
        ({"DDP_LOOP_START": "no JSON"}, "python lab/train.py"),
        ({"DDP_LOOP_START": '{"argv": 3}'}, "python lab/train.py"),
    ],
)
def test_the_start_is_that_of_the_launcher(variables: dict[str, str], command: str) -> None:
    words = [*command.split(), "--run", "the one"]
    assert start_command(variables, "/home/me") == {"start": words, "directory": "/home/me"}


def test_the_launcher_s_own_words_and_folder_count_most() -> None:
    words = ["python", "-m", "ddp_loop", "run", "--ranks", "2", "train.py"]
    left = json.dumps({"argv": words, "directory": "/home/me"})
    variables = {"DDP_LOOP_START": left, "TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2"}
    assert start_command(variables, "/elsewhere") == {"start": words, "directory": "/home/me"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_torchrun_s_own_words_are_those_of_the_parent(tmp_path: Path) -> None:
    """A launcher's rank prints how it would be started again."""
    rank = "from ddp_loop.checkpoint.starting import start_command; print(*start_command()['start'], sep='|')"
    launcher = tmp_path / "torchrun"
    launcher.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {rank!r}], check=True)\n")
    words = ["--nnodes=2", "--rdzv-endpoint=10.0.0.1:29400", "the one.py"]
    variables = {"TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    said = run(str(launcher), *words, folder=tmp_path, **variables).stdout
    assert said.rstrip("\n").split("|") == ["torchrun", *words]


@pytest.mark.parametrize(("name", "module"), [("lab.train", "lab.train"), ("lab.__main__", "lab")])
def test_a_module_is_started_as_one(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name=name, origin="lab/train.py"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert start_command({}, None)["start"] == ["python", "-m", module, "--run", "the one"]


def test_the_way_on_can_be_pasted() -> None:
    status = {"start": ["python", "train.py", "--run", "the one; rm -r x"], "directory": "/home/me/my lab"}
    command = "python train.py --run 'the one; rm -r x'"
    assert way_on(status) == f"cd '/home/me/my lab' && {command}"
    assert way_on(status, here="/home/me/my lab") == command
    assert way_on({**status, "directory": None}) == command
    starts: list[object] = [None, 5, [], "python train.py", ["python", 3], {"argv": []}]
    for start in starts:
        assert way_on({"start": start, "directory": "/home/me"}) == "", start


def test_a_working_folder_that_is_gone_does_not_spoil_the_words_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made beside each checkpoint, so an error would count as one of the checkpoint."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert words_to_go_on().startswith("to go on: ")


@pytest.mark.parametrize("is_found", [True, False])
def test_the_command_ddp_loop_is_named_as_it_was_typed(
    is_found: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "ddp_loop"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path if is_found else tmp_path / "elsewhere"))
    words = ["/usr/bin/python", str(program), "run", "train.py"]
    monkeypatch.setenv("DDP_LOOP_START", json.dumps({"argv": words, "directory": os.getcwd()}))
    expected = "ddp_loop run train.py" if is_found else " ".join(words)
    assert words_to_go_on() == f"to go on: {expected}"


def test_an_interpreter_that_the_shell_does_not_find_is_named_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert start_command({}, None)["start"][0] == sys.executable


HOLDS_EPOCHS = """
import torch, ddp_loop as dl
model = torch.nn.Linear(4, 1)
batches = dl.Batches(torch.zeros(8, 4), 4, dl.join_world(device="cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop = dl.Loop(batches, 2, state={"model": model, "optimizer": optimizer}, run_dir="run")
epochs = loop.epochs()
for step in next(epochs):
    for rows in step:
        step.backward(model(rows).square().mean())
    step.fold()
    loop.stop()
"""


def test_a_loop_that_lives_until_python_ends_has_last_words(tmp_path: Path) -> None:
    """Python drops `sys.argv` before a name of the script at its end."""
    (tmp_path / "train.py").write_text(HOLDS_EPOCHS)
    done = run("train.py", folder=tmp_path)
    assert "to go on: python train.py" in done.stdout
    assert "Traceback" not in done.stderr
