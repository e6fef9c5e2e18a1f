"""Sweeps as a user runs them: the example, its header's commands, and every snippet of `docs/sweeps.md`."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import ddp_loop as dl
from ddp_loop.cli import main
from ddp_loop.distributed import Pool
from examples.sweep import train as example
from tests.support.paths import DOCS, EXAMPLES
from tests.support.scripts import changed

FOLDER = EXAMPLES / "sweep"
RUN_S = 240.0
SMALL = ("--images", "20", "--slots", "2")
PRELUDE = "import ddp_loop as dl\nfrom train import train\n\n"


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a documented command in a folder, by this interpreter."""
    program, *arguments = shlex.split(command.replace("python -m ddp_loop", "ddp_loop"), comments=True)
    if program == "ddp_loop":
        return run_here(arguments, folder)
    command_line = [sys.executable, *arguments]
    return subprocess.run(command_line, cwd=folder, capture_output=True, text=True, timeout=RUN_S, check=False)


def run_here(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the package in this process, which has imported torch, and forget what it imports."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as around:
        around.enter_context(contextlib.chdir(folder))
        around.enter_context(contextlib.redirect_stdout(printed))
        around.enter_context(contextlib.redirect_stderr(said))
        around.enter_context(mock.patch.object(sys, "path", [*sys.path]))
        try:
            code = main(arguments)
        finally:
            sys.modules.pop("train", None)
    return subprocess.CompletedProcess(arguments, code, printed.getvalue(), said.getvalue())


def statuses(folder: Path) -> list[str]:
    return [json.loads(path.read_text())["status"] for path in sorted(folder.glob("trials/*/trial.json"))]


# -- the example -------------------------------------------------------------------------------------------


def result(trial: int, status: str, value: float | None, folder: Path) -> dl.TrialResult:
    return dl.TrialResult(trial, {"rate": 0.01, "momentum": 0.9, "width": 8}, status, value, None, folder)


def test_the_table_has_the_best_trial_first_and_those_without_a_value_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evaluations.jsonl").write_text('{"loss": 0.5, "accuracy": 0.25}\n{"loss": 0.2, "accuracy": 0.75}\n')
    missing = tmp_path / "missing"
    example.print_table(
        [
            result(0, "failed", None, missing),
            result(1, "pruned", 0.1, missing),
            result(2, "done", 0.3, missing),
            result(3, "done", 0.2, tmp_path),
        ]
    )
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["3", "2", "1", "0"]
    assert lines[0].split() == ["3", "0.01", "0.9", "8", "0.2000", "0.7500", "done"]
    assert lines[-1].split() == ["0", "0.01", "0.9", "8", "failed"]
    assert max(map(len, lines)) < 80


def test_the_file_describes_the_grid_of_the_script() -> None:
    given = tomllib.loads((FOLDER / "sweep.toml").read_text())
    usual = example.read_arguments([])
    assert given["space"] == example.GRID
    assert given["objective"] == example.OBJECTIVE
    assert given["keywords"] == {"epochs": usual.epochs, "images": usual.images}


@pytest.mark.slow
def test_the_commands_of_the_example_run_as_its_header_says(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "sweep", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    folder = tmp_path / "sweep"
    toml = folder / "sweep.toml"
    toml.write_text(toml.read_text().replace("images = 10000", "images = 20"))
    commands = dict(re.findall(r"^([A-Z].+?): {2,}(python .+)$", example.__doc__ or "", re.MULTILINE))
    assert len(commands) == 7

    grid = run(f"{commands['Two at a time']} --images 20", folder)
    assert grid.returncode == 0, grid.stderr
    assert re.search(r"^Best: trial \d+, \{'rate': ", grid.stdout, re.MULTILINE)
    assert statuses(folder / "runs" / "grid") == ["done"] * 12
    assert (folder / "runs" / "grid" / "trials.png").stat().st_size > 10_000
    attempts = [path.read_text() for path in sorted(folder.glob("runs/grid/trials/*/trial.json"))]

    for name in ("A grid of 12 trials", "The grid from a file", "Help from elsewhere"):  # all have ended
        again = run(commands[name] + (" --images 20" if "train.py" in commands[name] else ""), folder)
        assert again.returncode == 0, again.stderr
        assert [path.read_text() for path in sorted(folder.glob("runs/grid/trials/*/trial.json"))] == attempts


@pytest.mark.slow
def test_the_example_with_tpe_and_pruning_on_two_ranks_has_twelve_trials(tmp_path: Path) -> None:
    done = run(f"python {FOLDER / 'train.py'} --tpe --ranks 2 {shlex.join(SMALL)}", tmp_path)
    assert done.returncode == 0, done.stderr
    found = statuses(tmp_path / "runs" / "tpe")
    assert len(found) == 12
    assert set(found) <= {"done", "pruned"}


# -- the guide ---------------------------------------------------------------------------------------------


def test_the_guide_names_every_status_and_every_argument() -> None:
    guide = (DOCS / "sweeps.md").read_text()
    for status in ("done", "pruned", "failed", "killed", "not finite", "timed out", "stopped"):
        assert f"| `{status}` |" in guide
    for argument in ("keywords", "trials", "sampler", "pruner", "objective", "direction", "report_every", "ranks",
                     "slots", "time_limit_s", "seed", "storage", "heartbeat_s"):  # fmt: skip
        assert re.search(rf"`[^`]*\b{argument}\b[^`]*`", guide), argument


def forget() -> None:
    sys.modules.pop("train", None)


@pytest.fixture
def forgetting(warm_pools: list[Pool], warm: None) -> Iterator[None]:
    """Sweeps of this process run on ranks that are there, which know no `train` of another folder before or after."""
    for ranks, one in zip((2, 1), warm_pools, strict=True):
        one.run(forget, ranks)
    yield
    for ranks, one in zip((2, 1), warm_pools, strict=True):
        one.run(forget, ranks)


@pytest.mark.slow
@pytest.mark.usefixtures("forgetting")
def test_every_snippet_of_the_guide_runs(tmp_path: Path) -> None:
    guide = changed((DOCS / "sweeps.md").read_text(), {"size=1000": "size=200", "trials=12": "trials=5"})
    for number, (kind, text) in enumerate(re.findall(r"^```(python|toml|sh)\n(.*?)^```$", guide, re.M | re.S)):
        if named := re.match(r"# (\w+\.(?:py|toml))\n", text):
            (tmp_path / named[1]).write_text(text)
        elif kind == "python":  # a call with the first snippet's function
            body = "".join(f"    {line}\n" for line in text.splitlines())
            script = tmp_path / f"snippet_{number}.py"
            script.write_text(f'{PRELUDE}if __name__ == "__main__":\n{body}    print([r.status for r in results])\n')
            done = run(f"python {script.name}", tmp_path)
            assert done.returncode == 0, done.stderr
            assert re.search(r"\[('(done|pruned)'(, )?)+\]$", done.stdout.strip()), done.stdout
        for command in re.findall(r"^(?:python|ddp_loop) .+$", text if kind == "sh" else "", re.MULTILINE):
            if "@server/" in command or "--on slurm" in command:  # their own tests have servers
                continue
            done = run(command, tmp_path)
            if " stop " in command or re.search(r"again \S+$", command):  # nothing runs, and nothing failed
                assert done.returncode == 2, done.stdout + done.stderr
            else:
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert {path.name: set(statuses(path)) for path in (tmp_path / "runs").iterdir()} == {
        "first": {"done"},
        "file": {"done"},
        "other": {"done"},
        "script": {"done"},
        "tpe": set(statuses(tmp_path / "runs" / "tpe")),
        "pairs": {"done"},
    }
