"""Run folders found below a folder, and each one's record: state, parameters, last and best values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ddp_loop.checkpoint import RunFolder, ask_to_stop
from ddp_loop.reporting import JsonlTail, RunRecord, jsonl, plain_reason, read_run, run_records
from ddp_loop.reporting.run_records import ValueSummary, find_runs, is_lower_better
from tests.support.logged_files import append_lines
from tests.support.serving import logged_line, row, write_lines, write_run


def write_trial(folder: Path, **facts: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trial.json").write_text(json.dumps({"trial": 0, "parameters": {}, **facts}))
    return folder


@pytest.mark.covers("E4", "J8")
def test_runs_are_found_at_any_depth_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b", "a/deep/down", "c/trials/0001"):
        write_run(tmp_path / name, [row(1)])
    write_trial(tmp_path / "c/trials/0000")
    for name in ("b/checkpoints/run", "b/before/1", "b/tables/x", ".hidden/run"):
        write_run(tmp_path / name, [row(1)])
    (tmp_path / "loop").symlink_to(tmp_path)
    found = find_runs(tmp_path)
    assert [str(one.relative_to(tmp_path)) for one in found] == ["a/deep/down", "b", "c/trials/0000", "c/trials/0001"]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]
    assert find_runs(tmp_path / "none") == []
    assert [read_run(one, tmp_path).name for one in found] == ["a/deep/down", "b", "c/trials/0000", "c/trials/0001"]
    assert read_run(tmp_path / "b", tmp_path / "b").name == read_run(tmp_path / "b").name == "b"


def test_a_record_has_what_the_files_say(tmp_path: Path) -> None:
    lines = [row(k, loss=loss, accuracy=k / 10) for k, loss in enumerate((3.0, 1.0, 2.0), 1)]
    run = write_run(tmp_path / "one", lines, status="stopped", iteration=3, why="enough")
    evaluated = enumerate((0.5, 0.75, 0.25), 1)
    write_lines(run / "evaluations.jsonl", [logged_line(k, accuracy=one, elapsed_s=5.0) for k, one in evaluated])
    run_json = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(run_json | {"config": {"rate": 0.1, "net.width": 8, "run": "RUN_DIR"}}))
    (run / "note.txt").write_text("a good one\n")
    said = read_run(run)
    assert (said.name, said.folder, said.state, said.why) == ("one", run, "stopped", "enough")
    assert said.parameters == {"rate": 0.1, "net.width": 8}
    assert said.rows == {"loss": ValueSummary(2.0, 3, 1.0, 2), "accuracy": ValueSummary(0.3, 3, 0.3, 3)}
    assert said.evaluations == {"accuracy": ValueSummary(0.25, 3, 0.75, 2)}
    assert (said.steps, said.epoch, said.ranks, said.elapsed_s, said.note) == (3, 1, 2, 5.0, "a good one")


def test_what_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    losses = [None, 2.0, float("nan"), float("-inf"), 1.5, None]
    run = write_run(tmp_path / "one", [row(k, loss=loss) for k, loss in enumerate(losses, 1)])
    loss = read_run(run).rows["loss"]
    assert (math.isnan(loss.last), loss.at, loss.best, loss.best_at) == (True, 6, 1.5, 5)
    other = write_run(tmp_path / "two", [row(1, loss=None)])
    assert (read_run(other).rows["loss"].best, read_run(other).rows["loss"].best_at) == (None, None)


@pytest.mark.parametrize("lines_each", [1, 6])
def test_of_two_evaluations_of_a_step_the_last_one_counts(lines_each: int, tmp_path: Path) -> None:
    """Also where the file is read between the two."""
    run = write_run(tmp_path / "one", [row(3)])
    losses = ((1, 0.1), (1, 3.0), (2, 0.2), (2, 2.0), (3, 0.3), (3, 4.0))
    lines = [logged_line(k, loss=loss) for k, loss in losses]
    for first in range(0, len(lines), lines_each):
        append_lines(run / "evaluations.jsonl", lines[first : first + lines_each])
        found = read_run(run).evaluations
    assert found == {"loss": ValueSummary(4.0, 3, 2.0, 2)}


@pytest.mark.parametrize("many", [2, 20])  # few rows, and columns of them
def test_a_mean_beyond_the_largest_float_is_not_finite(many: int, tmp_path: Path) -> None:
    lines = [row(k, loss=1.5) for k in range(1, many)]
    run = write_run(tmp_path / "one", [*lines, row(many, loss=1e308, epoch=2)])
    loss = read_run(run, for_table=True).epoch_means["loss"]
    assert (math.isnan(loss.last), loss.at, loss.best, loss.best_at) == (True, many, 1.5, many - 1)


def test_damaged_and_half_lines_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", [row(1), row(2)])
    with (run / "rows.jsonl").open("ab") as file:
        file.write(b'\0\0{"loss": -5\n7\n\n[1]\n{"iteration": true, "loss": -6}\n{"loss": -7}\n')
        file.write(b'{"iteration": 3, "loss": 1' + b"0" * 500 + b"}\n")
        file.write(json.dumps(row(4, loss="low")).encode() + b"\n" + json.dumps(row(5)).encode() + b"\n")
        file.write(b'{"iteration": 6, "loss": -8')
    loss = read_run(run).rows["loss"]
    assert (loss.last, loss.at, loss.best) == (row(5)["loss"], 5, row(5)["loss"])
    for name in ("run.json", "status.json", "trial.json", "evaluations.jsonl"):
        (run / name).write_bytes(b"\xff{")
    (run / "note.txt").write_bytes(b"\xff" * 5000)
    said = read_run(run)
    assert (said.state, said.parameters, said.evaluations, len(said.note)) == ("waiting", {}, {}, 500)


@pytest.mark.parametrize(
    ("odd", "place"),
    [
        *(({}, 0), ({"loss": "low"}, 0), ({"loss": None}, 17), ({"loss": 2.0**70}, 39), ({"more": 1.0}, 17)),
        *(({"more": 1.0}, 0), ({"epoch": "1"}, 39)),
    ],
)
def test_many_rows_have_the_values_of_row_by_row(odd: dict[str, Any], place: int, tmp_path: Path) -> None:
    rows = [row(k, loss=(k - 20) ** 2 + 0.5, accuracy=k % 7) for k in range(1, 41)]
    rows[place] |= odd
    run, other = write_run(tmp_path / "one", []), write_run(tmp_path / "two", rows)
    for one in rows:
        append_lines(run / "rows.jsonl", [one])
        by_row = read_run(run).rows
    at_once = read_run(other).rows
    assert repr(at_once) == repr({name: by_row[name] for name in at_once})
    assert at_once.keys() == by_row.keys()
    assert at_once["loss"].best_at == 20


def test_epochs_of_few_rows_have_their_means_without_work_in_python_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(k, epoch=(k + 2) // 3, loss=(k - 2000.0) ** 2, skipped=k % 3 == 1) for k in range(1, 6001)]
    run = write_run(tmp_path / "one", rows[:3002])
    calls = []
    summary = run_records._summary

    def counted(*given: Any) -> ValueSummary:
        calls.append(given)
        return summary(*given)

    monkeypatch.setattr(run_records, "_summary", counted)
    middle = read_run(run, for_table=True).epoch_means["loss"]
    append_lines(run / "rows.jsonl", rows[3002:])
    end = read_run(run, for_table=True).epoch_means["loss"]
    # The means of k - 2000 = -1, 1 in epoch 667 (of 1999 skipped, 2000 and 2001), of 1002 in half of epoch 1001.
    assert middle == ValueSummary(1002.0**2, 3002, 0.5, 2001)
    assert end == ValueSummary((3999.0**2 + 4000.0**2) / 2, 6000, 0.5, 2001)
    assert len(calls) < 200


def test_a_long_file_is_read_up_to_the_deadline_and_then_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", [row(k) for k in range(1, 20_001)])
    (run / "run.json").write_text('{"began": 7.0}')
    found = read_run(run, deadline=0.0)
    assert (found.is_behind, found.began, found.rows) == (True, 7.0, {})
    found = read_run(run)
    assert (found.is_behind, found.rows["loss"].at) == (False, 20_000)


def test_all_lines_of_a_file_that_is_read_in_parts_come(tmp_path: Path) -> None:
    values = dict.fromkeys(map("x{}".format, range(500)), 0.5)
    write_lines(tmp_path / "rows.jsonl", [{"iteration": k, **values} for k in range(1, 301)])
    assert (tmp_path / "rows.jsonl").stat().st_size > jsonl.CHUNK
    assert [one["iteration"] for one in jsonl.read_lines(tmp_path / "rows.jsonl")] == list(range(1, 301))


def test_rows_that_are_added_cut_off_or_written_anew_are_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", [row(k) for k in range(1, 6)])
    assert read_run(run).rows["loss"].best_at == 5
    append_lines(run / "rows.jsonl", [row(6)])
    assert read_run(run).rows["loss"].best_at == 6
    write_lines(run / "rows.jsonl", [row(k) for k in range(1, 4)])
    assert (read_run(run).rows["loss"].best_at, read_run(run).steps) == (3, 3)
    (run / "rows.jsonl").unlink()
    assert read_run(run).rows == {}


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_trial(write_run(tmp_path / "one", [row(1)], status="done"), status="done")
    first = read_run(run)
    monkeypatch.setattr(run_records, "read_json", None)
    monkeypatch.setattr(JsonlTail, "poll", None)
    assert read_run(run) == first


@pytest.mark.parametrize(
    ("status", "trial", "state"),
    [
        (None, None, "waiting"),
        ("running", None, "lost"),
        ("done", None, "done"),
        ("stopped", "pruned", "pruned"),
        ("running", "killed", "killed"),
        ("failed", "not finite", "not finite"),
        ("failed", "waiting", "waiting"),
        (None, "running", "starting"),
        ("done", "running", "running"),
        ("running", "running", "lost"),
        ("failed", "running", "failed"),
        ("done", "nonsense", "done"),
    ],
)
def test_a_trial_is_what_its_sweep_says_where_its_run_says_nothing_better(
    status: str | None, trial: str | None, state: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "one", [row(1)], **({} if status is None else {"status": status}))
    if status is None:
        (run / "status.json").unlink(missing_ok=True)
    if trial is not None:
        write_trial(run, status=trial)
    assert read_run(run).state == state


def test_a_run_that_holds_its_folder_is_running_and_then_stopping(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "one", {}, None)
    write_trial(folder.folder, status="waiting")
    assert read_run(folder.folder).state == "running"
    ask_to_stop(folder.folder, "a test")
    assert read_run(folder.folder).state == "stopping"
    folder.close()


@pytest.mark.covers("G4", "J8")
def test_a_trial_has_its_parameters_its_number_and_its_objective(tmp_path: Path) -> None:
    run = write_run(tmp_path / "trials/0003", [row(1, loss=1.0), row(2, loss=2.0)], status="done")
    trial = {"trial": 3, "parameters": {"rate": 0.5}, "status": "done", "value": 2.0, "why": None, "ranks": 1}
    write_trial(run, **trial, objective="loss", direction="maximize", attempts=[{"began": 17.0}])
    said = read_run(run, tmp_path)
    assert (said.name, said.trial, said.parameters, said.value) == ("trials/0003", 3, {"rate": 0.5}, 2.0)
    assert (said.objective, said.direction, said.began) == ("loss", "maximize", 17.0)
    assert said.rows["loss"].best_at == 2
    waiting = read_run(write_trial(tmp_path / "trials/0004", trial=4, parameters={"rate": 1}, status="waiting"))
    assert waiting == RunRecord("0004", tmp_path / "trials/0004", "waiting", {"rate": 1}, trial=4)


@pytest.mark.parametrize(("direction", "best"), [("minimize", (0.25, 3)), ("maximize", (0.75, 2))])
def test_a_sweep_s_direction_decides_what_is_best(direction: str, best: tuple[float, int], tmp_path: Path) -> None:
    run = write_run(tmp_path / "0000", [row(1)], status="done")
    values = enumerate((0.5, 0.75, 0.25), 1)
    write_lines(run / "evaluations.jsonl", [logged_line(k, distance=one, elapsed_s=None) for k, one in values])
    write_trial(run, objective="evaluation.distance", direction=direction)
    said = read_run(run).evaluations["distance"]
    assert (said.best, said.best_at) == best


def test_the_best_is_the_lowest_for_losses_and_errors_and_else_the_highest() -> None:
    names = ["loss", "validation_loss", "squared error", "rmse", "test/mse", "Perplexity"]
    assert list(filter(is_lower_better, [*names, "accuracy", "psnr", "mean_iou", "answer"])) == names


@pytest.mark.parametrize(
    ("why", "plain"),
    [
        (
            "ddp_loop.distributed.failures.PeerFailed: rank 1 failed in forward of step 70: ValueError: no image 7\n\n"
            "Traceback (most recent call last):\n  x",
            "ValueError: no image 7 (rank 1, step 70)\n\nTraceback (most recent call last):\n  x",
        ),
        (
            "ddp_loop.distributed.failures.PeerFailed: rank 3 on host node7 (10.0.0.7) failed in forward of step 12: "
            "torch.OutOfMemoryError: 2 GiB",
            "OutOfMemoryError: 2 GiB (rank 3, step 12)",
        ),
        ("ddp_loop.distributed.failures.PeerFailed: rank 1 left the loop", "PeerFailed: rank 1 left the loop"),
        ("FloatingPointError: The loss of step 2 is nan", "FloatingPointError: The loss of step 2 is nan"),
        ("the page", "the page"),
        ("my.own: word", "my.own: word"),
        (None, None),
    ],
)
def test_a_reason_begins_with_the_error_of_the_rank_that_failed(why: str | None, plain: str | None) -> None:
    assert plain_reason(why) == plain
