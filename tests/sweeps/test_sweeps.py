"""Sweeps of small networks: one trial for each slot at a time, in order, each with the bits of its run alone."""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ddp_loop as dl
from ddp_loop.cli import main
from ddp_loop.distributed import Pool
from ddp_loop.reporting import ask_for
from ddp_loop.sweeps.command import _plan_of
from ddp_loop.sweeps.folders import Objective, read_sweep
from ddp_loop.sweeps.jobs import FunctionJob, ScriptJob
from ddp_loop.sweeps.plan import make_plan, make_space
from ddp_loop.sweeps.results import TrialResult, say_results
from ddp_loop.sweeps.running import left_s
from tests.support.paths import ROOT
from tests.support.trials import final, intervals, most_at_once, named, toml, train, trial, trivial, writes

SCRIPT = """
import argparse
from tests.support.trials import train
parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float)
parser.add_argument("--width", type=int)
parser.add_argument("--run_dir")
parser.add_argument("--steps", type=int)
parser.add_argument("--first-two", default="")
train(**vars(parser.parse_args()))
"""

sweep = partial(dl.sweep, progress=False)


def check_alone(pool: Pool, ranks: int, result: dl.TrialResult) -> None:
    """A trial has the digests of the same run outside a sweep."""
    run = result.folder.parents[2] / f"alone-{result.trial}"
    parameters: dict[str, Any] = dict(result.parameters)
    pool.run(train, ranks, run_dir=str(run), **parameters)
    assert final(result.folder) == final(run)


@pytest.mark.covers("F1", "G1")
@pytest.mark.usefixtures("warm")
def test_trials_run_on_all_slots_in_order_with_the_bits_of_their_runs_alone(pool: Pool, tmp_path: Path) -> None:
    space: dict[str, Any] = {"rate": [0.1, 0.02, 0.004], "width": [2, 5]}
    results = sweep(train, space, tmp_path / "sweep", slots=2, keywords={"first_two": "together"})
    points = [{"rate": rate, "width": width} for rate in space["rate"] for width in space["width"]]
    assert [(one.parameters, one.status) for one in results] == [(point, "done") for point in points]
    assert most_at_once(intervals(tmp_path / "sweep")) == 2
    for one in (results[0], results[5]):
        check_alone(pool, 1, one)
    assert len({tuple(final(one.folder)) for one in results}) == 6
    assert all(trial(tmp_path / "sweep", one.trial)["status"] == "done" for one in results)


@pytest.mark.covers("G2", "G3")
@pytest.mark.usefixtures("warm")
def test_trials_of_two_ranks_on_two_slots_run_one_at_a_time(pool: Pool, tmp_path: Path) -> None:
    results = sweep(train, {"rate": [0.1, 0.02]}, tmp_path / "sweep", slots=2, ranks=2)
    assert [one.status for one in results] == ["done", "done"]
    assert most_at_once(intervals(tmp_path / "sweep")) == 1
    for one in results:
        check_alone(pool, 2, one)


@pytest.mark.usefixtures("warm")
def test_results_do_not_depend_on_the_order_in_which_trials_end(tmp_path: Path) -> None:
    points = [{"rate": 0.1, "steps": steps} for steps in (9, 1, 1)]
    results = sweep(train, points, tmp_path / "sweep", slots=2, keywords={"first_two": "reversed"})
    assert [one.parameters for one in results] == points
    first, second = (trial(tmp_path / "sweep", number)["attempts"][0]["ended"] for number in (0, 1))
    assert first > second


@pytest.mark.usefixtures("warm")
def test_a_function_returns_its_objective_or_several_numbers(tmp_path: Path) -> None:
    values = [one.value for one in sweep(trivial, {"x": [3, 1, 2]}, tmp_path / "one", slots=1)]
    assert values == [3.0, 1.0, 2.0]
    values = [one.value for one in sweep(named, {"x": [4, 5]}, tmp_path / "two", slots=2, objective="accuracy")]
    assert values == [4.0, 5.0]


@pytest.mark.covers("F2")
@pytest.mark.usefixtures("warm")
def test_the_usual_objective_is_the_evaluated_loss_where_a_trial_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    results = dl.sweep(writes, {"x": [3.0, 1.0, 0.0]}, folder, slots=1)
    expected = [("evaluation.loss", 3.0), ("evaluation.loss", 1.0), ("loss", 5.0)]
    assert [(one.objective, one.value) for one in results] == expected
    found = [trial(folder, number) for number in range(3)]
    assert [(one["objective"], one["value"]) for one in found] == expected
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Trial 0 \(x=3\) done, eval loss 3\. 1 of 3, \d+:\d\d left", lines[0])
    assert lines[2] == "Trial 2 (x=0) done, loss 5. 3 of 3"
    assert lines[-1] == f"Best: trial 1 (x=1), eval loss 1 ({results[1].folder})"
    for words, said in (
        ("best", "eval loss   1, the lowest of 3"),
        ("runs", "Sweep s: objective eval loss or loss, minimize"),
    ):
        assert main([words, str(folder)]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.usefixtures("warm")
def test_a_sweep_of_a_version_whose_usual_objective_was_the_training_loss_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    sweep(writes, {"x": [3.0]}, folder, slots=1, objective="loss")
    ask_for(folder, [0])
    [one] = sweep(writes, {"x": [3.0]}, folder, slots=1)
    assert (one.objective, one.value, read_sweep(folder)["objective"]) == ("loss", 5.0, "loss")
    with pytest.raises(ValueError, match=r"objective: was 'loss', is 'evaluation\.loss'"):
        sweep(writes, {"x": [3.0]}, folder, slots=1, objective="evaluation.loss")


@pytest.mark.usefixtures("warm")
def test_a_sweep_whose_folder_was_renamed_keeps_its_trials(tmp_path: Path) -> None:
    """Also between names with letters that a URL writes otherwise."""
    folder = tmp_path / "lr?50%25"
    sweep(trivial, {"x": [1, 2]}, folder, slots=1)
    assert [one.name for one in tmp_path.iterdir()] == [folder.name]
    moved = folder.rename(tmp_path / "other")
    assert main(["sweep", "again", str(moved), "--trials", "1", "--slots", "1"]) == 0
    assert [one.value for one in sweep(trivial, {"x": [1, 2]}, moved, slots=1)] == [1.0, 2.0]
    assert [len(trial(moved, number)["attempts"]) for number in (0, 1)] == [1, 2]


def test_a_keyword_is_the_same_one_at_another_address() -> None:
    """An object without a repr of its own has its address there, and another one in the process that resumes."""
    first, second = (FunctionJob(trivial, {"data": one}).facts for one in (object(), object()))
    assert first == second


def test_each_step_of_a_range_is_drawn_and_the_last_one_is_not_above_its_end() -> None:
    space = make_space({"rate": {"low": 0.1, "high": 0.7, "step": 0.1}}, "random", 50, 0)
    rates = {float(str(point["rate"])) for point in space.points or ()}
    assert (len(rates), min(rates), max(rates)) == (7, 0.1, 0.7)


def test_the_time_left_is_that_of_the_trials_that_ended() -> None:
    assert left_s([10.0, 20.0], [], 4, 1) == 60.0
    assert left_s([10.0, 20.0], [5.0, 99.0], 4, 2) == 20.0  # two run, one of them longer than usual


@pytest.mark.slow
@pytest.mark.covers("F2")
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("sampler", ["random", "tpe", "QMCSampler"])
def test_a_sampler_draws_the_same_points_in_each_sweep(sampler: Any, tmp_path: Path) -> None:
    space = {"x": {"low": 1, "high": 1000, "log": True}}
    one, other = (
        [trial.parameters["x"] for trial in sweep(trivial, space, tmp_path / name, slots=1, sampler=sampler, trials=4)]
        for name in ("one", "other")
    )
    assert one == other
    assert len(set(one)) > 1


def test_a_sampler_that_stops_optuna_s_own_loop_after_its_last_point_is_taken() -> None:
    plan = make_plan(FunctionJob(trivial), {"x": [1, 2]}, {"sampler": "BruteForceSampler", "trials": 2})
    assert plan.space.sampler == "BruteForceSampler"


@pytest.mark.covers("F2")
@pytest.mark.usefixtures("warm")
def test_a_sampler_and_a_pruner_by_name_in_a_file_that_a_worker_reads_again(tmp_path: Path) -> None:
    facts = {"function": f"{ROOT}/tests/support/trials.py:trivial", "folder": "s", "slots": 1, "trials": 3}
    names = {"sampler": "QMCSampler", "pruner": "SuccessiveHalvingPruner"}
    file = toml(tmp_path / "sweep.toml", **facts, **names, space={"x": {"low": 1, "high": 99}})
    assert main(["sweep", str(file)]) == 0
    found = read_sweep(tmp_path / "s")
    assert {name: found[name] for name in names} == names
    plan = _plan_of(found)
    assert type(plan.sampler(1)).__name__ == names["sampler"]
    assert type(plan.pruner).__name__ == names["pruner"]
    assert main(["sweep", "work", str(tmp_path / "s"), "--slots", "1"]) == 0


@pytest.mark.slow
@pytest.mark.covers("F2")
def test_a_script_in_a_toml_file(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    facts = {"script": "job.py", "folder": "sweep", "slots": 2, "arguments": ["--steps=5", "--first-two=together"]}
    file = toml(tmp_path / "sweep.toml", **facts, space={"rate": [0.1, 0.05], "width": [2]})
    assert main(["sweep", str(file)]) == 0
    assert most_at_once(intervals(tmp_path / "sweep")) == 2
    for number, rate in enumerate([0.1, 0.05]):
        pool.run(train, 1, run_dir=str(tmp_path / "alone"), steps=5, rate=rate, width=2)
        assert final(tmp_path / f"sweep/trials/000{number}") == final(tmp_path / "alone")
        shutil.rmtree(tmp_path / "alone")


def test_a_script_gets_the_options_that_its_help_has(tmp_path: Path) -> None:
    options = "".join(f"parser.add_argument('{one}')\n" for one in ("--learning_rate", "--batch-size", "--run_dir"))
    script = tmp_path / "job.py"
    script.write_text(f"import argparse\nparser = argparse.ArgumentParser()\n{options}parser.parse_args()\n")
    job = ScriptJob(script)
    job.check(["learning_rate", "batch_size"])
    words = job.arguments({"learning_rate": 0.1, "batch_size": 4}, "run")
    assert words == ["--learning_rate=0.1", "--batch-size=4", "--run_dir=run"]


@pytest.mark.parametrize(
    ("values", "direction", "best"),
    [
        ([0.5, 0.25, None], "minimize", ["Best: trial 1 (lr=0.1, width=8), loss 0.25 (trials/1)"]),
        ([0.5, 0.25, None], "maximize", ["Best: trial 0 (lr=0, width=8), loss 0.5 (trials/0)"]),
        ([None, None, None], "minimize", []),
    ],
)
def test_a_sweep_ends_with_its_best_trial_if_one_has_a_value(
    values: list[float | None], direction: str, best: list[str]
) -> None:
    results = [
        TrialResult(trial, {"lr": 0.1 * trial, "width": 8}, status, value, None, Path(f"trials/{trial}"))
        for trial, (status, value) in enumerate([*(("done", value) for value in values), ("pruned", 0.0)])
    ]
    said: list[str] = []
    say_results(results, Path("s"), Objective("loss", direction), said.append)
    assert said == ["4 trials: 3 done, 1 pruned", *best]


@pytest.mark.parametrize(("typed", "shown"), [("/bin/ddp_loop", "ddp_loop"), ("/x/__main__.py", "python -m ddp_loop")])
def test_the_command_for_failed_trials_is_written_as_the_user_types_it(
    typed: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [typed, "sweep", "s.toml"])
    said: list[str] = []
    failed = TrialResult(0, {}, "failed", None, "ValueError", Path("s/trials/0000"))
    say_results([failed], Path("s"), Objective("loss", "minimize"), said.append)
    assert said[-1] == f"Run them again: {shown} sweep again s"
