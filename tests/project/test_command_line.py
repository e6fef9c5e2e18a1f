"""`python -m ddp_loop`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import ddp_loop as dl
from ddp_loop.cli import EXAMPLES, _parser, main
from ddp_loop.distributed import describe_devices
from tests.support.scripts import run


@pytest.mark.covers("C1")
def test_devices_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    assert capsys.readouterr().out == describe_devices() + "\n"


@pytest.mark.parametrize("command", [["stop"], ["plot"], ["checkpoints"], ["export", "-o", "weights"]])
def test_a_folder_of_runs_in_place_of_a_run_names_them(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text('{"id": "a"}')
    assert main([*command, str(tmp_path)]) == 2
    said = f"{tmp_path} is a folder of runs: {tmp_path / 'one'}, {tmp_path / 'other'}. Pass one of them.\n"
    assert capsys.readouterr().err == f"ddp_loop {command[0]}: {said}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["device"], "There is no command 'device'. Did you mean 'devices'?"),
        (["trian"], "There is no command 'trian'. Did you mean 'run'? For example: python -m ddp_loop run --ranks 4"),
        (["help", "device"], "There is no command 'device'. Did you mean 'devices'?"),
        (["frobnicate"], "There is no command 'frobnicate'. The commands are run, sweep, hosts, devices, verify,"),
        (["devices", "--gpus"], "python -m ddp_loop devices: error: unrecognized arguments: --gpus"),
        (["--print-completion", "cmd"], "--print-completion takes bash,"),
    ],
)
def test_what_is_no_command_is_refused_with_the_usage(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    printed = capsys.readouterr().err
    assert "usage: python -m ddp_loop" in printed
    assert said in printed


def printed_by(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_by(["help"], capsys) == printed_by(["--help"], capsys)
    for command in ("run", "export"):
        assert printed_by(["help", command], capsys) == printed_by([command, "--help"], capsys)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (["ddp_loop", "run", "my train.py"], "cd /lab && ddp_loop run 'my train.py'"),
        (["python", "train.py", "--token=***"], "cd /lab && python train.py '--token=***' The command had a secret,"),
        (None, ", for example: python -m ddp_loop run --ranks 4 train.py --epochs 20"),
    ],
)
def test_resume_is_no_command_and_the_one_that_resumes_the_run_is_named(
    start: list[str] | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"status": "stopped", "start": start, "directory": "/lab"}))
    assert main(["resume", "--best", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    fact = "ddp_loop: There is no command 'resume'. A run resumes when its script is started again"
    assert printed.err.startswith(f"{fact}{said if start is None else f': {said}'}")
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_alone_it_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == [*EXAMPLES]


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_help_of_a_command_has_a_sentence_an_example_and_its_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed_by([command, "--help"], capsys)
    assert re.search(r"\n\n[A-Z][^\n]+", text) is not None
    example = re.search(rf"^Example: python -m ddp_loop ({command} .*|{command})$", text, re.MULTILINE)
    assert example is not None
    assert re.search(r"^Exit codes: 0 \w+", text, re.MULTILINE)
    if command not in ("run", "sweep", "hosts"):
        words = shlex.split(example[1])
        assert _parser().parse_args(words[: words.index("--")] if "--" in words else words).command == command


def test_the_help_of_run_begins_with_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_by(["run", "--help"], capsys)
    assert text.index("--ranks N|gpu         number of ranks") < text.index("--nnodes NNODES") < text.index("Example:")


@pytest.mark.parametrize("command", ["verify", "profile"])
def test_the_help_says_that_files_of_the_script_are_overwritten(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(printed_by([command, "--help"], capsys).split())
    assert "files that the script writes itself, such as by torch.save, overwrite the files of a whole training" in text
    assert "Pass it other paths after --, or run it in a copy of its folder." in text


def test_the_version_is_that_of_the_package_and_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_by(["--version"], capsys).startswith(
        f"ddp_loop {dl.__version__}, torch {metadata.version('torch')}, "
    )


COMPLETE = """
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_ddp_loop
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ddp_loop pl", "plot"),
        ("ddp_loop run --rank", "--ranks"),
        ("ddp_loop run --standal", "--standalone"),
        ("ddp_loop run some_scr", "some_script.py"),
        ("ddp_loop plot some_fol", "some_folder"),
        ("ddp_loop monitor --por", "--port"),
    ],
)
def test_bash_completes_commands_options_and_files(
    typed: str,
    completed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/ddp_loop"])
    (tmp_path / "some_script.py").touch()
    (tmp_path / "some_folder").mkdir()
    script = printed_by(["--print-completion", "bash"], capsys) + COMPLETE
    command = ["bash", "-c", script, "bash", *typed.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == completed


def test_the_console_script_is_named_in_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="ddp_loop")
    assert script.load() is main
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/ddp_loop"])
    assert "Example: ddp_loop stop runs/one" in printed_by(["stop", "--help"], capsys)


@pytest.mark.slow
def test_the_exit_code_of_a_command_is_that_of_its_process(tmp_path: Path) -> None:
    done = run("-m", "ddp_loop", "checkpoints", str(tmp_path / "none"))
    assert (done.returncode, main(["checkpoints", str(tmp_path / "none")])) == (2, 2)
