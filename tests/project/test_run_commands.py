"""`python -m ddp_loop runs FOLDER` and `best FOLDER`."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.checkpoint import CheckpointStore
from ddp_loop.checkpoint.serialization import SerializedState
from ddp_loop.cli import main
from ddp_loop.reporting.run_table import short
from tests.support.serving import row, write_lines, write_run

Said = pytest.CaptureFixture[str]


def add_run(
    folder: Path, config: dict[str, Any], losses: list[float], evaluated: float | None = None, **more: Any
) -> Path:
    rows = [row(k) | {"loss": loss, "accuracy": k / 10} for k, loss in enumerate(losses, 1)]
    run = write_run(folder, rows, **{"status": "done", "iteration": len(losses)} | more)
    known = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(known | {"config": config}))
    if evaluated is not None:
        lines = [(1, evaluated), (2, evaluated + 1)]
        write_lines(run / "evaluations.jsonl", [{"epoch": 1, "iteration": k, "loss": loss} for k, loss in lines])
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs that differ in their rate, and one in its width too."""
    add_run(tmp_path / "a", {"rate": 0.1, "width": 8, "data": "digits"}, [3.0, 1.0, 2.0], evaluated=0.5)
    add_run(
        tmp_path / "b", {"rate": 0.01, "width": 8, "data": "digits"}, [8.29e26, 5.0], evaluated=0.25, status="failed"
    )
    add_run(tmp_path / "deep/c", {"rate": 1, "width": 16, "data": "digits"}, [float("nan")])
    return tmp_path


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Trials whose numbers and paths have another order, and one that was pruned with the best value."""
    for number, value, status in (
        (9998, 0.5, "done"),
        (9999, 0.25, "done"),
        (10000, 0.1, "pruned"),
        (10001, None, "failed"),
    ):
        run = add_run(tmp_path / f"trials/{number:04}", {}, [1.0, 2.0])
        facts = {"trial": number, "parameters": {"rate": number}, "status": status, "value": value, "why": None}
        (run / "trial.json").write_text(json.dumps(facts | {"objective": "loss", "direction": "minimize"}))
    (tmp_path / "sweep.json").write_text(json.dumps({"name": "s", "objective": "loss", "direction": "minimize"}))
    return tmp_path


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes stdout a terminal without colours, of so many columns."""

    def make(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))

    return make


def printed(capsys: Said, *arguments: object) -> list[str]:
    assert main([str(one) for one in arguments]) == 0
    return capsys.readouterr().out.splitlines()


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of the table after the empty line, which are two blanks apart."""
    table = lines[lines.index("") + 1 :]
    return [[one.strip() for one in line.split("  ") if one.strip()] for line in table]


@pytest.mark.covers("E4", "G4")
def test_runs_shows_what_differs_and_the_last_and_best_values(runs: Path, capsys: Said) -> None:
    lines = printed(capsys, "runs", runs)
    assert lines[:3] == [f"3 runs in {runs}: 2 done, 1 failed", "All with data=digits", ""]
    head, *rows = cells(lines)
    names = ["name", "state", "rate", "width", "epoch loss", "best epoch loss", "epoch accuracy", "best epoch accuracy"]
    assert head == [*names, "eval loss", "best eval loss", "steps", "time"]
    assert rows[0] == ["a", "done", "0.1", "8", "2", "2", "0.2", "0.2", "1.5", "0.5", "3", "0:00"]
    assert rows[1][:6] == ["b", "failed", "0.01", "8", "4.14e+26", "4.14e+26"]
    assert rows[2][:6] == ["deep/c", "done", "1", "16", "nan", "-"]


def test_the_steps_of_a_run_that_was_left_are_shown_beside_all_that_it_has(tmp_path: Path, capsys: Said) -> None:
    add_run(tmp_path / "a", {}, [1.0, 2.0], steps=9, status="left")
    add_run(tmp_path / "b", {}, [1.0, 2.0, 3.0], steps=3)
    head, *rows = cells(printed(capsys, "runs", tmp_path))
    assert [line[head.index("steps")] for line in rows] == ["2/9", "3"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--sort", "rate"], ["b", "a", "deep/c"]),
        (["--sort", "rate", "--descending"], ["deep/c", "a", "b"]),
        (["--sort", "best_eval_loss"], ["b", "a", "deep/c"]),
        (["--sort", "LOSS"], ["a", "b", "deep/c"]),  # NaN is last
        (["--sort", "loss", "--descending"], ["b", "a", "deep/c"]),
        (["--sort", "state"], ["a", "deep/c", "b"]),
        (["--where", "rate=0.10"], ["a"]),
        (["--where", "rate==0.1", "--where", "state==done"], ["a"]),
        (["--where", "state=failed"], ["b"]),
        (["--where", "state!=failed", "--where", "width>8"], ["deep/c"]),
        (["--where", "best eval loss <= 0.25"], ["b"]),
        (["--where", "best evaluation.loss <= 0.25", "--sort", "Evaluated loss"], ["b"]),
        (["--where", "data=digits"], ["a", "b", "deep/c"]),
        (["--where", "rate>1e9"], []),
    ],
)
def test_runs_are_sorted_and_chosen(arguments: list[str], names: list[str], runs: Path, capsys: Said) -> None:
    lines = printed(capsys, "runs", runs, *arguments)
    found = [line[0] for line in cells(lines)[1:]]
    assert found == names
    assert ("No run meets the conditions." in lines) == (not names)


def test_metrics_and_parameters_whose_names_are_taken_have_columns_of_their_own(tmp_path: Path, capsys: Said) -> None:
    rates = {"folder": "x", "state": "y", "loss": 3, "metric.name": 4}
    run = add_run(tmp_path / "a", rates, [2.0, 1.0], evaluated=0.5)
    odd = {"name": 1.0, "objective": 2.0, "steps": 3.0, "best loss": 4.0, "eval loss": 5.0, "accuracy": 0.9}
    last = odd | {"name": 0.5, "accuracy": 0.25}
    write_lines(run / "rows.jsonl", [row(1, **odd), row(2, **last)])
    trial = {"trial": 0, "parameters": rates, "status": "done", "value": 0.125, "objective": "loss"}
    (run / "trial.json").write_text(json.dumps(trial | {"direction": "minimize"}))
    printed(capsys, "runs", tmp_path, "--csv", tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open() as file:
        (found,) = csv.DictReader(file)
    own = {"name": "a", "state": "done", "objective": "0.125", "steps": "2", "best loss": "0.5", "eval loss": "1.5"}
    own |= {"folder": str(run), "accuracy": "0.25", "best accuracy": "0.9"}
    assert {name: found[name] for name in own} == own
    config = {"config.folder": "x", "config.state": "y", "config.loss": "3", "config.metric.name": "4"}
    assert {name: found[name] for name in config} == config
    metrics = {f"metric.{name}": str(last[name]) for name in odd if name != "accuracy"}
    assert {name: found[name] for name in metrics} == metrics
    assert found["best metric.name"] == "1.0"
    assert len(cells(printed(capsys, "runs", tmp_path, "--sort", "metric.name"))) == 2


def test_the_values_are_written_as_csv_with_all_digits(runs: Path, tmp_path: Path, capsys: Said) -> None:
    printed(capsys, "runs", runs, "--sort", "rate", "--csv", tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [one["name"] for one in rows] == ["b", "a", "deep/c"]
    assert (rows[0]["rate"], rows[0]["data"], rows[0]["loss"]) == ("0.01", "digits", "5.0")
    assert (rows[2]["loss"], rows[2]["best loss"], rows[1]["folder"]) == ("nan", "", str(runs / "a"))


def test_a_file_that_cannot_be_written_is_one_line_with_its_path(runs: Path, capsys: Said) -> None:
    for command in (
        ["runs", str(runs), "--csv", f"{runs}/none/it"],
        ["plot", str(runs / "a"), "-o", f"{runs}/a/run.json"],
    ):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"ddp_loop {command[0]}: {command[-1]} cannot be read or written (")


@pytest.mark.covers("G4")
def test_a_sweep_is_shown_in_the_order_of_its_trials_with_its_objective(sweep: Path, capsys: Said) -> None:
    lines = printed(capsys, "runs", sweep)
    assert lines[1] == "Sweep s: objective loss, minimize"
    head, *rows = cells(lines)
    assert head[:4] == ["name", "state", "rate", "objective"]
    assert [line[:4] for line in rows] == [
        ["trials/9998", "done", "9998", "0.5"],
        ["trials/9999", "done", "9999", "0.25"],
        ["trials/10000", "pruned", "10000", "0.1"],
        ["trials/10001", "failed", "10001", "-"],
    ]


def add_epochs(folder: Path, losses: list[tuple[int, int, float]]) -> Path:
    """A run with a line of logged values after its two epochs; each loss comes with its epoch and weight."""
    lines = [
        row(k) | {"epoch": epoch, "weight": weight, "loss": loss} for k, (epoch, weight, loss) in enumerate(losses, 1)
    ]
    run = write_run(folder, lines, status="done", iteration=len(lines))
    logged = [(1, 2, 0.5), (2, len(lines), 0.75)]
    write_lines(
        run / "logged.jsonl",
        [{"epoch": epoch, "iteration": k, "val_loss": one, "elapsed_s": 1.0} for epoch, k, one in logged],
    )
    return run


@pytest.mark.covers("E4")
@pytest.mark.parametrize("more", [0, 10])
def test_a_loss_is_the_mean_over_its_epoch_as_in_the_terminal(more: int, tmp_path: Path, capsys: Said) -> None:
    add_epochs(tmp_path / "a", [(1, 1, 2.0), (1, 3, 4.0), (2, 1, 9.0), *([(2, 1, 9.0)] * more)])
    write_lines(tmp_path / "a/evaluations.jsonl", [])
    head, found = cells(printed(capsys, "runs", tmp_path))
    shown = dict(zip(head, found, strict=True))
    assert (shown["epoch loss"], shown["best epoch loss"], "loss" in head) == ("9", "3.5", False)
    assert "epoch loss  3.5 at step 2, the lowest of 1" in printed(capsys, "best", tmp_path, "--by", "loss")
    for name in ("loss", "best loss", "epoch loss"):
        assert len(cells(printed(capsys, "runs", tmp_path, "--sort", name))) == 2


def test_a_skipped_step_is_not_in_the_mean_over_its_epoch(tmp_path: Path, capsys: Said) -> None:
    for number, count in enumerate((2, 20)):  # few rows, and columns of them
        lines = [row(k) | {"loss": 2.0, "skipped": 0} for k in range(1, count)]
        write_run(tmp_path / str(number), [*lines, row(count) | {"loss": None, "skipped": 1}])
    for line in cells(printed(capsys, "runs", tmp_path))[1:]:
        assert line[2] == "2"


@pytest.mark.covers("E4", "G4")
def test_what_the_script_logs_is_a_column_and_decides(tmp_path: Path, capsys: Said) -> None:
    add_epochs(tmp_path / "a", [(1, 1, 2.0), (1, 3, 4.0), (2, 1, 9.0)])
    other = add_epochs(tmp_path / "b", [(1, 1, 2.0), (1, 3, 4.0)])
    write_lines(other / "logged.jsonl", [{"epoch": 1, "iteration": 2, "val_loss": 0.625, "name": 7.0}])
    lines = cells(printed(capsys, "runs", tmp_path, "--sort", "val_loss"))
    shown = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [(one["name"], one["val_loss"], one["best val_loss"]) for one in shown] == [
        ("b", "0.625", "0.625"),
        ("a", "0.75", "0.5"),
    ]
    assert "logged.name" in lines[0]
    for name in ("val_loss", "best val_loss", "Val Loss"):
        said = printed(capsys, "best", tmp_path, "--by", name)
        assert said[0].split() == ["run", "a"]
        assert "val_loss    0.5 at step 2, the lowest of 2" in said


def test_without_an_evaluated_loss_the_score_of_a_checkpoint_decides(tmp_path: Path, capsys: Said) -> None:
    for name, scores in (("a", (0.5, 0.75)), ("b", (0.625, 0.25)), ("c", ())):
        run = add_run(tmp_path / name, {}, [1.0])
        store = CheckpointStore(run, "0123456789abcdef")
        for iteration, score in enumerate((*scores, None), 1):
            store.write(SerializedState({}, {}), iteration=iteration, facts={}, score=score)
    lines = cells(printed(capsys, "runs", tmp_path, "--sort", "score"))
    shown = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [(one["name"], one["score"], one["best score"]) for one in shown] == [
        ("b", "0.25", "0.25"),
        ("a", "0.75", "0.5"),
        ("c", "-", "-"),
    ]
    for arguments in ([], ["--by", "score"], ["--by", "best score"]):
        said = printed(capsys, "best", tmp_path, *arguments)
        assert said[0].split() == ["run", "b"]
        assert "score       0.25 at step 2, the lowest of 2" in said
    assert "0.75 at step 2, the highest of 2" in printed(capsys, "best", tmp_path, "--highest")[1]


@pytest.mark.parametrize("command", ["runs", "best"])
def test_a_folder_without_runs_is_refused(command: str, tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "file").touch()
    for folder, said in (("none", "none does not exist"), ("file", "file is a file"), ("", "There is no run below")):
        assert main([command, str(tmp_path / folder)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"ddp_loop {command}: ")
        assert said in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs", "--sort", "rat"], "No run has a column 'rat'. Did you mean 'rate'?"),
        (["runs", "--where", "wdith=3"], "Did you mean 'width'?"),
        (["runs", "--where", "rate"], "A condition compares a column"),
        (["runs", "--where", "rate<abc"], "< compares numbers. Got 'rate<abc'."),
        (["runs", "--where", "rate= "], "A condition compares a column"),
        (["runs", "--sort", "qqqq"], "There are name, state, rate"),
        (["best", "--by", "acuracy"], "Did you mean 'accuracy'?"),
        (["best", "--by", "nonsense"], "No run has a column 'nonsense'. There are accuracy, "),
        (["runs", "--watch", "--csv", "x.csv"], "Leave out --watch or --csv."),
    ],
)
def test_an_unknown_column_is_refused_with_the_nearest_one(
    arguments: list[str], said: str, runs: Path, capsys: Said
) -> None:
    assert main([*arguments, str(runs)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize("colored", [True, False])
def test_a_terminal_gets_what_fits(
    columns: int, colored: bool, runs: Path, capsys: Said, terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(columns)
    monkeypatch.setenv("NO_COLOR", "" if colored else "1")
    lines = printed(capsys, "runs", runs)
    assert ("\x1b[" in "".join(lines)) == colored
    plain = [re.sub(r"\x1b\[\d+m", "", line) for line in lines[1:]]
    assert max(map(len, plain)) <= columns
    assert ("best epoch accuracy" in plain[plain.index("") + 1]) == (columns == 160)
    assert any(line.startswith("Left out for want of width: ") for line in plain) == (columns == 80)


def test_watch_shows_the_table_anew_also_before_the_first_run(
    tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(seconds: float) -> None:
        if (tmp_path / "a").exists():
            raise KeyboardInterrupt
        add_run(tmp_path / "a", {}, [1.0])

    monkeypatch.setattr(time, "sleep", wait)
    assert main(["runs", str(tmp_path), "--watch"]) == 130
    said = capsys.readouterr().out
    assert said.index("no run has begun yet") < said.index(f"1 run in {tmp_path}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((8.29e26, "8.29e+26"), (1e-5, "1e-05"), (0.123456, "0.1235"), (12, "12"), (True, "true"), ("a\nb", "a?b")),
        *((float("nan"), "nan"), (123456.0, "1.23e+05"), ("x" * 30, "x" * 23 + "\u2026")),
    ],
)
def test_a_value_is_written_short(value: object, text: str) -> None:
    assert short(value) == text


@pytest.mark.covers("G4")
@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ([], ["b", "eval loss   0.25 at step 1, the lowest of 2", "rate      0.01"]),
        (["--highest", "--by", "loss"], ["a", "eval loss   1.5 at step 2, the highest of 2"]),
        (["--by", "Accuracy"], ["a", "epoch accuracy  0.2 at step 3, the highest of 3"]),
    ],
)
def test_best_is_the_run_with_the_best_evaluated_loss(
    arguments: list[str], facts: list[str], runs: Path, capsys: Said
) -> None:
    lines = printed(capsys, "best", runs, *arguments)
    assert lines[0].split() == ["run", facts[0]]
    for fact in facts[1:]:
        assert any(line.strip() == fact for line in lines), lines
    assert lines[-2].endswith(str(runs / facts[0]))


@pytest.mark.covers("G4")
def test_best_of_a_sweep_is_the_done_trial_with_the_best_objective(sweep: Path, capsys: Said) -> None:
    lines = printed(capsys, "best", sweep)
    assert lines[0].split() == ["run", "trials/9999"]
    assert "0.25, the lowest of 2" in lines[1]
    known = json.loads((sweep / "sweep.json").read_text())
    (sweep / "sweep.json").write_text(json.dumps(known | {"direction": "maximize"}))
    assert "0.5, the highest of 2" in printed(capsys, "best", sweep)[1]
    (sweep / "sweep.json").write_text(json.dumps(known))
    assert "0.5, the highest of 2" in printed(capsys, "best", sweep, "--highest")[1]


@pytest.mark.parametrize(
    ("by", "last"),
    [
        ("score", "step-00000001 (the best score 0.5)"),
        ("accuracy", "step-00000002"),  # of its own step, although another has a better score
        ("eval loss", "step-00000001 (the best score 0.5, there is none of step 4)"),
    ],
)
def test_best_shows_the_checkpoint_of_the_best_values_step_or_says_that_there_is_none(
    by: str, last: str, tmp_path: Path, capsys: Said
) -> None:
    run = add_run(tmp_path / "a", {}, [3.0, 1.0])
    write_lines(run / "evaluations.jsonl", [{"epoch": 1, "iteration": 4, "loss": 0.5}])
    store = CheckpointStore(run, "0123456789abcdef")
    for iteration, score in ((1, 0.5), (2, None), (3, 0.75)):
        store.write(SerializedState({}, {}), iteration=iteration, facts={}, score=score)
    assert printed(capsys, "best", tmp_path, "--by", by)[-1].endswith(f"/{last}")


def test_where_nothing_was_evaluated_there_is_no_best_run(tmp_path: Path, capsys: Said) -> None:
    add_run(tmp_path / "a", {}, [1.0])
    assert main(["best", str(tmp_path)]) == 1
    assert (
        "No run has a finite eval loss or a score. Pass --by NAME, such as loss, accuracy." in capsys.readouterr().out
    )
    lines = printed(capsys, "best", tmp_path, "--by", "loss")
    assert "1 at step 1, the lowest of 1" in lines[1]
    assert lines[-1].split() == ["checkpoint", "none"]


@pytest.mark.parametrize(
    "name", ["accuracy", "eval accuracy", "evaluated accuracy", "Eval Accuracy", "evaluation.accuracy"]
)
def test_best_takes_the_names_that_the_table_prints(name: str, tmp_path: Path, capsys: Said) -> None:
    for number in range(2):
        run = add_run(tmp_path / f"run{number}", {"rate": number}, [1.0, 0.5], evaluated=0.5)
        lines = [{"epoch": 1, "iteration": 2, "loss": 0.5, "accuracy": 0.25 + number / 2}]
        write_lines(run / "evaluations.jsonl", lines)
    assert main(["best", str(tmp_path), "--by", name]) == 0
    assert re.search(r"^eval accuracy +0.75 at step 2, the highest of 2$", capsys.readouterr().out, re.MULTILINE)


WHY = "ddp_loop.distributed.failures.PeerFailed: rank 1 failed in forward of step 70: ValueError: no image 7\n\nT"


@pytest.mark.parametrize("columns", [80, 160])
def test_a_narrow_table_keeps_the_reason_and_leaves_out_what_is_alike(
    columns: int, tmp_path: Path, capsys: Said, terminal: Any
) -> None:
    folder = {"run": "RUN_DIR"}
    add_run(tmp_path / "begun", {"rate": 0.1, "depth": 3}, [1.0, 0.5])
    add_run(tmp_path / "good", {"rate": 0.1, "depth": 3, "size": 7} | folder, [1.0, 0.5])
    add_run(tmp_path / "bad", {"rate": 0.2, "depth": 4, "size": 7} | folder, [1.0, 0.25], status="failed", why=WHY)
    terminal(columns)
    lines = printed(capsys, "runs", tmp_path)
    assert max(map(len, lines[1:])) <= columns
    head, bad, *_ = cells(lines)
    assert ("why" in head, "run" in head, bad[-1][:20]) == (True, False, "ValueError: no image")
    assert {"rate", "depth", "epoch loss"} <= {*head}
    alike = {"size", "best epoch accuracy", "steps"}
    assert alike & {*head} == (set() if columns == 80 else alike)


def test_a_narrow_table_keeps_a_result_however_many_parameters_differ(
    tmp_path: Path, capsys: Said, terminal: Any
) -> None:
    for number in range(2):
        config = {f"a_long_parameter_{k}": number for k in range(9)}
        add_run(tmp_path / str(number), config, [1.0, 0.5], evaluated=0.25)
    terminal(80)
    head = cells(printed(capsys, "runs", tmp_path))[0]
    assert {"state", "a_long_parameter_0", "eval loss"} <= {*head}


def test_a_narrow_table_has_results_and_times_before_parameters(tmp_path: Path, capsys: Said, terminal: Any) -> None:
    for number in range(2):
        config = dict.fromkeys(("patience", "n", "width", "rate", "depth", "momentum"), number)
        add_run(tmp_path / str(number), config, [2.0, 1.0, 1.5][: 3 - number], evaluated=0.25 + number)
    order = ["name", "state", "steps", "epoch loss", "best eval loss", "eval loss", "time", "patience", "n"]
    for count in range(2, len(order) + 1):
        widths = [max(len(name), 4) for name in order[:count]]
        terminal(sum(widths) + 2 * count)
        head = cells(printed(capsys, "runs", tmp_path))[0]
        assert {*head} == {*order[:count]}


@pytest.mark.parametrize("words", [["runs", "FOLDER"], ["best", "FOLDER", "--by", "loss"], ["devices"]])
def test_a_command_whose_reader_has_gone_ends_without_a_word(words: list[str], tmp_path: Path) -> None:
    add_run(tmp_path / "a", {}, [1.0])
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ddp_loop", *(str(tmp_path) if one == "FOLDER" else one for one in words)]
    with os.fdopen(writing, "wb") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 141)


def test_a_run_without_a_config_leaves_alike_parameters_out_of_the_table(tmp_path: Path, capsys: Said) -> None:
    for number in range(2):
        add_run(tmp_path / str(number), {"rate": number, "size": 7}, [1.0])
    add_run(tmp_path / "plain", {}, [1.0])
    lines = printed(capsys, "runs", tmp_path)
    assert lines[1] == "2 with size=7"
    assert {"rate", "size"} & {*cells(lines)[0]} == {"rate"}
