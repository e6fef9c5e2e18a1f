"""Sweeps that cannot be begun: errors with the fact, what came and the remedy; nothing is written or overwritten."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution

import ddp_loop as dl
from ddp_loop.checkpoint import FileLock
from ddp_loop.cli import main
from ddp_loop.distributed import launcher
from ddp_loop.sweeps import command
from ddp_loop.sweeps.command import begin
from tests.support.trials import toml, train, trivial

sweep = partial(dl.sweep, progress=False)
RANGE = {"low": 1, "high": 5}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.covers("F2")
@pytest.mark.parametrize(
    ("space", "keywords", "said"),
    [
        ({"rat": [1]}, {}, "has no parameter 'rat'. Did you mean 'rate'?"),
        ({}, {}, "The space has no parameter"),
        ({"rate": []}, {}, "The grid is empty: rate has no value"),
        ([], {}, "The list of points is empty"),
        ([{"rate": 1}, {"width": 1}], {}, "All points must have the same parameters"),
        ({"rate": [1]}, {"ranks": 3, "slots": 2}, "A trial has 3 ranks, but there are 2 slots here"),
        ({"rate": [1]}, {"slots": 0}, "slots must be a whole number, 1 or more. Got 0"),
        ({"rate": [1]}, {"trials": 3}, "This grid has 1 trials. Got trials=3"),
        ([{"rate": 1}], {"trials": 3}, "A list has its own 1 trials"),
        ({"rate": {"low": 1}}, {"trials": 3, "sampler": "random"}, "A range needs low and high. rate has low"),
        ({"rate": {"low": 1, "hi": 2}}, {"trials": 3, "sampler": "tpe"}, "rate has 'hi'. Did you mean 'high'?"),
        ({"rate": {"low": 5, "high": 1}}, {"trials": 3, "sampler": "tpe"}, "The range of rate is not possible"),
        ({"rate": RANGE}, {}, "A grid needs the values of each parameter. rate has a range"),
        ({"rate": RANGE}, {"sampler": "random"}, "trials must be the number of trials to draw, 1 or more. Got None"),
        ({"rate": [float("nan")]}, {}, "A value of rate must be finite. Got nan"),
        ({"rate": {"low": 0, "high": float("inf")}}, {}, "A value of rate must be finite. Got inf"),
        ({"rate": ["a", object()]}, {}, "A value of rate must be a number, a text, a bool or None"),
        ({"rate": CategoricalDistribution([float("nan")])}, {}, "A value of rate must be finite. Got nan"),
        ({"rate": [1]}, {"sampler": "tpo"}, "sampler must be one of grid, random, tpe"),
        ({"rate": [1]}, {"sampler": "CmaESSampler", "trials": 3}, "Got 'CmaESSampler'. Did you mean 'CmaEsSampler'?"),
        ({"rate": [1]}, {"sampler": "GridSampler", "trials": 3}, "GridSampler cannot be made by its name alone"),
        ({"rate": [1]}, {"pruner": "medium"}, "Did you mean 'median'?"),
        ({"rate": [1]}, {"pruner": "PercentilePruner"}, "Optuna's PercentilePruner cannot be made by its name alone"),
        ({"rate": [1]}, {"direction": "up"}, "direction must be minimize or maximize. Got 'up'"),
        ({"rate": [1]}, {"time_limit_s": "9"}, "time_limit_s must be positive, or None for no limit. Got '9'"),
        ({"rate": [1]}, {"seed": 1.5}, "seed must be a whole number. Got 1.5"),
        ({"rate": [1]}, {"objective": 5}, "objective must be a text, such as \"loss\". Got 5"),
        ({"rate": [1]}, {"sampler": 5, "trials": 3}, "sampler must be one of grid, random, tpe or one of Optuna's"),
        ({"rate": [1]}, {"time_limit_s": 0}, "time_limit_s must be positive, or None for no limit. Got 0"),
        ({"rate": [1]}, {"storage": "here"}, "A storage is given by SQLAlchemy's URL"),
        ({"rate": [1]}, {"storage": "sqlite:////no/such/folder/x.db"}, "unable to open database file). Check that its"),
        ({"rate": [1]}, {"storage": "postgresql+psycopg://u:secret@127.0.0.1:1/x"}, "u:***@127.0.0.1:1/x cannot be"),
        ({"rate": [1]}, {"storage": "mysql+mysqlconnector://u@h/x"}, "needs a driver"),
        ({"rate": [1]}, {"keywords": {"rate": 2}}, "'rate' is given twice"),
        ({"run_dir": ["a"]}, {}, "'run_dir' is given twice: by the space, by keywords= or by the sweep. Remove one"),
        ({"rate": [1]}, {"keywords": {"run_dir": "a"}}, "'run_dir' is given twice"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(space: Any, keywords: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        sweep(train, space, tmp_path / "sweep", **keywords)
    assert "secret" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_sampler_whose_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna imports it for the third trial."""
    monkeypatch.setitem(sys.modules, "cmaes", None)
    for module in [name for name in sys.modules if name.startswith("cmaes.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ValueError, match=r"needs the package cmaes. Run pip install cmaes"):
        sweep(train, {"rate": {"low": 0.1, "high": 1.0}}, tmp_path / "s", sampler="CmaEsSampler", trials=3)
    assert list(tmp_path.iterdir()) == []


def test_a_storage_without_optuna(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("optuna", "sqlalchemy"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["sweep", "work", "sqlite:///none.db"]) == 2
    assert "A sweep needs optuna. optuna is missing. Run pip install" in capsys.readouterr().err


def test_functions_that_new_processes_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "has_cloudpickle", lambda: False)
    with pytest.raises(TypeError, match=r"cannot be pickled.*Import it from a module"):
        sweep(lambda rate, run_dir: None, {"rate": [1]}, tmp_path / "sweep", slots=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_folder_of_another_sweep_or_of_one_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    for name in ("lock", ".sweep.json-0a1b2c3d"):  # of a start that was killed before the sweep was written
        (folder / name).write_text("")
    assert [one.status for one in sweep(trivial, {"x": [1]}, folder, slots=1)] == ["done"]
    before = files(tmp_path)
    with pytest.raises(ValueError, match=r"is the folder of a sweep. Pass its TOML file"):
        begin(folder, 1, None, None, print)
    with pytest.raises(ValueError, match=r"has another sweep: space.x: was \[1\], is \[2\]. Restore these"):
        sweep(trivial, {"x": [2]}, folder, slots=1)
    assert files(tmp_path) == before
    with (
        closing(FileLock(folder / "lock", "sweep")),
        pytest.raises(ValueError, match="To help it, start python -m ddp_loop sweep work"),
    ):
        sweep(trivial, {"x": [1]}, folder, slots=1)
    assert files(tmp_path).keys() == before.keys()


@pytest.mark.usefixtures("warm")
@pytest.mark.slow
def test_an_objective_that_no_row_has(tmp_path: Path) -> None:
    (one,) = sweep(train, {"rate": [0.1]}, tmp_path / "s", slots=1, objective="los")
    assert one.status == "failed"
    assert "The rows of its Loop have no 'los' (Did you mean 'loss'?)." in str(one.why)


def test_folders_with_other_files_or_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match=r"has files, and no sweep: thesis.txt. Choose an empty folder"):
        sweep(trivial, {"x": [1]}, tmp_path, slots=1)
    with pytest.raises(OSError, match=r"The sweep's folder .* cannot be created or written \(Not a directory\)"):
        sweep(trivial, {"x": [1]}, tmp_path / "thesis.txt" / "s", slots=1)
    assert files(tmp_path) == {"thesis.txt": b"all of it"}


JOB = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--rate")
parser.add_argument("--run-dir")
parser.parse_args()
"""


@pytest.mark.covers("F2")
def test_files_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.py").write_text(JOB)
    usual: dict[str, Any] = {"folder": "s", "slots": 1, "space": {"rate": [1]}}
    script = usual | {"script": "job.py"}
    table: list[tuple[dict[str, Any], str]] = [
        (script | {"smapler": "tpe"}, "unknown key 'smapler'. Did you mean 'sampler'?"),
        (script | {"space": {"rat": [1]}}, "job.py has no option --rat. Did you mean '--rate'?"),
        (script | {"script": "no.py"}, "does not exist"),
        (script | {"script": "."}, "is a folder"),
        (script | {"function": "job.py:train"}, "either script"),
        (script | {"arguments": "--steps 3"}, "sweep.toml has '--steps 3'"),
        (script | {"arguments": "--steps 3"}, "arguments must be a list of texts"),
        (usual | {"function": "no.py:train"}, "names no file"),
    ]
    for facts, said in table:
        assert main(["sweep", str(toml(tmp_path / "sweep.toml", **facts))]) == 2
        assert said in capsys.readouterr().err
    assert main(["sweep", str(tmp_path / "missing.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert sorted(files(tmp_path)) == ["job.py", "sweep.toml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep.toml", "--trials", "20"], "--trials goes with again FOLDER. A file has trials = N"),
        (["again", "s", "--on", "slurm"], "--on goes with FILE.toml or FOLDER alone. Got sweep again s --on"),
        (["work", "s", "--on", "local"], "--on goes with FILE.toml or FOLDER alone"),
        (["sweep.toml", "--workers", "8"], "--workers goes with --on"),
        (["sweep.toml", "--slurm", "partition=gpu"], "--slurm goes with --on"),
        (["work", "s", "--folder", "other"], "--folder goes with FILE.toml or work URL"),
    ],
)
def test_options_that_would_not_count(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_storage_must_have_one_sweep_and_otherwise_its_sweeps_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Path] = []
    monkeypatch.setattr(command, "check_reachable", str)
    monkeypatch.setattr(command, "folders_in", lambda url: found)
    for said in ("It has none", None, r"It has 2: runs/0, runs/1"):
        if said is None:
            assert command.folder_in("sqlite://") == Path("runs/0")
        else:
            with pytest.raises(ValueError, match=rf"must have one sweep\. {said}\. Pass --folder FOLDER\."):
                command.folder_in("sqlite://")
        found.append(Path(f"runs/{len(found)}"))
